// libcudart over the driver of cuda.c: allocations, copies and fills are real, launches are counted and do nothing.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <malloc.h>
#include <fcntl.h>
#include <pthread.h>
#include <linux/falloc.h>
#include <cuda_runtime_api.h>
#include <cuda.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaGetDriverEntryPoint
#define E cudaError_t
size_t fake_used;
extern int fake_count(void);
extern int fake_attribute(int);
extern int fake_hardware(int);
extern int fake_trace(const char *);
static __thread int device;
static __thread void *capturing;
static __thread unsigned long long capture_id;
static const size_t total = 80ull << 30;
E cudaGetDeviceCount(int *n) {
    *n = fake_count();
    return *n ? 0 : 100;
}
E cudaGetDevice(int *d) {
    *d = device;
    return 0;
}
E cudaSetDevice(int d) {
    if (d < 0 || d >= fake_count())
        return 101;
    device = d;
    cuCtxSetCurrent((CUcontext)(size_t)(0x1000 + d));
    return 0;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= fake_count())
        return 101;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    p->uuid.bytes[15] = fake_hardware(d);
    p->totalGlobalMem = total;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlockOptin = 232448;
    p->unifiedAddressing = 1;
    p->canMapHostMemory = 1;
    p->concurrentKernels = 1;
    p->maxBlocksPerMultiProcessor = 32;
    p->memoryBusWidth = 5120;
    p->memoryPoolsSupported = 1;
    p->clusterLaunch = 1;
    p->cooperativeLaunch = 1;
    p->pciBusID = fake_hardware(d) + 1;
    return 0;
}
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    *v = fake_attribute(a);
    return 0;
}
E cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:%02x:00.0", fake_hardware(d) + 1);
    return 0;
}
E cudaDeviceCanAccessPeer(int *c, int a, int b) {
    *c = 1;
    return 0;
}
E cudaDeviceGetStreamPriorityRange(int *l, int *g) {
    if (l)
        *l = 0;
    if (g)
        *g = -5;
    return 0;
}
E cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
E cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
E cudaMemGetInfo(size_t *f, size_t *t) {
    *t = total;
    *f = total - fake_used - (1ull << 29) - ((size_t)(getenv("FAKE_OTHER") ? atoi(getenv("FAKE_OTHER")) : 0) << 30);
    return 0;
}
// The memory of all devices of a process is one file without a name, so that another process can map a part of it. An
// address is used once: freed pages go back to the host, and a new allocation is zero. A header page holds the size.
#define ARENA (1ull << 44)
#define HEADER 4096
static char *arena;
static size_t arena_used;
static int arena_file;
static pthread_mutex_t arena_lock = PTHREAD_MUTEX_INITIALIZER;
static void forget_arena(void) { arena = 0; }
static size_t pages(size_t n) { return (n + HEADER - 1) / HEADER * HEADER; }
static char *take(size_t num_bytes) {
    static int registered;
    pthread_mutex_lock(&arena_lock);
    if (!arena) {
        arena_file = memfd_create("stub-cuda", MFD_CLOEXEC);
        if (arena_file < 0 || ftruncate(arena_file, ARENA))
            abort();
        arena = mmap(0, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena_file, 0);
        if (arena == MAP_FAILED)
            abort();
        arena_used = 0;
        if (!registered++)
            pthread_atfork(0, 0, forget_arena); // a child must not write into its parent's devices
    }
    char *block = arena + arena_used;
    arena_used += num_bytes;
    pthread_mutex_unlock(&arena_lock);
    return arena_used > ARENA ? 0 : block;
}
E cudaMalloc(void **p, size_t n) {
    *p = 0;
    if (fake_used + n > total)
        return 2;
    size_t *m = (size_t *)take(HEADER + pages(n));
    if (!m)
        return 2;
    m[0] = n;
    fake_used += n;
    *p = (char *)m + HEADER;
    return 0;
}
E cudaFree(void *p) {
    if (!p || !arena || (char *)p < arena || (char *)p >= arena + ARENA)
        return 0;
    size_t *m = (size_t *)((char *)p - HEADER), n = m[0];
    fake_used -= n;
    fallocate(arena_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)m - arena, HEADER + pages(n));
    return 0;
}
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
E cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
E cudaHostAlloc(void **p, size_t n, unsigned f) {
    size_t *m = mmap(0, n + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m[0] = n;
    *p = (char *)m + 4096;
    return 0;
}
E cudaFreeHost(void *p) {
    if (p) {
        size_t *m = (size_t *)((char *)p - 4096);
        munmap(m, m[0] + 4096);
    }
    return 0;
}
E cudaHostGetDevicePointer(void **d, void *h, unsigned f) {
    *d = h;
    return 0;
}
static int count_copies(const char *what, size_t n) { return 0; }
E cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    memmove(d, s, n);
    return 0;
}
E cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) {
    if (n)
        memmove(d, s, n);
    return 0;
}
E cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t st) {
    memmove(d, s, n);
    return 0;
}
E cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k,
                    cudaStream_t st) {
    for (size_t i = 0; i < h; i++)
        memmove((char *)d + i * dp, (const char *)s + i * sp, w);
    return 0;
}
E cudaMemset(void *d, int v, size_t n) {
    memset(d, v, n);
    return 0;
}
E cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) {
    if (n)
        memset(d, v, n);
    return 0;
}
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeDevice;
    a->device = device;
    a->devicePointer = a->hostPointer = (void *)p;
    return 0;
}
static size_t next_handle = 0x10000;
E cudaStreamCreate(cudaStream_t *s) {
    *s = (cudaStream_t)(next_handle += 64);
    return 0;
}
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    *s = (cudaStream_t)(next_handle += 64);
    return 0;
}
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
    *s = (cudaStream_t)(next_handle += 64);
    return 0;
}
E cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = 0;
    return 0;
}
E cudaEventCreate(cudaEvent_t *e) {
    *e = (cudaEvent_t)(next_handle += 64);
    return 0;
}
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    *e = (cudaEvent_t)(next_handle += 64);
    return 0;
}
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = 1.0f;
    return 0;
}
static const char *forbidden(const char *w) {
    if (capturing)
        fprintf(stderr, "[fake] %s WHILE CAPTURING\n", w);
    return 0;
}
E cudaStreamSynchronize(cudaStream_t s) {
    if (capturing) {
        forbidden("cudaStreamSynchronize");
        return 900;
    }
    return 0;
}
E cudaDeviceSynchronize(void) {
    if (capturing) {
        forbidden("cudaDeviceSynchronize");
        return 900;
    }
    return 0;
}
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
    *c = capturing == (void *)s && capturing ? 1 : 0;
    return 0;
}
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                           const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    *c = capturing && capturing == (void *)s ? 1 : 0;
    if (id)
        *id = capture_id;
    if (g)
        *g = (cudaGraph_t)0x5000;
    if (n)
        *n = 0;
    return 0;
}
E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    capturing = (void *)s;
    capture_id++;
    return 0;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    capturing = 0;
    *g = (cudaGraph_t)(next_handle += 64);
    return 0;
}
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) {
    *x = (cudaGraphExec_t)(next_handle += 64);
    return 0;
}
E cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) {
    *x = (cudaGraphExec_t)(next_handle += 64);
    return 0;
}
E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *k) {
    *k = 1;
    return 0;
}
E cudaGraphNodeGetDependencies(cudaGraphNode_t a, cudaGraphNode_t *b, cudaGraphEdgeData *c, size_t *n) {
    *n = 0;
    return 0;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = 90;
    a->ptxVersion = 90;
    a->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
    *n = 4;
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
    *n = 4;
    return 0;
}
E cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) {
    *n = 16;
    return 0;
}
E cudaGetSymbolAddress(void **p, const void *s) {
    static char pad[1 << 16];
    *p = pad;
    return 0;
}
E cudaMemcpyToSymbol(const void *s, const void *c, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
E cudaGetDriverEntryPointByVersion(const char *s, void **p, unsigned v, unsigned long long f,
                                   enum cudaDriverEntryPointQueryResult *r) {
    CUdriverProcAddressQueryResult q;
    int e = cuGetProcAddress_v2(s, p, v, f, &q);
    if (r)
        *r = e ? 1 : 0;
    return 0;
}
E cudaGetDriverEntryPoint(const char *s, void **p, unsigned long long f, enum cudaDriverEntryPointQueryResult *r) {
    return cudaGetDriverEntryPointByVersion(s, p, 13000, f, r);
}
const char *cudaGetErrorString(E e) {
    return e == 900 ? "operation not permitted when stream is capturing (fake)"
           : e == 2 ? "out of memory (fake)"
                    : "fake error";
}
const char *cudaGetErrorName(E e) { return "cudaErrorFake"; }
E cudaDeviceGetDefaultMemPool(cudaMemPool_t *m, int d) {
    *m = (cudaMemPool_t)0x7000;
    return 0;
}
E cudaMemPoolGetAttribute(cudaMemPool_t m, enum cudaMemPoolAttr a, void *v) {
    *(unsigned long long *)v = 0;
    return 0;
}
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *u) {
    fn(u);
    return 0;
}
E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t fn, void *u, unsigned f) {
    fn(s, 0, u);
    return 0;
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
    static __thread enum cudaStreamCaptureMode mode;
    enum cudaStreamCaptureMode o = mode;
    mode = *m;
    *m = o;
    return 0;
}
struct handle {
    int pid, file;
    size_t offset, num_bytes;
};
E cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    if (!arena || (char *)p < arena + HEADER || (char *)p >= arena + ARENA)
        return 1;
    char *m = (char *)p - HEADER;
    struct handle found = {getpid(), arena_file, m - arena, *(size_t *)m};
    memset(h, 0, sizeof *h);
    memcpy(h, &found, sizeof found);
    return 0;
}
E cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
    struct handle given;
    memcpy(&given, &h, sizeof given);
    if (given.pid == getpid())
        return 201;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return 400;
    char *m = mmap(0, HEADER + pages(given.num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, given.offset);
    close(file);
    if (m == MAP_FAILED)
        return 2;
    *p = m + HEADER;
    return 0;
}
E cudaIpcCloseMemHandle(void *p) {
    size_t *m = (size_t *)((char *)p - HEADER);
    munmap(m, HEADER + pages(m[0]));
    return 0;
}
static __thread dim3 pg, pb;
static __thread size_t ps;
static __thread cudaStream_t pst;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st *st) {
    pg = g;
    pb = b;
    ps = s;
    pst = st;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
    *g = pg;
    *b = pb;
    *s = ps;
    *(cudaStream_t *)st = pst;
    return 0;
}
void **__cudaRegisterFatBinary(void *f) {
    static void *h[4];
    return h;
}
E __cudaGetKernel(void **k, const void *f) {
    *k = (void *)f;
    return 0;
}
char __cudaInitModule(void **f) { return 1; }
int fake_launches;
E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) {
    fake_launches++;
    return 0;
}
E __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) {
    fake_launches++;
    return 0;
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    fake_launches++;
    return 0;
}
E cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)f;
    return 0;
}
E cudaGetFuncBySymbol(cudaFunction_t *k, const void *f) {
    *k = (cudaFunction_t)f;
    return 0;
}
E cudaDeviceGetByPCIBusId(int *d, const char *s) {
    *d = 0;
    return 0;
}
E cudaStreamGetDevice(cudaStream_t s, int *d) {
    *d = device;
    return 0;
}
E cudaStreamGetId(cudaStream_t s, unsigned long long *d) {
    *d = (size_t)s;
    return 0;
}
E cudaGetDeviceFlags(unsigned *f) {
    *f = 0;
    return 0;
}
E cudaEventQuery(cudaEvent_t e) { return 0; }
E cudaEventSynchronize(cudaEvent_t e) {
    if (capturing) {
        forbidden("cudaEventSynchronize");
        return 900;
    }
    return 0;
}
E cudaStreamQuery(cudaStream_t e) { return 0; }
E cudaGetLastError(void) { return 0; }
E cudaPeekAtLastError(void) { return 0; }
E cudaSuccessStub(void) { return 0; }

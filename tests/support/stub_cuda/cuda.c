// libcuda: a driver whose devices have the memory of the host and whose kernels do nothing.
// FAKE_GPUS is the number of devices; FAKE_TRACE=1 prints every function without a body of its own at its first call.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>
#include <sys/mman.h>
#define CUDA_API_PER_THREAD_DEFAULT_STREAM_NO
#include <cuda.h>
#undef cuGetProcAddress
#undef cuDeviceTotalMem
#undef cuCtxCreate
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemGetInfo
static int fd_trace = -1;
int fake_trace(const char *n) {
    if (fd_trace < 0)
        fd_trace = getenv("FAKE_TRACE") ? 1 : 0;
    if (fd_trace)
        fprintf(stderr, "[fake] %s\n", n);
    return 0;
}
int fake_count(void) {
    const char *v = getenv("CUDA_VISIBLE_DEVICES");
    int all = getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 8;
    if (!v)
        return all;
    if (!*v)
        return 0;
    int n = 1;
    for (; *v; v++)
        n += *v == ',';
    return n;
}
// Number of the hardware behind the visible device d.
int fake_hardware(int d) {
    const char *v = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; v && *v && i < d; i++) {
        v = strchr(v, ',');
        v = v ? v + 1 : 0;
    }
    return v && *v ? atoi(v) : d;
}
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
CUresult cuDeviceGetCount(int *n) {
    *n = fake_count();
    return 0;
}
CUresult cuDeviceGet(CUdevice *d, int i) {
    *d = i;
    return 0;
}
CUresult cuDeviceGetName(char *n, int len, CUdevice d) {
    strncpy(n, "NVIDIA H100 80GB HBM3", len);
    return 0;
}
CUresult cuDeviceTotalMem_v2(size_t *b, CUdevice d) {
    *b = 80ull << 30;
    return 0;
}
CUresult cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) {
    memset(u, 0, sizeof *u);
    u->bytes[15] = fake_hardware(d);
    return 0;
}
int fake_attribute(int a) {
    switch (a) {
    case 1:
        return 1024;
    case 2:
    case 3:
        return 1024;
    case 4:
        return 64;
    case 5:
        return 2147483647;
    case 6:
    case 7:
        return 65535;
    case 8:
        return 49152;
    case 10:
        return 32;
    case 12:
        return 65536;
    case 13:
        return 1980000;
    case 16:
        return 132;
    case 36:
        return 2619000;
    case 37:
        return 5120;
    case 38:
        return 50 << 20;
    case 39:
        return 2048;
    case 75:
        return 9;
    case 76:
        return 0;
    case 81:
        return 233472;
    case 82:
        return 65536;
    case 97:
        return 232448;
    case 95:
        return 1;
    case 106:
        return 32;
    case 111:
        return 1024;
    case 115:
        return 1;
    case 120:
        return 1;
    case 128:
        return 1;
    case 41:
        return 1;
    case 31:
        return 1;
    case 102:
        return 1;
    case 103:
        return 1;
    case 132:
        return 0;
    }
    return 0;
}
CUresult cuDeviceGetAttribute(int *p, CUdevice_attribute a, CUdevice d) {
    *p = fake_attribute(a);
    return 0;
}
static __thread CUcontext current;
CUresult cuCtxGetCurrent(CUcontext *c) {
    *c = current;
    return 0;
}
CUresult cuCtxSetCurrent(CUcontext c) {
    current = c;
    return 0;
}
CUresult cuCtxGetDevice(CUdevice *d) {
    *d = current ? (int)((size_t)current - 0x1000) : 0;
    return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext c) {
    current = c;
    return 0;
}
CUresult cuCtxPopCurrent_v2(CUcontext *c) {
    if (c)
        *c = current;
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = (CUcontext)(size_t)(0x1000 + d);
    return 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
CUresult cuGetErrorString(CUresult e, const char **s) {
    *s = "fake";
    return 0;
}
CUresult cuGetErrorName(CUresult e, const char **s) {
    *s = "FAKE";
    return 0;
}
CUresult cuGetProcAddress_v2(const char *s, void **p, int v, cuuint64_t f, CUdriverProcAddressQueryResult *r) {
    *p = dlsym(RTLD_DEFAULT, s);
    char b[256];
    for (int k = 4; !*p && k > 1; k--) {
        snprintf(b, sizeof b, "%s_v%d", s, k);
        *p = dlsym(RTLD_DEFAULT, b);
    }
    if (r)
        *r = *p ? 0 : 1;
    return *p ? 0 : 500;
}
CUresult cuGetProcAddress(const char *s, void **p, int v, cuuint64_t f) { return cuGetProcAddress_v2(s, p, v, f, 0); }
CUresult cuGetExportTable(const void **t, const CUuuid *u) { return 999; }
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags o) {
    *g = 2 << 20;
    return 0;
}
extern size_t fake_used;
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t al, CUdeviceptr a, unsigned long long f) {
    void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = (CUdeviceptr)m;
    return m == MAP_FAILED ? 2 : 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
    munmap((void *)p, n);
    return 0;
}
static long handles;
static size_t handle_size[1 << 16];
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
    *h = ++handles;
    handle_size[handles & 65535] = n;
    fake_used += n;
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
    fake_used -= handle_size[h & 65535];
    return 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    madvise((void *)p, n, MADV_DONTNEED);
    return 0;
}
static size_t fid;
CUresult cuModuleLoadData(CUmodule *m, const void *i) {
    *m = (CUmodule)++fid;
    return 0;
}
CUresult cuModuleLoadDataEx(CUmodule *m, const void *i, unsigned n, CUjit_option *o, void **v) {
    *m = (CUmodule)++fid;
    return 0;
}
CUresult cuModuleGetFunction(CUfunction *m, CUmodule k, const char *n) {
    *m = (CUfunction)++fid;
    return 0;
}
CUresult cuLibraryLoadData(CUlibrary *l, const void *c, CUjit_option *a, void **b, unsigned n, CUlibraryOption *d,
                           void **e, unsigned k) {
    *l = (CUlibrary)++fid;
    return 0;
}
CUresult cuLibraryGetKernel(CUkernel *m, CUlibrary k, const char *n) {
    *m = (CUkernel)++fid;
    return 0;
}
CUresult cuKernelGetFunction(CUfunction *m, CUkernel k) {
    *m = (CUfunction)++fid;
    return 0;
}
CUresult cuFuncGetAttribute(int *p, CUfunction_attribute a, CUfunction f) {
    *p = a == 0 ? 1024 : a == 4 ? 32 : 0;
    return 0;
}
CUresult cuKernelGetAttribute(int *p, CUfunction_attribute a, CUkernel f, CUdevice d) {
    *p = a == 0 ? 1024 : a == 4 ? 32 : 0;
    return 0;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t s) {
    *n = 4;
    return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
    *n = 16;
    return 0;
}
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) {
    if (a == 2)
        *(int *)d = 2;
    else if (a == 3)
        *(CUdeviceptr *)d = p;
    else if (a == 1)
        *(CUcontext *)d = current ? current : (CUcontext)0x1000;
    else if (a == 9)
        *(int *)d = 0;
    else
        *(int *)d = 0;
    return 0;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *b, size_t *n, CUdeviceptr p) {
    if (b)
        *b = p;
    if (n)
        *n = 1 << 20;
    return 0;
}
CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) {
    memset((void *)p, v, n);
    return 0;
}
CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned v, size_t n) {
    for (size_t i = 0; i < n; i++)
        ((unsigned *)p)[i] = v;
    return 0;
}
CUresult cuMemcpyDtoH_v2(void *d, CUdeviceptr s, size_t n) {
    memcpy(d, (void *)s, n);
    return 0;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *s, size_t n) {
    memcpy((void *)d, s, n);
    return 0;
}
CUresult cuStreamGetCtx(CUstream s, CUcontext *c) {
    *c = current ? current : (CUcontext)0x1000;
    return 0;
}

// libnccl: ranks are processes of one host. Every message is a file in shared memory, named after communicator, sender,
// receiver and number. Collectives are made of messages; sums are computed on the host, so results are right.
// Calls wait for their peers: a program that relies on calls that only enqueue may hang here, and ends after 300 s.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PREFIX "/dev/shm/stub-nccl-"
enum { MAX_RANKS = 64, MAX_QUEUED = 4096, WAIT_S = 300 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FP8_E4M3, FP8_E5M2 };

struct id {
    char bytes[128];
};
struct comm {
    int size, rank, num_splits;
    char name[64];
    long sent[MAX_RANKS], received[MAX_RANKS];
};
struct transfer {
    struct comm *comm;
    void *data;
    size_t num_bytes;
    int peer, is_send;
};

static int fail(const char *what) {
    fprintf(stderr, "[stub NCCL] %s\n", what);
    abort();
}
static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}

// -- messages ------------------------------------------------------------------------------------------

static void path_of(char *path, struct comm *c, int from, int to, long number) {
    snprintf(path, 256, PREFIX "%s-%d-%d-%ld", c->name, from, to, number);
}
static void put(struct comm *c, int to, const void *data, size_t num_bytes) {
    char path[256], partial[300];
    path_of(path, c, c->rank, to, c->sent[to]++);
    snprintf(partial, sizeof partial, "%s.partial", path);
    int file = open(partial, O_CREAT | O_WRONLY | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        fail("a message cannot be written");
    for (size_t done = 0; done < num_bytes;) {
        ssize_t n = write(file, (const char *)data + done, num_bytes - done);
        if (n <= 0)
            fail("shared memory is full");
        done += n;
    }
    close(file);
    if (rename(partial, path))
        fail("a message cannot be renamed");
}
static void get(struct comm *c, int from, void *data, size_t num_bytes) {
    char path[256];
    path_of(path, c, from, c->rank, c->received[from]++);
    int file;
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
        usleep(200);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begin.tv_sec > WAIT_S)
            fail(path);
    }
    struct stat found;
    fstat(file, &found);
    if ((size_t)found.st_size != num_bytes)
        fail("sender and receiver differ in the number of bytes");
    for (size_t done = 0; done < num_bytes;) {
        ssize_t n = read(file, (char *)data + done, num_bytes - done);
        if (n <= 0)
            fail("a message cannot be read");
        done += n;
    }
    close(file);
    unlink(path);
}

// -- sums ----------------------------------------------------------------------------------------------

static float of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#define COMBINE(a, b) (op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : op == MIN ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define EACH(T)                                                                                                        \
    for (size_t i = 0; i < n; i++)                                                                                     \
        ((T *)into)[i] = COMBINE(((T *)into)[i], ((const T *)from)[i]);                                                \
    break
static void combine(void *into, const void *from, size_t n, int type, int op) {
    switch (type) {
    case INT8:
        EACH(int8_t);
    case UINT8:
        EACH(uint8_t);
    case INT32:
        EACH(int32_t);
    case UINT32:
        EACH(uint32_t);
    case INT64:
        EACH(int64_t);
    case UINT64:
        EACH(uint64_t);
    case FLOAT32:
        EACH(float);
    case FLOAT64:
        EACH(double);
    case BFLOAT16:
        for (size_t i = 0; i < n; i++) {
            float a = of_bf16(((uint16_t *)into)[i]), b = of_bf16(((const uint16_t *)from)[i]);
            ((uint16_t *)into)[i] = to_bf16(COMBINE(a, b));
        }
        break;
    default:
        fail("this type has no sum here");
    }
}
static void divide(void *data, size_t n, int type, int by) {
    for (size_t i = 0; i < n; i++) {
        if (type == FLOAT32)
            ((float *)data)[i] /= by;
        else if (type == FLOAT64)
            ((double *)data)[i] /= by;
        else if (type == BFLOAT16)
            ((uint16_t *)data)[i] = to_bf16(of_bf16(((uint16_t *)data)[i]) / by);
        else
            fail("this type has no mean here");
    }
}
// `own` is this rank's part, which stays as it is; `into` receives the result of all ranks, in the order of ranks.
static void reduce(struct comm *c, const void *own, void *into, size_t n, int type, int op) {
    if (op > AVG)
        fail("this operation is not supported");
    size_t num_bytes = n * width(type);
    char *sum = malloc(num_bytes + 1), *part = malloc(num_bytes + 1);
    for (int rank = 0; rank < c->size; rank++) {
        const void *from = own;
        if (rank != c->rank) {
            get(c, rank, part, num_bytes);
            from = part;
        }
        if (!rank)
            memcpy(sum, from, num_bytes);
        else
            combine(sum, from, n, type, op);
    }
    if (op == AVG)
        divide(sum, n, type, c->size);
    memcpy(into, sum, num_bytes);
    free(sum);
    free(part);
}

// -- communicators -------------------------------------------------------------------------------------

int ncclGetVersion(int *v) {
    *v = 22809;
    return 0;
}
int ncclGetUniqueId(struct id *u) {
    memset(u, 0, sizeof *u);
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, u->bytes, 12) != 12)
        fail("no random bytes");
    close(file);
    return 0;
}
static struct comm *joined(int size, int rank) {
    if (size > MAX_RANKS)
        fail("too many ranks");
    // callers read fields of NCCL's own, larger structure
    struct comm *c = calloc(1, 1 << 16);
    c->size = size;
    c->rank = rank;
    return c;
}
int ncclCommInitRank(struct comm **c, int size, struct id id, int rank) {
    *c = joined(size, rank);
    for (int i = 0; i < 12; i++)
        sprintf((*c)->name + 2 * i, "%02x", (unsigned char)id.bytes[i]);
    return 0;
}
int ncclCommInitRankConfig(struct comm **c, int size, struct id id, int rank, void *config) {
    return ncclCommInitRank(c, size, id, rank);
}
int ncclCommInitRankScalable(struct comm **c, int size, int rank, int num_ids, struct id *ids, void *config) {
    return ncclCommInitRank(c, size, ids[0], rank);
}
int ncclCommSplit(struct comm *c, int color, int key, struct comm **made, void *config) {
    int all[MAX_RANKS][2], own[2] = {color, key};
    for (int rank = 0; rank < c->size; rank++)
        if (rank != c->rank)
            put(c, rank, own, sizeof own);
    for (int rank = 0; rank < c->size; rank++)
        if (rank != c->rank)
            get(c, rank, all[rank], sizeof own);
        else
            memcpy(all[rank], own, sizeof own);
    int number = c->num_splits++, size = 0, place = 0;
    for (int rank = 0; rank < c->size; rank++)
        if (all[rank][0] == color) {
            size++;
            place += all[rank][1] < key || (all[rank][1] == key && rank < c->rank);
        }
    *made = 0;
    if (color < 0)
        return 0;
    *made = joined(size, place);
    snprintf((*made)->name, sizeof(*made)->name, "%.24s%02x%02x", c->name, number & 255, color & 255);
    return 0;
}
int ncclCommCount(struct comm *c, int *n) {
    *n = c->size;
    return 0;
}
int ncclCommUserRank(struct comm *c, int *n) {
    *n = c->rank;
    return 0;
}
int ncclCommGetAsyncError(struct comm *c, int *e) {
    *e = 0;
    return 0;
}
const char *ncclGetErrorString(int e) { return "stub"; }
const char *ncclGetLastError(void *c) { return "stub"; }
int ncclMemAlloc(void **p, size_t n) {
    *p = calloc(1, n);
    return 0;
}

// -- transfers and collectives -------------------------------------------------------------------------

static __thread int depth, num_queued;
static __thread struct transfer queue[MAX_QUEUED];

static void flush(void) {
    for (int i = 0; i < num_queued; i++)
        if (queue[i].is_send)
            put(queue[i].comm, queue[i].peer, queue[i].data, queue[i].num_bytes);
    for (int i = 0; i < num_queued; i++)
        if (!queue[i].is_send)
            get(queue[i].comm, queue[i].peer, queue[i].data, queue[i].num_bytes);
    num_queued = 0;
}
static int transfer(struct comm *c, void *data, size_t num_bytes, int peer, int is_send) {
    if (num_queued == MAX_QUEUED)
        fail("too many transfers in a group");
    queue[num_queued++] = (struct transfer){c, data, num_bytes, peer, is_send};
    if (!depth)
        flush();
    return 0;
}
int ncclGroupStart(void) {
    depth++;
    return 0;
}
int ncclGroupEnd(void) {
    if (!--depth)
        flush();
    return 0;
}
int ncclSend(const void *s, size_t n, int type, int peer, struct comm *c, void *stream) {
    return transfer(c, (void *)s, n * width(type), peer, 1);
}
int ncclRecv(void *d, size_t n, int type, int peer, struct comm *c, void *stream) {
    return transfer(c, d, n * width(type), peer, 0);
}
static void put_all(struct comm *c, const void *s, size_t num_bytes) {
    for (int rank = 0; rank < c->size; rank++)
        if (rank != c->rank)
            put(c, rank, s, num_bytes);
}
int ncclAllReduce(const void *s, void *d, size_t n, int type, int op, struct comm *c, void *stream) {
    put_all(c, s, n * width(type));
    reduce(c, s, d, n, type, op);
    return 0;
}
int ncclReduce(const void *s, void *d, size_t n, int type, int op, int root, struct comm *c, void *stream) {
    if (c->rank == root)
        reduce(c, s, d, n, type, op);
    else
        put(c, root, s, n * width(type));
    return 0;
}
int ncclReduceScatter(const void *s, void *d, size_t n, int type, int op, struct comm *c, void *stream) {
    size_t num_bytes = n * width(type);
    for (int rank = 0; rank < c->size; rank++)
        if (rank != c->rank)
            put(c, rank, (const char *)s + rank * num_bytes, num_bytes);
    reduce(c, (const char *)s + c->rank * num_bytes, d, n, type, op);
    return 0;
}
int ncclAllGather(const void *s, void *d, size_t n, int type, struct comm *c, void *stream) {
    size_t num_bytes = n * width(type);
    put_all(c, s, num_bytes);
    for (int rank = 0; rank < c->size; rank++)
        if (rank == c->rank)
            memmove((char *)d + rank * num_bytes, s, num_bytes);
        else
            get(c, rank, (char *)d + rank * num_bytes, num_bytes);
    return 0;
}
int ncclBroadcast(const void *s, void *d, size_t n, int type, int root, struct comm *c, void *stream) {
    if (c->rank != root) {
        get(c, root, d, n * width(type));
        return 0;
    }
    put_all(c, s, n * width(type));
    if (s != d)
        memmove(d, s, n * width(type));
    return 0;
}
int ncclBcast(void *d, size_t n, int type, int root, struct comm *c, void *stream) {
    return ncclBroadcast(d, d, n, type, root, c, stream);
}
int ncclAlltoAll(const void *s, void *d, size_t n, int type, struct comm *c, void *stream) {
    size_t num_bytes = n * width(type);
    for (int rank = 0; rank < c->size; rank++)
        put(c, rank, (const char *)s + rank * num_bytes, num_bytes);
    for (int rank = 0; rank < c->size; rank++)
        get(c, rank, (char *)d + rank * num_bytes, num_bytes);
    return 0;
}
int ncclGather(const void *s, void *d, size_t n, int type, int root, struct comm *c, void *stream) {
    size_t num_bytes = n * width(type);
    put(c, root, s, num_bytes);
    for (int rank = 0; c->rank == root && rank < c->size; rank++)
        get(c, rank, (char *)d + rank * num_bytes, num_bytes);
    return 0;
}
int ncclScatter(const void *s, void *d, size_t n, int type, int root, struct comm *c, void *stream) {
    size_t num_bytes = n * width(type);
    for (int rank = 0; c->rank == root && rank < c->size; rank++)
        put(c, rank, (const char *)s + rank * num_bytes, num_bytes);
    get(c, root, d, num_bytes);
    return 0;
}

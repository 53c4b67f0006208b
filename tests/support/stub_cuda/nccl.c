// libnccl: each rank gets its own data back, as if it were alone.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
int ncclGetVersion(int *v) {
    *v = 22809;
    return 0;
}
int ncclGetUniqueId(void *u) {
    memset(u, 7, 128);
    return 0;
}
struct comm {
    int n, r;
};
int ncclCommInitRank(struct comm **c, int n, struct { char b[128]; } id, int r) {
    *c = calloc(1, 4096);
    (*c)->n = n;
    (*c)->r = r;
    return 0;
}
int ncclCommInitRankConfig(struct comm **c, int n, struct { char b[128]; } id, int r, void *k) {
    *c = calloc(1, 4096);
    (*c)->n = n;
    (*c)->r = r;
    return 0;
}
int ncclCommSplit(struct comm *o, int color, int key, struct comm **c, void *k) {
    *c = calloc(1, 4096);
    **c = *o;
    return 0;
}
int ncclCommCount(struct comm *c, int *n) {
    *n = c->n;
    return 0;
}
int ncclCommUserRank(struct comm *c, int *n) {
    *n = c->r;
    return 0;
}
int ncclCommGetAsyncError(struct comm *c, int *e) {
    *e = 0;
    return 0;
}
const char *ncclGetErrorString(int e) { return "fake"; }
const char *ncclGetLastError(void *c) { return "fake"; }
static int width(int t) {
    static int w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return w[t];
}
int ncclAllReduce(const void *s, void *d, size_t n, int t, int op, void *c, void *st) {
    if (s != d)
        memmove(d, s, n * width(t));
    return 0;
}
int ncclReduceScatter(const void *s, void *d, size_t n, int t, int op, struct comm *c, void *st) {
    if (s != d)
        memmove(d, (char *)s + c->r * n * width(t), n * width(t));
    return 0;
}
int ncclAllGather(const void *s, void *d, size_t n, int t, struct comm *c, void *st) {
    for (int i = 0; i < c->n; i++)
        memmove((char *)d + i * n * width(t), s, n * width(t));
    return 0;
}
int ncclBroadcast(const void *s, void *d, size_t n, int t, int root, void *c, void *st) {
    if (s != d)
        memmove(d, s, n * width(t));
    return 0;
}
int ncclMemAlloc(void **p, size_t n) {
    *p = calloc(1, n);
    return 0;
}

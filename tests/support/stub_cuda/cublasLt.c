// libcublasLt: descriptors only; products are left out.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
int cublasLtCreate(void **h) {
    *h = calloc(1, 4096);
    return 0;
}
int cublasLtMatmulDescCreate(void **d, int a, int b) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **d) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatrixLayoutCreate(void **d, int t, unsigned long r, unsigned long c, long ld) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, char *res,
                                   int *found) {
    memset(res, 0, 96);
    *found = 1;
    return 0;
}

// libcublas: handles only; products are left out.
#include <stddef.h>
#include <string.h>
static char handle[4096];
int cublasCreate_v2(void **h) {
    *h = handle;
    return 0;
}
int cublasGetMathMode(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasGetPointerMode_v2(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasGetVersion_v2(void *h, int *m) {
    *m = 130100;
    return 0;
}
size_t cublasGetVersionNumber(void) { return 130100; }

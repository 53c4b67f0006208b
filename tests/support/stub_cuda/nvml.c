// libnvidia-ml: names and memory of the devices.
#include <string.h>
#include <stdlib.h>
#include <stdio.h>
static int n(void) { return getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 8; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *c) {
    *c = n();
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    *h = (void *)(size_t)(0x100 + i);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *u, void **h) {
    *h = (void *)(size_t)0x100;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    *a = 9;
    *b = 0;
    return 0;
}
int nvmlDeviceGetName(void *h, char *s, unsigned l) {
    strncpy(s, "NVIDIA H100 80GB HBM3", l);
    return 0;
}
int nvmlDeviceGetUUID(void *h, char *s, unsigned l) {
    snprintf(s, l, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)h);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) {
    m[0] = 80ull << 30;
    m[1] = 79ull << 30;
    m[2] = 1ull << 30;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *s) {
    *s = 0;
    return 0;
}
int nvmlSystemGetDriverVersion(char *s, unsigned l) {
    strncpy(s, "580.65.06", l);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *v) {
    *v = 13000;
    return 0;
}
int nvmlSystemGetCudaDriverVersion(int *v) {
    *v = 13000;
    return 0;
}
int nvmlDeviceGetMinorNumber(void *h, unsigned *m) {
    *m = (unsigned)(size_t)h - 0x100;
    return 0;
}
const char *nvmlErrorString(int e) { return "fake"; }
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount(unsigned *c) {
    *c = n();
    return 0;
}

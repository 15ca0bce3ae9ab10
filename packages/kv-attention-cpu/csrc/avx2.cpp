#define KV_NAME avx2
#include "kernels.inc"

#define KV_NAME avx512
#include "kernels.inc"

#define KV_NAME plain
#include "kernels.inc"

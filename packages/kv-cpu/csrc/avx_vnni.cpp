#include "words.inc"

namespace kv {

extern const Kernels avx_vnni_kernels = {
    "avx-vnni", prepared_size, prepare, dot_words, weigh_words, soften_words, observe, renew,
    widen,      bound,         is_taken};

}  // namespace kv

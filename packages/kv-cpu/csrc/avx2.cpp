#include "words.inc"

namespace kv {

extern const Kernels avx2_kernels = {"avx2", prepared_size, prepare, dot_words, weigh_words,
                                     soften_words, observe, renew, widen, bound, is_taken};

}  // namespace kv

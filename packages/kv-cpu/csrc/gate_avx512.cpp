#include "gate.inc"

namespace kv {

extern const GateKernels avx512_gate = {turn, features, pack, products};

}  // namespace kv

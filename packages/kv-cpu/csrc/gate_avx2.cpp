#include "gate.inc"

namespace kv {

extern const GateKernels avx2_gate = {turn, features, pack, products};

}  // namespace kv

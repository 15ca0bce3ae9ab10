#include "gate.inc"

namespace kv {

extern const GateKernels avx2_gate = {turn, features, products};

}  // namespace kv

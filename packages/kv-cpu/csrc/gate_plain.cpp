#include "gate.inc"

namespace kv {

extern const GateKernels plain_gate = {turn, features, products};

}  // namespace kv

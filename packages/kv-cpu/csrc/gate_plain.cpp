#include "gate.inc"

namespace kv {

extern const GateKernels plain_gate = {turn, features, pack, products};

}  // namespace kv

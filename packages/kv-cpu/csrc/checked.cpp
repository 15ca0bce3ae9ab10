#include "checked.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(type);
  }
}

// The address of empty tensors, so that address arithmetic is valid.
alignas(64) uint8_t kNothing[64];

struct Sizes {
  const int64_t *first, *last;
};

std::ostream& operator<<(std::ostream& to, const Sizes& sizes) {
  to << '[';
  for (const int64_t* size = sizes.first; size != sizes.last; ++size) {
    if (size != sizes.first) to << ", ";
    *size < 0 ? to << "any" : to << *size;
  }
  return to << ']';
}

bool fits(int64_t wanted, int64_t size) {
  return wanted == kMany || (wanted == kAny ? size <= kMost : size == wanted);
}

bool lies(Lay lay, const int64_t* sizes, const int64_t* strides, int dims) {
  if (lay == Lay::kStrided || dims == 0) return true;
  if (lay == Lay::kRows) return strides[dims - 1] == 1 || sizes[dims - 1] <= 1;
  int64_t step = 1;
  bool contiguous = true;
  for (int i = dims - 1; i >= 0; --i) {
    if (sizes[i] == 0) return true;
    contiguous &= sizes[i] == 1 || strides[i] == step;
    step = product(step, sizes[i]);
  }
  return contiguous;
}

}  // namespace

std::ostream& operator<<(std::ostream& to, const Label& label) {
  to << label.text;
  return label.of < 0 ? to : to << label.of;
}

View view(const Tensor& x, Label label, Kinds kinds, std::initializer_list<int64_t> sizes, Lay lay,
          Use use) {
  if (!x.defined()) refuse(label, " is None; it must be a tensor");
  if (!x.is_cpu()) refuse(label, " is not on the CPU; move it there");
  View found;
  found.type = x.scalar_type();
  const auto given_sizes = x.sizes(), given_strides = x.strides();
  const int dims = int(given_sizes.size());
  found.sizes = given_sizes.data(), found.strides = given_strides.data();
  bool right = (mask_of(found.type) & kinds.mask) && dims == int(sizes.size());
  for (int i = 0; right && i < dims; ++i) right = fits(sizes.begin()[i], found.sizes[i]);
  if (!right)
    refuse(label, " is ", name_of(found.type), " ", Sizes{found.sizes, found.sizes + dims},
           "; it must be ", kinds.text, " ", Sizes{sizes.begin(), sizes.end()},
           ", where any is up to ", kMost);
  if (!lies(lay, found.sizes, found.strides, dims))
    refuse(label, " has strides ", Sizes{found.strides, found.strides + dims}, " for sizes ",
           Sizes{found.sizes, found.sizes + dims}, "; ",
           lay == Lay::kRows ? "numbers of the last dimension must be consecutive"
                             : "it must be contiguous");
  // The sizes of a tensor are unchanged if its storage was resized.
  found.item = int64_t(x.element_size());
  int64_t last = 0;
  bool empty = false;
  for (int i = 0; i < dims; ++i) {
    empty |= found.sizes[i] == 0;
    last = sum(last, product(found.sizes[i] - (found.sizes[i] > 0), found.strides[i]));
  }
  found.data = kNothing;
  if (empty) return found;
  found.bytes = product(sum(last, 1), found.item);
  int64_t storage = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &storage));
  const int64_t end = sum(product(x.storage_offset(), found.item), found.bytes);
  found.data = static_cast<uint8_t*>(use == Use::kWrites ? x.mutable_data_ptr()
                                                         : const_cast<void*>(x.const_data_ptr()));
  if (end > storage || !found.data)
    refuse(label, " reaches to byte ", end, " of its storage, which has ", storage);
  if (reinterpret_cast<uintptr_t>(found.data) % uintptr_t(found.item))
    refuse(label, " starts at an address that is not a multiple of ", found.item,
           ", the bytes of a number; clone it");
  return found;
}

void check_apart(const View& written, Label label, const View& other, Label other_label) {
  const auto a = reinterpret_cast<uintptr_t>(written.data);
  const auto b = reinterpret_cast<uintptr_t>(other.data);
  if (written.bytes && other.bytes && a < b + uintptr_t(other.bytes) &&
      b < a + uintptr_t(written.bytes))
    refuse(label, " is written to and shares memory with ", other_label, "; clone one of them");
}

Integers integers_of(const View& view) { return {view.data, view.type == ScalarType::Long}; }

}  // namespace kv

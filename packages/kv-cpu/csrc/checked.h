// Arguments of the operators, checked as they are read: a tensor has the dtype, sizes and strides
// that an operator requires and is inside of its memory, a number is in range. Each error message
// names the argument, the given value and the valid values. Sums and products are computed such
// that they cannot overflow.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "ops.h"

namespace kv {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // default limit of sizes

template <typename... Words>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Words&... words) {
  std::ostringstream sentence;
  (sentence << ... << words);
  throw std::runtime_error(sentence.str());
}

// The name of an argument; the last word is its index if there are several.
struct Label {
  const char* text;
  int64_t of = -1;
};

std::ostream& operator<<(std::ostream& to, const Label& label);

// The dtypes that an argument may have.
struct Kinds {
  uint64_t mask;
  const char* text;
};

constexpr uint64_t mask_of(torch::headeronly::ScalarType type) { return uint64_t(1) << int(type); }

constexpr Kinds kBytes{mask_of(torch::headeronly::ScalarType::Byte), "uint8"};
constexpr Kinds kMarks{mask_of(torch::headeronly::ScalarType::Bool), "bool"};
constexpr Kinds kInt32{mask_of(torch::headeronly::ScalarType::Int), "int32"};
constexpr Kinds kInt64{mask_of(torch::headeronly::ScalarType::Long), "int64"};
constexpr Kinds kIntegers{kInt32.mask | kInt64.mask, "int32 or int64"};
constexpr Kinds kFloat32{mask_of(torch::headeronly::ScalarType::Float), "float32"};
constexpr Kinds kFloat16{mask_of(torch::headeronly::ScalarType::Half), "float16"};
constexpr Kinds kBFloat16{mask_of(torch::headeronly::ScalarType::BFloat16), "bfloat16"};
constexpr Kinds kFloats{kFloat32.mask | kFloat16.mask | kBFloat16.mask,
                        "float32, float16 or bfloat16"};

// Sizes of an argument that are not fixed: up to kMost, or any.
constexpr int64_t kAny = -1, kMany = -2;

// The memory layout of a tensor: contiguous, with a contiguous last dimension, or with any
// strides.
enum class Lay { kContiguous, kRows, kStrided };

// Whether an operator writes to a tensor.
enum class Use { kReads, kWrites };

// A checked tensor. Sizes and strides are torch's own, and live as long as the tensor.
struct View {
  uint8_t* data = nullptr;
  const int64_t *sizes = nullptr, *strides = nullptr;  // strides in numbers
  torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Undefined;
  int64_t item = 0;   // bytes of a number
  int64_t bytes = 0;  // from the first number to the end of the last; 0 if empty

  int64_t size(int i) const { return sizes[i]; }
  int64_t step(int i) const { return strides[i] * item; }  // in bytes
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

View view(const torch::stable::Tensor& x, Label label, Kinds kinds,
          std::initializer_list<int64_t> sizes, Lay lay, Use use = Use::kReads);

// Raises if a tensor that is written shares memory with another argument, whose checked values
// could then change.
void check_apart(const View& written, Label label, const View& other, Label other_label);

// A number from `least` to `most`.
inline int64_t within(Label label, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    refuse(label, " is ", value, "; it must be ", least, " to ", most);
  return value;
}

// The product of nonnegative numbers, saturated at the maximum.
inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

inline int64_t sum(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_add_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

// Raises if rows of a page, one per token, are not inside its bytes.
inline void check_rows(Label label, int64_t offset, int64_t tokens, int64_t width, int64_t page) {
  if (offset < 0 || sum(offset, product(tokens, width)) > page)
    refuse(label, " is ", offset, "; ", tokens, " tokens of ", width,
           " bytes each from there on do not fit in a page of ", page);
}

Integers integers_of(const View& view);

// The number of table rows that justify a thread if each costs `each` of the unit of `worth`.
inline int64_t grain(int64_t worth, int64_t each) { return worth / sum(each, 1); }

}  // namespace kv

// Products of vectors with matrices: what maps queries, keys and values of a decode step to stored
// coordinates, and its output back.
#pragma once

#include <memory>
#include <vector>

#include "arguments.h"
#include "coder.h"

namespace kv {

// A matrix that vectors are multiplied with from the right, one for all heads or one for each KV
// head; its lines are its rows or its columns, whose numbers are consecutive.
struct Map {
  View given;  // [from, to] or [H, from, to]
  int64_t count = 0, from = 0, to = 0;  // matrices, and dimensions of vectors before and after
  int64_t step = 0, line = 0;  // bytes from one matrix to the next, and from one line to the next
  bool rows = true;            // whether lines are rows

  explicit operator bool() const { return count > 0; }
};

// The maps of a decode step; those without matrices leave vectors as they are.
struct Maps {
  Map key, query, value, output;
  View shift;  // [H, D], subtracted from keys; without numbers: nothing is

  // f(label, view) for each tensor that is given.
  template <typename F>
  void each(const F& f) const {
    if (key) f(Label{"the map of keys"}, key.given);
    if (query) f(Label{"the map of queries"}, query.given);
    if (value) f(Label{"the map of values"}, value.given);
    if (output) f(Label{"the map of outputs"}, output.given);
    if (shift.sizes) f(Label{"the shift of keys"}, shift);
  }
};

// Reads the tensors named by `kinds`, which ascend: maps of keys, queries, values and outputs, and
// the shift of keys.
Maps maps_of(const std::vector<torch::stable::Tensor>& tensors, const std::vector<int64_t>& kinds,
             int64_t heads);

// Vectors [m, heads, D] after a map: uninitialized, or those that were given if there is no map.
class Mapped {
 public:
  Mapped(const View& given, const Map& map, Label label);
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  const View& view() const { return view_; }

 private:
  View view_;
  int64_t sizes_[3], strides_[3];
  std::unique_ptr<uint8_t[]> room_;
};

// The vectors of some rows and all heads, which are a multiple of the matrices. Where `shift` has
// numbers, a vector of each head, it is subtracted before. Results are rounded to `to_number`.
struct Product {
  const Map& map;
  const View& shift;
  const uint8_t* from;
  int64_t from_step[2];  // bytes between rows and heads
  Number from_number;
  uint8_t* to;
  int64_t to_step[2];
  Number to_number;
  int64_t rows, heads;
};

// Rows first .. last - 1 of tensors by row and head.
Product product_of(const Map& map, const View& shift, const View& from, const View& to,
                   int64_t first, int64_t last);

// Computes products in float32, in several threads if the work justifies it; that of a vector with
// an infinite number may be NaN. `kernels` are those of `in_float32`.
void multiply(const std::vector<Product>& products, const Kernels& kernels, const Coder& coder);

}  // namespace kv

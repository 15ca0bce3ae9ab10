#include "maps.h"

#include <algorithm>

#include "boundary.h"

namespace kv {
namespace {

using torch::stable::Tensor;

constexpr int kTogether = 16;          // vectors that a thread multiplies with a matrix in turn
constexpr int64_t kWorth = 1 << 20;    // multiplications that justify another thread
constexpr int kKinds = 5;

Format plain(Number number, int64_t dim) { return {number, int(dim), 0, 1, 0, 0}; }

Map map_of(const Tensor& matrix, Label label, int64_t heads) {
  if (!matrix.defined()) refuse(label, " is None; it must be a tensor");
  const bool each = matrix.dim() == 3;
  Map map;
  map.given = each ? view(matrix, label, kFloats, {heads, kAny, kAny}, Lay::kStrided)
                   : view(matrix, label, kFloats, {kAny, kAny}, Lay::kStrided);
  const int row = each, column = row + 1;
  map.count = each ? heads : 1;
  map.from = within(label, map.given.size(row), 1, kMostDim);
  map.to = within(label, map.given.size(column), 1, kMostDim);
  map.step = each ? map.given.step(0) : 0;
  map.rows = map.given.strides[column] == 1 || map.to == 1;
  if (!map.rows && map.given.strides[row] != 1 && map.from > 1)
    refuse(label, " has strides ", map.given.strides[row], ", ", map.given.strides[column],
           " of rows and columns; numbers of its rows, or of its columns, must be consecutive");
  map.line = map.given.step(map.rows ? row : column);
  return map;
}

// The addresses of some lines; the last one is repeated up to a multiple of kLanes.
class Lines {
 public:
  Lines(const uint8_t* first, int64_t step, int count) : count_(count) {
    for (int i = 0; i < padded(count); ++i) at_[i] = first + std::min(i, count - 1) * step;
  }
  Rows rows() const { return {count_, at_, at_, nullptr, 0}; }

 private:
  int count_;
  const uint8_t* at_[kBlock];
};

// Vectors in float32, and their products.
struct Room {
  alignas(64) float x[kTogether * kMostDim];
  alignas(64) float y[kTogether * kMostDim];
  alignas(64) float block[kTogether * kBlock];
};

void round(const Format& format, const Kernels& kernels, const Coder& coder, float* x) {
  if (format.number == Number::kFloat32) return;
  alignas(64) uint8_t narrow[2 * kMostDim];
  const auto* from = reinterpret_cast<const uint8_t*>(x);
  coder.encode(format, Number::kFloat32, &from, 1, narrow, nullptr);
  kernels.widen(format.number, narrow, format.dim, x);
}

// Subtracts a head's shift, in the dtype of the vector.
void subtract(const Product& product, int64_t head, const Kernels& kernels, const Coder& coder,
              float* x) {
  const View& shift = product.shift;
  const Format format = plain(product.from_number, product.map.from);
  alignas(64) float less[kMostDim];
  kernels.widen(number_of(shift.type), shift.data + head * shift.step(0), format.dim, less);
  round(format, kernels, coder, less);
  for (int d = 0; d < format.dim; ++d) x[d] -= less[d];
  round(format, kernels, coder, x);
}

// Rows of the matrix are tokens that are weighted with the numbers of the vectors.
void by_rows(const Map& map, const uint8_t* matrix, int count, int step, const Kernels& kernels,
             Room& room) {
  const int width = padded(int(map.to));
  const Format format = plain(number_of(map.given.type), map.to);
  std::fill_n(room.y, count * width, 0.0f);
  for (int64_t first = 0; first < map.from; first += kBlock) {
    const int some = int(std::min<int64_t>(kBlock, map.from - first));
    const Lines lines(matrix + first * map.line, map.line, some);
    const float* weights = room.x;
    if (step != kBlock) {
      for (int k = 0; k < count; ++k)
        std::copy_n(room.x + k * step + first, padded(some), room.block + k * kBlock);
      weights = room.block;
    }
    Ahead ahead;
    kernels.weigh(format, lines.rows(), count, weights, room.y, width, ahead);
  }
}

// Columns of the matrix are tokens whose logits are products with the vectors.
void by_columns(const Map& map, const uint8_t* matrix, int count, int step, const Kernels& kernels,
                Room& room) {
  const int width = padded(int(map.to));
  const Format format = plain(number_of(map.given.type), map.from);
  const float sums[kTogether] = {};  // for zero points, which plain numbers have none of
  const Queries vectors{room.x, sums, count, step};
  for (int64_t first = 0; first < map.to; first += kBlock) {
    const int some = int(std::min<int64_t>(kBlock, map.to - first));
    const Lines lines(matrix + first * map.line, map.line, some);
    Ahead ahead;
    kernels.dot(format, lines.rows(), vectors, nullptr, room.block, ahead);
    for (int k = 0; k < count; ++k)
      std::copy_n(room.block + k * kBlock, some, room.y + k * width + first);
  }
}

// Groups of vectors that are multiplied with one matrix.
int64_t groups_of(const Product& product) {
  return (product.rows * (product.heads / product.map.count) + kTogether - 1) / kTogether;
}

void multiply_group(const Product& product, int64_t i, const Kernels& kernels, const Coder& coder,
                    Room& room) {
  const Map& map = product.map;
  const int64_t groups = groups_of(product), per = product.heads / map.count;
  const int64_t matrix = i / groups, start = i % groups * kTogether;
  const int count = int(std::min<int64_t>(kTogether, product.rows * per - start));
  const int from = int(map.from), width = padded(from), step = std::max(width, kBlock);
  auto offset = [&](int k, const int64_t* steps) {
    const int64_t row = (start + k) / per, head = matrix * per + (start + k) % per;
    return row * steps[0] + head * steps[1];
  };
  for (int k = 0; k < count; ++k) {
    float* x = room.x + k * step;
    kernels.widen(product.from_number, product.from + offset(k, product.from_step), from, x);
    if (product.shift.sizes)
      subtract(product, matrix * per + (start + k) % per, kernels, coder, x);
    std::fill_n(x + from, width - from, 0.0f);
  }
  (map.rows ? by_rows : by_columns)(map, map.given.data + matrix * map.step, count, step, kernels,
                                    room);
  const Format format = plain(product.to_number, map.to);
  for (int k = 0; k < count; ++k) {
    const auto* y = reinterpret_cast<const uint8_t*>(room.y + k * padded(int(map.to)));
    coder.encode(format, Number::kFloat32, &y, 1, product.to + offset(k, product.to_step), nullptr);
  }
}

}  // namespace

Maps maps_of(const std::vector<Tensor>& tensors, const std::vector<int64_t>& kinds,
             int64_t heads) {
  if (tensors.size() != kinds.size())
    refuse("maps are ", tensors.size(), " tensors of ", kinds.size(), " kinds; give one of each");
  Maps maps;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const int64_t kind = within({"a kind of maps"}, kinds[i], i ? kinds[i - 1] + 1 : 0, kKinds - 1);
    if (kind == 0) maps.key = map_of(tensors[i], {"the map of keys"}, heads);
    if (kind == 1) maps.query = map_of(tensors[i], {"the map of queries"}, heads);
    if (kind == 2) maps.value = map_of(tensors[i], {"the map of values"}, heads);
    if (kind == 3) maps.output = map_of(tensors[i], {"the map of outputs"}, heads);
    if (kind < 4) continue;
    if (!maps.key) refuse("keys have a shift and no map; give both, or no shift");
    maps.shift =
        view(tensors[i], {"the shift of keys"}, kFloats, {heads, maps.key.from}, Lay::kRows);
  }
  return maps;
}

Mapped::Mapped(const View& given, const Map& map, Label label) : view_(given) {
  if (!map) return;
  if (given.size(2) != map.from)
    refuse(label, " have ", given.size(2), " dimensions, and their map takes ", map.from,
           "; give as many");
  const int64_t sizes[] = {given.size(0), given.size(1), map.to};
  const int64_t strides[] = {product(sizes[1], sizes[2]), sizes[2], 1};
  std::copy_n(sizes, 3, sizes_), std::copy_n(strides, 3, strides_);
  room_ = std::make_unique_for_overwrite<uint8_t[]>(
      product(product(sizes[0], strides[0]), given.item));
  // Without bytes: no argument shares this memory.
  view_ = {room_.get(), sizes_, strides_, given.type, given.item, 0};
}

Product product_of(const Map& map, const View& shift, const View& from, const View& to,
                   int64_t first, int64_t last) {
  return {map,
          shift,
          from.data + first * from.step(0),
          {from.step(0), from.step(1)},
          number_of(from.type),
          to.data + first * to.step(0),
          {to.step(0), to.step(1)},
          number_of(to.type),
          last - first,
          from.size(1)};
}

void multiply(const std::vector<Product>& products, const Kernels& kernels, const Coder& coder) {
  std::vector<int64_t> end;  // of each product's groups among all
  int64_t count = 0, most = 1;
  for (const Product& product : products) {
    const Map& map = product.map;
    count += groups_of(product) * map.count, end.push_back(count);
    const int64_t together = std::min<int64_t>(kTogether, product.rows * product.heads / map.count);
    most = std::max(most, together * map.from * map.to);
  }
  for_all(count, kWorth / most, [&](int64_t i) {
    Room room;
    size_t of = 0;
    while (i >= end[of]) ++of;
    multiply_group(products[of], i - (of ? end[of - 1] : 0), kernels, coder, room);
  });
}

}  // namespace kv

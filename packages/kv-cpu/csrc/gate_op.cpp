// The operator that computes the logarithms of the scores of a gate.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>

#include "arguments.h"
#include "boundary.h"
#include "gate.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTokens = 8 * kRows;    // of a task; their cosines and sines serve all heads
constexpr int64_t kWorth = 1 << 18;       // products that justify another thread

const GateKernels* const levels[] = {
    &plain_gate,
#ifdef KV_X86
    &avx2_gate, &avx512_gate,
#endif  // NEON is in the plain ones already
};

// The rotary embedding of a layer, checked and padded.
class Rope {
 public:
  Rope(const float* frequencies, const Integers& pairs, int64_t first, int64_t most, int dim) {
    std::vector<bool> paired(dim, false);
    for (int64_t i = 0; i < most; ++i) {
      const int64_t one = pairs[2 * (first + i)], other = pairs[2 * (first + i) + 1];
      if (one == -1 && other == -1) break;  // padding, as other layers have more
      for (int64_t each : {one, other}) {
        within({"a dimension of a pair"}, each, 0, dim - 1);
        if (paired[each]) refuse("dimension ", each, " is in two pairs; it must be in at most one");
        paired[each] = true;
        dims_.push_back(int(each));
      }
      frequency_.push_back(frequencies[first + i]);
    }
    pairs_ = int(frequency_.size());
    frequency_.resize(padded(pairs_));
    apart_ = pairs_ ? dims_[1] : 0;
    for (int i = 0; i < pairs_; ++i)
      if (dims_[2 * i] != i || dims_[2 * i + 1] != i + apart_) apart_ = 0;
    for (int d = 0; d < dim; ++d)
      if (!paired[d]) dims_.push_back(d);
    for (float each : frequency_)
      most_ = std::max(most_, std::isfinite(each) ? std::fabs(each) : INFINITY);
  }

  Rotation get() const {
    const int alone = int(dims_.size()) - 2 * pairs_;
    return {pairs_, alone, apart_, dims_.data(), frequency_.data(), most_};
  }

 private:
  int pairs_, apart_;
  float most_ = 0;
  std::vector<int> dims_;
  std::vector<float> frequency_;
};

struct Scratch {
  std::vector<Line> turns, rows, linear, inner, outer;
};

class Gate {
 public:
  Gate(const Tensor& key, const Tensor& value, const Tensor& position, const Tensor& layer,
       const Tensor& frequency, const Tensor& pairs, const Tensor& linear, const Tensor& inner,
       const Tensor& outer, int64_t first_head, const Name& isa) {
    kernels_of(isa);  // raises if it is not available
    kernels_ = levels[std::min(level_of(isa.text), int(std::size(levels)) - 1)];
    key_ = view(key, {"key"}, kFloats, {kAny, kAny, kAny, kAny}, Lay::kRows);
    sequences_ = key_.size(0), heads_ = key_.size(1), length_ = key_.size(2);
    value_ = view(value, {"value"}, kFloats, {sequences_, heads_, length_, kAny}, Lay::kRows);
    const View place = view(position, {"position"}, kIntegers, {sequences_, heads_, length_},
                            Lay::kStrided);
    place_ = integers_of(place);
    std::copy_n(place.strides, 3, place_step_);
    key_dim_ = int(within({"dimensions of a key"}, key_.size(3), 1, kMostDim));
    value_dim_ = int(within({"dimensions of a value"}, value_.size(3), 1, kMostDim));
    features_ = 2 * key_dim_ + value_dim_ + kScalars;
    width_ = padded(features_);
    const View first = view(linear, {"linear"}, kFloat32, {kAny, kAny, features_},
                            Lay::kContiguous);
    const int64_t layers = first.size(0);
    all_heads_ = first.size(1);
    const View second = view(inner, {"inner"}, kFloat32, {layers, all_heads_, features_, kAny},
                             Lay::kContiguous);
    units_ = int(within({"units"}, second.size(3), 0, kMostUnits));
    const View third = view(outer, {"outer"}, kFloat32, {layers, all_heads_, units_},
                            Lay::kContiguous);
    linear_ = first.as<const float>(), inner_ = second.as<const float>();
    outer_ = third.as<const float>();
    first_head_ = within({"first_head"}, first_head, 0, all_heads_);
    if (heads_ > all_heads_ - first_head_)
      refuse("key has ", heads_, " heads from head ", first_head_, " on; there are weights for ",
             all_heads_);
    const Integers of = integers_of(view(layer, {"layer"}, kIntegers, {sequences_},
                                         Lay::kContiguous));
    for (int64_t b = 0; b < sequences_; ++b)
      layer_.push_back(within({"a layer"}, of[b], 0, layers - 1));
    read_ropes(frequency, pairs, layers);
  }

  Tensor run(const Tensor& key) {
    Tensor result = torch::stable::new_empty(key, {sequences_, heads_, length_}, ScalarType::Float);
    if (!sequences_ || !heads_ || !length_) return result;
    out_ = static_cast<float*>(result.mutable_data_ptr());
    const int64_t each = product(features_, units_ + 8);  // reading a feature costs as much as 8
    const int64_t work = product(each, product(heads_, product(sequences_, length_)));
    blocks_ = (length_ + kTokens - 1) / kTokens;
    const int64_t threads = std::min({int64_t(torch::stable::get_num_threads()),
                                      product(blocks_, sequences_), work / kWorth + 1});
    scratch_.resize(threads);
    for (Scratch& scratch : scratch_) {
      scratch.turns.resize(2 * kTokens * turns_width_ / kLanes);
      scratch.rows.resize(kRows * width_ / kLanes);
      scratch.linear.resize(width_ / kLanes);
      scratch.inner.resize(features_ * padded(units_) / kLanes);
      scratch.outer.resize(padded(units_) / kLanes);
    }
    if (threads == 1)
      work_on(scratch_[0]);
    else
      parallel(
          threads,
          [](int64_t i, void* me) {
            Gate& gate = *static_cast<Gate*>(me);
            gate.work_on(gate.scratch_[i]);
          },
          this);
    return result;
  }

 private:
  void read_ropes(const Tensor& frequency, const Tensor& pairs, int64_t layers) {
    const View each = view(frequency, {"frequency"}, kFloat32, {kAny, kAny}, Lay::kContiguous);
    const int64_t ropes = each.size(0), most = each.size(1);
    if (ropes != 1 && ropes != layers)
      refuse("frequency is of ", ropes, " layers; it must be of 1, for all, or of ", layers);
    within({"pairs"}, most, 0, kMostDim);
    const Integers which = integers_of(view(pairs, {"pairs"}, kIntegers, {ropes, most, 2},
                                            Lay::kContiguous));
    for (int64_t i = 0; i < ropes; ++i)
      ropes_.emplace_back(each.as<const float>(), which, i * most, most, key_dim_);
    for (const Rope& rope : ropes_)
      turns_width_ = std::max(turns_width_, int64_t(padded(rope.get().pairs)));
  }

  void work_on(Scratch& scratch) {
    for (int64_t i; (i = next_++) < blocks_ * sequences_;) {
      const int64_t b = i / blocks_, first = i % blocks_ * kTokens;
      const int64_t last = std::min(first + kTokens, length_);
      const Rotation rope = ropes_[ropes_.size() == 1 ? 0 : layer_[b]].get();
      for (int64_t h = 0; h < heads_; ++h) {
        // Heads of a prompt have the same positions.
        if (h == 0 || place_step_[1] != 0) turn(rope, b, h, first, last, scratch);
        const PackedHead head =
            head_of(rope, layer_[b] * all_heads_ + first_head_ + h, scratch);
        for (int64_t at = first; at < last; at += kRows)
          score(rope, head, b, h, at, int(std::min<int64_t>(kRows, last - at)), at - first, scratch);
      }
    }
  }

  void turn(const Rotation& rope, int64_t b, int64_t h, int64_t first, int64_t last,
            Scratch& scratch) const {
    if (!rope.pairs) return;
    float* to = scratch.turns[0].numbers;
    for (int64_t at = first; at < last; ++at, to += 2 * turns_width_) {
      const int64_t place = place_[b * place_step_[0] + h * place_step_[1] + at * place_step_[2]];
      kernels_->turn(rope, std::max<int64_t>(0, place), to, to + turns_width_);
    }
  }

  PackedHead head_of(const Rotation& rope, int64_t head, Scratch& scratch) const {
    const GateHead given{linear_ + head * features_, inner_ + head * features_ * units_,
                         outer_ + head * units_, key_dim_, value_dim_, units_};
    auto of = [](std::vector<Line>& lines) { return lines.empty() ? nullptr : lines[0].numbers; };
    const PackedHead packed{of(scratch.linear), of(scratch.inner), of(scratch.outer),
                            features_ - key_dim_ + rope.norms(), units_};
    kernels_->pack(rope, given, packed);
    return packed;
  }

  void score(const Rotation& rope, const PackedHead& head, int64_t b, int64_t h, int64_t first,
             int count, int64_t in_task, Scratch& scratch) const {
    float* rows = scratch.rows[0].numbers;
    const float* turns = rope.pairs ? scratch.turns[0].numbers : nullptr;
    for (int i = 0; i < count; ++i) {
      const float* cosine = turns ? turns + (in_task + i) * 2 * turns_width_ : nullptr;
      const GateToken token{
          key_.data + b * key_.step(0) + h * key_.step(1) + (first + i) * key_.step(2),
          value_.data + b * value_.step(0) + h * value_.step(1) + (first + i) * value_.step(2),
          number_of(key_.type),
          number_of(value_.type),
          key_dim_,
          value_dim_,
          cosine,
          cosine ? cosine + turns_width_ : nullptr};
      kernels_->features(rope, token, rows + i * width_);
    }
    kernels_->products(head, rows, width_, count, out_ + (b * heads_ + h) * length_ + first);
  }

  const GateKernels* kernels_;
  View key_, value_;
  Integers place_;
  int64_t place_step_[3];  // in numbers
  int64_t sequences_, heads_, length_, all_heads_, first_head_, blocks_ = 0, turns_width_ = 0;
  int key_dim_, value_dim_, features_, width_, units_;
  const float *linear_, *inner_, *outer_;
  float* out_ = nullptr;
  std::vector<int64_t> layer_;
  std::vector<Rope> ropes_;
  std::vector<Scratch> scratch_;
  std::atomic<int64_t> next_{0};
};

// The logarithms [B, H, L] in float32.
Tensor gate(Tensor key, Tensor value, Tensor position, Tensor layer, Tensor frequency,
            Tensor pairs, Tensor linear, Tensor inner, Tensor outer, int64_t first_head, Name isa) {
  return Gate(key, value, position, layer, frequency, pairs, linear, inner, outer, first_head, isa)
      .run(key);
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "gate(Tensor key, Tensor value, Tensor position, Tensor layer, Tensor frequency, "
      "Tensor pairs, Tensor linear, Tensor inner, Tensor outer, int first_head, str isa) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("gate", KV_BOX(&kv::gate)); }

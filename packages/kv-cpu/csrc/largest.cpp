// Loops over the tokens of each table row in blocks, and over the queries that count.
#include "largest.h"

#include <algorithm>
#include <cmath>

#include "sequence.h"

namespace kv {
namespace {

constexpr int kRows = kMostRows;  // queries held at a time; a multiple of kTile
static_assert(kRows % kTile == 0);

struct Scratch {
  std::vector<Line> queries, panels, logits, most;
};

class Finder {
 public:
  Finder(const Largest& job, int workers)
      : job_(job),
        narrow_(job.kernels->narrow && job.query_number == Number::kBFloat16 &&
                job.key_number == Number::kBFloat16),
        blocks_((job.tokens + kBlock - 1) / kBlock) {
    const int64_t rows = job.group * job.length;
    for (int64_t table_row = 0; table_row < job.sequences * job.heads; ++table_row) {
      std::vector<int64_t>& counted = counted_.emplace_back();
      const float* lse = job.lse + table_row * rows;
      for (int64_t i = 0; i < rows; ++i)
        if (lse[i] != -INFINITY) counted.push_back(i);
    }
    auto room = [](int64_t bytes) { return std::vector<Line>((bytes + 63) / 64); };
    scratch_.resize(workers);
    for (Scratch& scratch : scratch_) {
      scratch.queries = room(kRows * row_bytes(job.dim, false));
      scratch.panels = room(kPanels * panel_bytes(job.dim, false));
      scratch.logits = room(4 * kRows * kPanel);
      scratch.most = room(4 * kBlock);
    }
  }

  void run(Parallel parallel) {
    parallel(
        int64_t(scratch_.size()),
        [](int64_t i, void* me) { static_cast<Finder*>(me)->work(int(i)); }, this);
  }

 private:
  void work(int worker) {
    const int64_t count = blocks_ * job_.sequences * job_.heads;
    for (int64_t i; (i = next_++) < count;)
      find(i / blocks_, i % blocks_ * kBlock, scratch_[worker]);
  }

  // For the tokens of a block from `first` on.
  void find(int64_t table_row, int64_t first, Scratch& scratch) const {
    const int count = int(std::min<int64_t>(kBlock, job_.tokens - first));
    put_keys(table_row, first, count, scratch);
    float* most = scratch.most[0].numbers;
    std::fill_n(most, kBlock, -INFINITY);
    const std::vector<int64_t>& counted = counted_[table_row];
    const auto* panels = reinterpret_cast<const uint8_t*>(scratch.panels.data());
    float* logits = scratch.logits[0].numbers;
    for (size_t at = 0; at < counted.size(); at += kRows) {
      const int rows = int(std::min<size_t>(kRows, counted.size() - at));
      float lse[kRows];
      put_queries(table_row, &counted[at], rows, lse, scratch);
      for (int panel = 0; panel * kPanel < count; ++panel) {
        job_.kernels->products(scratch.queries.data(), (rows + kTile - 1) / kTile * kTile, job_.dim,
                               narrow_, panels + panel * panel_bytes(job_.dim, narrow_), logits);
        job_.kernels->raise(logits, rows, job_.scale, lse, most + panel * kPanel);
      }
    }
    float* out = job_.out + table_row * job_.tokens + first;
    for (int t = 0; t < count; ++t) out[t] = std::exp(most[t]);
  }

  void put_keys(int64_t table_row, int64_t first, int count, Scratch& scratch) const {
    const uint8_t *from = job_.keys + table_row / job_.heads * job_.key_step[0] +
                          table_row % job_.heads * job_.key_step[1] + first * job_.key_step[2],
                  *keys[kBlock];
    for (int t = 0; t < count; ++t) keys[t] = from + t * job_.key_step[2];
    std::fill(scratch.panels.begin(), scratch.panels.end(), Line{});
    job_.kernels->put_keys({job_.key_number, job_.dim, 0, 1, 0, 0},
                           {count, keys, nullptr, nullptr, 0}, narrow_, scratch.panels.data());
  }

  void put_queries(int64_t table_row, const int64_t* counted, int rows, float* lse,
                   Scratch& scratch) const {
    const int64_t* step = job_.query_step;
    const uint8_t* from =
        job_.queries + table_row / job_.heads * step[0] + table_row % job_.heads * step[1];
    auto* to = reinterpret_cast<uint8_t*>(scratch.queries.data());
    for (int r = 0; r < rows; ++r, to += row_bytes(job_.dim, narrow_)) {
      const int64_t i = counted[r];
      job_.kernels->put_query(job_.query_number,
                              from + i / job_.length * step[2] + i % job_.length * step[3], step[4],
                              job_.dim, narrow_, to);
      lse[r] = job_.lse[table_row * job_.group * job_.length + i];
    }
  }

  const Largest& job_;
  const bool narrow_;     // bfloat16 is multiplied directly
  const int64_t blocks_;  // of a table row
  std::vector<std::vector<int64_t>> counted_;  // per table row, indices into [G, L]
  std::vector<Scratch> scratch_;
  std::atomic<int64_t> next_{0};
};

}  // namespace

void largest(const Largest& job, int workers, Parallel parallel) {
  Finder(job, workers).run(parallel);
}

}  // namespace kv

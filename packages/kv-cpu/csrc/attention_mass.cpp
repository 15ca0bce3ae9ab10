// Loops over the tokens of each table row in blocks, and over the queries that count for any of
// them.
#include "attention_mass.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace kv {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

struct Scratch {
  std::vector<Line> queries, panels, logits, p;
  std::vector<Line> sums;  // terms x group x kBlock
  std::vector<float> lse;
  std::vector<int> start;  // per watch and token, the first query that counts
  std::vector<int> least;  // per watch and panel, the minimum of these
};

class Looker {
 public:
  Looker(Pass& pass, int workers, Fault& fault)
      : pass_(pass),
        job_(pass.job),
        fault_(fault),
        group_(int(job_.group)),
        queries_(std::max(1, kMostRows / group_)) {
    const int64_t most = *std::max_element(pass_.last.begin(), pass_.last.end());
    for (int64_t b = 0; b < job_.sequences; ++b) {
      const Sequence& found = sequences_.emplace_back(pass.chunk, b, most);
      latest_.push_back(found.latest());
      even_.emplace_back();
      for (int64_t at : found.position) even_.back().push_back(1 / float(at + 1));
    }
    pass.job.position = latest_.data();
    for (int64_t table_row = 0; table_row < job_.table_rows(); ++table_row)
      blocks_ = std::max(blocks_, (job_.tokens(table_row) + kBlock - 1) / kBlock);
    const int dim = int(job_.key_dim), rows = (queries_ * group_ + kTile - 1) / kTile * kTile;
    scratch_.resize(workers);
    for (Scratch& scratch : scratch_) {
      scratch.queries.resize(rows * row_bytes(dim, false) / sizeof(Line));
      scratch.panels.resize(kPanels * panel_bytes(dim, false) / sizeof(Line));
      scratch.logits.resize(rows * kPanel * sizeof(float) / sizeof(Line));
      scratch.p.resize(scratch.logits.size());
      scratch.lse.resize(rows);
      scratch.sums.resize(job_.terms * group_ * kBlock * sizeof(float) / sizeof(Line));
      scratch.start.resize(job_.watches.size() * kBlock);
      scratch.least.resize(job_.watches.size() * kPanels);
    }
  }

  void run(Parallel parallel) {
    parallel(
        int64_t(scratch_.size()),
        [](int64_t i, void* me) { static_cast<Looker*>(me)->work(int(i)); }, this);
  }

 private:
  void work(int worker) {
    // The first tokens have the most queries, so schedule blocks of all table rows in this order.
    const int64_t table_rows = job_.table_rows();
    for (int64_t i; (i = next_++) < blocks_ * table_rows && fault_.part < 0;) {
      const int64_t table_row = i % table_rows, first = i / table_rows * kBlock;
      const int64_t last = std::min(first + kBlock, job_.tokens(table_row));
      if (first >= last || sequences_[table_row / job_.heads].place.empty()) continue;
      Block block;
      Cursor cursor(job_, table_row, first, last, fault_);
      while (cursor.next(block)) look(table_row, block, scratch_[worker]);
    }
  }

  void look(int64_t table_row, const Block& block, Scratch& scratch) const {
    const Sequence& sequence = sequences_[table_row / job_.heads];
    const Format& key = job_.parts[block.part].key;
    const bool narrow = pass_.kernels->narrow && job_.query_number == Number::kBFloat16 &&
                        key.number == Number::kBFloat16;
    std::fill(scratch.panels.begin(), scratch.panels.end(), Line{});
    pass_.kernels->put_keys(key, block.keys(), narrow, scratch.panels.data());
    find_starts(table_row, block, sequence, scratch);
    std::fill(scratch.sums.begin(), scratch.sums.end(), Line{});
    const int count = int(sequence.place.size());
    int first = *std::min_element(scratch.least.begin(), scratch.least.end());
    for (; first < count; first += queries_) {
      const int queries = std::min(queries_, count - first);
      const HeldRows rows{queries, group_, first, scratch.lse.data(),
                          &even_[table_row / job_.heads][first]};
      fill_queries(table_row, sequence, rows, narrow, scratch);
      for (int panel = 0; panel < kPanels; ++panel) look(rows, panel, narrow, scratch);
    }
    hand_over(table_row, block, count, scratch);
  }

  // A query counts for a token if it is among the last ones and far enough after it.
  void find_starts(int64_t table_row, const Block& block, const Sequence& sequence,
                   Scratch& scratch) const {
    const int count = int(sequence.place.size());
    const Part& part = job_.parts[block.part];
    const int64_t* place = part.place + table_row / job_.heads * part.place_step[0] +
                           table_row % job_.heads * part.place_step[1];
    std::fill(scratch.start.begin(), scratch.start.end(), kNever);
    for (size_t w = 0; w < job_.watches.size(); ++w) {
      const int64_t skip = job_.watches[w].skip;
      int *const first = &scratch.start[w * kBlock], *start = first;
      std::fill_n(start, block.count, int(std::max<int64_t>(0, count - pass_.last[w])));
      // Stored tokens precede every query.
      for (int i = 0; i < block.runs && !(part.paged && skip <= 1); ++i)
        for (int64_t slot = block.run[i].slot; slot < block.run[i].slot + block.run[i].count;
             ++slot) {
          const int64_t at = std::min(place[slot * part.place_step[2]], kMostPosition);
          const int from = sequence.from(at + skip);
          *start = std::max(*start, from);
          ++start;
        }
      for (int panel = 0; panel < kPanels; ++panel)
        scratch.least[w * kPanels + panel] =
            *std::min_element(first + panel * kPanel, first + (panel + 1) * kPanel);
    }
  }

  void fill_queries(int64_t table_row, const Sequence& sequence, const HeldRows& rows, bool narrow,
                    Scratch& scratch) const {
    const int64_t* step = pass_.chunk.query_step;
    const int dim = int(job_.key_dim);
    const uint8_t* from =
        job_.queries + table_row / job_.heads * step[0] + table_row % job_.heads * step[1];
    auto* to = reinterpret_cast<uint8_t*>(scratch.queries.data());
    float* lse = scratch.lse.data();
    for (int i = 0; i < rows.queries; ++i) {
      const int64_t place = sequence.place[rows.first + i];
      for (int g = 0; g < group_; ++g, to += row_bytes(dim, narrow)) {
        pass_.kernels->put_query(job_.query_number, from + g * step[2] + place * step[3], step[4],
                                 dim, narrow, to);
        *lse++ = pass_.lse[(table_row * group_ + g) * pass_.chunk.length + place];
      }
    }
  }

  void look(const HeldRows& rows, int panel, bool narrow, Scratch& scratch) const {
    const int dim = int(job_.key_dim), count = rows.queries * group_;
    const int end = rows.first + rows.queries;
    float *logits = scratch.logits[0].numbers, *p = scratch.p[0].numbers;
    bool multiplied = false;
    for (size_t w = 0; w < job_.watches.size(); ++w) {
      if (scratch.least[w * kPanels + panel] >= end) continue;  // no query counts
      if (!multiplied) {
        const auto* keys = reinterpret_cast<const uint8_t*>(scratch.panels.data());
        pass_.kernels->products(scratch.queries.data(), (count + kTile - 1) / kTile * kTile, dim,
                                narrow, keys + panel * panel_bytes(dim, narrow), logits);
        pass_.kernels->soften(logits, count, job_.scale, job_.softcap, rows.lse, p);
        multiplied = true;
      }
      const Watch& watch = job_.watches[w];
      for (size_t t = 0; t < watch.terms.size(); ++t)
        pass_.kernels->observe(p, logits, rows, &scratch.start[w * kBlock + panel * kPanel],
                               watch.terms[t], watch.group, watch.above,
                               sums_of(scratch, watch.first + t) + panel * kPanel);
    }
  }

  void hand_over(int64_t table_row, const Block& block, int count, Scratch& scratch) const {
    const int64_t width = job_.parts[block.part].width, plane = job_.table_rows() * width;
    for (int i = 0, at = 0; i < block.runs; at += block.run[i++].count) {
      const Run& run = block.run[i];
      const int64_t to = table_row * width + run.slot;
      for (size_t w = 0; w < job_.watches.size(); ++w) {
        const Watch& watch = job_.watches[w];
        for (int t = 0; t < run.count; ++t)
          job_.seen[block.part][w * plane + to + t] =
              std::max(0, count - scratch.start[w * kBlock + at + t]);
        for (size_t k = 0; k < watch.terms.size(); ++k) {
          const float* sums = sums_of(scratch, watch.first + k) + at;
          for (int t = 0; t < run.count; ++t) {
            float sum = sums[t];
            for (int g = 1; watch.group == Group::kMaxOfSums && g < group_; ++g)
              sum = std::max(sum, sums[g * kBlock + t]);
            job_.sums[block.part][(watch.first + k) * plane + to + t] =
                watch.group == Group::kMean ? sum / float(group_) : sum;
          }
        }
      }
    }
  }

  float* sums_of(Scratch& scratch, size_t term) const {
    return scratch.sums.data()->numbers + term * group_ * kBlock;
  }

  const Pass& pass_;
  const Job& job_;
  Fault& fault_;
  const int group_, queries_;  // queries held at a time
  std::vector<Sequence> sequences_;
  std::vector<std::vector<float>> even_;  // per sequence and query, the uniform share
  std::vector<int64_t> latest_;
  std::vector<Scratch> scratch_;
  int64_t blocks_ = 0;  // of the longest table row
  std::atomic<int64_t> next_{0};
};

}  // namespace

void attention_mass(Pass& pass, int workers, Parallel parallel, Fault& fault) {
  Looker(pass, workers, fault).run(parallel);
}

}  // namespace kv

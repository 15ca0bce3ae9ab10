// Loops over the queries of each table row in tasks, and per task over the tokens in blocks, which
// are unpacked once for all heads of the group.
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "prompt_mass.h"
#include "uninitialized.h"

namespace kv {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();
constexpr float kLow = -1e30f;  // below every logit, but finite, so that differences are not NaN
constexpr float kLog2 = 1.44269504f;

std::vector<Line> room(int64_t bytes) { return std::vector<Line>((bytes + 63) / 64); }

struct Scratch {
  std::vector<Line> wide, narrow;  // queries
  std::vector<Line> top, total, sums, shift, totals;
  std::vector<Line> keys, values, scales, logits, weights, found, numbers;
  std::vector<int> rank, start;
  std::vector<RowTile> tiles;  // that see tokens of a block
  int latest[kPanels], earliest[kPanels];
  // for the largest probabilities, or their sums: logits of a task by block and tile, or weights by
  // block and panel, with their tops, and the log-sum-exp of its rows in base 2
  std::vector<KeptBlock> blocks;
  Uninitialized<float> kept, tops;
  std::vector<Line> lse, factors;
  std::vector<std::vector<float>> largest;  // logarithms so far of each part's tokens [B, H, width]
};

class Attender {
 public:
  Attender(Prompt& prompt, int workers, Fault& fault)
      : prompt_(prompt), job_(prompt.job), fault_(fault) {
    for (int64_t b = 0; b < job_.sequences; ++b)
      latest_.push_back(sequences_.emplace_back(prompt.chunk, b, prompt.chunk.length).latest());
    prompt.job.position = latest_.data();
    for (const Part& part : job_.parts) {
      starts_.push_back(starts_of(part));
      if (!holds_any(part)) continue;  // as the pages of a prompt's first chunk
      (is_narrow(part.key) ? any_narrow_ : any_wide_) = true;
      any_scaled_ |= is_scaled(part.key);
    }
    for (size_t i = 0; i < prompt.largest.size(); ++i) kept_ += job_.parts[i].width;
    const bool sums = !job_.watches.empty();
    for (int64_t i = 0; i < job_.table_rows() && sums; ++i) kept_ = std::max(kept_, job_.tokens(i));
    const Tasks found(job_, sequences_, starts_, sums ? kept_ * kKeptFloats / kPanel : kept_,
                      int(tile_rows()), workers);
    tasks_ = found.all;
    if (sums) masses_.emplace(prompt.job, sequences_, tasks_);
    scratch_.resize(workers);
    const int64_t rows = (found.most + tile_rows() - 1) / tile_rows() * tile_rows();
    kept_rows_ = padded(int(rows));
    for (Scratch& scratch : scratch_) make(scratch, rows);
  }

  void run(Parallel parallel) {
    for (int64_t b = 0; b < job_.sequences; ++b)
      if (int64_t(sequences_[b].place.size()) < prompt_.chunk.length) clear_padding(b);
    parallel(int64_t(scratch_.size()),
             [](int64_t i, void* me) { static_cast<Attender*>(me)->work(int(i)); }, this);
    if (masses_ && fault_.part < 0) masses_->finish(fault_);
    for (size_t part = 0; part < prompt_.largest.size(); ++part)
      for (int64_t i = 0; i < job_.table_rows() * job_.parts[part].width; ++i) {
        float most = -INFINITY;
        for (const Scratch& scratch : scratch_) raise(most, scratch.largest[part][i]);
        prompt_.largest[part][i] = std::exp2(most);
      }
  }

 private:
  // Whether numbers are multiplied in bfloat16: only if nothing but weights is rounded by it.
  bool is_narrow(const Format& format) const {
    return prompt_.kernels->narrow && job_.query_number == Number::kBFloat16 &&
           (format.number == Number::kBFloat16 || (is_scaled(format) && !format.leveled));
  }

  static bool is_scaled(const Format& format) {
    return format.number == Number::kCodes && format.groups == 1;
  }

  bool holds_any(const Part& part) const {
    for (int64_t i = 0; i < job_.table_rows(); ++i)
      if (part.count(i) > 0) return true;
    return false;
  }

  std::vector<int> starts_of(const Part& part) const {
    std::vector<int> starts;
    for (int64_t b = 0; b < job_.sequences && !part.paged; ++b)
      for (int64_t slot = 0; slot < part.width; ++slot) {
        const int64_t at = part.place[b * part.place_step[0] + slot * part.place_step[2]];
        starts.push_back(at < 0 ? kNever : sequences_[b].from(at));
      }
    return starts;
  }

  // In several sums, whose latencies overlap.
  static float sum_of(const float* numbers, int count) {
    float sums[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += numbers[i + lane];
    return std::accumulate(numbers + i, numbers + count,
                           std::accumulate(sums, sums + kLanes, 0.0f));
  }

  // The maximum, or NaN if one is.
  static void raise(float& most, float x) { most = x > most || x != x ? x : most; }

  void make(Scratch& scratch, int64_t rows) const {
    for (size_t i = 0; i < prompt_.largest.size(); ++i)
      scratch.largest.emplace_back(job_.table_rows() * job_.parts[i].width, -INFINITY);
    if (kept_) {
      const int64_t blocks = kept_ / kBlock + int64_t(job_.parts.size());
      const int64_t size = masses_ ? kept_rows_ * kPanels * kKeptFloats : rows * kBlock;
      scratch.kept = Uninitialized<float>(size * blocks);
      scratch.tops = Uninitialized<float>(masses_ ? kTops * kept_rows_ * blocks : 0);
      scratch.lse = room(4 * kept_rows_);
      scratch.factors = room(4 * kTops * kept_rows_);
    }
    const int dim = int(job_.key_dim), panels = panels_of(int(job_.value_dim));
    scratch.wide = room((any_wide_ ? rows : 1) * row_bytes(dim, false));
    if (any_narrow_) scratch.narrow = room(rows * row_bytes(dim, true));
    for (auto* of : {&scratch.top, &scratch.total, &scratch.shift, &scratch.totals})
      *of = room(4 * rows);
    scratch.sums = room(4 * rows * panels * kPanel);
    scratch.keys = room(kPanels * panel_bytes(dim, false));
    scratch.values = room(panels * panel_bytes(kBlock, false));
    scratch.scales = room(4 * 4 * kBlock);
    scratch.logits = room(4 * tile_rows() * kBlock);
    scratch.weights = room(tile_rows() * row_bytes(kBlock, false));
    scratch.found = room(4 * tile_rows() * panels * kPanel);
    scratch.numbers = room(4 * panels * kPanel);
    scratch.rank.resize(rows);
    scratch.start.resize(kBlock);
  }

  void work(int worker) {
    Scratch& scratch = scratch_[worker];
    for (size_t i; (i = next_++) < tasks_.size() && fault_.part < 0;) {
      const Task& task = tasks_[i];
      begin(task, scratch);
      Block blocks[2];  // the present one and the next, which has no tokens after the last
      Cursor cursor(job_, task.table_row, 0, end_of(task), fault_);
      scratch.blocks.clear();
      bool more = cursor.next(blocks[0]);
      for (int at = 0; more; at ^= 1) {
        more = cursor.next(blocks[at ^ 1]);
        attend(task, blocks[at], blocks[at ^ 1], scratch);
      }
      finish(task, scratch);
      if (masses_) {
        sum(task, scratch);
        masses_->add(i, std::move(scratch.blocks));
      } else {
        find_largest(task, scratch);
      }
    }
  }

  int64_t tile_rows() const { return prompt_.kernels->rows; }
  int64_t rows(const Task& task) const { return (task.last - task.first) * job_.group; }

  // The tokens of its table row up to the last that its queries see, in the order of a cursor.
  int64_t end_of(const Task& task) const {
    int64_t end = job_.tokens(task.table_row);
    for (size_t i = job_.parts.size(); i-- > 0 && !job_.parts[i].paged;) {
      const int64_t width = job_.parts[i].width;
      const int* starts = starts_[i].data() + task.table_row / job_.heads * width;
      for (int64_t slot = width; slot-- > 0; --end)
        if (starts[slot] < task.last) return end;
    }
    return end;
  }

  void begin(const Task& task, Scratch& scratch) const {
    const int64_t* step = prompt_.chunk.query_step;
    const int64_t b = task.table_row / job_.heads;
    const int dim = int(job_.key_dim), group = int(job_.group);
    const uint8_t* from = job_.queries + b * step[0] + task.table_row % job_.heads * step[1];
    std::fill(scratch.top.begin(), scratch.top.end(), Line{});
    std::fill(scratch.total.begin(), scratch.total.end(), Line{});
    std::fill(scratch.sums.begin(), scratch.sums.end(), Line{});
    std::fill(scratch.shift.begin(), scratch.shift.end(), Line{});
    auto* narrow = reinterpret_cast<uint8_t*>(scratch.narrow.data());
    auto* wide = reinterpret_cast<uint8_t*>(scratch.wide.data());
    for (int64_t r = 0; r < rows(task); ++r) {
      const int64_t rank = task.first + r / group, place = sequences_[b].place[rank];
      const uint8_t* at = from + r % group * step[2] + place * step[3];
      auto put = [&](bool is_narrow, uint8_t* row) {
        prompt_.kernels->put_query(job_.query_number, at, step[4], dim, is_narrow, row);
      };
      if (any_narrow_) put(true, narrow + r * row_bytes(dim, true));
      uint8_t* row = wide + (any_wide_ ? r * row_bytes(dim, false) : 0);
      if (any_wide_ || any_scaled_) put(false, row);
      if (any_scaled_) {
        const auto* numbers = reinterpret_cast<const float*>(row);
        scratch.totals[0].numbers[r] = sum_of(numbers, dim);
      }
      scratch.top[0].numbers[r] = kLow;
      if (job_.sinks) {  // as tokens whose value is 0
        const float sink = job_.sinks[task.table_row % job_.heads * group + r % group] * kLog2;
        if (!(sink <= kLow)) scratch.top[0].numbers[r] = sink, scratch.total[0].numbers[r] = 1;
      }
      scratch.rank[r] = int(rank);
    }
  }

  void attend(const Task& task, const Block& block, const Block& next, Scratch& scratch) const {
    find_starts(task, block, scratch);
    const int panels = panels_of(block.count), end = int(task.last);
    if (*std::min_element(scratch.earliest, scratch.earliest + panels) >= end) return;
    const Part& part = job_.parts[block.part];
    float* scales = scratch.scales[0].numbers;
    const Packed keys{is_narrow(part.key), is_scaled(part.key), scratch.keys.data(), scales,
                      scales + kBlock};
    const Packed values{is_narrow(part.value), is_scaled(part.value), scratch.values.data(),
                        scales + 2 * kBlock, scales + 3 * kBlock};
    prompt_.kernels->pack_keys(part.key, block.keys(), keys);
    prompt_.kernels->pack_values(part.value, block.values(), values);
    const int dim = int(job_.key_dim), value_dim = int(job_.value_dim);
    const PackedBlock packed{keys, values, dim, value_dim, scratch.start.data(), scratch.latest};
    const auto* queries = reinterpret_cast<const uint8_t*>(
        keys.narrow ? scratch.narrow.data() : scratch.wide.data());
    const int sums = panels_of(value_dim) * kPanel;
    const bool keeps = size_t(block.part) < prompt_.largest.size();
    const auto kept = int64_t(scratch.blocks.size());
    if (keeps || masses_)
      scratch.blocks.push_back({block.part, {block.run, block.run + block.runs}, {}});
    float* weights = masses_ ? weights_of(kept, scratch) : nullptr;
    float* tops = masses_ ? tops_of(kept, scratch) : nullptr;
    scratch.tiles.clear();
    for (int64_t r = 0; r < rows(task); r += tile_rows()) {
      const int last = scratch.rank[std::min(r + tile_rows(), rows(task)) - 1];
      int held = panels;
      while (held > 0 && scratch.earliest[held - 1] > last) --held;
      if (keeps || masses_) scratch.blocks.back().panels.push_back(held);
      if (held == 0) continue;
      scratch.tiles.push_back({int(std::min(tile_rows(), rows(task) - r)),
                               held,
                               queries + r * row_bytes(dim, keys.narrow),
                               scratch.totals[0].numbers + r,
                               scratch.rank.data() + r,
                               scratch.top[0].numbers + r,
                               scratch.total[0].numbers + r,
                               scratch.sums[0].numbers + r * sums,
                               scratch.shift[0].numbers + r,
                               keeps,
                               keeps ? logits_of(task, kept, r, scratch)
                                     : scratch.logits[0].numbers,
                               scratch.weights[0].numbers,
                               scratch.found[0].numbers,
                               weights ? weights + r * kKeptFloats : nullptr,
                               tops ? tops + r : nullptr,
                               int(kept_rows_)});
    }
    const Format &key = job_.parts[next.part].key, &value = job_.parts[next.part].value;
    NextRows ahead{{next.keys(), key.bytes(), key.meta_bytes()},
                   {next.values(), value.bytes(), value.meta_bytes()}};
    prompt_.kernels->attend(packed, job_.scale * kLog2, job_.softcap * kLog2, scratch.tiles.data(),
                            int(scratch.tiles.size()), ahead);
  }

  // The kept logits of the tile of rows from r on.
  float* logits_of(const Task& task, int64_t block, int64_t r, Scratch& scratch) const {
    const int64_t tiles = (rows(task) + tile_rows() - 1) / tile_rows();
    return scratch.kept.get() + (block * tiles + r / tile_rows()) * tile_rows() * kBlock;
  }

  float* weights_of(int64_t block, Scratch& scratch) const {
    return scratch.kept.get() + block * kPanels * kept_rows_ * kKeptFloats;
  }
  float* tops_of(int64_t block, Scratch& scratch) const {
    return scratch.tops.get() + block * kTops * kept_rows_;
  }

  // Sums the probabilities of a task's blocks, whose log-sum-exp is known now.
  void sum(const Task& task, Scratch& scratch) const {
    int start[kBlock], first[kPanels];
    for (size_t i = 0; i < scratch.blocks.size(); ++i) {
      KeptBlock& block = scratch.blocks[i];
      const auto begin = block.panels.begin(), end = block.panels.end();  // ascending
      const int panels = *(end - 1), heads = masses_->heads();
      for (int panel = 0; panel < panels; ++panel)
        first[panel] = int(tile_rows() * (std::upper_bound(begin, end, panel) - begin));
      const KeptRows kept{int(rows(task)),
                          int(kept_rows_),
                          is_narrow(job_.parts[block.part].value),
                          job_.watches[0].terms[0] == Term::kSquare,
                          weights_of(int64_t(i), scratch),
                          tops_of(int64_t(i), scratch),
                          scratch.lse[0].numbers,
                          scratch.rank.data(),
                          first,
                          masses_->starts(task.table_row, block, start)};
      block.sums.assign(heads * kBlock, 0.0f);
      prompt_.kernels->mass(kept, panels, heads, scratch.factors[0].numbers, block.sums.data());
    }
  }

  // Raises the largest probabilities by those of a task, whose log-sum-exp is known now.
  void find_largest(const Task& task, Scratch& scratch) const {
    alignas(64) float most[kBlock];
    for (size_t i = 0; i < scratch.blocks.size(); ++i) {
      const KeptBlock& block = scratch.blocks[i];
      std::fill_n(most, kBlock, -INFINITY);
      for (int64_t r = 0; r < rows(task); r += tile_rows())
        prompt_.kernels->raise(logits_of(task, int64_t(i), r, scratch),
                               block.panels[r / tile_rows()],
                               int(std::min(tile_rows(), rows(task) - r)),
                               scratch.lse[0].numbers + r, most);
      float* largest =
          &scratch.largest[block.part][task.table_row * job_.parts[block.part].width];
      const float* from = most;
      for (const Run& run : block.runs)
        for (int t = 0; t < run.count; ++t) raise(largest[run.slot + t], *from++);
    }
  }

  // The first query that sees each token of the block: all see a stored one.
  void find_starts(const Task& task, const Block& block, Scratch& scratch) const {
    std::vector<int>& start = scratch.start;
    const Part& part = job_.parts[block.part];
    if (part.paged) {
      std::fill_n(start.begin(), block.count, 0);
    } else {
      const int* of = &starts_[block.part][task.table_row / job_.heads * part.width];
      auto to = start.begin();
      for (int i = 0; i < block.runs; ++i)
        to = std::copy_n(of + block.run[i].slot, block.run[i].count, to);
    }
    std::fill(start.begin() + block.count, start.end(), kNever);
    for (int panel = 0; panel < kPanels; ++panel) {
      const auto [least, most] = std::minmax_element(start.begin() + panel * kPanel,
                                                     start.begin() + (panel + 1) * kPanel);
      scratch.earliest[panel] = *least, scratch.latest[panel] = *most;
    }
  }

  void finish(const Task& task, Scratch& scratch) const {
    const int64_t b = task.table_row / job_.heads, group = job_.group;
    const int panels = panels_of(int(job_.value_dim));
    float* row = scratch.numbers[0].numbers;
    for (int64_t r = 0; r < rows(task); ++r) {
      const float total = scratch.total[0].numbers[r], top = scratch.top[0].numbers[r];
      const float share = total == 0 ? 0 : 1 / total;
      const float shift = scratch.shift[0].numbers[r] * share;
      const int64_t tile = r / tile_rows(), inside = r % tile_rows();
      const float* sums =
          scratch.sums[0].numbers + (tile * panels * tile_rows() + inside) * kPanel;
      prompt_.kernels->finish(sums, panels, share, shift, row);
      const int64_t place = sequences_[b].place[task.first + r / group];
      const float lse = top + std::log2(total);
      // A query that sees nothing has no probabilities.
      if (kept_) scratch.lse[0].numbers[r] = total == 0 ? -kLow : lse;
      put(row, total == 0 ? -INFINITY : lse / kLog2,
          (task.table_row * group + r % group) * prompt_.chunk.length + place);
    }
  }

  void put(const float* row, float lse, int64_t query) const {
    const int dim = int(job_.value_dim);
    const Format format{job_.query_number, dim, 0, 1, 0, 0};
    const auto* from = reinterpret_cast<const uint8_t*>(row);
    prompt_.coder->encode(format, Number::kFloat32, &from, 1,
                          prompt_.out + query * format.bytes(), nullptr);
    job_.lse[query] = lse;
  }

  void clear_padding(int64_t b) const {
    const std::vector<float> zeros(job_.value_dim, 0.0f);
    const int64_t length = prompt_.chunk.length, heads = job_.heads * job_.group;
    for (int64_t i = 0; i < length; ++i)
      if (prompt_.chunk.position[b * length + i] < 0)
        for (int64_t head = b * heads; head < (b + 1) * heads; ++head)
          put(zeros.data(), -INFINITY, head * length + i);
  }

  const Prompt& prompt_;
  const Job& job_;
  Fault& fault_;
  std::vector<Sequence> sequences_;
  std::vector<int64_t> latest_;
  std::vector<std::vector<int>> starts_;  // per part, sequence and slot
  static constexpr int kTops = kPanels / kTopPanels;
  int64_t kept_ = 0;  // most tokens of a task whose logits or weights are kept
  int64_t kept_rows_ = 0;
  std::optional<Masses> masses_;
  bool any_narrow_ = false, any_wide_ = false, any_scaled_ = false;  // of the parts' keys
  std::vector<Task> tasks_;
  std::vector<Scratch> scratch_;
  std::atomic<size_t> next_{0};
};

}  // namespace

void attend(Prompt& prompt, int workers, Parallel parallel, Fault& fault) {
  Attender(prompt, workers, fault).run(parallel);
}

}  // namespace kv

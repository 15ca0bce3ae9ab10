#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "ops.h"
#include "uninitialized.h"

namespace kv {
namespace {

// The partial result of one piece of a table row: weights relative to its largest logit.
struct State {
  float *top, *total, *sums;
};

// What two workers write is on different lines of their caches.
constexpr size_t kLine = 64;

// The blocks of a piece, for its observation.
class alignas(kLine) Seen {
 public:
  struct Some {
    int part, first, last;  // the runs first .. last - 1
  };

  void clear() { blocks_.clear(), runs_.clear(); }
  void add(const Block& block) {
    const int first = int(runs_.size());
    runs_.insert(runs_.end(), block.run, block.run + block.runs);
    blocks_.push_back({block.part, first, first + block.runs});
  }
  const std::vector<Some>& blocks() const { return blocks_; }
  const Run& run(int i) const { return runs_[i]; }

 private:
  std::vector<Some> blocks_;
  std::vector<Run> runs_;
};

// The buffers of a worker.
struct alignas(kLine) Scratch {
  Uninitialized<float> numbers, weights;
  Uninitialized<uint8_t> prepared;  // queries, per part
  float *queries, *query_sums;
  State state;
  Seen seen;
};

// Prefetches `values`, then `keys`.
Ahead ahead_of(const Spans& values, const Spans& keys) {
  Ahead ahead;
  ahead.span[0] = values.begin(), ahead.end[0] = values.end();
  ahead.span[1] = keys.begin(), ahead.end[1] = keys.end();
  ahead.lines = values.lines() + keys.lines();
  return ahead;
}

void set_rows(Ahead& ahead, const Format& format, const Rows& rows) {
  ahead.rows = rows, ahead.bytes = format.bytes(), ahead.meta_bytes = format.meta_bytes();
}

// Calls the kernels' begin and end around their products.
class Around {
 public:
  explicit Around(const Kernels& kernels) : end_(kernels.end) {
    if (kernels.begin) kernels.begin();
  }
  Around(const Around&) = delete;
  Around& operator=(const Around&) = delete;
  ~Around() {
    if (end_) end_();
  }

 private:
  void (*end_)();
};

class Runner {
 public:
  Runner(const Job& job, int workers, Fault& fault)
      : job_(job), fault_(fault), plan_(plan(job, workers)), workers_(workers) {
    const bool watching = !job.watches.empty();
    int64_t prepared = 0;
    for (const Part& part : job.parts) {
      const auto size_of = job.kernels->prepared_size;
      const int64_t size = size_of ? size_of(part.key, int(job.group)) : 0;
      prepared_.push_back(size ? prepared : -1);
      prepared += size;
    }
    for (int i = 0; i < workers; ++i) {
      const int64_t queries = job.group * job.query_width;
      Scratch& scratch = scratch_.emplace_back(Scratch{
          Uninitialized<float>(queries + job.group + state_size()),
          Uninitialized<float>((watching ? std::max<int64_t>(1, plan_.longest) : 1) * block_size()),
          Uninitialized<uint8_t>(prepared), nullptr, nullptr, {}, {}});
      scratch.queries = scratch.numbers.get();
      scratch.query_sums = scratch.queries + queries;
      scratch.state = state_in(scratch.query_sums + job.group);
    }
    split_ = Uninitialized<float>(plan_.split_pieces * state_size());
    if (!watching) return;
    kept_ = Uninitialized<float>(plan_.kept * block_size());
    split_seen_.resize(plan_.split_pieces);
    split_worker_.resize(plan_.split_pieces);
    observed_ = std::vector<std::atomic_flag>(plan_.split_pieces);
  }

  void run(Parallel parallel) {
    parallel(workers_, [](int64_t i, void* me) { static_cast<Runner*>(me)->attend(int(i)); }, this);
    if (plan_.splits.empty() || fault_.part >= 0) return;
    for (size_t i = 0; i < plan_.splits.size(); ++i) merge(i);
    if (job_.watches.empty()) return;
    parallel(workers_,
             [](int64_t i, void* me) { static_cast<Runner*>(me)->attention_mass(int(i)); }, this);
  }

 private:
  // Floats, in whole vectors.
  int64_t state_size() const { return padded(int(job_.group * (job_.value_width + 2))); }

  State state_in(float* numbers) const {
    return {numbers, numbers + job_.group, numbers + 2 * job_.group};
  }

  State split(int piece) const { return state_in(split_.get() + piece * state_size()); }

  float* kept(const Piece& piece) const { return kept_.get() + piece.weights * block_size(); }

  // Floats of a block of weights, including its largest logits.
  int64_t block_size() const { return kBlock * job_.group + padded(int(job_.group)); }

  // The next piece of a worker; null after the last.
  const Piece* take() {
    const size_t i = next_++;
    return i < plan_.pieces.size() ? &plan_.pieces[i] : nullptr;
  }

  // A worker takes a piece before it has finished another, so that its first block is prefetched.
  void attend(int worker) {
    Scratch& scratch = scratch_[worker];
    const bool watching = !job_.watches.empty();
    const Around around(*job_.kernels);
    Block blocks[2];
    Block *now = blocks, *next = blocks + 1;
    std::optional<Cursor> cursor;
    auto enter = [&](const Piece* piece, Block& block) {
      cursor.emplace(job_, piece->table_row, piece->first, piece->last, fault_, Places::kStrips);
      cursor->next(block);
    };
    const Piece* piece = take();
    if (piece) enter(piece, *now);
    while (piece && fault_.part < 0) {
      const Piece* then = take();
      const bool whole = piece->split < 0;
      const State state = whole ? scratch.state : split(piece->split);
      float* weights = whole || !watching ? scratch.weights.get() : kept(*piece);
      Seen& seen = whole || !watching ? scratch.seen : split_seen_[piece->split];
      seen.clear();
      if (!whole && watching) split_worker_[piece->split] = worker;
      start(*piece, state);
      if (now->count) {
        const Queries queries = prepare(piece->table_row, scratch);
        float* at = weights;
        for (bool last = false; !last; std::swap(now, next)) {
          if (watching) seen.add(*now);
          last = !cursor->next(*next);
          if (last && then) enter(then, *next);
          attend(*now, *next, queries, scratch, state, at);
          if (!watching) continue;
          std::copy_n(state.top, job_.group, at + kBlock * job_.group);
          at += block_size();
        }
      } else if (then) {
        enter(then, *now);
      }
      if (whole) finish(piece->table_row, state);
      if (whole && watching) observe(*piece, weights, seen);
      piece = then;
    }
  }

  void start(const Piece& piece, const State& state) const {
    std::fill_n(state.top, job_.group, -INFINITY);
    std::fill_n(state.total, job_.group, 0.0f);
    std::fill_n(state.sums, job_.group * job_.value_width, 0.0f);
    if (job_.sinks && piece.starts) begin(piece.table_row, state);
  }

  // Attends to a block; the keys of the next one are prefetched.
  void attend(const Block& now, const Block& next, const Queries& queries, const Scratch& scratch,
              const State& state, float* weights) const {
    const int group = int(job_.group), width = job_.value_width;
    const Part &part = job_.parts[now.part], &coming = job_.parts[next.part];
    const int64_t prepared = prepared_[now.part];
    Ahead ahead = ahead_of(now.value_spans, next.key_spans);
    set_rows(ahead, part.value, now.values());
    job_.kernels->dot(part.key, now.keys(), queries,
                      prepared < 0 ? nullptr : scratch.prepared.get() + prepared, weights, ahead);
    if (job_.softcap > 0) job_.kernels->bound(weights, now.count, group, job_.softcap);
    set_rows(ahead, coming.key, next.keys());
    job_.kernels->soften(weights, now.count, group, state.top, state.total, state.sums, width,
                         ahead);
    job_.kernels->weigh(part.value, now.values(), group, weights, state.sums, width, ahead);
  }

  // Begins with the sinks, as tokens whose value is 0; a query that is padding has none.
  void begin(int64_t table_row, const State& state) const {
    if (job_.position[table_row / job_.heads] < 0) return;
    const float* sinks = job_.sinks + table_row % job_.heads * job_.group;
    for (int64_t g = 0; g < job_.group; ++g) {
      state.top[g] = sinks[g];
      state.total[g] = sinks[g] == -INFINITY ? 0 : 1;
    }
  }

  Queries prepare(int64_t table_row, Scratch& scratch) const {
    const int64_t* step = job_.query_step;
    const uint8_t* from =
        job_.queries + table_row / job_.heads * step[0] + table_row % job_.heads * step[1];
    const int width = job_.query_width;
    const HeadGroup* group = job_.group_of(table_row);
    const int64_t dim = group ? group->key_dim : job_.key_dim;
    std::fill_n(scratch.queries, job_.group * width, 0.0f);
    for (int64_t g = 0; g < job_.group; ++g) {
      float* row = scratch.queries + g * width;
      const uint8_t* at = from + g * step[2];
      const bool close = step[3] == (job_.query_number == Number::kFloat32 ? 4 : 2);
      const int count = close ? int(dim) : 1;  // numbers to read at a time
      for (int64_t d = 0; d < dim; d += count)
        job_.kernels->widen(job_.query_number, at + d * step[3], count, row + d);
      float sums[kLanes] = {};  // per lane, for vectorization
      for (int d = 0; d < width; d += kLanes)
        for (int i = 0; i < kLanes; ++i) sums[i] += row[d + i] *= job_.scale;
      scratch.query_sums[g] = std::accumulate(sums, sums + kLanes, 0.0f);
    }
    const Queries queries{scratch.queries, scratch.query_sums, int(job_.group), width};
    for (size_t i = 0; i < job_.parts.size(); ++i)
      if (prepared_[i] >= 0 && job_.parts[i].own(table_row) >= 0)
        job_.kernels->prepare(job_.parts[i].key, queries, scratch.prepared.get() + prepared_[i]);
    return queries;
  }

  void finish(int64_t table_row, const State& state) {
    // Kernels leave sums past the dimensions of values undefined.
    const HeadGroup* group = job_.group_of(table_row);
    const int64_t dim = group ? group->value_dim : job_.value_dim;
    for (int64_t g = 0; g < job_.group; ++g) {
      const float total = state.total[g];
      const float share = total == 0 ? 0 : 1 / total;  // without tokens, the sums are 0 as well
      float* out = job_.out + (table_row * job_.group + g) * job_.value_dim;
      const float* sums = state.sums + g * job_.value_width;
      for (int64_t d = 0; d < dim; ++d) out[d] = sums[d] * share;
      std::fill(out + dim, out + job_.value_dim, 0.0f);
      job_.lse[table_row * job_.group + g] =
          total == 0 ? -INFINITY : state.top[g] + std::log(total);
    }
  }

  // Merges the pieces of a table row into the first of them.
  void merge(size_t table_row) {
    const State all = split(plan_.of[table_row][0]);
    const int width = job_.value_width;
    for (size_t i = 1; i < plan_.of[table_row].size(); ++i) {
      const State more = split(plan_.of[table_row][i]);
      for (int64_t g = 0; g < job_.group; ++g) {
        const float top = std::max(all.top[g], more.top[g]);
        const float a = all.total[g] == 0 ? 0 : std::exp(all.top[g] - top);
        const float b = more.total[g] == 0 ? 0 : std::exp(more.top[g] - top);
        all.top[g] = top;
        all.total[g] = all.total[g] * a + more.total[g] * b;
        for (int d = 0; d < width; ++d) {
          float& sum = all.sums[g * width + d];
          sum = sum * a + more.sums[g * width + d] * b;
        }
      }
    }
    finish(plan_.splits[table_row], all);
  }

  // A worker begins with the pieces that it attended to, whose pages and weights are in its cache.
  void attention_mass(int worker) {
    for (const bool own : {true, false})
      for (const Piece& piece : plan_.pieces)
        if (piece.split >= 0 && (split_worker_[piece.split] == worker) == own &&
            !observed_[piece.split].test_and_set())
          observe(piece, kept(piece), split_seen_[piece.split]);
  }

  void observe(const Piece& piece, const float* weights, const Seen& seen) {
    const int group = int(job_.group);
    const float* lse = job_.lse + piece.table_row * group;
    const std::vector<float>::size_type most = 64;
    float few[most];
    std::vector<float> many(size_t(group) > most ? group : 0);
    float* factor = many.empty() ? few : many.data();
    // Spans of tokens that were read in strips had their scores, and a whole table row was just read.
    const auto strips = job_.kernels->strips;
    auto fetched = [&](const Part& part) {
      return piece.split < 0 && strips && strips(part.key) && strips(part.value);
    };
    Unseen unseen(*this, piece);
    for (auto block = seen.blocks().begin(); block != seen.blocks().end(); ++block) {
      const auto next = block + 1;
      if (job_.renews && next != seen.blocks().end() && !fetched(job_.parts[next->part]))
        for (int i = next->first; i < next->last; ++i)
          prefetch(piece.table_row, job_.parts[next->part], seen.run(i));
      const float* top = weights + kBlock * group;
      for (int g = 0; g < group; ++g) factor[g] = std::exp(top[g] - lse[g]);
      const float* at = weights;
      for (int i = block->first; i < block->last; at += seen.run(i++).count) {
        unseen.until(block->part, seen.run(i));
        observe(piece.table_row, block->part, seen.run(i), at, factor);
      }
      weights += block_size();
    }
    unseen.rest();
  }

  // Fetches the scores and positions of a run, which are on lines of their own in each page.
  void prefetch(int64_t table_row, const Part& part, const Run& run) const {
    each_page(table_row, part, run, [&](int, uint8_t* page, int64_t first, int count) {
      const int64_t last = 4 * (first + count) - 1;
      for (int64_t offset : {part.score, part.stored_position})
        for (int64_t at = 4 * first; offset >= 0 && at < last + 64; at += 64)
          __builtin_prefetch(page + offset + std::min(at, last), 1, 3);
    });
  }

  // Calls use(tokens before, page, first slot of it, tokens) for each page of a run.
  template <typename Use>
  void each_page(int64_t table_row, const Part& part, const Run& run, Use use) const {
    if (!part.paged) return;
    const int64_t entries = part.own(table_row) * part.table_width;
    int64_t column = run.slot / part.tokens, first = run.slot % part.tokens;
    for (int done = 0, count; done < run.count; done += count, first = 0, ++column) {
      count = int(std::min<int64_t>(part.tokens - first, run.count - done));
      const int64_t entry = part.reverse ? part.table_width - 1 - column : column;
      const uint8_t* page = part.data + part.table[entries + entry] * part.page_step;
      use(done, const_cast<uint8_t*>(page), first, count);
    }
  }

  // Zeros the slots of a piece's parts that no run names, and those after the last piece: results
  // are uninitialized, and each slot is written once.
  class Unseen {
   public:
    Unseen(const Runner& runner, const Piece& piece) : runner_(runner), piece_(piece) { enter(); }

    // Zeros those before a run; runs are in order.
    void until(int part, const Run& run) {
      while (part_ < part) leave();
      zero(run.slot);
      at_ = run.slot + run.count;
    }

    void rest() {
      while (part_ < int(runner_.job_.parts.size())) leave();
    }

   private:
    void enter() {
      if (part_ == int(runner_.job_.parts.size())) return;
      const Part& part = runner_.job_.parts[part_];
      const int64_t count = part.count(piece_.table_row);
      at_ = std::clamp<int64_t>(piece_.first - before_, 0, count);
      end_ = piece_.ends ? part.width : std::clamp<int64_t>(piece_.last - before_, 0, count);
      before_ += count;
    }

    void leave() {
      zero(end_);
      ++part_;
      enter();
    }

    void zero(int64_t end) const {
      if (at_ >= end) return;
      const Job& job = runner_.job_;
      if (job.renews && job.parts[part_].paged) return;
      const int64_t width = job.parts[part_].width, plane = job.table_rows() * width;
      const int64_t from = piece_.table_row * width + at_, count = end - at_;
      for (int t = 0; t < job.terms; ++t)
        std::fill_n(job.sums[part_] + t * plane + from, count, 0.0f);
      for (size_t w = 0; w < job.watches.size(); ++w)
        std::fill_n(job.seen[part_] + w * plane + from, count, 0);
    }

    const Runner& runner_;
    const Piece& piece_;
    int part_ = 0;
    int64_t before_ = 0, at_ = 0, end_ = 0;  // tokens of the parts before; slots of this one
  };

  void observe(int64_t table_row, int which, const Run& run, const float* weights,
               const float* factor) {
    const Part& part = job_.parts[which];
    if (job_.renews && part.paged) return renew(table_row, part, run, weights, factor);
    const int64_t query = job_.position[table_row / job_.heads];
    const int64_t plane = job_.table_rows() * part.width, at = table_row * part.width + run.slot;
    const float even = 1 / float(query + 1);
    for (size_t w = 0; w < job_.watches.size(); ++w) {
      const Watch& watch = job_.watches[w];
      int32_t* seen = job_.seen[which] + w * plane + at;
      std::fill_n(seen, run.count, 1);
      // A stored token is at least one position before the query.
      if (watch.skip > (part.paged ? 1 : 0)) {
        const int64_t* place = part.place + table_row / job_.heads * part.place_step[0] +
                               table_row % job_.heads * part.place_step[1];
        for (int i = 0; i < run.count; ++i)
          seen[i] = place[(run.slot + i) * part.place_step[2]] <= query - watch.skip;
      }
      for (size_t t = 0; t < watch.terms.size(); ++t) {
        float* sums = job_.sums[which] + (watch.first + t) * plane + at;
        job_.kernels->observe(weights, run.count, int(job_.group), factor, watch.terms[t],
                              watch.group, watch.above * even, sums);
        for (int i = 0; i < run.count; ++i) sums[i] = seen[i] ? sums[i] : 0;
      }
    }
  }

  // Updates the scores of consecutive slots. The query counts for all stored tokens.
  void renew(int64_t table_row, const Part& part, const Run& run, const float* weights,
             const float* factor) const {
    const Watch& watch = job_.watches[0];
    Renewal renewal = job_.renewal;
    renewal.query = int32_t(job_.position[table_row / job_.heads]);
    float mass[kBlock];
    job_.kernels->observe(weights, run.count, int(job_.group), factor, watch.terms[0], watch.group,
                          watch.above / float(renewal.query + 1), mass);
    int32_t given[kBlock];
    if (part.stored_position < 0) {
      const int64_t* place = part.place + table_row / job_.heads * part.place_step[0] +
                             table_row % job_.heads * part.place_step[1];
      for (int i = 0; i < run.count; ++i)
        given[i] = int32_t(std::clamp<int64_t>(place[(run.slot + i) * part.place_step[2]], -1,
                                               INT32_MAX));
    }
    each_page(table_row, part, run, [&](int done, uint8_t* page, int64_t first, int count) {
      const uint8_t* positions = part.stored_position < 0
                                     ? reinterpret_cast<const uint8_t*>(given + done)
                                     : page + part.stored_position + 4 * first;
      job_.kernels->renew(mass + done, count, positions, renewal, page + part.score + 4 * first);
    });
  }

  const Job& job_;
  Fault& fault_;
  const Plan plan_;
  const int workers_;
  std::vector<int64_t> prepared_;  // offset of each part's queries; -1: none
  std::vector<Scratch> scratch_;
  Uninitialized<float> split_, kept_;
  std::vector<Seen> split_seen_;  // by split piece
  std::vector<int> split_worker_;
  std::vector<std::atomic_flag> observed_;  // by split piece, once some worker has begun
  alignas(kLine) std::atomic<size_t> next_{0};
};

}  // namespace

void run(const Job& job, int workers, Parallel parallel, Fault& fault) {
  Runner(job, workers, fault).run(parallel);
}

}  // namespace kv

// The data structures of the operators, which may use the standard library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"

namespace kv {

// Maximum position of queries and tokens, and maximum skip, so that their sums do not overflow.
constexpr int64_t kMostPosition = INT64_MAX / 2;

// Names of the compiled instruction sets, or of those that the processor supports.
std::string names(bool all);

// The prefill kernels of an available instruction set: 0 plain, 1 AVX2, 2 AVX-512, 3 with
// AVX512-BF16, 4 with emulated tiles, 5 with AMX. AVX-VNNI uses those of AVX2, VNNI the best of them.
int level_of(const std::string& isa);

// A tensor of 32-bit or 64-bit integers.
struct Integers {
  const void* data = nullptr;
  bool wide = false;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Heads of a layer whose vectors have other dimensions than those of its other heads.
struct HeadGroup {
  std::vector<int32_t> index;  // of each head of the job among these; -1: it is none of them
  int64_t heads = 0, key_dim = 0, value_dim = 0;
  int64_t parts = 0;  // in pages

  int64_t own(int64_t table_row) const {
    const auto all = int64_t(index.size());
    const int32_t head = index[table_row % all];
    return head < 0 ? -1 : table_row / all * heads + head;
  }
};

// One tier in pages, or one set of dense tensors.
struct Part {
  Format key, value;
  bool paged = false;
  int64_t width = 0;  // slots that are observed
  // for pages
  const uint8_t* data = nullptr;
  int64_t pages = 0, page_bytes = 0, page_step = 0, tokens = 0, table_width = 0;
  int64_t offset[4] = {0, 0, 0, 0};  // of key codes, key metadata, value codes, value metadata
  int64_t position_offset = -1;      // of stored positions, if slots may be empty
  bool reverse = false;
  Integers table, length;
  int64_t score = -1, stored_position = -1;  // offsets, if scores of tokens are updated
  // for dense tensors: bytes between sequences, heads and tokens
  const uint8_t *keys = nullptr, *values = nullptr;
  int64_t key_step[3] = {0, 0, 0}, value_step[3] = {0, 0, 0};
  // positions [B, H, width] of the tokens, if needed
  const int64_t* place = nullptr;
  int64_t place_step[3] = {0, 0, 0};
  const HeadGroup* of = nullptr;  // the heads that have these tokens; null: all

  // The row in `table` and `length` of a table row of the job; -1: its head has none.
  int64_t own(int64_t table_row) const { return of ? of->own(table_row) : table_row; }
  int64_t count(int64_t table_row) const {
    const int64_t row = own(table_row);
    return row < 0 ? 0 : paged ? length[row] : width;
  }
  // From the start of a page to the last byte that a decode step reads, with scores if it updates
  // them.
  int64_t read_bytes() const {
    int64_t end = 0;
    for (const auto& [format, at] : {std::pair{&key, offset}, {&value, offset + 2}})
      end = std::max({end, at[0] + tokens * format->bytes(),
                      at[1] + (tokens + format->share - 1) / format->share * format->meta_bytes()});
    for (const int64_t at : {score, stored_position, position_offset})
      if (at >= 0) end = std::max(end, at + 4 * tokens);
    return end;
  }
  // per token
  int64_t bytes() const {
    return key.bytes() + key.meta_bytes() / key.share + value.bytes() +
           value.meta_bytes() / value.share;
  }
};

// One `Observe`: its terms, first that of `mass`.
struct Watch {
  Group group;
  int64_t skip;
  float above;  // threshold, as a multiple of the uniform share
  std::vector<Term> terms;
  int first;  // index of its first term among the terms of all
};

// All inputs and results of a decode step.
struct Job {
  const Kernels* kernels;
  int64_t sequences, heads, group, key_dim, value_dim;
  int query_width, value_width;  // floats of a padded row
  float scale;
  float softcap = 0;             // the bound of the logits; 0: none
  const float* sinks = nullptr;  // [H, G], a logit of each query head without a value; null: none
  Number query_number;
  const uint8_t* queries;
  int64_t query_step[4];  // bytes between sequences, heads, group, dimensions
  const int64_t* position;  // position of each sequence's query
  std::vector<HeadGroup> groups;  // with all heads; empty: all have the job's dimensions
  std::vector<Part> parts;
  std::vector<Watch> watches;
  int terms = 0;
  bool renews = false;  // scores in pages are updated with the first term, in place of sums
  Renewal renewal{};    // without the query's position
  // results
  float *out, *lse;
  std::vector<float*> sums;    // per part: terms x B x H x width; null if scores are updated
  std::vector<int32_t*> seen;  // per part: watches x B x H x width; the same

  int64_t table_rows() const { return sequences * heads; }
  int64_t tokens(int64_t table_row) const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += part.count(table_row);
    return sum;
  }
  // The group of a table row's head; null: there are no groups.
  const HeadGroup* group_of(int64_t table_row) const {
    for (const HeadGroup& each : groups)
      if (each.index[table_row % heads] >= 0) return &each;
    return nullptr;
  }
};

// An invalid page number or length. Only the first one found is kept.
struct Fault {
  std::atomic<int> part{-1};
  std::atomic<int64_t> page{0};
  void raise(int where, int64_t what) {
    int none = -1;
    if (part.compare_exchange_strong(none, where)) page = what;
  }
};

// Consecutive visible tokens.
struct Run {
  int64_t slot;
  int count;
};

// The addresses of a block's keys or values, with their scales and zero points; or those of whole
// pages, as keys.
class Spans {
 public:
  void clear() { count_ = lines_ = 0; }

  void add(const uint8_t* first, const uint8_t* last) {
    lines_ += int(last - first) / 64 + 1;
    if (count_ && spans_[count_ - 1].last == first)
      spans_[count_ - 1].last = last;
    else if (first < last)
      spans_[count_++] = {first, last};
  }

  const Span* begin() const { return spans_; }
  const Span* end() const { return spans_ + count_; }
  int lines() const { return lines_; }  // at least those of cache

 private:
  int count_ = 0, lines_ = 0;
  Span spans_[4 * kBlock];
};

// Up to kBlock visible tokens of one part.
struct Block {
  int part = 0, count = 0, runs = 0;
  Run run[kBlock];  // as long as they can be
  // addresses of the numbers of each token, and of its scales and zero points
  const uint8_t *key[kBlock], *key_meta[kBlock], *value[kBlock], *value_meta[kBlock];
  Strips key_strip, value_strip;                  // see Rows
  bool key_strips = false, value_strips = false;  // whether they are read in strips
  int64_t key_step = 0, value_step = 0;
  Spans key_spans, value_spans;  // if any are read in strips

  void add(const Run& more) {
    if (runs && run[runs - 1].slot + run[runs - 1].count == more.slot)
      run[runs - 1].count += more.count;
    else
      run[runs++] = more;
    count += more.count;
  }
  Rows keys() const { return {count, key, key_meta, key_strips ? &key_strip : nullptr, key_step}; }
  Rows values() const {
    return {count, value, value_meta, value_strips ? &value_strip : nullptr, value_step};
  }
};

// How a block addresses its tokens: by every row, or by strips if the kernels read them.
enum class Places { kRows, kStrips };

// Iterates over the visible tokens first .. last - 1 of a table row, in the order of its parts, in
// blocks.
class Cursor {
 public:
  Cursor(const Job& job, int64_t table_row, int64_t first, int64_t last, Fault& fault,
         Places places = Places::kRows);
  // Fills the next block; false after the last token.
  bool next(Block& block);

 private:
  bool enter();
  void find();
  void start(const Part& part, Block& block) const;
  bool from_pages(const Part& part, Block& block);
  void add_slots(const uint8_t* page, int64_t first, int count, Block& block) const;
  void add_spans(const Part& part, const uint8_t* page, int64_t first, int64_t count,
                 Block& block) const;
  bool is_whole() const;
  void from_tensors(const Part& part, Block& block);

  const Job& job_;
  Fault& fault_;
  bool (*const strips_)(const Format&);  // null: rows are not read in strips, and none prefetched
  const int64_t first_;
  int64_t table_row_, at_, last_;  // in tokens of the table row
  int64_t entries_ = 0;  // of the part's table before those of the table row
  int64_t column_ = 0, inside_ = 0;  // the next token's page of its part, and slot in that
  int part_ = 0;
  int64_t before_ = 0, end_ = 0;  // tokens of the parts before; end of the part, or `last`
  int64_t read_ = 0;  // bytes to prefetch of a page at once; 0: pages are not prefetched whole
  // How the keys, and the values, of the part are read, and how they lie in its pages.
  struct Side {
    int64_t data, meta;   // offsets of the first slot's
    int step, meta_step;  // bytes
    int share;
    bool strips;
  } key_{}, value_{};
  Side side_of(const Format& format, const int64_t* offset) const;
};

// Tokens first .. last - 1 of a table row, for one worker.
struct Piece {
  int64_t table_row, first, last, bytes;
  bool starts = true;      // no other piece has earlier tokens
  bool ends = true;        // no other piece has later tokens
  int split = -1;          // index among the pieces of split table rows; -1: the whole table row
  int64_t weights = 0;     // offset of its weights, in blocks
};

// The assignment of work: the longest first, long table rows in pieces.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<int64_t> splits;       // table rows in pieces
  std::vector<std::vector<int>> of;  // the pieces of each of these
  int split_pieces = 0;
  int64_t longest = 0;  // blocks of a whole table row, for which a worker keeps weights
  int64_t kept = 0;     // blocks of weights of split table rows
};

Plan plan(const Job& job, int workers);

// Computes everything. `parallel(n, f)` calls f(0) ... f(n - 1), each in a thread.
using Body = void (*)(int64_t, void*);
using Parallel = void (*)(int64_t, Body, void*);
void run(const Job& job, int workers, Parallel parallel, Fault& fault);

}  // namespace kv

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace kv {
namespace {

constexpr int kWhole = 4096;    // maximum bytes of pages that are prefetched whole
constexpr int kPagesAhead = 8;  // whose positions are prefetched, as each page has its own lines

// Equally spaced rows of a page, and where their addresses are stored.
struct Column {
  const uint8_t* first;
  int64_t step;
  const uint8_t** rows;         // of a block, by row
  const uint8_t* (*starts)[2];  // by strip
};

// Adds `count` rows to a strip that has rows of two or more pages: it loses its head, and all rows
// have an address.
__attribute__((noinline)) void scatter(const Column& column, int strip, int head, int inside,
                                       const uint8_t* first, int count) {
  const uint8_t** rows = column.rows + strip * kLanes;
  const uint8_t* const* starts = column.starts[strip];
  for (int i = 0; head && i < inside; ++i)
    rows[i] = i < head ? starts[0] + i * column.step : starts[1] + (i - head) * column.step;
  for (int i = 0; i < count; ++i) rows[inside + i] = first + i * column.step;
}

// Adds `count` rows of a page at index `at` of a block; see Rows.
template <size_t kColumns>
inline void add(const Column (&columns)[kColumns], int at, int count, int* heads) {
  unsigned strip = unsigned(at) / kLanes, inside = unsigned(at) % kLanes;
  for (int done = 0, some; done < count; done += some, inside = 0, ++strip) {
    some = std::min(count - done, kLanes - int(inside));
    int& head = heads[strip];
    if (inside == 0) {
      head = some;
      for (const Column& column : columns)
        column.starts[strip][0] = column.first + done * column.step;
    } else if (int(inside) == head) {
      for (const Column& column : columns)
        column.starts[strip][1] = column.first + done * column.step;
    } else {
      for (const Column& column : columns)
        scatter(column, strip, head, inside, column.first + done * column.step, some);
      head = 0;
    }
  }
}

// The same, by row.
void add_rows(const Column& column, int at, int count) {
  for (int i = 0; i < count; ++i) column.rows[at + i] = column.first + i * column.step;
}

// Repeats the last row, so that kernels can process whole vectors.
void pad(Block& block) {
  auto repeat = [&](const uint8_t** rows, const uint8_t** meta, const Strips* strips) {
    if (strips && strips->head[(block.count - 1) / kLanes]) return;
    for (int i = block.count; i < padded(block.count); ++i)
      rows[i] = rows[block.count - 1], meta[i] = meta[block.count - 1];
  };
  repeat(block.key, block.key_meta, block.key_strips ? &block.key_strip : nullptr);
  repeat(block.value, block.value_meta, block.value_strips ? &block.value_strip : nullptr);
}

}  // namespace

Cursor::Cursor(const Job& job, int64_t table_row, int64_t first, int64_t last, Fault& fault,
               Places places)
    : job_(job),
      fault_(fault),
      strips_(places == Places::kStrips ? job.kernels->strips : nullptr),
      first_(first),
      table_row_(table_row),
      at_(first),
      last_(last) {
  if (job.parts.empty()) return;
  end_ = std::min(job.parts[0].count(table_row), last);
  find();
}

bool Cursor::next(Block& block) {
  block.count = block.runs = 0;
  block.key_spans.clear();
  block.value_spans.clear();
  while (block.count == 0 && enter()) {
    const Part& part = job_.parts[part_];
    block.part = part_;
    start(part, block);
    if (!part.paged)
      from_tensors(part, block);
    else
      while (block.count < kBlock && at_ < end_ && from_pages(part, block)) {
      }
  }
  if (block.count) pad(block);
  return block.count > 0;
}

// Advances to the part of the next token.
bool Cursor::enter() {
  while (at_ < last_ && at_ >= end_) {
    before_ += job_.parts[part_].count(table_row_);
    end_ = std::min(before_ + job_.parts[++part_].count(table_row_), last_);
    find();
  }
  return at_ < last_;
}

// Sets the page of the next token.
void Cursor::find() {
  const Part& part = job_.parts[part_];
  if (!part.paged) return;
  entries_ = part.own(table_row_) * part.table_width;
  column_ = (at_ - before_) / part.tokens;
  inside_ = (at_ - before_) % part.tokens;
  read_ = strips_ ? part.read_bytes() : 0;
  if (read_ > kWhole) read_ = 0;
  key_ = side_of(part.key, part.offset);
  value_ = side_of(part.value, part.offset + 2);
}

Cursor::Side Cursor::side_of(const Format& format, const int64_t* offset) const {
  return {offset[0],    offset[1],    format.bytes(), format.meta_bytes(),
          format.share, strips_ && strips_(format)};
}

// Whether all slots of the next token's page are read: its spans are then one, at its first slot.
bool Cursor::is_whole() const {
  const int64_t from = at_ - inside_;
  return read_ && from >= std::max(first_, before_) &&
         from + job_.parts[part_].tokens <= end_;
}

// Sets how a block addresses the tokens of a part.
void Cursor::start(const Part& part, Block& block) const {
  block.key_strips = strips_ && strips_(part.key);
  block.value_strips = strips_ && strips_(part.value);
  block.key_step = part.paged ? part.key.bytes() : part.key_step[2];
  block.value_step = part.paged ? part.value.bytes() : part.value_step[2];
}

// Adds tokens of the page with the next slot, up to a hole; false for an invalid page.
bool Cursor::from_pages(const Part& part, Block& block) {
  const int64_t slot = at_ - before_, inside = inside_, width = part.table_width;
  auto page_at = [&](int64_t column) -> int64_t {
    return part.table[entries_ + (part.reverse ? width - 1 - column : column)];
  };
  const int64_t page = page_at(column_);
  if (page < 0 || page >= part.pages) {
    fault_.raise(part_, page);
    at_ = end_ = last_;
    return false;
  }
  if (inside == 0 && part.position_offset >= 0 && column_ + kPagesAhead < width) {
    const int64_t later = page_at(column_ + kPagesAhead);
    if (later >= 0 && later < part.pages) {  // entries past the last page may name none
      const uint8_t* positions = part.data + later * part.page_step + part.position_offset;
      for (int64_t i = 0; i < 4 * part.tokens; i += 64) __builtin_prefetch(positions + i, 0, 3);
    }
  }
  const uint8_t* at = part.data + page * part.page_step;
  const bool whole = is_whole();
  if (whole && inside == 0) block.key_spans.add(at, at + read_);
  const int64_t most = std::min(part.tokens - inside, end_ - at_);
  int64_t skipped = 0, count = std::min<int64_t>(most, kBlock - block.count);
  if (part.position_offset >= 0) {
    const uint8_t* stored = at + part.position_offset + 4 * inside;
    auto held = [stored](int64_t i) {
      int32_t position;
      std::memcpy(&position, stored + 4 * i, sizeof position);
      return position >= 0;
    };
    while (skipped < most && !held(skipped)) ++skipped;
    const int64_t stop = std::min(most, skipped + kBlock - block.count);
    int64_t i = skipped;
    while (i < stop && held(i)) ++i;
    count = i - skipped;
  }
  at_ += skipped + count;
  inside_ += skipped + count;
  if (inside_ >= part.tokens) ++column_, inside_ = 0;
  if (count == 0) return true;
  add_slots(at, inside + skipped, int(count), block);
  if (strips_ && !whole) add_spans(part, at, inside + skipped, count, block);
  block.add({slot + skipped, int(count)});
  return true;
}

// Adds the addresses of `count` slots of a page.
inline void Cursor::add_slots(const uint8_t* page, int64_t first, int count, Block& block) const {
  const int to = block.count;
  const Column keys[] = {
      {page + key_.data + first * key_.step, key_.step, block.key, block.key_strip.data},
      {page + key_.meta + first * key_.meta_step, key_.meta_step, block.key_meta,
       block.key_strip.meta}};
  const Column values[] = {
      {page + value_.data + first * value_.step, value_.step, block.value, block.value_strip.data},
      {page + value_.meta + first * value_.meta_step, value_.meta_step, block.value_meta,
       block.value_strip.meta}};
  auto list = [&](const Side& side, const Column (&columns)[2], Strips& strips) {
    if (side.strips) return add(columns, to, count, strips.head);
    add_rows(columns[0], to, count);
    if (side.share == 1) return add_rows(columns[1], to, count);
    for (int i = 0; i < count; ++i)
      columns[1].rows[to + i] = page + side.meta + (first + i) / side.share * side.meta_step;
  };
  list(key_, keys, block.key_strip);
  list(value_, values, block.value_strip);
}

// Adds what is read of `count` slots of a page, to be prefetched.
void Cursor::add_spans(const Part& part, const uint8_t* page, int64_t first, int64_t count,
                       Block& block) const {
  auto add = [&](const Side& side, Spans& spans) {
    const uint8_t *data = page + side.data + first * side.step;
    const uint8_t *meta = page + side.meta + first * side.meta_step;
    spans.add(data, data + count * side.step);
    if (side.meta_step && side.share == 1) spans.add(meta, meta + count * side.meta_step);
  };
  add(key_, block.key_spans);
  add(value_, block.value_spans);
  for (const int64_t offset : {part.score, part.stored_position})
    if (offset >= 0)
      block.value_spans.add(page + offset + 4 * first, page + offset + 4 * (first + count));
}

void Cursor::from_tensors(const Part& part, Block& block) {
  const int64_t b = table_row_ / job_.heads, h = table_row_ % job_.heads, query = job_.position[b];
  const int64_t* place = part.place + b * part.place_step[0];
  const uint8_t* keys = part.keys + b * part.key_step[0] + h * part.key_step[1];
  const uint8_t* values = part.values + b * part.value_step[0] + h * part.value_step[1];
  while (at_ < end_ && block.count < kBlock) {
    auto sees = [&](int64_t i) {
      const int64_t position = place[i * part.place_step[2]];
      return position >= 0 && position <= query;
    };
    const int64_t end = end_ - before_;
    int64_t slot = at_ - before_;
    while (slot < end && !sees(slot)) ++slot;
    int64_t stop = slot;
    while (stop < std::min(end, slot + kBlock - block.count) && sees(stop)) ++stop;
    at_ = before_ + stop;
    const int count = int(stop - slot);
    if (count == 0) continue;
    const int64_t key = part.key_step[2], value = part.value_step[2];
    auto list = [&](const Column& column, Strips* strips) {
      strips ? add({column}, block.count, count, strips->head)
             : add_rows(column, block.count, count);
    };
    list({keys + slot * key, key, block.key, block.key_strip.data},
         block.key_strips ? &block.key_strip : nullptr);
    list({values + slot * value, value, block.value, block.value_strip.data},
         block.value_strips ? &block.value_strip : nullptr);
    for (int64_t i = slot; strips_ && i < stop; ++i) {
      block.key_spans.add(keys + i * key, keys + i * key + part.key.bytes());
      block.value_spans.add(values + i * value, values + i * value + part.value.bytes());
    }
    block.add({slot, count});
  }
  // Plain numbers have no scales.
  std::fill_n(block.key_meta, block.count, nullptr);
  std::fill_n(block.value_meta, block.count, nullptr);
}

}  // namespace kv

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace kv {

Cursor::Cursor(const Job& job, int64_t stream, int64_t first, int64_t last, Fault& fault)
    : job_(job), fault_(fault), stream_(stream), at_(first), last_(last) {}

int Cursor::next(Run* runs, int& count) {
  int tokens = 0;
  for (count = 0; tokens < kBlock && run(runs[count], kBlock - tokens); ++count)
    tokens += runs[count].count;
  return tokens;
}

bool Cursor::run(Run& run, int room) {
  while (at_ < last_) {
    const Part& part = job_.parts[part_];
    const int64_t count = part.count(stream_);
    if (at_ - before_ >= count) {
      before_ += count;
      ++part_;
      continue;
    }
    run.part = part_;
    const int64_t end = std::min(count, last_ - before_);
    if (part.paged ? from_pages(part, run, end, room) : from_tensors(part, run, end, room))
      return true;
  }
  return false;
}

bool Cursor::from_pages(const Part& part, Run& run, int64_t end, int room) {
  const int64_t slot = at_ - before_, column = slot / part.tokens, inside = slot % part.tokens;
  const int64_t width = part.table_width;
  const int64_t page = part.table[stream_ * width + (part.reverse ? width - 1 - column : column)];
  if (page < 0 || page >= part.pages) {
    fault_.raise(part_, page);
    at_ = last_;
    return false;
  }
  const uint8_t* at = part.data + page * part.page_step;
  const int64_t most = std::min(part.tokens - inside, end - slot);
  int64_t skipped = 0, count = std::min<int64_t>(most, room);
  if (part.position_offset >= 0) {
    const uint8_t* stored = at + part.position_offset + 4 * inside;
    auto held = [stored](int64_t i) {
      int32_t position;
      std::memcpy(&position, stored + 4 * i, sizeof position);
      return position >= 0;
    };
    while (skipped < most && !held(skipped)) ++skipped;
    const int64_t stop = std::min(most, skipped + room);
    int64_t i = skipped;
    while (i < stop && held(i)) ++i;
    count = i - skipped;
  }
  at_ += skipped + count;
  const int64_t first = inside + skipped;
  auto rows = [&](const Format& format, int64_t codes, int64_t meta) {
    const bool coded = format.number == Number::kCodes;
    const int64_t wide = format.number == Number::kFloat32 ? 4 : 2;
    const int64_t step = coded ? format.stride : wide * format.dim, more = 4 * format.groups;
    const uint8_t* numbers = coded ? at + meta + first * more : nullptr;
    return Rows{at + codes + first * step, step, numbers, more};
  };
  run.key = rows(part.key, part.offset[0], part.offset[1]);
  run.value = rows(part.value, part.offset[2], part.offset[3]);
  run.slot = slot + skipped;
  run.count = int(count);
  return count > 0;
}

bool Cursor::from_tensors(const Part& part, Run& run, int64_t end, int room) {
  const int64_t b = stream_ / job_.heads, h = stream_ % job_.heads, query = job_.position[b];
  const int64_t* place = part.place + b * part.place_step[0];
  auto sees = [&](int64_t i) {
    const int64_t at = place[i * part.place_step[2]];
    return at >= 0 && at <= query;
  };
  int64_t slot = at_ - before_;
  while (slot < end && !sees(slot)) ++slot;
  int64_t stop = slot;
  while (stop < std::min(end, slot + room) && sees(stop)) ++stop;
  at_ = before_ + stop;
  auto rows = [&](const uint8_t* data, const int64_t* step) {
    return Rows{data + b * step[0] + h * step[1] + slot * step[2], step[2], nullptr, 0};
  };
  run.key = rows(part.keys, part.key_step);
  run.value = rows(part.values, part.value_step);
  run.slot = slot;
  run.count = int(stop - slot);
  return run.count > 0;
}

}  // namespace kv

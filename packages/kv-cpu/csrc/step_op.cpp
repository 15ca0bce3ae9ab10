// A decode step: in every table row one token enters, and one is evicted or moves to another tier.
#include <algorithm>
#include <cstring>

#include "boundary.h"
#include "name.h"
#include "pages.h"

namespace kv {
namespace {

constexpr int64_t kWorth = 128;  // table rows that justify another thread
constexpr int kWorkTensors = 8;  // before the two of each tier

struct Member {
  Tier tier;
  int32_t *table, *length;
};

// The changes to one table row; a missing tier is -1.
struct Move {
  int from = -1, to = -1, enter = -1;
  int64_t victim = 0;  // its slot
  bool swap() const { return from >= 0 && from == enter; }
  bool gone() const { return from >= 0 && !swap(); }
};

// Table rows of one kind, with their candidates and moves.
struct Work {
  std::vector<Member> tiers;
  int64_t table_rows;
  const uint8_t *candidate, *victim, *target;
  const int64_t* place;
  const Vectors key, value;
  const float* score;
  Integers position;
  std::vector<Move> moves;
  std::vector<float> vectors;  // of victims that move
  std::vector<uint8_t> beside;

  int width() const { return tiers[0].tier.format[0].dim + tiers[0].tier.format[1].dim; }
  // The first free slot of a tier without the victim.
  int64_t end(int tier, int64_t table_row) const {
    const Move& move = moves[table_row];
    return int64_t(tiers[tier].length[table_row]) - (move.from == tier && move.gone());
  }
  bool arrives(int tier, int64_t table_row) const { return moves[table_row].to == tier; }
  bool enters(int tier, int64_t table_row) const {
    return moves[table_row].enter == tier && !moves[table_row].swap();
  }
  int64_t entry(int tier, int64_t table_row) const {
    return end(tier, table_row) + arrives(tier, table_row);
  }
};

struct Pool {
  int32_t* ring;
  int64_t *start, *free;
  int64_t pages, bytes;

  void give(int64_t page) { ring[(*start + (*free)++) % pages] = int32_t(page); }
  int32_t take() {
    const int32_t page = ring[*start];
    *start = (*start + 1) % pages;
    --*free;
    return page;
  }
};

void plan(Work& work) {
  const int tiers = int(work.tiers.size());
  work.moves.resize(work.table_rows);
  for (int64_t i = 0; i < work.table_rows; ++i) {
    Move& move = work.moves[i];
    const int victim = work.victim[i], target = work.target[i], enter = work.candidate[i];
    if (victim < tiers && work.place[victim * work.table_rows + i] >= 0) {
      move.from = victim;
      move.victim = work.place[victim * work.table_rows + i];
      if (target > victim && target < tiers) move.to = target;
    }
    if (enter < tiers) move.enter = enter;
  }
}

// Whether the slot is the first of its page.
bool opens(const Tier& tier, int64_t slot) { return slot % tier.tokens == 0; }

void check_slot(const Tier& tier, int64_t table_row, int64_t slot, bool opened) {
  if (!opened) return tier.check(table_row, slot, slot + 1);
  if (slot / tier.tokens >= tier.width)
    refuse("a token enters slot ", slot, "; the table covers ", tier.room());
}

// Raises if a missing page would be read or written, and counts released and allocated pages.
void check(const Work& work, int64_t& given, int64_t& taken) {
  for (int t = 0; t < int(work.tiers.size()); ++t) {
    const Tier& tier = work.tiers[t].tier;
    for (int64_t i = 0; i < work.table_rows; ++i) {
      const int64_t length = work.tiers[t].length[i], end = work.end(t, i), entry = work.entry(t, i);
      if (length < 0) refuse("a table row has ", length, " tokens; it must have 0 or more");
      if (work.moves[i].from == t) {
        if (work.moves[i].victim >= length)
          refuse("slot ", work.moves[i].victim, " holds no token, the table row has ", length);
        tier.check(i, work.moves[i].victim, work.moves[i].victim + 1);
        tier.check(i, length - 1, length);
        given += work.moves[i].gone() && opens(tier, end);
      }
      const bool arrives = work.arrives(t, i), enters = work.enters(t, i);
      if (arrives) check_slot(tier, i, end, opens(tier, end));
      const bool follows = arrives && opens(tier, end) && !opens(tier, entry);  // in a new page
      if (enters && !follows) check_slot(tier, i, entry, opens(tier, entry));
      taken += (arrives && opens(tier, end)) + (enters && opens(tier, entry));
    }
  }
}

// Removes the victim, and moves the last token of its tier into the gap.
void leave(Work& work, const Coder& coder, int64_t i) {
  const Move& move = work.moves[i];
  if (move.from < 0) return;
  const Tier& tier = work.tiers[move.from].tier;
  uint8_t* page = tier.page(i, move.victim);
  const int64_t row = move.victim % tier.tokens;
  if (move.to >= 0) {
    float* to = &work.vectors[i * work.width()];
    tier.decode(coder, 0, page, row, to);
    tier.decode(coder, 1, page, row, to + tier.format[0].dim);
    uint8_t* beside = &work.beside[8 * i];
    if (tier.score >= 0) std::memcpy(beside, page + tier.score + 4 * row, 4);
    if (tier.position >= 0) std::memcpy(beside + 4, page + tier.position + 4 * row, 4);
  }
  const int64_t end = work.end(move.from, i);
  if (move.gone()) tier.move(tier.page(i, end), end % tier.tokens, page, row);
}

// Releases the emptied pages, of all kinds and tiers, and then allocates new ones.
void exchange(std::vector<Work>& works, Pool& pool, uint8_t* data, int64_t step, bool poison) {
  for (Work& work : works)
    for (int t = 0; t < int(work.tiers.size()); ++t)
      for (int64_t i = 0; i < work.table_rows; ++i) {
        const Tier& tier = work.tiers[t].tier;
        if (work.moves[i].from != t || !work.moves[i].gone() || !opens(tier, work.end(t, i)))
          continue;
        const int64_t page = tier.table[tier.entry(i, work.end(t, i) / tier.tokens)];
        pool.give(page);
        if (poison) std::memset(data + page * step, 0xff, pool.bytes);
      }
  for (Work& work : works)
    for (int t = 0; t < int(work.tiers.size()); ++t) {
      const Tier& tier = work.tiers[t].tier;
      auto open = [&](int64_t i, int64_t slot, bool some) {
        if (some && opens(tier, slot))
          work.tiers[t].table[tier.entry(i, slot / tier.tokens)] = pool.take();
      };
      for (int64_t i = 0; i < work.table_rows; ++i) open(i, work.end(t, i), work.arrives(t, i));
      for (int64_t i = 0; i < work.table_rows; ++i) open(i, work.entry(t, i), work.enters(t, i));
    }
}

void put(const Tier& tier, const Coder& coder, int64_t i, int64_t slot, const uint8_t* key,
         Number key_number, const uint8_t* value, Number value_number, const void* score,
         const void* position) {
  uint8_t* page = tier.page(i, slot);
  const int64_t row = slot % tier.tokens;
  tier.encode(coder, 0, key_number, &key, 1, page, row);
  tier.encode(coder, 1, value_number, &value, 1, page, row);
  if (tier.score >= 0) std::memcpy(page + tier.score + 4 * row, score, 4);
  if (tier.position >= 0) std::memcpy(page + tier.position + 4 * row, position, 4);
}

// Writes the victim to its new tier, and then the candidate.
void enter(Work& work, const Coder& coder, int64_t i) {
  const Move& move = work.moves[i];
  if (move.to >= 0) {
    const Tier& tier = work.tiers[move.to].tier;
    const auto* from = reinterpret_cast<const uint8_t*>(&work.vectors[i * work.width()]);
    const uint8_t* beside = &work.beside[8 * i];
    put(tier, coder, i, work.end(move.to, i), from, Number::kFloat32,
        from + sizeof(float) * tier.format[0].dim, Number::kFloat32, beside, beside + 4);
  }
  if (move.enter >= 0) {
    const int32_t position = work.position.data ? int32_t(work.position[i]) : 0;
    put(work.tiers[move.enter].tier, coder, i,
        move.swap() ? move.victim : work.entry(move.enter, i), work.key.at(i, 0), work.key.number,
        work.value.at(i, 0), work.value.number, work.score ? work.score + i : nullptr, &position);
  }
}

// All memory that a step reads or writes, to check that written memory does not overlap. Tables may
// overlap each other: two tiers may share one, a side each.
class Memory {
 public:
  enum class Role { kRead, kTable, kWritten };
  void add(const View& view, Label label, Role role) {
    if (view.bytes) all_.push_back({view, label, role});
  }
  void check() {
    std::sort(all_.begin(), all_.end(),
              [](const Entry& a, const Entry& b) { return a.view.data < b.view.data; });
    for (auto a = all_.begin(); a != all_.end(); ++a)
      for (auto b = a + 1; b != all_.end() && b->view.data < a->view.data + a->view.bytes; ++b) {
        const bool either = a->role == b->role && a->role != Role::kWritten;
        if (either) continue;
        a->role == Role::kRead ? check_apart(b->view, b->label, a->view, a->label)
                               : check_apart(a->view, a->label, b->view, b->label);
      }
  }

 private:
  struct Entry {
    View view;
    Label label;
    Role role;
  };
  std::vector<Entry> all_;
};

using Role = Memory::Role;

// tensors: candidate, victim, target [S], place [K, S], key, value [S, 1, D], score, position [S]
// or empty, then per tier its table [S, T] and lengths [S]
Work work_of(const View& pages, const Tensor* tensors, int64_t tiers, const int64_t* numbers,
             Memory& memory) {
  std::vector<Member> members;
  auto read = [&](int i, Label label, Kinds kinds, std::initializer_list<int64_t> sizes, Lay lay) {
    const View found = view(tensors[i], label, kinds, sizes, lay);
    memory.add(found, label, Role::kRead);
    return found;
  };
  const View candidate = read(0, {"candidate"}, kBytes, {kAny}, Lay::kContiguous);
  const int64_t table_rows = candidate.size(0);
  for (int64_t t = 0; t < tiers; ++t) {
    const Label names[] = {{"table of tier ", t}, {"lengths of tier ", t}};
    const Tensor &table = tensors[kWorkTensors + 2 * t], &length = tensors[kWorkTensors + 2 * t + 1];
    const View ids =
        view(table, names[0], kInt32, {table_rows, kAny}, Lay::kContiguous, Use::kWrites);
    const View lengths =
        view(length, names[1], kInt32, {table_rows}, Lay::kContiguous, Use::kWrites);
    memory.add(ids, names[0], Role::kTable);
    memory.add(lengths, names[1], Role::kWritten);
    members.push_back({tier_of(pages, table, numbers), ids.as<int32_t>(), lengths.as<int32_t>()});
    numbers += tier_size(numbers, kTierNumbers);
    const Tier &tier = members.back().tier, &first = members[0].tier;
    if (tier.room() > kMost)
      refuse(names[0], " covers ", tier.room(), " tokens; lengths are limited to ", kMost);
    if (tier.format[0].dim != first.format[0].dim || tier.format[1].dim != first.format[1].dim ||
        (tier.score < 0) != (first.score < 0) || (tier.position < 0) != (first.position < 0))
      refuse("tier ", t, " has other dimensions, scores or positions than tier 0; tiers between "
             "which tokens move must store the same");
  }
  const Tier& tier = members[0].tier;
  auto bytes = [&](int i, const char* name) {
    return read(i, {name}, kBytes, {table_rows}, Lay::kContiguous).data;
  };
  const uint8_t *victim = bytes(1, "victim"), *target = bytes(2, "target");
  const View place = read(3, {"place"}, kInt64, {tiers, table_rows}, Lay::kContiguous);
  const View key = read(4, {"key"}, kFloats, {table_rows, 1, tier.format[0].dim}, Lay::kRows);
  const View value = read(5, {"value"}, kFloats, {table_rows, 1, tier.format[1].dim}, Lay::kRows);
  Work work{members,
            table_rows,
            candidate.data,
            victim,
            target,
            place.as<const int64_t>(),
            Vectors(key),
            Vectors(value),
            nullptr,
            {},
            {},
            {},
            {}};
  if (tier.score >= 0)
    work.score = read(6, {"score"}, kFloat32, {table_rows}, Lay::kContiguous).as<const float>();
  if (tier.position >= 0) {
    work.position = integers_of(read(7, {"position"}, kIntegers, {table_rows}, Lay::kContiguous));
    for (int64_t i = 0; work.position.wide && i < table_rows; ++i)
      if (work.candidate[i] < tiers)
        within({"a position"}, work.position[i], INT32_MIN, INT32_MAX);
  }
  plan(work);
  work.vectors.resize(table_rows * work.width());
  work.beside.resize(8 * table_rows);
  return work;
}

Pool pool_of(const View& data, const Tensor& ring, const Tensor& start, const Tensor& free,
             int64_t given, int64_t taken, Memory& memory) {
  const int64_t pages = within({"pages of a pool"}, data.size(0), 0, kMost - 1);
  auto written = [&](const Tensor& x, Label label, Kinds kinds, int64_t count) {
    const View found = view(x, label, kinds, {count}, Lay::kContiguous, Use::kWrites);
    memory.add(found, label, Role::kWritten);
    return found;
  };
  auto number = [&](const Tensor& x, Label label) {
    if (x.defined() && x.dim() != 0) return written(x, label, kInt64, 1);
    const View found = view(x, label, kInt64, {}, Lay::kContiguous, Use::kWrites);
    memory.add(found, label, Role::kWritten);
    return found;
  };
  Pool pool{written(ring, {"ring of free pages"}, kInt32, pages + 1).as<int32_t>(),
            number(start, {"start of the ring"}).as<int64_t>(),
            number(free, {"number of free pages"}).as<int64_t>(), pages, data.size(1)};
  memory.check();
  const int64_t there = within({"number of free pages"}, *pool.free, 0, pages);
  const int64_t first = within({"start of the ring"}, *pool.start, 0, std::max<int64_t>(pages - 1, 0));
  if (there + given > pages)
    refuse("the pool has ", there, " of ", pages, " pages free, and the step releases ", given,
           "; that exceeds its size");
  if (taken > there + given)
    refuse("a step allocates ", taken, " pages and ", there + given, " are free");
  for (int64_t i = 0; i < taken && i < there; ++i) {
    const int64_t page = pool.ring[(first + i) % pages];
    if (page < 0 || page >= pages)
      refuse("the pool lists page ", page, " as free; it has ", pages);
  }
  return pool;
}

// numbers: per kind of table rows the number of its tiers, and the numbers of these
void page_step(Tensor data, Tensor ring, Tensor start, Tensor free, std::vector<Tensor> tensors,
               std::vector<int64_t> numbers, bool poison, Name isa) {
  const Coder& coder = coder_of(isa);
  const View pages = pages_of(data, Use::kWrites);
  Memory memory;
  memory.add(pages, {"page data"}, Role::kWritten);
  std::vector<Work> works;
  int64_t given = 0, taken = 0;
  const auto all = int64_t(numbers.size()), given_tensors = int64_t(tensors.size());
  int64_t at = 0, tensor = 0;
  while (at < all) {
    const int64_t tiers = within({"tiers of a kind of table rows"}, numbers[at++], 1, kMost);
    int64_t needed = 0;
    for (int64_t t = 0; t < tiers && needed <= all - at; ++t)
      needed += tier_size(numbers.data() + at + needed, all - at - needed);
    if (needed > all - at || kWorkTensors + 2 * tiers > given_tensors - tensor)
      refuse("a kind of table rows has ", tiers, " tiers, which need ", tiers * kTierNumbers,
             " numbers, the levels of their codes, and ", kWorkTensors + 2 * tiers, " tensors; ",
             all - at, " and ", given_tensors - tensor, " are left");
    works.push_back(work_of(pages, &tensors[tensor], tiers, &numbers[at], memory));
    check(works.back(), given, taken);
    at += needed, tensor += kWorkTensors + 2 * tiers;
  }
  if (tensor != given_tensors)
    refuse(given_tensors, " tensors are given; numbers describe ", tensor, " of them");
  Pool pool = pool_of(pages, ring, start, free, given, taken, memory);
  for (Work& work : works)
    for_all(work.table_rows, kWorth, [&](int64_t i) { leave(work, coder, i); });
  exchange(works, pool, pages.data, pages.strides[0], poison);
  for (Work& work : works) {
    for_all(work.table_rows, kWorth, [&](int64_t i) { enter(work, coder, i); });
    for (int t = 0; t < int(work.tiers.size()); ++t)
      for (int64_t i = 0; i < work.table_rows; ++i)
        work.tiers[t].length[i] = int32_t(work.entry(t, i) + work.enters(t, i));
  }
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_step(Tensor(a!) data, Tensor(b!) ring, Tensor(c!) start, Tensor(d!) free, "
      "Tensor(e!)[] tensors, int[] numbers, bool poison, str isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("page_step", KV_BOX(&kv::page_step)); }

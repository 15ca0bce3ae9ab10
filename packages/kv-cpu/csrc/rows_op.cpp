// A decode step on tensors as an engine has them, by token and head: attention over stored tokens
// and the new token of each sequence, which may be stored or copied by the same call.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "boundary.h"
#include "maps.h"
#include "page_set.h"
#include "pages.h"

namespace kv {
namespace {

constexpr int64_t kWorth = 64;     // vectors to encode that justify another thread
constexpr int64_t kTogether = 16;  // tokens of a head that a thread encodes in turn

// Rows first .. first + count - 1 of tensors by token and head.
struct TokenRows {
  const View& x;
  int64_t first;
  const uint8_t* at(int64_t row, int64_t head) const {
    return x.data + (first + row) * x.step(0) + head * x.step(1);
  }
};

Format plain(ScalarType type, int64_t dim) { return {number_of(type), int(dim), 0, 1, 0, 0}; }

// The new tokens as a part of one token per sequence.
Part fresh_part(const View& key, const View& value, int64_t first, const int64_t* position) {
  Part part;
  part.width = 1;
  part.key = plain(key.type, key.size(2)), part.value = plain(value.type, value.size(2));
  part.keys = TokenRows{key, first}.at(0, 0), part.values = TokenRows{value, first}.at(0, 0);
  for (int d = 0; d < 2; ++d) part.key_step[d] = key.step(d), part.value_step[d] = value.step(d);
  part.place = position;
  part.place_step[0] = 1;
  return part;
}

// Replaces the last part, the new tokens of all heads, by one of each group.
void split_by_group(Job& job) {
  const Part whole = job.parts.back();
  job.parts.pop_back();
  for (const HeadGroup& group : job.groups) {
    Part& part = job.parts.emplace_back(whole);
    part.of = &group;
    part.key.dim = int(group.key_dim), part.value.dim = int(group.value_dim);
  }
}

// The places of new tokens: data [P, bytes], page and slot [n * H], by token and head.
struct Places {
  Tier tier;
  Integers page, slot;
  int64_t count = 0;
};

Places places_of(const Tensor& pages, const Tensor& named, const Tensor& slots,
                 const std::vector<int64_t>& numbers, const View& key, const View& value) {
  const View data = pages_of(pages, Use::kWrites);
  const View page = view(named, {"pages of new tokens"}, kIntegers, {kAny}, Lay::kContiguous);
  const int64_t count = page.size(0), heads = key.size(1);
  const View slot = view(slots, {"slots of new tokens"}, kIntegers, {count}, Lay::kContiguous);
  Places places{tier_of(data, numbers), integers_of(page), integers_of(slot), count};
  const Tier& tier = places.tier;
  if (tier.score >= 0 || tier.position >= 0)
    refuse("pages of new tokens store scores or positions; none are given");
  if (tier.format[0].dim != key.size(2) || tier.format[1].dim != value.size(2))
    refuse("pages of new tokens have keys and values of ", tier.format[0].dim, " and ",
           tier.format[1].dim, " dimensions; those given have ", key.size(2), " and ",
           value.size(2));
  const int64_t tokens = std::min(key.size(0), value.size(0));
  if (count % heads || count > product(heads, tokens))
    refuse("there are ", count, " places of new tokens; ", tokens, " tokens of ", heads,
           " heads are given");
  for (int64_t i = 0; i < count; ++i) {
    tier.check_page(places.page[i]);
    within({"a slot of a new token"}, places.slot[i], 0, tier.tokens - 1);
  }
  for (const auto& [label, other] : {std::pair{Label{"pages of new tokens"}, &page},
                                     {Label{"slots of new tokens"}, &slot},
                                     {Label{"key"}, &key},
                                     {Label{"value"}, &value}})
    check_apart(data, {"page data"}, *other, label);
  return places;
}

void store_tokens(const Places& places, const Coder& coder, const View& key, const View& value) {
  const int64_t heads = key.size(1), tokens = places.count / heads;
  const int64_t pieces = (tokens + kTogether - 1) / kTogether;
  for_all(pieces * heads, kWorth / (2 * kTogether), [&](int64_t i) {
    const int64_t head = i % heads;
    int64_t token = i / heads * kTogether;
    const int64_t last = std::min(token + kTogether, tokens);
    while (token < last) {
      // Tokens of consecutive slots of a page are encoded together.
      const int64_t page = places.page[token * heads + head];
      const int64_t slot = places.slot[token * heads + head];
      int count = 1;
      while (token + count < last && places.page[(token + count) * heads + head] == page &&
             places.slot[(token + count) * heads + head] == slot + count)
        ++count;
      for (int which = 0; which < 2; ++which) {
        const View& x = which ? value : key;
        const uint8_t* from[kTogether];
        for (int k = 0; k < count; ++k) from[k] = TokenRows{x, 0}.at(token + k, head);
        places.tier.encode(coder, which, number_of(x.type), from, count, places.tier.at(page), slot);
      }
      token += count;
    }
  });
}

// Encodes the first tokens of key [m, H, D] and value [m, H, Dv], and writes them to their places:
// pages and slots [n * H], by token and head. If a page is missing, nothing is written.
void page_place(Tensor data, std::vector<int64_t> tier, Tensor page, Tensor slot, Tensor key,
                Tensor value, Name isa) {
  const Coder& coder = coder_of(isa);
  const View keys = view(key, {"key"}, kFloats, {kAny, kAny, kAny}, Lay::kRows);
  const View values = view(value, {"value"}, kFloats, {kAny, keys.size(1), kAny}, Lay::kRows);
  within({"KV heads"}, keys.size(1), 1, kMost);
  store_tokens(places_of(data, page, slot, tier, keys, values), coder, keys, values);
}

// Copies the new tokens [B, H, D] of a job.
void copy_tokens(const View& from, int64_t first, const View& to) {
  const TokenRows rows{from, first}, copies{to, 0};
  for (int64_t b = 0; b < to.size(0); ++b)
    for (int64_t h = 0; h < to.size(1); ++h)
      std::memcpy(const_cast<uint8_t*>(copies.at(b, h)), rows.at(b, h), to.size(2) * to.item);
}

// Raises if the scores of a part, which are written, share bytes with another field of its pages.
void check_scores(Label label, const Part& part, int64_t score, int64_t position) {
  const int64_t end = score + 4 * part.tokens;
  auto apart = [&](int64_t first, int64_t bytes) {
    if (score < first + bytes && first < end)
      refuse(label, " is ", score, ", up to ", end, "; from ", first, " to ", first + bytes,
             " the page has another field");
  };
  for (int which = 0; which < 2; ++which) {
    const Format& format = which ? part.value : part.key;
    apart(part.offset[2 * which], part.tokens * format.bytes());
    if (format.groups)
      apart(part.offset[2 * which + 1], part.tokens / format.share * format.meta_bytes());
  }
  for (const int64_t positions : {position, part.position_offset})
    if (positions >= 0) apart(positions, 4 * part.tokens);
}

// Reads how scores of stored tokens are updated: not at all, or the maximum weight of the past in a
// mean (-1: no limit), the divisor of a sum (0: a mean), and per part in pages the offset of scores
// and that of positions (-1: they are given).
void read_renewal(Job& job, const std::vector<int64_t>& numbers,
                  const std::vector<Tensor>& tensors,
                  const std::vector<std::pair<Label, const View*>>& read) {
  if (numbers.empty()) return;
  if (numbers.size() != 2 + 2 * job.parts.size())
    refuse("running is ", numbers.size(), " numbers for ", job.parts.size(),
           " parts; give two, and two per part, or none");
  if (job.watches.size() != 1 || job.terms != 1)
    refuse("scores are updated with one term of one watch; ", job.terms, " terms of ",
           job.watches.size(), " are given");
  const int64_t last = within({"last"}, numbers[0], -1, INT64_MAX);
  job.renews = true;
  job.renewal.most = int32_t(last < 0 ? INT32_MAX : std::min<int64_t>(last, INT32_MAX));
  job.renewal.over = float(within({"over"}, numbers[1], 0, INT64_MAX));
  if (job.watches[0].skip > 1)
    refuse("scores are updated with a watch of skip ", job.watches[0].skip,
           "; each stored token must be observed, by skip 0 or 1");
  for (int64_t b = 0; b < job.sequences; ++b)
    within({"a position of a query"}, job.position[b], INT64_MIN, INT32_MAX);
  for (size_t i = 0; i < job.parts.size(); ++i) {
    Part& part = job.parts[i];
    const int64_t score = numbers[2 + 2 * i], position = numbers[3 + 2 * i], at = int64_t(i);
    if (!part.paged) refuse("part ", at, " is not in pages, which store scores");
    const View data = pages_of(tensors[4 * i], Use::kWrites);
    check_rows({"offset of scores of part ", at}, score, part.tokens, 4, data.size(1));
    if (position >= 0)
      check_rows({"offset of positions of part ", at}, position, part.tokens, 4, data.size(1));
    else if (!part.place)
      refuse("part ", at, " has no positions, in pages or given; updating scores needs them");
    check_scores({"offset of scores of part ", at}, part, score, position);
    part.score = score, part.stored_position = position;
    for (size_t j = 0; j < i; ++j) {
      const View other = pages_of(tensors[4 * j], Use::kWrites);
      if (other.data != data.data || other.size(0) != data.size(0) || other.step(0) != data.step(0))
        check_apart(data, {"page data of part ", at}, other, {"page data of part ", int64_t(j)});
    }
    const Label label{"page data of part ", at};
    auto apart = [&](int k, Label other, std::initializer_list<int64_t> sizes) {
      const View x = view(tensors[4 * i + k], other, kIntegers, sizes, Lay::kStrided);
      check_apart(data, label, x, other);
    };
    apart(1, {"table of part ", at}, {kAny, kAny, kAny});
    apart(2, {"lengths of part ", at}, {kAny, kAny});
    if (part.place) apart(3, {"positions of part ", at}, {kAny, kAny, kAny});
    for (const auto& [other, x] : read) check_apart(data, label, *x, other);
  }
}

// Raises for a page of stored tokens that does not exist, and for one whose scores two table rows
// would update, before anything is written.
void check_tables(const Job& job) {
  Fault fault;
  auto used_by = [&](const Part& part, int64_t row) {
    const bool padding = job.position[row / job.heads] < 0;
    return padding || !part.paged ? 0 : (part.count(row) + part.tokens - 1) / part.tokens;
  };
  int64_t most = 0;
  for (const Part& part : job.parts)
    for (int64_t row = 0; row < job.table_rows(); ++row) most += used_by(part, row);
  std::vector<std::optional<PageSet>> named(job.parts.size());  // by the first part of a pool
  for (size_t i = 0; i < job.parts.size(); ++i) {
    const Part& part = job.parts[i];
    size_t pool = 0;
    while (job.parts[pool].data != part.data) ++pool;
    if (job.renews && part.paged && !named[pool]) named[pool].emplace(part.pages, most);
    for (int64_t row = 0; row < job.table_rows(); ++row) {
      const int64_t used = used_by(part, row);
      const int64_t first = row * part.table_width + (part.reverse ? part.table_width - used : 0);
      for (int64_t column = first; column < first + used; ++column) {
        const int64_t page = part.table[column];
        if (page < 0 || page >= part.pages) {
          fault.raise(int(i), page);
        } else if (job.renews && !named[pool]->add(page)) {
          refuse("page ", page, " is in two table rows; scores of a page are updated by one");
        }
      }
    }
  }
  check(job, fault);
}

// Raises if vectors of the output [m, Q, Dv] overlap.
void check_rows_apart(const View& out) {
  int64_t reach = out.size(2);
  const int faster = out.strides[1] <= out.strides[0] ? 1 : 0;
  for (int i : {faster, 1 - faster}) {
    if (out.size(i) > 1 && out.strides[i] < reach)
      refuse("out has sizes ", out.size(0), ", ", out.size(1), ", ", out.size(2), " and strides ",
             out.strides[0], ", ", out.strides[1], "; its vectors must not overlap");
    reach = sum(reach, product(out.size(i) - 1, out.strides[i]));
  }
}

Kinds kind_of(ScalarType type) {
  if (type == ScalarType::Float) return kFloat32;
  return type == ScalarType::Half ? kFloat16 : kBFloat16;
}

// Writes the attention of a job, [B * Q, Dv] in float32, to rows of the output, mapped if there is a
// map.
void write_output(const Job& job, const Map& map, const View& result, int64_t first,
                  const Coder& coder) {
  const int64_t heads = job.heads * job.group, width = job.value_dim;
  const TokenRows to{result, first};
  const auto* from = reinterpret_cast<const uint8_t*>(job.out);
  if (map) {
    const View nothing;
    const Product back{map,
                       nothing,
                       from,
                       {4 * heads * width, 4 * width},
                       Number::kFloat32,
                       const_cast<uint8_t*>(to.at(0, 0)),
                       {result.step(0), result.step(1)},
                       number_of(result.type),
                       job.sequences,
                       heads};
    return multiply({back}, in_float32(*job.kernels), coder);
  }
  const Format format = plain(result.type, width);
  for_all(job.sequences, grain(kWorth, heads), [&](int64_t b) {
    for (int64_t h = 0; h < heads; ++h) {
      const uint8_t* row = from + 4 * (b * heads + h) * width;
      coder.encode(format, Number::kFloat32, &row, 1, const_cast<uint8_t*>(to.at(b, h)), nullptr);
    }
  });
}

// The attention of rows first .. first + B - 1 of q [m, Q, D], whose positions are [B, 1], over parts
// in pages and the new tokens key [m, H, D] and value [m, H, Dv] of these rows; it is written to the
// same rows of out [m, Q, Dv]. `maps` are matrices that keys, queries, values and outputs are
// multiplied with, and the shift of keys, as `mapped` names them (see `maps_of`): what is stored,
// copied and attended to is mapped. New tokens are stored first, if `store` has their places: page
// data [P, bytes], pages and slots [n * H] of the first n tokens. `copies`, if any, are set to the
// keys [B, H, D] and values [B, H, Dv] of the rows. Returns per part, that of new tokens last, the
// sums [terms, B, H, width] and counts [watches, B, H, width], if anything is observed. With
// `running` (see read_renewal) scores of stored tokens are updated with the only term, and only the
// last part has sums and counts. With `groups` (see read_groups) vectors of a head have the dimensions
// of its group; numbers of queries and new tokens past them are not read, and those of outputs,
// before their map, are 0. If a page is missing, nothing is written.
std::vector<Tensor> decode_rows(Tensor q, Tensor key, Tensor value, Tensor position, Tensor out,
                                int64_t first, std::vector<Tensor> tensors,
                                std::vector<int64_t> parts, std::vector<int64_t> watches,
                                std::vector<double> above, std::vector<int64_t> running,
                                std::vector<int64_t> groups, double scale, double softcap,
                                std::vector<Tensor> sinks, std::vector<Tensor> store,
                                std::vector<int64_t> tier, std::vector<Tensor> copies,
                                std::vector<Tensor> maps, std::vector<int64_t> mapped, Name isa) {
  const Coder& coder = coder_of(isa);
  Job job;
  job.kernels = kernels_of(isa);
  const View given_x = view(q, {"q"}, kFloats, {kAny, kAny, kAny}, Lay::kRows);
  const View given_keys = view(key, {"key"}, kFloats, {kAny, kAny, kAny}, Lay::kRows);
  const View given_values =
      view(value, {"value"}, kFloats, {kAny, given_keys.size(1), kAny}, Lay::kRows);
  const View result =
      view(out, {"out"}, kFloats, {kAny, given_x.size(1), kAny}, Lay::kRows, Use::kWrites);
  check_rows_apart(result);
  const View place = view(position, {"position"}, kInt64, {kAny, 1}, Lay::kContiguous);
  job.sequences = place.size(0), job.heads = given_keys.size(1);
  const int64_t rows =
      std::min({given_x.size(0), given_keys.size(0), given_values.size(0), result.size(0)});
  within({"the first row"}, first, 0, rows);
  if (job.sequences > rows - first)
    refuse("rows ", first, " to ", first + job.sequences - 1, " decode; there are ", rows);
  if (job.heads < 1 || given_x.size(1) % job.heads)
    refuse("q has ", given_x.size(1), " heads; they must be a multiple of the ", job.heads,
           " KV heads");
  job.group = within({"queries of a KV head"}, given_x.size(1) / job.heads, 1, kMostGroup);
  const Maps bases = maps_of(maps, mapped, job.heads);
  const Mapped mapped_x(given_x, bases.query, {"q"}), mapped_keys(given_keys, bases.key, {"keys"});
  const Mapped mapped_values(given_values, bases.value, {"values"});
  const View &x = mapped_x.view(), &keys = mapped_keys.view(), &values = mapped_values.view();
  job.key_dim = within({"dimensions of q"}, x.size(2), 1, kMostDim);
  job.value_dim = within({"dimensions of values"}, values.size(2), 1, kMostDim);
  if (keys.size(2) != job.key_dim)
    refuse("key has ", keys.size(2), " dimensions and q ", job.key_dim,
           ", after their maps; they must be equal");
  const Map& back = bases.output;
  if (back && back.from != job.value_dim)
    refuse("the map of outputs takes ", back.from, " dimensions, and values have ", job.value_dim,
           "; they must be equal");
  if (const int64_t width = back ? back.to : job.value_dim; result.size(2) != width)
    refuse("out has ", result.size(2), " dimensions and the attention ", width,
           "; they must be equal");
  job.query_width = padded(int(job.key_dim) + 7), job.value_width = padded(int(job.value_dim));
  job.scale = float(scale);
  job.query_number = number_of(x.type);
  job.queries = TokenRows{x, first}.at(0, 0);
  job.query_step[0] = x.step(0), job.query_step[1] = job.group * x.step(1);
  job.query_step[2] = x.step(1), job.query_step[3] = x.item;
  job.position = read_positions(position, job.sequences, 1);
  read_softmax(job, softcap, sinks);
  read_watches(job, watches, above);
  for (Watch& watch : job.watches)  // for one query, the maximum of sums is the sum of maxima
    if (watch.group == Group::kMaxOfSums) watch.group = Group::kMax;
  read_groups(job, groups);
  if (!groups.empty() && !(job.watches.empty() && running.empty() && store.empty()))
    refuse("heads are in groups; then nothing is observed and no token is stored");
  read_parts(job, tensors, parts);
  std::vector<std::pair<Label, const View*>> read{
      {{"q"}, &given_x}, {{"key"}, &given_keys}, {{"value"}, &given_values}, {{"position"}, &place}};
  bases.each([&](Label label, const View& given) { read.emplace_back(label, &given); });
  for (const auto& [label, other] : read) check_apart(result, {"out"}, *other, label);
  read.emplace_back(Label{"out"}, &result);
  read_renewal(job, running, tensors, read);
  job.parts.push_back(fresh_part(keys, values, first, job.position));
  if (!job.groups.empty()) split_by_group(job);
  Places places;
  if (!store.empty()) {
    if (store.size() != 3)
      refuse("store has ", store.size(), " tensors; give page data, pages and slots, or none");
    places = places_of(store[0], store[1], store[2], tier, keys, values);
    for (const auto& [label, other] : read)
      check_apart(places.tier.pages_view, {"page data"}, *other, label);
  }
  View copied[2];
  if (!copies.empty() && copies.size() != 2)
    refuse("copies are ", copies.size(), " tensors; give one of keys and one of values, or none");
  for (size_t i = 0; i < copies.size(); ++i) {
    const View& from = i ? values : keys;
    const Label label{i ? "copies of values" : "copies of keys"};
    copied[i] = view(copies[i], label, kind_of(from.type),
                     {job.sequences, job.heads, from.size(2)}, Lay::kContiguous, Use::kWrites);
    for (const auto& [other_label, other] : read)
      check_apart(copied[i], label, *other, other_label);
    if (i) check_apart(copied[i], label, copied[0], {"copies of keys"});
  }
  std::vector<Tensor> sums;
  make_sums(job, q, false, sums);
  const int64_t heads = job.sequences * x.size(1), width = job.value_dim;
  const auto room = std::make_unique_for_overwrite<float[]>(heads * (width + 1));
  job.out = room.get(), job.lse = room.get() + heads * width;
  if (!store.empty() || job.renews) check_tables(job);
  if (!maps.empty()) {
    const int64_t last = first + job.sequences, stored = places.count / job.heads;
    const int64_t begin = store.empty() ? first : 0, end = std::max(last, stored);
    const View nothing;
    std::vector<Product> products;
    if (bases.query) products.push_back(product_of(bases.query, nothing, given_x, x, first, last));
    if (bases.key)
      products.push_back(product_of(bases.key, bases.shift, given_keys, keys, begin, end));
    if (bases.value)
      products.push_back(product_of(bases.value, nothing, given_values, values, begin, end));
    multiply(products, in_float32(*job.kernels), coder);
  }
  if (!store.empty()) {
    // Before the attention: rows of one request see each other's tokens as they are stored.
    store_tokens(places, coder, keys, values);
  }
  Fault fault;
  run(job, int(torch::stable::get_num_threads()), parallel, fault);
  check(job, fault);
  write_output(job, back, result, first, coder);
  for (size_t i = 0; i < copies.size(); ++i) copy_tokens(i ? values : keys, first, copied[i]);
  return sums;
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "decode_rows(Tensor q, Tensor key, Tensor value, Tensor position, Tensor(a!) out, int first, "
      "Tensor[] tensors, int[] parts, int[] watches, float[] above, int[] running, int[] groups, "
      "float scale, float softcap, Tensor[] sinks, Tensor(b!)[] store, int[] tier, "
      "Tensor(c!)[] copies, Tensor[] maps, int[] mapped, str isa) -> Tensor[]");
  m.def(
      "page_place(Tensor(a!) data, int[] tier, Tensor page, Tensor slot, Tensor key, Tensor value, "
      "str isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("decode_rows", KV_BOX(&kv::decode_rows));
  m.impl("page_place", KV_BOX(&kv::page_place));
}

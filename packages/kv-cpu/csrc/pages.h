// Table rows of tokens in pages, for the operators that write, move and read them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "boundary.h"
#include "coder.h"
#include "ops.h"

namespace kv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows of a page that move together with a token: offset of the first, and bytes of each.
struct Segment {
  int64_t offset, width;
};

constexpr int kTierNumbers = 16;  // and the levels of its codes

// All table rows of one tier.
struct Tier {
  Format format[2];  // of keys, of values
  int64_t code[2], meta[2], score = -1, position = -1;  // offsets in a page; -1: not stored
  Segment segment[6];  // all segments of a token
  int segments = 0;
  uint8_t* data = nullptr;
  int64_t pages = 0, step = 0;  // bytes from one page to the next
  int64_t tokens = 1;
  Integers table;
  int64_t table_rows = 0, width = 0;
  bool reverse = false;
  View pages_view, table_view;

  int64_t entry(int64_t table_row, int64_t column) const {
    return table_row * width + (reverse ? width - 1 - column : column);
  }
  uint8_t* page(int64_t table_row, int64_t slot) const {
    return at(table[entry(table_row, slot / tokens)]);
  }
  uint8_t* at(int64_t page) const { return data + page * step; }
  // Number of slots that the table covers per table row.
  int64_t room() const { return width * tokens; }

  // Raises if a page of the slots first .. last - 1 of a table row is missing.
  void check(int64_t table_row, int64_t first, int64_t last) const;
  void check_page(int64_t page) const;
  void check_table_row(int64_t table_row) const;
  void move(uint8_t* from, int64_t row, uint8_t* to, int64_t target) const;
  void decode(const Coder&, int which, uint8_t* page, int64_t row, float* to) const;
  void encode(const Coder&, int which, Number from, const uint8_t* const* x, int count,
              uint8_t* page, int64_t row) const;
  // The address of a row's codes or numbers, and of its scales and zero points.
  uint8_t* codes_at(int which, uint8_t* page, int64_t row) const {
    return page + code[which] + row * format[which].bytes();
  }
  uint8_t* meta_at(int which, uint8_t* page, int64_t row) const {
    return page + meta[which] + row * format[which].meta_bytes();
  }
};

// Pages [P, bytes]; those that are written must not overlap.
View pages_of(const Tensor& data, Use use);

// numbers: tokens, offsets of key codes, key metadata, value codes and value metadata, offsets of
// scores and positions, reverse, number, dim, bits and group of keys and of values, then the levels
// of codes of keys and of values
Tier tier_of(const View& pages, const Tensor& table, const int64_t* numbers);
// The same, without a table: tokens are found by page alone.
Tier tier_of(const View& pages, const int64_t* numbers);
// The same, for a single tier.
Tier tier_of(const View& pages, const Tensor& table, const std::vector<int64_t>& numbers);
Tier tier_of(const View& pages, const std::vector<int64_t>& numbers);

// The numbers of a tier, of which there are `left`; more than these if some are missing.
int64_t tier_size(const int64_t* numbers, int64_t left);

// Vectors [S, L, D] whose numbers are consecutive.
struct Vectors {
  explicit Vectors(const View& x)
      : data(x.data), step{x.step(0), x.step(1)}, number(number_of(x.type)) {}
  const uint8_t* at(int64_t i, int64_t token) const {
    return data + i * step[0] + token * step[1];
  }
  const uint8_t* data;
  int64_t step[2];
  Number number;
};

// The named table rows [S], which must exist in the tier.
View table_rows_of(const Tier& tier, const Tensor& table_rows, int64_t count);

// Raises if a table row is named twice: two threads would write to the same slots.
void check_distinct(const Tier& tier, const Integers& table_rows, int64_t count);

const Coder& coder_of(const Name& isa);

}  // namespace kv

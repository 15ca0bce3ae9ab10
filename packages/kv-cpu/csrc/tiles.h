// The matrix tiles of AMX: those of the processor or, if KV_EMULATED_TILES is defined, an emulation
// in plain C++, for tests without AMX. Both have the same palette and the same functions.
//
// Tiles 0 to 3 hold sums; 4 and 5 the left factors, tokens or queries as rows; 6 and 7 the right
// ones, whose rows hold four bytes of each column. A product of bytes adds to sums[m][n] the sum of
// left[m][4 * k + i] * right[k][4 * n + i] over k and i, in 32 bits that wrap around. One of
// bfloat16 numbers, two in four bytes, adds their products in float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace kv {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // per row
constexpr int kTileSize = kTileRows * kTileBytes;
constexpr int kSumTiles = 4;

// The operand of LDTILECFG.
struct alignas(64) Palette {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // per row, by tile
  uint8_t rows[16] = {};

  // Left factors have `height` rows and `depth` bytes; there are always 16 columns.
  Palette(int height, int depth) {
    for (int tile = 0; tile < 8; ++tile) {
      const bool left = tile == 4 || tile == 5, right = tile > 5;
      bytes[tile] = uint16_t(left ? depth : kTileBytes);
      rows[tile] = uint8_t(right ? depth / 4 : height);
    }
  }
};
static_assert(sizeof(Palette) == 64);

// Calls f.operator()<i>() for each i below kEnd, as a tile's number is part of its instructions.
template <int kEnd, int kFrom = 0, typename F>
inline __attribute__((always_inline)) void each(F&& f) {
  if constexpr (kFrom < kEnd) {
    f.template operator()<kFrom>();
    each<kEnd, kFrom + 1>(f);
  }
}

#ifndef KV_EMULATED_TILES

// The tiles of this thread, configured during the lifetime of this object and released afterwards,
// so that no other code sees them changed and no context switch has to save them.
//
// The compiler's intrinsics are not used: gcc's do not declare that they read memory, so that
// stores to it may come too late or not at all, and they do not accept a template argument as a
// tile.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (height_) release();
  }

  // Configures the tiles, which clears them, unless they are of this shape.
  void shape(int height, int depth) {
    if (height == height_ && depth == depth_) return;
    configure(height, depth);
    height_ = height, depth_ = depth;
  }

  // The same until `release`, for tiles that are used without further configuration.
  static void configure(int height, int depth) {
    const Palette palette(height, depth);
    __asm__ volatile("ldtilecfg %0" ::"m"(palette) : "memory");
  }
  static void release() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int kTile>
  void clear() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile) : "memory");
  }

  template <int kTile>
  void load(const void* from, int64_t step) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(kTile) : "memory");
  }

  template <int kTile>
  void store(void* to, int64_t step) const {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(kTile) : "memory");
  }

  // Left bytes are unsigned, right ones signed.
  template <int kSum, int kLeft, int kRight>
  void add_signed() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight)
                     : "memory");
  }

  // Both are unsigned.
  template <int kSum, int kLeft, int kRight>
  void add_unsigned() {
    __asm__ volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight)
                     : "memory");
  }

  // A product whose sums, in tile 0, are not used: after some tenths of a microsecond without one,
  // the next products are slower.
  void keep_in_use() { add_unsigned<0, 4, 6>(); }

  // Both are bfloat16.
  template <int kSum, int kLeft, int kRight>
  void add_numbers() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight)
                     : "memory");
  }

 private:
  int height_ = 0, depth_ = 0;
};

#else

// The semantics of the instructions in Intel's manual. This traps where a processor would fault.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void shape(int height, int depth) {
    if (height == height_ && depth == depth_) return;
    height_ = height, depth_ = depth;
    const Palette palette(height, depth);
    expect(palette.palette == 1 && palette.start == 0);
    for (int i = 0; i < 8; ++i) {
      expect(palette.rows[i] <= kTileRows && palette.bytes[i] <= kTileBytes);
      expect((palette.rows[i] == 0) == (palette.bytes[i] == 0));
      tiles_[i] = {palette.rows[i], palette.bytes[i], {}};
    }
  }

  template <int kTile>
  void clear() {
    expect(tiles_[kTile].rows > 0);
    std::memset(tiles_[kTile].at, 0, kTileSize);
  }

  template <int kTile>
  void load(const void* from, int64_t step) {
    clear<kTile>();  // bytes outside the rows and bytes in use are zero
    Tile& tile = tiles_[kTile];
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(tile.at[row], static_cast<const uint8_t*>(from) + row * step, tile.bytes);
  }

  template <int kTile>
  void store(void* to, int64_t step) const {
    const Tile& tile = tiles_[kTile];
    expect(tile.rows > 0);
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * step, tile.at[row], tile.bytes);
  }

  template <int kSum, int kLeft, int kRight>
  void add_signed() {
    add<int8_t>(tiles_[kSum], tiles_[kLeft], tiles_[kRight]);
  }

  template <int kSum, int kLeft, int kRight>
  void add_unsigned() {
    add<uint8_t>(tiles_[kSum], tiles_[kLeft], tiles_[kRight]);
  }

  void keep_in_use() {}

  template <int kSum, int kLeft, int kRight>
  void add_numbers() {
    Tile& sums = tiles_[kSum];
    const Tile &left = tiles_[kLeft], &right = tiles_[kRight];
    fit(sums, left, right);
    for (int m = 0; m < sums.rows; ++m)
      for (int k = 0; k < right.rows; ++k)
        for (int n = 0; n < sums.bytes / 4; ++n) {
          float sum = read<float>(sums.at[m] + 4 * n);
          for (int i = 0; i < 4; i += 2)
            sum += number(left.at[m] + 4 * k + i) * number(right.at[k] + 4 * n + i);
          std::memcpy(sums.at[m] + 4 * n, &sum, sizeof sum);
        }
  }

 private:
  struct Tile {
    int rows, bytes;
    uint8_t at[kTileRows][kTileBytes];
  };

  static void expect(bool holds) {
    if (!holds) __builtin_trap();
  }

  static void fit(const Tile& sums, const Tile& left, const Tile& right) {
    expect(sums.rows > 0 && sums.rows == left.rows && sums.bytes == right.bytes);
    expect(left.bytes == 4 * right.rows && sums.bytes % 4 == 0);
  }

  template <typename T>
  static T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }

  static float number(const void* from) {
    const uint32_t bits = uint32_t(read<uint16_t>(from)) << 16;
    return read<float>(&bits);
  }

  template <typename Right>
  static void add(Tile& sums, const Tile& left, const Tile& right) {
    fit(sums, left, right);
    for (int m = 0; m < sums.rows; ++m) {
      uint32_t row[kTileBytes / 4];
      std::memcpy(row, sums.at[m], sizeof row);
      for (int k = 0; k < right.rows; ++k)
        for (int n = 0; n < sums.bytes / 4; ++n)
          for (int i = 0; i < 4; ++i)
            row[n] += uint32_t(left.at[m][4 * k + i] * int(Right(right.at[k][4 * n + i])));
      std::memcpy(sums.at[m], row, sizeof row);
    }
  }

  int height_ = 0, depth_ = 0;
  Tile tiles_[8] = {};
};

#endif

}  // namespace
}  // namespace kv

// Buffers that are written before they are read.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace kv {

// Aligned, uninitialized memory.
template <typename T>
class Uninitialized {
 public:
  explicit Uninitialized(int64_t count = 0)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), kAlign))) {}
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* data) const { ::operator delete(data, kAlign); }
  };
  std::unique_ptr<T, Free> data_;
};

}  // namespace kv

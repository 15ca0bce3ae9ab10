// Where the library and torch call each other. No exception passes: only torch's C interface is
// shared, and each of the two may have a C++ runtime and an unwinder of its own.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdio>
#include <exception>

namespace kv {

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

struct Message {
  char text[4096];
};

// Calls an operator; false: it raised, with this message.
[[gnu::noinline]] inline bool attempt(Boxed call, StableIValue* stack, uint64_t inputs,
                                      uint64_t outputs, Message& message) noexcept {
  try {
    call(stack, inputs, outputs);
    return true;
  } catch (const std::exception& error) {
    std::snprintf(message.text, sizeof message.text, "%s", error.what());
  } catch (...) {
    std::snprintf(message.text, sizeof message.text, "an error without a message");
  }
  return false;
}

// torch throws its own error through this function, so nothing here may have a destructor: what
// unwinds it would be asked of the library's own runtime.
template <Boxed kCall>
void guarded(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  Message message;
  if (!attempt(kCall, stack, inputs, outputs, message))
    aoti_torch_check(false, "kv_cpu", __FILE_NAME__, __LINE__, message.text);
}

#define KV_BOX(function) (&kv::guarded<&TORCH_BOX(function)>)

// f(i) for i < count, in several threads if the work justifies it; raises the first error of any.
template <typename F>
void for_all(int64_t count, int64_t grain, const F& f) {
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  torch::stable::parallel_for(0, count, grain < 1 ? 1 : grain, [&](int64_t first, int64_t last) {
    try {
      for (int64_t i = first; i < last; ++i) f(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace kv

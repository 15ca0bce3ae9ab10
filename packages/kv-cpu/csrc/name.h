// A string argument of an operator. torch's conversion to std::string never frees one of its copies
// (2.10 to 2.13): 48 bytes at every call. This one frees all of them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace kv {

struct Name {
  std::string text;
};

}  // namespace kv

template <>
struct torch::stable::detail::ToImpl<kv::Name> {
  static kv::Name call(StableIValue value, uint64_t, bool) {
    StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    kv::Name name{std::string(data, length)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return name;
  }
};

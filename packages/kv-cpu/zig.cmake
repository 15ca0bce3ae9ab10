# Compiles with clang of the pip package ziglang, for Linux with glibc 2.28 or newer:
# -DKV_ZIG=site-packages/ziglang/zig -DKV_PROCESSOR=x86_64 or aarch64
foreach(name KV_ZIG KV_PROCESSOR)
  if(NOT DEFINED ${name})
    message(FATAL_ERROR "${name} is not set; zig.cmake needs the path of zig and a processor")
  endif()
endforeach()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KV_ZIG KV_PROCESSOR)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "${KV_PROCESSOR}")
set(CMAKE_CXX_COMPILER "${KV_ZIG}" c++ -target "${KV_PROCESSOR}-linux-gnu.2.28")

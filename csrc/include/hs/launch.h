// Conventions of the C interface: raw device pointers, a stream, and a CUDA error code as result.
#pragma once

#include <cuda_runtime.h>

#define HS_EXPORT extern "C" __attribute__((visibility("default")))

namespace hs {

// Codes of the `dtype` arguments.
constexpr int kFloat16 = 0;
constexpr int kBFloat16 = 1;

}  // namespace hs

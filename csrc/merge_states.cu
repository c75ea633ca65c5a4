// Joins partial attention results by their log-sum-exp. Bound: bytes, each read once.

#include <cstdint>

#include "hs/launch.h"

namespace hs {
namespace {

// One thread for each output element. Partials whose lse is -inf count nothing, whatever they hold.
__global__ void merge_kernel(const float* outs, const float* lses, float* out, float* lse,
                             int splits, std::int64_t rows, int channels) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * channels) return;
  const std::int64_t row = i / channels;
  float top = -INFINITY;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, lses[s * rows + row]);
  float total = 0.f, weighted = 0.f;
  for (int s = 0; s < splits; ++s) {
    const float z = lses[s * rows + row];
    if (z == -INFINITY) continue;
    const float weight = expf(z - top);
    total += weight;
    weighted += weight * outs[s * rows * channels + i];
  }
  out[i] = total > 0.f ? weighted / total : 0.f;
  if (i % channels == 0) lse[row] = total > 0.f ? top + logf(total) : -INFINITY;
}

}  // namespace
}  // namespace hs

// outs f32 [splits, rows, channels], lses [splits, rows] -> out f32 [rows, channels], lse [rows].
HS_EXPORT int hs_merge_states(const float* outs, const float* lses, float* out, float* lse,
                              int splits, long long rows, int channels, void* stream) {
  using namespace hs;
  if (rows == 0 || channels == 0) return cudaSuccess;
  const long long threads = rows * channels;
  merge_kernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0,
                 static_cast<cudaStream_t>(stream)>>>(outs, lses, out, lse, splits, rows, channels);
  return cudaGetLastError();
}

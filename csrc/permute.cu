// The fixed channel permutation of K, and the same of Q, after RoPE. Bound: bytes, read and
// written once; a warp holds a whole row, so that the result may replace its source.

#include <cstdint>

#include "hs/launch.h"

namespace hs {
namespace {

template <int D>
__global__ void permute_kernel(const std::uint16_t* from, std::int64_t from_token_stride,
                               std::uint16_t* to, std::int64_t to_token_stride,
                               const int* permutation, std::int64_t rows, int heads, int group) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (i >= rows) return;
  const std::int64_t token = i / heads;
  const int head = static_cast<int>(i % heads);
  const std::uint16_t* source = from + token * from_token_stride + head * D;
  std::uint16_t* target = to + token * to_token_stride + head * D;
  const int* order = permutation + head / group * D;
  std::uint16_t value[D / 32];
#pragma unroll
  for (int c = 0; c < D / 32; ++c) value[c] = source[order[32 * c + lane]];
  __syncwarp();
#pragma unroll
  for (int c = 0; c < D / 32; ++c) target[32 * c + lane] = value[c];
}

template <int D>
cudaError_t launch(const void* from, long long from_token_stride, void* to,
                   long long to_token_stride, const int* permutation, long long rows, int heads,
                   int group, cudaStream_t stream) {
  permute_kernel<D><<<static_cast<unsigned>((rows * 32 + 255) / 256), 256, 0, stream>>>(
      static_cast<const std::uint16_t*>(from), from_token_stride, static_cast<std::uint16_t*>(to),
      to_token_stride, permutation, rows, heads, group);
  return cudaGetLastError();
}

}  // namespace
}  // namespace hs

// Channel c of head h becomes channel permutation[h / group][c] of the source; 16-bit elements,
// strides in elements, heads adjacent. `to` may be `from`.
HS_EXPORT int hs_permute_channels(int head_dim, const void* from, long long from_token_stride,
                                  void* to, long long to_token_stride, const int* permutation,
                                  long long tokens, int heads, int group, void* stream) {
  using namespace hs;
  if (tokens == 0) return cudaSuccess;
  const long long rows = tokens * heads;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64:
      return launch<64>(from, from_token_stride, to, to_token_stride, permutation, rows, heads,
                        group, s);
    case 128:
      return launch<128>(from, from_token_stride, to, to_token_stride, permutation, rows, heads,
                         group, s);
    case 256:
      return launch<256>(from, from_token_stride, to, to_token_stride, permutation, rows, heads,
                         group, s);
  }
  return cudaErrorInvalidValue;
}

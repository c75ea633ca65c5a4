// Unpacks blocks of either kind into dense ones, in a scratch arena of dense slots: block n of side
// s lands in slot 1 + s * N + n, so that a dense kernel reads them by positive refs.
//
// Bound: bytes, 25,600 for a sparse block of D = 128. A CTA has one block; its bytes pass through
// shared memory, since rows of the result take elements from all over an operand in MMA order.

#include <type_traits>

#include "hs/block.cuh"
#include "hs/launch.h"
#include "hs/two_four.cuh"

namespace hs {
namespace {

constexpr int kExpandThreads = 128;

struct ExpandParams {
  const std::uint8_t* arena;
  const int* refs;    // [2, N, H]
  const void* means;  // [sparse slots, H, D] of V, or null
  std::uint8_t* out;  // [1 + 2 N, H, 64, D]
  int blocks, heads;
};

// Four elements of a group, the first in the lowest bits, from the two that are kept.
__device__ __forceinline__ std::uint64_t spread(std::uint32_t pair, std::uint32_t nibble) {
  return std::uint64_t{pair & 0xffffu} << (nibble & 3u) * 16 |
         std::uint64_t{pair >> 16} << (nibble >> 2 & 3u) * 16;
}

template <int D, Side S>
__device__ __forceinline__ std::uint64_t group_of(const std::uint32_t* words, int row, int group) {
  using O = Operand<D, S>;
  const std::uint32_t* values = words + BlockFormat<D, 2>::kMetadataBytes / 4;
  const std::uint32_t nibble = words[O::group_word(row, group)] >> O::group_shift(row, group);
  return spread(values[O::nonzero(row, 2 * group) / 2], nibble & 15u);
}

template <typename T>
__device__ __forceinline__ std::uint32_t add_mean(std::uint32_t bits, std::uint32_t mean) {
  const float sum = to_float<T>(bits) + to_float<T>(mean);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat16 r = __float2bfloat16_rn(sum);
    return reinterpret_cast<const std::uint16_t&>(r);
  } else {
    const __half r = __float2half_rn(sum);
    return reinterpret_cast<const std::uint16_t&>(r);
  }
}

template <int D>
__device__ void expand_keys(const std::uint32_t* words, uint4* out, int t) {
  constexpr int kPieces = D / 8;
  for (int task = t; task < kBlockSize * kPieces; task += kExpandThreads) {
    const int token = task / kPieces, piece = task % kPieces;
    const std::uint64_t low = group_of<D, Side::K>(words, token, 2 * piece);
    const std::uint64_t high = group_of<D, Side::K>(words, token, 2 * piece + 1);
    out[task] = make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                           static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32));
  }
}

template <int D, typename T>
__device__ void expand_values(const std::uint32_t* words, const std::uint16_t* mean, uint4* out,
                              int t) {
  constexpr int kPieces = D / 8;
  for (int task = t; task < kBlockSize / kGroup * kPieces; task += kExpandThreads) {
    const int group = task / kPieces, piece = task % kPieces;
    std::uint64_t tokens[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) tokens[c] = group_of<D, Side::V>(words, 8 * piece + c, group);
#pragma unroll
    for (int p = 0; p < kGroup; ++p) {
      std::uint32_t word[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        std::uint32_t low = static_cast<std::uint32_t>(tokens[2 * c] >> 16 * p) & 0xffffu;
        std::uint32_t high = static_cast<std::uint32_t>(tokens[2 * c + 1] >> 16 * p) & 0xffffu;
        if (mean != nullptr) {
          low = add_mean<T>(low, mean[8 * piece + 2 * c]);
          high = add_mean<T>(high, mean[8 * piece + 2 * c + 1]);
        }
        word[c] = low | high << 16;
      }
      out[(group * kGroup + p) * kPieces + piece] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

template <int D, typename T>
__global__ void __launch_bounds__(kExpandThreads) expand_kernel(ExpandParams p) {
  using F = BlockFormat<D, 2>;
  __shared__ uint4 stage[F::kSparseBytes / 16];
  const int t = threadIdx.x, block = blockIdx.x;
  const int side = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
  const std::int64_t at = static_cast<std::int64_t>(side) * p.blocks + block;
  const int ref = p.refs[at * p.heads + head];
  const std::int64_t source = static_cast<std::int64_t>(slot_of(ref)) * p.heads + head;
  uint4* out = reinterpret_cast<uint4*>(p.out + ((1 + at) * p.heads + head) * F::kDenseBytes);
  if (is_dense(ref)) {
    const uint4* in = reinterpret_cast<const uint4*>(p.arena + source * F::kDenseBytes);
    for (int i = t; i < F::kDenseBytes / 16; i += kExpandThreads) out[i] = in[i];
    return;
  }
  const uint4* in = reinterpret_cast<const uint4*>(p.arena + source * F::kSparseBytes);
  for (int i = t; i < F::kSparseBytes / 16; i += kExpandThreads) stage[i] = in[i];
  __syncthreads();
  const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(stage);
  if (side == 0) {
    expand_keys<D>(words, out, t);
  } else {
    const std::uint16_t* means = static_cast<const std::uint16_t*>(p.means);
    expand_values<D, T>(words, means == nullptr ? nullptr : means + source * D, out, t);
  }
}

template <int D>
cudaError_t launch_expand(int dtype, const ExpandParams& p, cudaStream_t stream) {
  const dim3 grid(p.blocks, 2 * p.heads);
  if (dtype == kBFloat16)
    expand_kernel<D, __nv_bfloat16><<<grid, kExpandThreads, 0, stream>>>(p);
  else if (dtype == kFloat16)
    expand_kernel<D, __half><<<grid, kExpandThreads, 0, stream>>>(p);
  else
    return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace
}  // namespace hs

// refs int32 [2, N, H]; out [1 + 2 N, H, 64, D], of which slot 0 is left alone; means [sparse slots,
// H, D] or null: what V's sparse blocks are stored without.
HS_EXPORT int hs_expand_blocks(int dtype, int head_dim, const void* arena, const int* refs,
                               const void* means, void* out, int blocks, int heads, void* stream) {
  using namespace hs;
  if (blocks == 0) return cudaSuccess;
  const ExpandParams p = {static_cast<const std::uint8_t*>(arena), refs, means,
                          static_cast<std::uint8_t*>(out), blocks, heads};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64: return launch_expand<64>(dtype, p, s);
    case 128: return launch_expand<128>(dtype, p, s);
    case 256: return launch_expand<256>(dtype, p, s);
  }
  return cudaErrorInvalidValue;
}

// Prunes K blocks to 2:4 such that what is kept takes over what is dropped, and packs them.
//
// The recipe is `compensate` in hs_kernels/reference.py. Rows (tokens) are independent; channels go
// from first to last in groups of four, and the error of a group moves to every later channel. So a
// warp takes 32 rows as fp32 accumulators of an MMA. For each step of 16 channels the quads
// transpose the step, so that a lane holds one row of it, does the four groups in registers, and
// hands the errors back as the A operand of a product with the factor, which updates all later
// channels at once. Errors and factor are split into two bf16 each (three products), which leaves
// 2^-16 of the update as its error.
//
// Bound: arithmetic; about 4,300 instructions for 32 rows of D = 128.

#include <cuda_bf16.h>

#include "hs/block.cuh"
#include "hs/launch.h"
#include "hs/ptx.cuh"
#include "hs/sparse_stage.cuh"
#include "hs/two_four.cuh"

namespace hs {
namespace {

struct CompensateParams {
  const void* blocks;  // [N, H, 64, D] with element strides; D is contiguous
  std::int64_t block_stride, head_stride, token_stride;
  const float* weights;  // [layers, H, D], of |x|
  const float* factor;   // [layers, H, D, D], upper triangular
  std::uint8_t* arena;
  const int* refs;  // [N, H]: > 0 dense, < 0 sparse, 0 leaves the block out
  int layer_blocks, heads, layers;  // N = layers * layer_blocks, layers end to end
};

constexpr int kStep = 16;  // channels whose errors are collected before later ones take them
constexpr int kPairs = 6;  // of four: (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)

template <int D>
struct Plan {
  static constexpr int kSteps = D / kStep;
  static constexpr int kRowTiles = D <= 128 ? 2 : 1;  // of 16 rows, for one warp
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kWarpsOfBlock = kBlockSize / kRows;
  static constexpr int kBlocks = kStoreThreads / 32 / kWarpsOfBlock;
  static constexpr int kTiles = D / 8;                       // of 8 channels
  static constexpr int kProducts = kSteps * (kSteps - 1);    // tiles after each step, summed
  static __device__ constexpr int first_product(int step) { return step * (2 * kSteps - 1 - step); }

  // Everything of one head that does not depend on the blocks.
  struct Shared {
    uint4 later[kProducts][32];        // B fragments of -factor: rounded b0, b1, and their rest
    float own[kSteps][kStep][kStep];   // the factor within each step
    float4 solve[D / kGroup][kPairs][3];  // by kept pair: e = [0] x[p0] + [1] x[p1]; [2] pads
    float weights[D];
    Stage<D, Side::K> stages[kBlocks];
  };
};

// Channel of a step at column n of tile t, and at row k of the second operand: a lane of a quad
// thus holds whole groups, four adjacent channels of a row.
__device__ __forceinline__ int channel_of_column(int t, int n) { return n / 2 * 4 + 2 * t + n % 2; }
__device__ __forceinline__ int channel_of_depth(int k) { return channel_of_column(k / 8, k % 8); }

__device__ __forceinline__ std::uint32_t split_pair(float x, float y, std::uint32_t& rest) {
  const std::uint32_t rounded = pack_pair<__nv_bfloat16>(x, y);
  rest = pack_pair<__nv_bfloat16>(x - unpack_low<__nv_bfloat16>(rounded),
                                  y - unpack_high<__nv_bfloat16>(rounded));
  return rounded;
}

template <int D>
__device__ void prepare(typename Plan<D>::Shared& shared, const float* factor,
                        const float* weights) {
  using P = Plan<D>;
  for (int i = threadIdx.x; i < P::kProducts * 32; i += kStoreThreads) {
    const int product = i / 32, lane = i % 32, g = lane / 4, q = lane % 4;
    int step = 0;
    while (product >= P::first_product(step + 1)) ++step;
    const int tile = product - P::first_product(step);
    const int column = kStep * (step + 1 + tile / 2) + channel_of_column(tile % 2, g);
    std::uint32_t word[2], rest[2];
    for (int h = 0; h < 2; ++h) {
      const float* row = factor + (kStep * step + channel_of_depth(8 * h + 2 * q)) * D + column;
      word[h] = split_pair(-row[0], -row[D], rest[h]);
    }
    shared.later[product][lane] = make_uint4(word[0], word[1], rest[0], rest[1]);
  }
  for (int i = threadIdx.x; i < D * kStep; i += kStoreThreads)
    shared.own[i / kStep / kStep][i / kStep % kStep][i % kStep] =
        factor[i / kStep * D + i / kStep / kStep * kStep + i % kStep];
  for (int i = threadIdx.x; i < D; i += kStoreThreads) shared.weights[i] = weights[i];
  for (int i = threadIdx.x; i < D / kGroup * kPairs; i += kStoreThreads) {
    const int group = i / kPairs, pruned = i % kPairs;
    const int a = pruned < 3 ? 0 : pruned < 5 ? 1 : 2;
    const int b = pruned < 3 ? pruned + 1 : pruned == 3 ? 2 : 3;
    const float* own = factor + kGroup * group * (D + 1);
    double u[2][kGroup], s00 = 0, s01 = 0, s11 = 0;
    for (int r = 0; r < kGroup; ++r) {
      u[0][r] = own[r * D + a], u[1][r] = own[r * D + b];
      s00 += u[0][r] * u[0][r], s01 += u[0][r] * u[1][r], s11 += u[1][r] * u[1][r];
    }
    const double determinant = s00 * s11 - s01 * s01;
    float m[2][kGroup];
    for (int r = 0; r < kGroup; ++r) {
      m[0][r] = static_cast<float>((u[0][r] * s11 - u[1][r] * s01) / determinant);
      m[1][r] = static_cast<float>((u[1][r] * s00 - u[0][r] * s01) / determinant);
    }
    for (int side = 0; side < 2; ++side)
      shared.solve[group][kPairs - 1 - pruned][side] =
          make_float4(m[side][0], m[side][1], m[side][2], m[side][3]);
  }
}

// Transposes a 4 x 4 matrix of packets across a quad: lane q's packet r becomes lane r's packet q.
template <typename Word>
__device__ __forceinline__ void transpose_quad(Word (&packet)[4][4], int q) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = q & step;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      if (a & step) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Word mine = upper ? packet[a][i] : packet[a | step][i];
        const Word other = __shfl_xor_sync(~0u, mine, step);
        if (upper) packet[a][i] = other; else packet[a | step][i] = other;
      }
    }
  }
}

__device__ __forceinline__ float pick(const float (&x)[4], std::uint32_t i) {
  const float low = i & 1u ? x[1] : x[0], high = i & 1u ? x[3] : x[2];
  return i & 2u ? high : low;
}

// Prunes tokens [token, token + kRows) of one block into the stage.
template <int D, typename T>
__device__ void compensate_rows(const typename Plan<D>::Shared& shared, Stage<D, Side::K>& stage,
                                const T* block, std::int64_t token_stride, int token, int lane) {
  using P = Plan<D>;
  const int g = lane / 4, q = lane % 4;
  // [r][t]: half r of the row tiles, rows g + 8 r; t counts from the step in work on.
  float x[P::kRowTiles][P::kTiles][4];
#pragma unroll
  for (int r = 0; r < 2 * P::kRowTiles; ++r) {
    const T* row = block + (token + g + 8 * r) * token_stride + 4 * q;
#pragma unroll
    for (int s = 0; s < P::kSteps; ++s) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + kStep * s));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const std::uint32_t pair = t ? v.y : v.x;
        x[r / 2][2 * s + t][r % 2 * 2] = unpack_low<T>(pair);
        x[r / 2][2 * s + t][r % 2 * 2 + 1] = unpack_high<T>(pair);
      }
    }
  }

  int product = 0;
#pragma unroll 1
  for (int step = 0; step < P::kSteps; ++step) {
    float v[4][4];  // rows of the quad, then groups of this lane's row
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[r][i] = r < 2 * P::kRowTiles ? x[r / 2 % P::kRowTiles][i / 2][r % 2 * 2 + i % 2] : 0.f;
    transpose_quad(v, q);

    std::uint32_t pairs[4], nibbles = 0, packet[4][4];
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const float4 weight =
          *reinterpret_cast<const float4*>(&shared.weights[kStep * step + kGroup * group]);
      const float w[4] = {weight.x, weight.y, weight.z, weight.w};
      std::uint32_t score[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] = __float_as_uint(fabsf(v[group][i]) * w[i]);
      std::uint32_t first, second;
      two_highest(score, first, second);
      const std::uint32_t kept = first == 0 ? second - 1 : first + second;  // number of the pair
      const std::uint32_t p0 = first > 0 ? 0u : second == 1 ? 2u : 1u;
      const std::uint32_t p1 = second < 3 ? 3u : first == 2 ? 1u : 2u;
      const float4* solve = shared.solve[4 * step + group][kept];
      const float4 m0 = solve[0], m1 = solve[1];
      const float y0 = pick(v[group], p0), y1 = pick(v[group], p1);
      const float e[4] = {m0.x * y0 + m1.x * y1, m0.y * y0 + m1.y * y1, m0.z * y0 + m1.z * y1,
                          m0.w * y0 + m1.w * y1};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* row = shared.own[step][kGroup * group + i];
#pragma unroll
        for (int later = group; later < 4; ++later) {
          const float4 u = *reinterpret_cast<const float4*>(row + kGroup * later);
          const float c[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (later > group || k >= i) v[later][k] -= e[i] * c[k];
        }
      }
      pairs[group] = pack_pair<T>(pick(v[group], first), pick(v[group], second));
      nibbles |= (first | second << 2) << (4 * group);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        packet[group][h] = split_pair(e[2 * h], e[2 * h + 1], packet[group][2 + h]);
    }
    if (q < 2 * P::kRowTiles) {
      const int row = token + g + 8 * q;
      *reinterpret_cast<uint4*>(&stage.pairs[stage.place(row, 4 * step)]) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      stage.nibbles[row][step] = static_cast<std::uint16_t>(nibbles);
    }
    transpose_quad(packet, q);

#pragma unroll
    for (int t = 2; t < P::kTiles; t += 2) {
      if (t >= P::kTiles - 2 * step) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 b = shared.later[product + t - 2 + h][lane];
#pragma unroll
        for (int r = 0; r < P::kRowTiles; ++r) {
          const std::uint32_t rounded[4] = {packet[2 * r][0], packet[2 * r + 1][0],
                                            packet[2 * r][1], packet[2 * r + 1][1]};
          const std::uint32_t rest[4] = {packet[2 * r][2], packet[2 * r + 1][2],
                                         packet[2 * r][3], packet[2 * r + 1][3]};
          // The result moves two tiles down, so that the next step begins at tile 0.
          Mma<__nv_bfloat16>::dense_from(x[r][t - 2 + h], rounded, b.x, b.y, x[r][t + h]);
          Mma<__nv_bfloat16>::dense(x[r][t - 2 + h], rest, b.x, b.y);
          Mma<__nv_bfloat16>::dense(x[r][t - 2 + h], rounded, b.z, b.w);
        }
      }
    }
    product += P::kTiles - 2 * (step + 1);
  }
}

// Grid [*, layers * H]: a CTA prepares the factor of one head and goes through its blocks.
template <int D, typename T>
__global__ void __launch_bounds__(kStoreThreads, D <= 128 ? 2 : 1)
    compensate_kernel(const CompensateParams p) {
  using P = Plan<D>;
  extern __shared__ __align__(16) unsigned char memory[];
  typename P::Shared& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const int head = blockIdx.y % p.heads, layer = blockIdx.y / p.heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t constants = blockIdx.y;
  prepare<D>(shared, p.factor + constants * D * D, p.weights + constants * D);
  __syncthreads();

  const int of_cta = warp / P::kWarpsOfBlock, t = threadIdx.x % (P::kWarpsOfBlock * 32);
  Stage<D, Side::K>& stage = shared.stages[of_cta];
  for (int base = blockIdx.x * P::kBlocks; base < p.layer_blocks; base += gridDim.x * P::kBlocks) {
    const int n = layer * p.layer_blocks + base + of_cta;
    const int ref = base + of_cta < p.layer_blocks
                        ? p.refs[static_cast<std::int64_t>(n) * p.heads + head]
                        : 0;
    const T* block =
        static_cast<const T*>(p.blocks) + n * p.block_stride + head * p.head_stride;
    if (ref > 0) {
      uint4* to = reinterpret_cast<uint4*>(dense_block<D>(p.arena, ref, p.heads, head));
#pragma unroll 4
      for (int i = t; i < kBlockSize * D / 8; i += P::kWarpsOfBlock * 32)
        to[i] = load_16(block + i / (D / 8) * p.token_stride + i % (D / 8) * 8);
    } else if (ref < 0) {
      compensate_rows<D>(shared, stage, block, p.token_stride, warp % P::kWarpsOfBlock * P::kRows,
                         lane);
    }
    __syncthreads();
    if (ref < 0 && t < Stage<D, Side::K>::kThreads)
      write_sparse<D, Side::K>(stage, sparse_block<D>(p.arena, -ref, p.heads, head), t);
    __syncthreads();
  }
}

template <int D, typename T>
cudaError_t launch(const CompensateParams& p, int processors, cudaStream_t stream) {
  constexpr int bytes = sizeof(typename Plan<D>::Shared);
  const cudaError_t error = cudaFuncSetAttribute(
      compensate_kernel<D, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  constexpr int kCtas = D <= 128 ? 2 : 1, kBlocks = Plan<D>::kBlocks;
  const int rows = p.layers * p.heads;
  const int most = (p.layer_blocks + kBlocks - 1) / kBlocks;
  const int wanted = (kCtas * processors + rows - 1) / rows;
  const dim3 grid(most < wanted ? most : wanted, rows);
  compensate_kernel<D, T><<<grid, kStoreThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

#if defined(HS_SMOKE)
constexpr bool kSmoke = true;
#else
constexpr bool kSmoke = false;
#endif

template <int D>
cudaError_t launch_dtype(int dtype, const CompensateParams& p, int processors,
                         cudaStream_t stream) {
  if (dtype == kBFloat16) return launch<D, __nv_bfloat16>(p, processors, stream);
  if constexpr (!kSmoke)
    if (dtype == kFloat16) return launch<D, __half>(p, processors, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace hs

// K blocks as their refs say: dense, or pruned with compensation. Strides in elements.
HS_EXPORT int hs_store_compensated(int dtype, int head_dim, const void* blocks,
                                   long long block_stride, long long head_stride,
                                   long long token_stride, const float* weights,
                                   const float* factor, void* arena, const int* refs,
                                   int blocks_count, int heads, int layers, int processors,
                                   void* stream) {
  using namespace hs;
  if (blocks_count == 0) return cudaSuccess;
  const CompensateParams p = {blocks,  block_stride, head_stride,
                              token_stride, weights, factor,
                              static_cast<std::uint8_t*>(arena), refs, blocks_count / layers, heads,
                              layers};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64:
      if constexpr (!kSmoke) return launch_dtype<64>(dtype, p, processors, s);
      break;
    case 128:
      return launch_dtype<128>(dtype, p, processors, s);
    case 256:
      if constexpr (!kSmoke) return launch_dtype<256>(dtype, p, processors, s);
      break;
  }
  return cudaErrorInvalidValue;
}

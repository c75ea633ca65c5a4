// Stores blocks in the arena: pruned to 2:4 and packed, or dense, as each block's ref says. Also
// the loss of pruning, and the ranking of blocks by it.
//
// Bound: bytes. A block of D = 128 is read once (16,384 B) and written once (9,216 B). A group of
// four never leaves a thread's registers: for K it is 8 B of a row; for V a thread reads
// four rows of 16 B, which are eight groups. What is kept goes through shared memory once, from
// natural order to the order of MMA fragments, and leaves as 512-byte stores.
// Losses are summed in fp64, so that they do not depend on the order of summation.

#include <type_traits>

#include "hs/block.cuh"
#include "hs/launch.h"
#include "hs/sparse_stage.cuh"
#include "hs/two_four.cuh"

namespace hs {
namespace {

constexpr int kTokenWeightThreads = 256;

// Magnitude alone, times a weight of the channel or (V) of the token, or a given mask.
enum Rule : int { kMagnitude = 0, kWeighted = 1, kGiven = 2, kByToken = 3 };

struct StoreParams {
  const void* blocks;      // [N, H, 64, D] with element strides; D is contiguous
  std::int64_t block_stride, head_stride, token_stride;
  const std::uint8_t* keep;  // kGiven: bool [N, H, 64, D], contiguous
  const float* weights;    // kWeighted: [layers, H, D], kByToken: [N, H, 64]; of |x|
  std::uint8_t* arena;
  const int* refs;         // [N, H] times `ref_sign`: > 0 dense, < 0 sparse, 0 leaves the block out
  int ref_sign;
  void* means;             // [sparse slots, H, D]: if given, the means subtracted from V blocks
  float* losses;           // [N, H]: if given, the losses are all that is computed
  int blocks_count, heads;
  int layer_blocks;        // blocks of a layer; layers lie end to end
};

// `kLoss`: a pass that sums losses; else one that stores.
template <typename T, Rule kRule, bool kLoss>
struct Pruner {
  double loss = 0;

  // `scale` [4]: weights of the elements. `given`: their mask.
  __device__ __forceinline__ Kept prune(Group g, const float (&scale)[4], std::uint32_t given) {
    if constexpr (kRule == kMagnitude) {
      std::uint32_t dropped[2];
      const Kept kept = keep_two_largest(g, dropped);
      if constexpr (kLoss) add(to_float<T>(dropped[0])), add(to_float<T>(dropped[1]));
      return kept;
    } else if constexpr (kRule == kWeighted || kRule == kByToken) {
      std::uint32_t score[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        score[i] = __float_as_uint(to_float<T>(element(g, i) & 0x7fffu) * scale[i]);
      const Kept kept = keep_two(g, score);
      if constexpr (kLoss) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!(kept.mask >> i & 1u)) add(__uint_as_float(score[i]));
      }
      return kept;
    } else {
      if constexpr (kLoss) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!(given >> i & 1u)) add(to_float<T>(element(g, i) & 0x7fffu));
      }
      return keep_given(g, given);
    }
  }

  __device__ __forceinline__ void add(float x) { loss += static_cast<double>(x); }
};

__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <typename T>
__device__ __forceinline__ std::uint32_t subtract_pair(std::uint32_t x, std::uint32_t y) {
  const float low = to_float<T>(x & 0xffffu) - to_float<T>(y & 0xffffu);
  const float high = to_float<T>(x >> 16) - to_float<T>(y >> 16);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(r);
  } else {
    const __half2 r = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(r);
  }
}

// K: thread t takes 16 consecutive channels of a token, eight times.
template <int D, typename T, Rule kRule, bool kLoss>
__device__ void prune_keys(const StoreParams& p, Stage<D, Side::K>& stage, const T* block,
                           const std::uint8_t* keep, const float* weights, int t,
                           Pruner<T, kRule, kLoss>& pruner) {
  constexpr int kPieces = D / 16, kTasks = kBlockSize * kPieces / Stage<D, Side::K>::kThreads;
  uint4 x[kTasks][2];
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    const int task = i * Stage<D, Side::K>::kThreads + t;
    const T* row = block + task / kPieces * p.token_stride + task % kPieces * 16;
    x[i][0] = load_16(row), x[i][1] = load_16(row + 8);
  }
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    const int task = i * Stage<D, Side::K>::kThreads + t;
    const int token = task / kPieces, piece = task % kPieces;
    std::uint32_t pair[4], nibbles = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4& v = x[i][j / 2];
      const Group g = {word_of(v, j % 2 * 2), word_of(v, j % 2 * 2 + 1)};
      float scale[4] = {1.f, 1.f, 1.f, 1.f};
      if constexpr (kRule == kWeighted) {
        const float4 w = __ldg(reinterpret_cast<const float4*>(weights + piece * 16 + j * 4));
        scale[0] = w.x, scale[1] = w.y, scale[2] = w.z, scale[3] = w.w;
      }
      std::uint32_t given = 0;
      if constexpr (kRule == kGiven) {
        const std::uint32_t flags = __ldg(
            reinterpret_cast<const std::uint32_t*>(keep + token * D + piece * 16 + j * 4));
        given = (flags & 1u) | (flags >> 7 & 2u) | (flags >> 14 & 4u) | (flags >> 21 & 8u);
      }
      const Kept kept = pruner.prune(g, scale, given);
      pair[j] = kept.pair;
      nibbles |= kept.nibble << (4 * j);
    }
    if constexpr (kLoss) continue;
    *reinterpret_cast<uint4*>(&stage.pairs[stage.place(token, 4 * piece)]) =
        make_uint4(pair[0], pair[1], pair[2], pair[3]);
    stage.nibbles[token][piece] = static_cast<std::uint16_t>(nibbles);
  }
}

// V: thread t takes 16 consecutive tokens of eight channels. `kCentered`: the block's mean of each
// channel is subtracted first.
template <int D, bool kCentered, typename T, Rule kRule, bool kLoss>
__device__ void prune_values(const StoreParams& p, Stage<D, Side::V>& stage, const T* block,
                             const std::uint8_t* keep, const float* weights, T* means, int t,
                             Pruner<T, kRule, kLoss>& pruner) {
  const int chunk = t % (D / 8), quarter = t / (D / 8);
  uint4 x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i)
    x[i] = load_16(block + (16 * quarter + i) * p.token_stride + 8 * chunk);

  if constexpr (kCentered) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        sum += to_float<T>(word_of(x[i], c / 2) >> (16 * (c % 2)) & 0xffffu);
      stage.sums[quarter][8 * chunk + c] = sum;
    }
    __syncthreads();
    std::uint32_t mean[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float m[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int channel = 8 * chunk + 2 * c + h;
        m[h] = ((stage.sums[0][channel] + stage.sums[1][channel]) +
                (stage.sums[2][channel] + stage.sums[3][channel])) /
               kBlockSize;
      }
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 r = __floats2bfloat162_rn(m[0], m[1]);
        mean[c] = reinterpret_cast<const std::uint32_t&>(r);
      } else {
        const __half2 r = __floats2half2_rn(m[0], m[1]);
        mean[c] = reinterpret_cast<const std::uint32_t&>(r);
      }
    }
    if (quarter == 0 && means != nullptr)
      *reinterpret_cast<uint4*>(means + 8 * chunk) = make_uint4(mean[0], mean[1], mean[2], mean[3]);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      x[i] = make_uint4(subtract_pair<T>(x[i].x, mean[0]), subtract_pair<T>(x[i].y, mean[1]),
                        subtract_pair<T>(x[i].z, mean[2]), subtract_pair<T>(x[i].w, mean[3]));
  }

#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int channel = 8 * chunk + c;
    std::uint32_t pair[4], nibbles = 0;
    float scale[4] = {1.f, 1.f, 1.f, 1.f};
    if constexpr (kRule == kWeighted)
      scale[0] = scale[1] = scale[2] = scale[3] = __ldg(weights + channel);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t select = c % 2 ? 0x7632 : 0x5410;
      const Group g = {
          __byte_perm(word_of(x[4 * j], c / 2), word_of(x[4 * j + 1], c / 2), select),
          __byte_perm(word_of(x[4 * j + 2], c / 2), word_of(x[4 * j + 3], c / 2), select)};
      if constexpr (kRule == kByToken)
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i] = __ldg(weights + 16 * quarter + 4 * j + i);
      std::uint32_t given = 0;
      if constexpr (kRule == kGiven)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          given |= std::uint32_t{__ldg(keep + (16 * quarter + 4 * j + i) * D + channel)} << i;
      const Kept kept = pruner.prune(g, scale, given);
      pair[j] = kept.pair;
      nibbles |= kept.nibble << (4 * j);
    }
    if constexpr (kLoss) continue;
    *reinterpret_cast<uint4*>(&stage.pairs[stage.place(channel, 4 * quarter)]) =
        make_uint4(pair[0], pair[1], pair[2], pair[3]);
    stage.nibbles[channel][quarter] = static_cast<std::uint16_t>(nibbles);
  }
}

template <int D, Side S>
struct Stages {
  Stage<D, S> of_block[Stage<D, S>::kBlocks];
};

template <int D, Side S, typename T, Rule kRule, bool kLoss, bool kCentered>
__device__ __forceinline__ void store(const StoreParams& p, Stages<D, S>& stages) {
  using St = Stage<D, S>;
  St& stage = stages.of_block[threadIdx.x / St::kThreads];
  const int t = threadIdx.x % St::kThreads;
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * St::kBlocks + threadIdx.x / St::kThreads;
  const bool exists = index < static_cast<std::int64_t>(p.blocks_count) * p.heads;
  const int n = exists ? static_cast<int>(index / p.heads) : 0;
  const int head = exists ? static_cast<int>(index % p.heads) : 0;
  const int ref = exists && !kLoss ? p.ref_sign * p.refs[index] : 0;
  const T* block = static_cast<const T*>(p.blocks) + n * p.block_stride + head * p.head_stride;

  if (ref > 0) {
    uint4* to = reinterpret_cast<uint4*>(dense_block<D>(p.arena, ref, p.heads, head));
#pragma unroll 8
    for (int i = t; i < kBlockSize * D / 8; i += St::kThreads)
      to[i] = load_16(block + i / (D / 8) * p.token_stride + i % (D / 8) * 8);
  }
  // Every thread of the CTA walks through the barriers; blocks without work prune for nothing.
  if (!kLoss && !__syncthreads_or(ref < 0)) return;
  Pruner<T, kRule, kLoss> pruner;
  const std::uint8_t* keep =
      kRule == kGiven ? p.keep + (exists ? index : 0) * (kBlockSize * D) : nullptr;
  const float* weights = kRule == kWeighted
                             ? p.weights + (static_cast<std::int64_t>(n / p.layer_blocks) * p.heads + head) * D
                         : kRule == kByToken ? p.weights + (exists ? index : 0) * kBlockSize
                                             : nullptr;
  if constexpr (S == Side::K) {
    prune_keys<D>(p, stage, block, keep, weights, t, pruner);
  } else {
    T* means = ref < 0 && p.means != nullptr
                   ? static_cast<T*>(p.means) +
                         (static_cast<std::int64_t>(-ref) * p.heads + head) * D
                   : nullptr;
    prune_values<D, kCentered>(p, stage, block, keep, weights, means, t, pruner);
  }
  if constexpr (kLoss) {
    double loss = pruner.loss;
    for (int step = 16; step > 0; step /= 2) loss += __shfl_down_sync(~0u, loss, step);
    if (t % 32 == 0) stage.loss[t / 32] = loss;
    __syncthreads();
    if (!exists || t != 0) return;
    for (int w = 1; w < St::kThreads / 32; ++w) loss += stage.loss[w];
    p.losses[index] = static_cast<float>(loss);
  } else {
    __syncthreads();
    if (ref < 0) write_sparse<D, S>(stage, sparse_block<D>(p.arena, -ref, p.heads, head), t);
  }
}

// CTAs of an SM: 96 registers where they nearly do, enough that nothing spills elsewhere.
constexpr int store_ctas(Rule rule, bool centered) {
  return rule == kMagnitude && !centered ? 5 : 3;
}

template <int D, Side S, typename T, Rule kRule, bool kLoss, bool kCentered>
__global__ void __launch_bounds__(kStoreThreads, store_ctas(kRule, kCentered))
    store_kernel(const StoreParams p) {
  __shared__ Stages<D, S> stages;
  store<D, S, T, kRule, kLoss, kCentered>(p, stages);
}

// K and V of the same pages in one launch: the second half of the grid takes V.
template <int D, typename T>
__global__ void __launch_bounds__(kStoreThreads, store_ctas(kMagnitude, false))
    store_pair_kernel(const StoreParams k, const StoreParams v) {
  __shared__ union {
    Stages<D, Side::K> k;
    Stages<D, Side::V> v;
  } stages;
  if (blockIdx.y == 0) {
    store<D, Side::K, T, kMagnitude, false, false>(k, stages.k);
  } else {
    store<D, Side::V, T, kMagnitude, false, false>(v, stages.v);
  }
}

template <int D, typename T>
cudaError_t launch_pair(const StoreParams& k, const StoreParams& v, cudaStream_t stream) {
  constexpr int kBlocks = Stage<D, Side::K>::kBlocks;
  const std::int64_t count = static_cast<std::int64_t>(k.blocks_count) * k.heads;
  const dim3 grid(static_cast<unsigned>((count + kBlocks - 1) / kBlocks), 2);
  store_pair_kernel<D, T><<<grid, kStoreThreads, 0, stream>>>(k, v);
  return cudaGetLastError();
}

template <int D, Side S, typename T, Rule kRule, bool kCentered>
cudaError_t launch_store(const StoreParams& p, cudaStream_t stream) {
  constexpr int kBlocks = Stage<D, S>::kBlocks;
  const std::int64_t count = static_cast<std::int64_t>(p.blocks_count) * p.heads;
  const int grid = static_cast<int>((count + kBlocks - 1) / kBlocks);
  if (p.losses != nullptr) {
    store_kernel<D, S, T, kRule, true, kCentered><<<grid, kStoreThreads, 0, stream>>>(p);
  } else {
    store_kernel<D, S, T, kRule, false, kCentered><<<grid, kStoreThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

#if defined(HS_SMOKE)
constexpr bool kSmoke = true;
#else
constexpr bool kSmoke = false;
#endif

template <int D, Side S, typename T>
cudaError_t launch_rule(int rule, bool centered, const StoreParams& p, cudaStream_t stream) {
  if (centered) {  // a given mask comes with values that are what they should be
    if constexpr (S == Side::V && !kSmoke) {
      if (rule == kMagnitude) return launch_store<D, S, T, kMagnitude, true>(p, stream);
      if (rule == kWeighted) return launch_store<D, S, T, kWeighted, true>(p, stream);
      if (rule == kByToken) return launch_store<D, S, T, kByToken, true>(p, stream);
    }
    return cudaErrorInvalidValue;
  }
  if (rule == kMagnitude) return launch_store<D, S, T, kMagnitude, false>(p, stream);
  if constexpr (!kSmoke) {
    if (rule == kWeighted) return launch_store<D, S, T, kWeighted, false>(p, stream);
    if (rule == kGiven) return launch_store<D, S, T, kGiven, false>(p, stream);
    if constexpr (S == Side::V)
      if (rule == kByToken) return launch_store<D, S, T, kByToken, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

template <int D, typename T>
cudaError_t launch_side(int side, int rule, bool centered, const StoreParams& p,
                        cudaStream_t stream) {
  return side == static_cast<int>(Side::K) ? launch_rule<D, Side::K, T>(rule, centered, p, stream)
                                           : launch_rule<D, Side::V, T>(rule, centered, p, stream);
}

template <int D>
cudaError_t launch_block(int dtype, int side, int rule, bool centered, const StoreParams& p,
                         cudaStream_t stream) {
  if (dtype == kBFloat16)
    return launch_side<D, __nv_bfloat16>(side, rule, centered, p, stream);
  if constexpr (!kSmoke)
    if (dtype == kFloat16) return launch_side<D, __half>(side, rule, centered, p, stream);
  return cudaErrorInvalidValue;
}

template <int D>
cudaError_t launch_pair_dtype(int dtype, const StoreParams& k, const StoreParams& v,
                              cudaStream_t stream) {
  if (dtype == kBFloat16) return launch_pair<D, __nv_bfloat16>(k, v, stream);
  if constexpr (!kSmoke)
    if (dtype == kFloat16) return launch_pair<D, __half>(k, v, stream);
  return cudaErrorInvalidValue;
}

struct TokenWeightParams {
  const void* keys;  // [N, H, 64, D] with element strides; D is contiguous
  std::int64_t block_stride, head_stride, token_stride;
  const float* query;  // [layers, H, D]
  float* weights;      // [N, H, 64]
  int heads, layer_blocks;
};

// weight = exp(query key). D / 8 lanes for each row, of which the grid has a whole number.
template <int D, typename T>
__global__ void token_weights_kernel(const TokenWeightParams p) {
  constexpr int kLanes = D / 8;
  const std::int64_t row =
      (static_cast<std::int64_t>(blockIdx.x) * kTokenWeightThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes, token = static_cast<int>(row % kBlockSize);
  const std::int64_t index = row / kBlockSize;
  const int n = static_cast<int>(index / p.heads), head = static_cast<int>(index % p.heads);
  const uint4 key = load_16(static_cast<const T*>(p.keys) + n * p.block_stride +
                            head * p.head_stride + token * p.token_stride + 8 * lane);
  const float* query =
      p.query + (static_cast<std::int64_t>(n / p.layer_blocks) * p.heads + head) * D + 8 * lane;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sum += to_float<T>(word_of(key, i / 2) >> (16 * (i % 2)) & 0xffffu) * __ldg(query + i);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) p.weights[row] = expf(sum);
}

template <int D, typename T>
cudaError_t launch_token_weights(const TokenWeightParams& p, int blocks_count,
                                 cudaStream_t stream) {
  constexpr int kCtasOfBlock = kBlockSize * D / 8 / kTokenWeightThreads;
  const unsigned grid = static_cast<unsigned>(blocks_count) * p.heads * kCtasOfBlock;
  token_weights_kernel<D, T><<<grid, kTokenWeightThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <int D>
cudaError_t token_weights_dtype(int dtype, const TokenWeightParams& p, int blocks_count,
                                cudaStream_t stream) {
  if (dtype == kBFloat16) return launch_token_weights<D, __nv_bfloat16>(p, blocks_count, stream);
  if (dtype == kFloat16) return launch_token_weights<D, __half>(p, blocks_count, stream);
  return cudaErrorInvalidValue;
}

// rank[i] = number of blocks with a lower loss, or the same loss and a lower index.
__global__ void rank_kernel(const float* losses, int* ranks, int candidates) {
  extern __shared__ std::uint32_t keys[];
  const float* row = losses + static_cast<std::int64_t>(blockIdx.x) * candidates;
  for (int i = threadIdx.x; i < candidates; i += blockDim.x)
    keys[i] = __float_as_uint(row[i]) & 0x7fffffffu;  // losses are not negative; NaN comes last
  __syncthreads();
  for (int i = threadIdx.x; i < candidates; i += blockDim.x) {
    const std::uint32_t own = keys[i];
    int rank = 0;
    for (int j = 0; j < candidates; ++j) rank += keys[j] < own || (keys[j] == own && j < i);
    ranks[static_cast<std::int64_t>(blockIdx.x) * candidates + i] = rank;
  }
}

}  // namespace
}  // namespace hs

// Strides in elements. One of the rules: 0 magnitude, 1 weighted, 2 given mask, 3 by token. With
// `losses` nothing is stored. `centered`: V blocks lose their channel means first; `means` keeps
// those of sparse blocks.
HS_EXPORT int hs_store_blocks(int dtype, int head_dim, int side, int rule, const void* blocks,
                              long long block_stride, long long head_stride,
                              long long token_stride, const void* keep, const float* weights,
                              void* arena, const int* refs, int ref_sign, int centered,
                              void* means, float* losses, int blocks_count, int heads,
                              int layers, void* stream) {
  using namespace hs;
  if (blocks_count == 0) return cudaSuccess;
  const StoreParams p = {blocks,
                         block_stride,
                         head_stride,
                         token_stride,
                         static_cast<const std::uint8_t*>(keep),
                         weights,
                         static_cast<std::uint8_t*>(arena),
                         refs,
                         ref_sign,
                         means,
                         losses,
                         blocks_count,
                         heads,
                         blocks_count / layers};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64:
      if constexpr (!kSmoke) return launch_block<64>(dtype, side, rule, centered != 0, p, s);
      break;
    case 128:
      return launch_block<128>(dtype, side, rule, centered != 0, p, s);
    case 256:
      if constexpr (!kSmoke) return launch_block<256>(dtype, side, rule, centered != 0, p, s);
      break;
  }
  return cudaErrorInvalidValue;
}

// K and V [N, H, 64, D] of the same pages, with the same strides, by magnitude; refs [N, H] of each
HS_EXPORT int hs_store_pair(int dtype, int head_dim, const void* k, const void* v,
                            long long block_stride, long long head_stride, long long token_stride,
                            void* arena, const int* k_refs, const int* v_refs, int blocks_count,
                            int heads, void* stream) {
  using namespace hs;
  if (blocks_count == 0) return cudaSuccess;
  StoreParams keys = {};
  keys.blocks = k;
  keys.block_stride = block_stride, keys.head_stride = head_stride;
  keys.token_stride = token_stride;
  keys.arena = static_cast<std::uint8_t*>(arena);
  keys.refs = k_refs, keys.ref_sign = 1;
  keys.blocks_count = keys.layer_blocks = blocks_count, keys.heads = heads;
  StoreParams values = keys;
  values.blocks = v, values.refs = v_refs;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64:
      if constexpr (!kSmoke) return launch_pair_dtype<64>(dtype, keys, values, s);
      break;
    case 128:
      return launch_pair_dtype<128>(dtype, keys, values, s);
    case 256:
      if constexpr (!kSmoke) return launch_pair_dtype<256>(dtype, keys, values, s);
      break;
  }
  return cudaErrorInvalidValue;
}

// losses f32 [rows, candidates] -> ranks int32, the same shape.
HS_EXPORT int hs_rank_blocks(const float* losses, int* ranks, int rows, int candidates,
                             void* stream) {
  using namespace hs;
  if (rows == 0 || candidates == 0) return cudaSuccess;
  if (candidates > 12 * 1024) return cudaErrorInvalidValue;
  const int threads = candidates >= 1024 ? 1024 : (candidates + 31) / 32 * 32;
  const int bytes = (candidates + 3) / 4 * 16;  // whole vectors: the compiler reads no less
  rank_kernel<<<rows, threads, bytes, static_cast<cudaStream_t>(stream)>>>(losses, ranks,
                                                                           candidates);
  return cudaGetLastError();
}

// keys [N, H, 64, D], strides in elements; query f32 [layers, H, D] -> weights f32 [N, H, 64].
HS_EXPORT int hs_token_weights(int dtype, int head_dim, const void* keys, long long block_stride,
                               long long head_stride, long long token_stride, const float* query,
                               float* weights, int blocks_count, int heads, int layers,
                               void* stream) {
  using namespace hs;
  if (blocks_count == 0) return cudaSuccess;
  const TokenWeightParams p = {keys,  block_stride, head_stride, token_stride,
                               query, weights,      heads,       blocks_count / layers};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (head_dim) {
    case 64:
      return token_weights_dtype<64>(dtype, p, blocks_count, s);
    case 128:
      return token_weights_dtype<128>(dtype, p, blocks_count, s);
    case 256:
      return token_weights_dtype<256>(dtype, p, blocks_count, s);
  }
  return cudaErrorInvalidValue;
}

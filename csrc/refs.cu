// Bookkeeping kernels on the arena and its refs: lists of ref updates, moves of whole slots, and
// single tokens written to dense blocks. All bounded by launch latency or by the bytes they move.

#include "hs/block.cuh"
#include "hs/launch.h"
#include "hs/ptx.cuh"

namespace hs {
namespace {

__global__ void update_refs_kernel(int* refs, const std::int64_t* index, const int* value,
                                   std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) refs[index[i]] = value[i];
}

// A segment owns `candidates` slots; slot of rank r holds, for each head, its block of rank r. The
// first `count` are sparse.
__global__ void assign_refs_kernel(int* refs, const int* pages, const int* slots,
                                   const int* counts, const int* ranks, int* block_refs,
                                   int segments, int candidates, int heads) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= segments * candidates * heads) return;
  const int head = i % heads, candidate = i / heads % candidates, segment = i / heads / candidates;
  const int rank = ranks == nullptr
                       ? candidate
                       : ranks[(segment * heads + head) * candidates + candidate];
  const int slot = slots[segment * candidates + rank];
  const int ref = rank < counts[segment] ? -slot : slot;
  refs[static_cast<std::int64_t>(pages[segment * candidates + candidate]) * heads + head] = ref;
  if (block_refs != nullptr) block_refs[i] = ref;
}

constexpr int kMoveThreads = 256;

// One move and one layer for each y, z; chunks of a slot along x.
__global__ void copy_slots_kernel(const std::int64_t* arenas, const int* from, const int* to,
                                  std::int64_t slot_bytes) {
  std::uint8_t* arena = reinterpret_cast<std::uint8_t*>(arenas[blockIdx.z]);
  const uint4* source = reinterpret_cast<const uint4*>(arena + from[blockIdx.y] * slot_bytes);
  uint4* target = reinterpret_cast<uint4*>(arena + to[blockIdx.y] * slot_bytes);
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x;
  if (i < slot_bytes / 16) target[i] = source[i];
}

struct Rows {  // of tokens; strides in bytes
  const std::uint8_t* base;
  std::int64_t token_stride, head_stride;

  __device__ const std::uint8_t* at(int token, int head) const {
    return base + token * token_stride + head * head_stride;
  }
};

// A warp copies a row. With `order`, element c comes from element order[c] of 16 bits.
__device__ void copy_row(std::uint8_t* target, const std::uint8_t* source, const int* order,
                         int row_bytes, int lane) {
  if (order == nullptr) {
    for (int c = lane; c < row_bytes / 16; c += 32)
      reinterpret_cast<uint4*>(target)[c] = reinterpret_cast<const uint4*>(source)[c];
  } else {
    for (int c = lane; c < row_bytes / 2; c += 32)
      reinterpret_cast<std::uint16_t*>(target)[c] =
          reinterpret_cast<const std::uint16_t*>(source)[order[c]];
  }
}

// Attention may begin at once: it waits before it reads what is written here (decode.cu). This
// kernel itself is launched as any other, so what came before it is complete.
//
// A warp for each token and head: K's, V's, then Q's where there is a permutation. Tokens whose
// block is not dense (padding, page 0) are dropped.
__global__ void store_tokens_kernel(Rows k, Rows v, Rows q, std::uint8_t* q_out,
                                    std::uint8_t* arena, const int* refs, std::int64_t side_refs,
                                    const std::int64_t* locations, const int* permutation,
                                    int count, int heads, int q_heads, int row_bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  allow_next_kernel();
#endif
  int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, channels = row_bytes / 2;
  if (i >= 2 * count * heads) {
    i -= 2 * count * heads;
    if (permutation == nullptr || i >= count * q_heads) return;
    const int token = i / q_heads, head = i % q_heads;
    copy_row(q_out + static_cast<std::int64_t>(i) * row_bytes, q.at(token, head),
             permutation + head / (q_heads / heads) * channels, row_bytes, lane);
    return;
  }
  const int side = i / (count * heads), token = i / heads % count, head = i % heads;
  const std::int64_t location = locations[token];
  if (location < 0) return;
  const int ref = refs[side * side_refs + location / kBlockSize * heads + head];
  if (!is_dense(ref)) return;
  std::uint8_t* target = arena + ((static_cast<std::int64_t>(ref) * heads + head) * kBlockSize +
                                  location % kBlockSize) * row_bytes;
  const int* order = side == 0 && permutation != nullptr ? permutation + head * channels : nullptr;
  copy_row(target, (side == 0 ? k : v).at(token, head), order, row_bytes, lane);
}

}  // namespace
}  // namespace hs

// refs int32, flat; index int64 [count] into it, no index twice; value int32 [count].
HS_EXPORT int hs_update_refs(int* refs, const long long* index, const int* value, long long count,
                             void* stream) {
  using namespace hs;
  if (count == 0) return cudaSuccess;
  update_refs_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0,
                       static_cast<cudaStream_t>(stream)>>>(
      refs, reinterpret_cast<const std::int64_t*>(index), value, count);
  return cudaGetLastError();
}

// refs int32 [P, H] of one layer and side; pages, slots int32 [segments, candidates]; counts int32
// [segments]; ranks int32 [segments, H, candidates], or null for page order; block_refs int32
// [segments, candidates, H] or null: what was assigned, for hs_store_blocks.
HS_EXPORT int hs_assign_refs(int* refs, const int* pages, const int* slots, const int* counts,
                             const int* ranks, int* block_refs, int segments, int candidates,
                             int heads, void* stream) {
  using namespace hs;
  const int count = segments * candidates * heads;
  if (count == 0) return cudaSuccess;
  assign_refs_kernel<<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      refs, pages, slots, counts, ranks, block_refs, segments, candidates, heads);
  return cudaGetLastError();
}

// arenas int64 [layers]: base addresses. Moves are independent: no slot is both read and written.
HS_EXPORT int hs_copy_slots(const long long* arenas, const int* from, const int* to, int moves,
                            int layers, long long slot_bytes, void* stream) {
  using namespace hs;
  if (moves == 0 || layers == 0) return cudaSuccess;
  if (moves > 65535 || layers > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((slot_bytes / 16 + kMoveThreads - 1) / kMoveThreads), moves,
                  layers);
  copy_slots_kernel<<<grid, kMoveThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const std::int64_t*>(arenas), from, to, slot_bytes);
  return cudaGetLastError();
}

// k, v: [count, heads] rows of `row_bytes`, a multiple of 16, strides in bytes. refs int32
// [2, P, H] of one layer, `side_refs` = P * H; locations int64 [count]: page * 64 + offset.
// permutation int32 [heads, D] or null: K's channels are stored in its order, and q [count,
// q_heads] goes to q_out, contiguous, in the same.
HS_EXPORT int hs_store_tokens(const void* k, long long k_token, long long k_head, const void* v,
                              long long v_token, long long v_head, const void* q,
                              long long q_token, long long q_head, void* q_out, void* arena,
                              const int* refs, long long side_refs, const long long* locations,
                              const int* permutation, int count, int heads, int q_heads,
                              int row_bytes, void* stream) {
  using namespace hs;
  if (count == 0) return cudaSuccess;
  const int rows = 2 * heads + (permutation != nullptr ? q_heads : 0);
  const long long threads = static_cast<long long>(count) * rows * 32;
  // The same division of an SM's memory as attention's, which could not begin beside it otherwise.
  static bool ready[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!ready[device % 64]) {
    error = cudaFuncSetAttribute(store_tokens_kernel,
                                 cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    ready[device % 64] = true;
  }
  store_tokens_kernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0,
                        static_cast<cudaStream_t>(stream)>>>(
      {static_cast<const std::uint8_t*>(k), k_token, k_head},
      {static_cast<const std::uint8_t*>(v), v_token, v_head},
      {static_cast<const std::uint8_t*>(q), q_token, q_head}, static_cast<std::uint8_t*>(q_out),
      static_cast<std::uint8_t*>(arena), refs, side_refs,
      reinterpret_cast<const std::int64_t*>(locations), permutation, count, heads, q_heads,
      row_bytes);
  return cudaGetLastError();
}

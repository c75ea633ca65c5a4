// Prefill attention over pages that are dense or 2:4-sparse, for sm_90a.
//
// One work item is a tile of 128 query rows of one head; two consumer warpgroups take 64 rows each.
// Keys come in blocks of 64 tokens, two blocks a step, from the diagonal backwards: the chunk's own
// tensors, then the dense tail, then pages through refs. Two warps of a third warpgroup copy them
// into rings in shared memory, dense blocks as swizzled boxes, sparse slots as plain bytes.
//
// A sparse matrix instruction wants its sparse operand on the left and in registers, so sparse V
// makes the second product O^T = V^T P^T, with P written to shared memory as [query][token]; sparse
// K makes the first one S^T = K Q^T. Dense V keeps the usual O = P V with P in registers.
//
// The bound: for D = 128 a unit of 64 tokens x 128 rows takes 768 tensor clocks with sparse V, 984
// of shared memory bandwidth and 512 of exp2 (PREFILL_NOTES.md). The one trick: no running maximum.
// The reference of a row's exponents is its maximum over the first step; P may exceed 1 afterwards,
// and only when the sum of a step passes a limit is the reference moved and O rescaled. The result
// is the same softmax; maxima, their reductions and the rescaling leave the loop.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "hs/block_format.h"
#include "hs/launch.h"
#include "hs/prefill_pipeline.cuh"
#include "hs/wgmma.cuh"

namespace hs {
namespace {

constexpr int kRows = 128;  // query rows of an item, at absolute multiples
constexpr int kWarpgroupRows = 64;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread; 64 K in all
constexpr std::int64_t kNearBytes = 16 << 20;  // of K and V that are read at a time; L2 has 50 MB
constexpr int kChunk = 64;  // channels of one 128-byte swizzled row
constexpr int kChunkBytes = kBlockSize * 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Item {
  int request, start, offset, prefix;  // start: absolute; absolute row + offset = row of q, k, v
  int end, frontier, blocks, unused;   // end: absolute, exclusive; blocks: entries to visit
};

// Where the tiles of an item's request lie in the schedule, and how many of its query heads are
// taken at once.
struct Span {
  int first, tiles, heads, unused;
};

struct Params {
  CUtensorMap q, k, v, arena;
  const char* arena_bytes;
  void* out;
  float* lse;
  const int* refs[2];  // of one side: [P, Hkv]
  const int* page_table;
  const int* tail_first;
  const int* tail_slots;
  int page_table_stride, max_tail;
  const Item* items;
  const Span* spans;
  int* next;
  int num_items, q_heads, kv_heads;
  float scale_log2;
};

// The blocks that a tile visits, in three runs: own chunk, tail, refs; each in descending order.
struct Runs {
  int chunk, tail, refs, last_page, tail_last;
};

__host__ __device__ inline Runs runs_of(int prefix, int end, int frontier) {
  Runs r;
  r.last_page = (end - 1) / kBlockSize;
  const int first_own = prefix / kBlockSize, tail_end = (prefix + kBlockSize - 1) / kBlockSize;
  const int from = frontier > first_own ? frontier : first_own;
  r.chunk = r.last_page >= from ? r.last_page - from + 1 : 0;
  r.tail_last = (tail_end <= r.last_page + 1 ? tail_end : r.last_page + 1) - 1;
  r.tail = r.tail_last >= frontier ? r.tail_last - frontier + 1 : 0;
  r.refs = frontier <= r.last_page ? frontier : r.last_page + 1;
  return r;
}

// --- the schedule --------------------------------------------------------------------------------
//
// Few heads of one request at a time, so that the multiprocessors read the same K and V from L2:
// with all heads of all requests at once, memory traffic takes power from the products.

struct Plan {
  const int *cu_seqlens, *prefix_lens, *tile_offsets, *frontiers;
  int requests, tiles, kv_heads, group;
  std::int64_t token_bytes;  // K and V of a token and head
};

__device__ Item item_of(const Plan& plan, int tile) {
  int low = 0, high = plan.requests;  // the last request whose tiles start at or before `tile`
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (plan.tile_offsets[mid] <= tile)
      low = mid;
    else
      high = mid;
  }
  Item item;
  item.request = low;
  item.prefix = plan.prefix_lens[low];
  const int rows = plan.cu_seqlens[low + 1] - plan.cu_seqlens[low];
  item.start = kRows * (item.prefix / kRows + tile - plan.tile_offsets[low]);
  item.offset = plan.cu_seqlens[low] - item.prefix;
  item.end = min(item.start + kRows, item.prefix + rows);
  item.frontier = max(plan.frontiers[tile], 0);
  const Runs runs = runs_of(item.prefix, item.end, item.frontier);
  item.blocks = runs.chunk + runs.tail + runs.refs;
  item.unused = 0;
  return item;
}

// Requests with the longest context first, and within one the tiles with the most blocks; the short
// tiles of the last one even out the end.
__device__ std::int64_t order_of(const Plan& plan, const Item& item) {
  const int r = item.request;
  const std::int64_t context = plan.prefix_lens[r] + plan.cu_seqlens[r + 1] - plan.cu_seqlens[r];
  // Requests below 2^16, blocks of a tile below 2^20.
  return (context << 16 | (plan.requests - r)) << 20 | item.blocks;
}

__global__ void schedule_kernel(Plan plan, Item* items, Span* spans, int* next) {
  __shared__ std::int64_t orders[256];
  const int tile = blockIdx.x * 256 + threadIdx.x;
  Item own{};
  std::int64_t mine = -1;
  if (tile < plan.tiles) own = item_of(plan, tile), mine = order_of(plan, own);
  if (tile == 0) *next = 0;
  int rank = 0, before = 0;
  for (int first = 0; first < plan.tiles; first += 256) {
    __syncthreads();
    const int other = first + threadIdx.x;
    orders[threadIdx.x] = other < plan.tiles ? order_of(plan, item_of(plan, other)) : -1;
    __syncthreads();
    for (int i = 0; i < 256; i++) {
      rank += orders[i] > mine || (orders[i] == mine && first + i < tile);
      before += orders[i] >> 20 > mine >> 20;
    }
  }
  if (tile >= plan.tiles) return;
  items[rank] = own;
  const int r = own.request;
  const std::int64_t context = plan.prefix_lens[r] + plan.cu_seqlens[r + 1] - plan.cu_seqlens[r];
  int kv_heads = plan.kv_heads;  // at most so many that their K and V are near
  while (kv_heads > 1 &&
         (plan.kv_heads % kv_heads || kv_heads * context * plan.token_bytes > kNearBytes))
    kv_heads--;
  spans[rank] = {before, plan.tile_offsets[r + 1] - plan.tile_offsets[r], kv_heads * plan.group, 0};
}

// --- shared memory -------------------------------------------------------------------------------

struct StepInfo {
  int4 block[2];  // first token, first and one past the last valid token (relative), unused
};

// What the next 32 blocks of an item are, block 0 in bit 0: read once in 16 steps, because a load
// from shared memory under the products' traffic takes 100 clocks and more. Four sets in turn;
// producers run at most `kStages` steps ahead.
struct Words {
  uint32_t k_sparse, masked, v_sparse, unused;
};

template <class Element, int HeadDim, bool MixedK, bool MixedV>
struct Config {
  using T = Element;
  static constexpr int D = HeadDim;
  static constexpr bool kMixedK = MixedK, kMixedV = MixedV;
  static constexpr int kChunks = D / kChunk;
  static constexpr int kDenseBytes = BlockFormat<D, 2>::kDenseBytes;
  static constexpr int kSparseBytes = BlockFormat<D, 2>::kSparseBytes;
  static constexpr int kStages = D == 64 ? 3 : (MixedV ? 2 : 3);
  // One warpgroup's P of a step: two halves of 64 tokens, [64 queries][128 bytes], swizzled.
  static constexpr int kPBytes = 2 * kWarpgroupRows * 128;

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kRows * D * 2;
  static constexpr int kV = kK + kStages * 2 * kDenseBytes;
  static constexpr int kP = kV + kStages * 2 * kDenseBytes;
  static constexpr int kColumns = kP + (MixedV ? kConsumers * 2 * kPBytes : 0);
  static constexpr int kInfo = kColumns + kConsumers * 4 * kWarpgroupRows * 4;
  static constexpr int kWords = kInfo + kStages * int(sizeof(StepInfo));
  static constexpr int kItems = kWords + 4 * int(sizeof(Words));
  static constexpr int kBarriers = (kItems + 2 * 48 + 15) / 16 * 16;
  static constexpr int kHanded = kBarriers + 8 * (2 + 4 * kStages + 5);  // two indices of pairs
  static constexpr int kPairBarriers = kHanded + 8;
  static constexpr int kBytes = kPairBarriers + 8 * (2 * kStages + 1);
  static_assert(kBytes <= 232448, "shared memory of one CTA");
};

template <class C>
struct Barriers {
  uint32_t base;
  __device__ uint32_t q_full() const { return base; }
  __device__ uint32_t q_empty() const { return base + 8; }
  __device__ uint32_t k_full(int s) const { return base + 16 + 8 * s; }
  __device__ uint32_t k_empty(int s) const { return base + 16 + 8 * (C::kStages + s); }
  __device__ uint32_t v_full(int s) const { return base + 16 + 8 * (2 * C::kStages + s); }
  __device__ uint32_t v_empty(int s) const { return base + 16 + 8 * (3 * C::kStages + s); }
  __device__ uint32_t item_full(int s) const { return base + 16 + 8 * (4 * C::kStages + s); }
  __device__ uint32_t item_empty(int s) const { return base + 16 + 8 * (4 * C::kStages + 2 + s); }
  __device__ uint32_t begun() const { return base + 16 + 8 * (4 * C::kStages + 4); }
  // Of pairs: the other CTA's stage is free too; an index has been handed over.
  __device__ uint32_t k_ready(int s) const {
    return base + C::kPairBarriers - C::kBarriers + 8 * s;
  }
  __device__ uint32_t v_ready(int s) const { return k_ready(C::kStages + s); }
  __device__ uint32_t handed() const { return k_ready(2 * C::kStages); }
};

// --- producers -----------------------------------------------------------------------------------

// Where a block's bytes are: a token row of k or v (own chunk), a token row of the arena (dense
// block) or the number of a sparse block.
enum Kind : int { kOwn, kDense, kSparse };
struct Source {
  int kind, where;
};

__device__ Source source_of(const Params& p, const Item& item, const Runs& runs, int side,
                            int kv_head, int e) {
  if (e >= item.blocks) e = 0;  // pads the last step: any valid block, wholly masked
  if (e < runs.chunk) return {kOwn, (runs.last_page - e) * kBlockSize + item.offset};
  e -= runs.chunk;
  if (e < runs.tail) {
    const int slot = p.tail_slots[(item.request * 2 + side) * p.max_tail + runs.tail_last - e -
                                  p.tail_first[item.request]];
    return {kDense, (slot * p.kv_heads + kv_head) * kBlockSize};
  }
  e -= runs.tail;
  const int id = p.page_table[size_t(item.request) * p.page_table_stride + runs.refs - 1 - e];
  const int ref = p.refs[side][size_t(id) * p.kv_heads + kv_head];
  const int block = slot_of(ref) * p.kv_heads + kv_head;
  return is_dense(ref) ? Source{kDense, block * kBlockSize} : Source{kSparse, block};
}

// First token of a block, and which of its tokens count: [lo, hi).
__device__ int4 extent_of(const Item& item, const Runs& runs, int e) {
  if (e >= item.blocks) return make_int4(0, 0, 0, 0);
  if (e < runs.chunk) {
    const int first = (runs.last_page - e) * kBlockSize;
    return make_int4(first, max(0, item.prefix - first), kBlockSize, 0);
  }
  e -= runs.chunk;
  if (e < runs.tail) {
    const int first = (runs.tail_last - e) * kBlockSize;
    return make_int4(first, 0, min(kBlockSize, item.prefix - first), 0);
  }
  return make_int4((runs.refs - 1 - e + runs.tail) * kBlockSize, 0, kBlockSize, 0);
}

// Q of an item, once consumers no longer need that of the one before.
template <class C>
__device__ __forceinline__ void produce_q(const Params& p, const char* smem, uint32_t slot,
                                          uint32_t base, const Barriers<C>& bar) {
  barrier_wait(bar.q_empty(), slot ^ 1);  // items alternate between two slots
  if (threadIdx.x % 32 == 0) {
    const Item& item = *reinterpret_cast<const Item*>(smem + C::kItems + slot * 48);
    const int head = *reinterpret_cast<const int*>(&item + 1);
    barrier_arrive_expecting(bar.q_full(), kRows * C::D * 2);
#pragma unroll
    for (int c = 0; c < C::kChunks; c++)
      copy_box<false>(base + C::kQ + c * kRows * 128, &p.q, bar.q_full(), c * kChunk, head,
                      item.start + item.offset);
  }
  __syncwarp();
}

template <class C, int Side, bool Pair>
__device__ __forceinline__ void produce_item(const Params& p, uint32_t slot, char* smem,
                                             uint32_t base, const Barriers<C>& bar,
                                             Ring<C::kStages>& ring, uint32_t& begun_parity,
                                             uint32_t& chunk) {
  const Item& item = *reinterpret_cast<const Item*>(smem + C::kItems + slot * 48);
  const int kv_head = *reinterpret_cast<const int*>(&item + 1) / (p.q_heads / p.kv_heads);
  constexpr bool kMixed = Side == 0 ? C::kMixedK : C::kMixedV;
  constexpr bool kChunkMajor = Side == 0 && !C::kMixedK;  // K as one operand of 128 rows
  const int lane = threadIdx.x % 32;
  const Runs runs = runs_of(item.prefix, item.end, item.frontier);
  // The page that `prefix` lies in may be begun: past it, its slot holds anything, and a weight of
  // 0 does not make NaN harmless. Its rows of V are zeroed before the consumers see the stage.
  const int valid = item.prefix % kBlockSize;
  const int begun =
      Side == 1 && valid && runs.tail > 0 && runs.tail_last == item.prefix / kBlockSize ? runs.chunk
                                                                                        : -1;
  Source ahead = source_of(p, item, runs, Side, kv_head, lane);
  for (int first = 0; first < item.blocks; first += 32) {
    const Source mine = ahead;
    if (first + 32 < item.blocks)
      ahead = source_of(p, item, runs, Side, kv_head, first + 32 + lane);
    const int count = min(32, item.blocks - first);
    uint32_t masked_bits = 0;
    const uint32_t sparse_bits = __ballot_sync(~0u, mine.kind == kSparse);
    if constexpr (Side == 0) {
      const int4 extent = extent_of(item, runs, first + lane);
      masked_bits = __ballot_sync(~0u, extent.x + kBlockSize > item.start + 1 || extent.y > 0 ||
                                           extent.z < kBlockSize);
    }
#pragma unroll 1
    for (int e = 0; e < count; e += 2) {
      const int st = ring.slot;
      // The blocks that this CTA copies: of a pair one each, to both.
      constexpr int kBlocks = Pair ? 1 : 2;
      const uint32_t first_block = Pair ? cluster_rank() : 0;
      Source source[kBlocks];
#pragma unroll
      for (int h = 0; h < kBlocks; h++) {
        source[h].kind = __shfl_sync(~0u, mine.kind, e + first_block + h);
        source[h].where = __shfl_sync(~0u, mine.where, e + first_block + h);
        if (!kMixed && source[h].kind == kSparse)
          __trap();  // the caller said that this side is dense
      }
      barrier_wait(Side == 0 ? bar.k_empty(st) : bar.v_empty(st), ring.parity ^ 1);
      const bool patch = Side == 1 && begun >= 0 && begun / 2 == (first + e) / 2;
      if (lane == 0) {
        const uint32_t full = Side == 0 ? bar.k_full(st) : patch ? bar.begun() : bar.v_full(st);
        const uint32_t stage = base + (Side == 0 ? C::kK : C::kV) + st * 2 * C::kDenseBytes;
        uint32_t bytes = 0;
        auto* words = reinterpret_cast<Words*>(smem + C::kWords) + chunk % 4;
        if (Side == 1 && e == 0) words->v_sparse = sparse_bits;
        if (Side == 0 && e == 0) words->k_sparse = sparse_bits, words->masked = masked_bits;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          bytes += kMixed && (sparse_bits >> (e + h) & 1) ? C::kSparseBytes : C::kDenseBytes;
          if constexpr (Side == 0) {
            auto* info = reinterpret_cast<StepInfo*>(smem + C::kInfo) + st;
            info->block[h] = extent_of(item, runs, first + e + h);
          }
        }
        barrier_arrive_expecting(full, bytes);
        if constexpr (Pair) {
          // Says to the other CTA that this stage is free, and waits until its is. This orders
          // nothing across the cluster: should bytes come before they are expected, the phase
          // still lacks the arrival above.
          const uint32_t ready = Side == 0 ? bar.k_ready(st) : bar.v_ready(st);
          remote_arrive(address_in(cluster_rank() ^ 1, ready));
          barrier_wait(ready, ring.parity);
        }
#pragma unroll
        for (int h = 0; h < kBlocks; h++) {
          const int place = first_block + h;
          if (kMixed && source[h].kind == kSparse) {
            copy_bytes<Pair>(stage + place * C::kDenseBytes,
                             p.arena_bytes + size_t(source[h].where) * C::kSparseBytes,
                             C::kSparseBytes, full);
          } else {
#pragma unroll
            for (int c = 0; c < C::kChunks; c++) {
              const uint32_t to =
                  stage + (kChunkMajor ? c * 2 * kChunkBytes + place * kChunkBytes
                                       : place * C::kDenseBytes + c * kChunkBytes);
              if (source[h].kind == kOwn)
                copy_box<Pair>(to, Side == 0 ? &p.k : &p.v, full, c * kChunk, kv_head,
                               source[h].where);
              else
                copy_box<Pair>(to, &p.arena, full, c * kChunk, source[h].where);
            }
          }
        }
      }
      __syncwarp();
      if (patch) {
        barrier_wait(bar.begun(), begun_parity);
        begun_parity ^= 1;
        char* block = smem + C::kV + (2 * st + begun % 2) * C::kDenseBytes;
        for (int i = lane; i < (kBlockSize - valid) * 8; i += 32) {
#pragma unroll
          for (int c = 0; c < C::kChunks; c++)
            *reinterpret_cast<uint4*>(block + c * kChunkBytes + valid * 128 + i * 16) =
                make_uint4(0, 0, 0, 0);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.v_full(st));
      }
      ring.next();
    }
    chunk++;
  }
}

template <class C, bool Pair>
__device__ void produce(const Params& p, char* smem, uint32_t base, const Barriers<C>& bar) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > 1) return;
  Ring<C::kStages> ring;
  Ring<2> slots;
  uint32_t begun_parity = 0, chunk = 0;
  for (;;) {
    int* slot = reinterpret_cast<int*>(smem + C::kItems + slots.slot * 48);
    int index;
    if (warp == 0) {
      if (lane == 0) {
        if constexpr (Pair) {
          // Two heads at a time. CTA 0 hands the index on: a word in turn is free, since this warp
          // has seen the other CTA's one wait for stages of the item that came after its last use.
          const uint32_t word = base + C::kHanded + 4 * slots.slot;
          if (cluster_rank() == 0) {
            index = 2 * atomicAdd(p.next, 1);
            if (index >= p.num_items) index = -1;
            remote_store(address_in(1, word), index, address_in(1, bar.handed()));
          } else {
            barrier_arrive_expecting(bar.handed(), 4);
            barrier_wait(bar.handed(), slots.slot);  // an item is a phase
            index = *reinterpret_cast<const volatile int*>(smem + C::kHanded + 4 * slots.slot);
            if (index >= 0) index++;
          }
        } else {
          index = atomicAdd(p.next, 1);
          if (index >= p.num_items) index = -1;
        }
      }
      index = __shfl_sync(~0u, index, 0);
      barrier_wait(bar.item_empty(slots.slot), slots.parity ^ 1);
      if (lane == 0) {
        int head = -1;
        if (index >= 0) {
          const Span span = p.spans[index / p.q_heads];
          const int place = index - span.first * p.q_heads, of_heads = span.tiles * span.heads;
          const int4* from = reinterpret_cast<const int4*>(p.items + span.first +
                                                           place % of_heads / span.heads);
          reinterpret_cast<int4*>(slot)[0] = from[0];
          reinterpret_cast<int4*>(slot)[1] = from[1];
          head = place / of_heads * span.heads + place % span.heads;
        }
        slot[8] = head;
        barrier_arrive(bar.item_full(slots.slot));
      }
    }
    barrier_wait(bar.item_full(slots.slot), slots.parity);
    if (slot[8] < 0) return;
    if (warp == 0) {
      produce_q<C>(p, smem, slots.slot, base, bar);
      produce_item<C, 0, Pair>(p, slots.slot, smem, base, bar, ring, begun_parity, chunk);
    } else {
      produce_item<C, 1, Pair>(p, slots.slot, smem, base, bar, ring, begun_parity, chunk);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bar.item_empty(slots.slot));
    slots.next();
  }
}

// --- consumers -----------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_unit(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <bool Transpose>
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  if constexpr (Transpose)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void warpgroup_barrier(int id) {
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(id) : "memory");
}
__device__ __forceinline__ bool warpgroup_any(int id, bool claim) {
  int any;
  asm volatile(
      "{.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\nselp.s32 "
      "%0, 1, 0, q;}"
      : "=r"(any)
      : "r"(int(claim)), "r"(id)
      : "memory");
  return any;
}
// With dense K and V the two warpgroups take turns in issuing products, so that one's exponentials
// meet the other's. Where P goes through shared memory, that gains nothing.
__device__ __forceinline__ void turn_begin(int warpgroup) {
  asm volatile("barrier.cta.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
}
__device__ __forceinline__ void turn_end(int warpgroup) {
  asm volatile("barrier.cta.arrive %0, 256;" ::"r"(3 + (warpgroup ^ 1)) : "memory");
}

// A step whose exponentials sum to more than this in one thread moves the reference. For f16 it
// keeps P below the largest half; bf16 has the range of fp32, of which O keeps a wide margin.
template <class T>
constexpr float kSumLimit = std::is_same_v<T, __half> ? 32768.f : 1.1e12f;

// The same in every lane, and known to be. Addresses, descriptors and loop counters that derive
// from it live in uniform registers; without it, ptxas takes whatever was read from shared memory,
// and all code behind a branch on it, to differ from lane to lane.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ bool uniform(bool x) { return __any_sync(~0u, x); }

// Where a consumer thread stands. Read anew in rare paths (volatile), lest the compiler keeps what
// they derive from it in registers all through the main loop.
struct Place {
  int warpgroup, warp, lane, g, q;
};
__device__ __forceinline__ Place place_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread -= 128;
  const int lane = thread % 32;
  return {uniform(thread / 128), thread / 32 % 4, lane, lane / 4, lane % 4};
}

// What sparse instructions read from registers of one block: nonzeros and metadata. Those of all
// products that go out together are loaded before the first of them: afterwards they would wait for
// its traffic.
template <class C>
struct SparseBlock {
  static constexpr int kFragments = 2 * C::kChunks;  // of K: steps along D; of V: strips x steps
  uint4 a[kFragments];
  uint32_t metadata[C::kChunks];

  template <Side S>
  __device__ __forceinline__ void load(const char* block, const Place& at) {
    const int lin = at.warp * C::kChunks;
    const char* words = block + lin / 4 * 512 + at.lane * 16 + lin % 4 * 4;
    if constexpr (C::kChunks == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(words);
      metadata[0] = x.x, metadata[1] = x.y;
    } else {
      metadata[0] = *reinterpret_cast<const uint32_t*>(words);
    }
    const uint4* fragment =
        reinterpret_cast<const uint4*>(block + BlockFormat<C::D, 2>::kMetadataBytes) + at.lane;
#pragma unroll
    for (int i = 0; i < kFragments; i++) {
      const int index =
          S == Side::K ? at.warp * kFragments + i : (4 * (i / 2) + at.warp) * 2 + i % 2;
      a[i] = fragment[index * 32];
    }
  }
};

template <int N>
__device__ __forceinline__ void pin_all(float (&d)[N][32]) {
#pragma unroll
  for (int i = 0; i < N; i++) pin(d[i]);
}

// ptxas serialises products that are in flight where branches meet, so which blocks are sparse is
// settled once a step, outside.

// Issues O^T += V^T P^T of one block of 64 tokens: V in registers or at `v_at`, P at `p_at`.
template <class C, bool Sparse>
__device__ __forceinline__ void multiply_v(float (&o)[C::kChunks][32], const SparseBlock<C>& v,
                                           uint32_t v_at, uint32_t p_at) {
  using T = typename C::T;
  const uint64_t p_desc = swizzled(p_at);
  wgmma_fence();
  if constexpr (Sparse) {
#pragma unroll
    for (int c = 0; c < C::kChunks; c++) {
      wgmma_sp<T, 0, true>(o[c], v.a[2 * c], p_desc, v.metadata[c]);
      wgmma_sp<T, 1, true>(o[c], v.a[2 * c + 1], p_desc + 4, v.metadata[c]);
    }
  } else {
    const uint64_t v_desc = swizzled(v_at, 1024, 1024);
#pragma unroll
    for (int c = 0; c < C::kChunks; c++)
#pragma unroll
      for (int s = 0; s < 4; s++)
        wgmma_ss<T, 1, 0, true>(o[c], v_desc + (c * kChunkBytes + s * 2048) / 16, p_desc + s * 2);
  }
  wgmma_commit();
}

// Issues S^T = K Q^T of one block of 64 tokens.
template <class C, bool Sparse>
__device__ __forceinline__ void multiply_k(float (&s)[32], const SparseBlock<C>& k, uint32_t k_at,
                                           uint64_t q_desc) {
  using T = typename C::T;
  wgmma_fence();
  if constexpr (Sparse) {
#pragma unroll
    for (int c = 0; c < C::kChunks; c++) {
      const uint64_t b = q_desc + c * (kRows * 128 / 16);
      if (c == 0)
        wgmma_sp<T, 0, false>(s, k.a[0], b, k.metadata[0]);
      else
        wgmma_sp<T, 0, true>(s, k.a[2 * c], b, k.metadata[c]);
      wgmma_sp<T, 1, true>(s, k.a[2 * c + 1], b + 4, k.metadata[c]);
    }
  } else {
    const uint64_t k_desc = swizzled(k_at);
#pragma unroll
    for (int i = 0; i < C::D / 16; i++) {
      const uint64_t a = k_desc + (i / 4 * kChunkBytes + i % 4 * 32) / 16;
      const uint64_t b = q_desc + (i / 4 * kRows * 128 + i % 4 * 32) / 16;
      if (i == 0)
        wgmma_ss<T, 0, 0, false>(s, a, b);
      else
        wgmma_ss<T, 0, 0, true>(s, a, b);
    }
  }
  wgmma_commit();
}

// Writes this warpgroup's output rows from the swizzled staging area [chunk][64 rows][128 bytes].
template <class C>
__device__ __forceinline__ void write_rows(const Params& p, const Item& item, int head,
                                           const char* staged, int chunk_stride) {
  constexpr int kVectors = C::D / 8;  // 16-byte pieces of a row
  const Place at = place_now();
  const int thread = at.warp * 32 + at.lane;
  const int first = item.start + at.warpgroup * kWarpgroupRows;
#pragma unroll
  for (int i = 0; i < kWarpgroupRows * kVectors / 128; i++) {
    const int index = i * 128 + thread, row = index / kVectors, piece = index % kVectors;
    const uint4 x = *reinterpret_cast<const uint4*>(staged + piece / 8 * chunk_stride + row * 128 +
                                                    ((piece % 8 ^ row % 8) << 4));
    if (first + row >= item.prefix && first + row < item.end) {
      const size_t to = (size_t(first + row + item.offset) * p.q_heads + head) * C::D + piece * 8;
      *reinterpret_cast<uint4*>(static_cast<typename C::T*>(p.out) + to) = x;
    }
  }
}

// Writes output rows from accumulators of O = P V, straight to global memory: lanes of four that
// share a row exchange pieces, so that each stores 16 bytes and the four of them 64.
template <class C>
__device__ __forceinline__ void write_fragments(const Params& p, const Item& item, int head,
                                                const float (&o)[C::D / 2],
                                                const float (&inverse)[2]) {
  using T = typename C::T;
  const Place at = place_now();
  const bool odd = at.q & 1, high = at.q & 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = item.start + at.warpgroup * kWarpgroupRows + at.warp * 16 + at.g + 8 * h;
    const bool valid = row >= item.prefix && row < item.end;
    T* to = static_cast<T*>(p.out) +
            (size_t(row + item.offset) * p.q_heads + head) * C::D + at.q * 8;
#pragma unroll
    for (int j = 0; j < C::D / 32; j++) {
      uint32_t x[4];  // of four pieces of 8 columns, this lane's two columns
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float* d = o + 16 * j + 4 * c + 2 * h;
        x[c] = pack<T>(d[0] * inverse[h], d[1] * inverse[h]);
      }
      // A transpose of 4 x 4 words: of 2 x 2 between neighbours, then between pairs.
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, odd ? x[c] : x[c + 1], 1);
        (odd ? x[c] : x[c + 1]) = got;
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const uint32_t got = __shfl_xor_sync(~0u, high ? x[c] : x[c + 2], 2);
        (high ? x[c] : x[c + 2]) = got;
      }
      if (valid) *reinterpret_cast<uint4*>(to + 32 * j) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

__device__ __forceinline__ void write_lse(const Params& p, const Item& item, int head, int row,
                                          float reference, float sum) {
  if (row >= item.prefix && row < item.end)
    p.lse[size_t(row + item.offset) * p.q_heads + head] = (reference + log2f(sum)) * kLn2;
}

__device__ __forceinline__ float safe(float reference) {
  return reference == -INFINITY ? 0.f : reference;
}

// S = Q K^T, rows are queries. A thread has rows g and g + 8 of its warp's 16, of scores and of Q,
// which stays in registers: what the first product reads from shared memory halves.
template <class C>
struct RowScores {
  using T = typename C::T;
  float s[64];
  float m[2], l[2];  // reference of the exponents (base 2) and this thread's share of the sum
  uint4 qf[C::D / 16];

  __device__ __forceinline__ void begin(const char* smem, uint32_t base, const Place& at) {
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0.f;
    const int row = at.warpgroup * kWarpgroupRows + at.warp * 16 + at.lane % 16;
#pragma unroll
    for (int k = 0; k < C::D / 16; k++) {
      const uint32_t from = base + C::kQ + k / 4 * kRows * 128 + row * 128 +
                            ((k % 4 * 2 + at.lane / 16 ^ row % 8) << 4);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(qf[k].x), "=r"(qf[k].y), "=r"(qf[k].z), "=r"(qf[k].w)
                   : "r"(from));
    }
  }
  __device__ __forceinline__ void multiply_k(uint32_t k_at) {
    const uint64_t k_desc = swizzled(k_at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::D / 16; k++) {
      const int step = (k / 4 * 2 * kChunkBytes + k % 4 * 32) / 16;
      if (k == 0)
        wgmma_rs<T, 0, false>(s, qf[k], k_desc + step);
      else
        wgmma_rs<T, 0, true>(s, qf[k], k_desc + step);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void mask(const StepInfo& info, int first_row) {
    const Place at = place_now();
    const int row = first_row + at.warp * 16 + at.g;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int4 block = info.block[h];
      const int lo = block.y, hi0 = min(block.z, row + 1 - block.x),
                hi1 = min(block.z, row + 9 - block.x);
#pragma unroll
      for (int c = 0; c < 32; c++) {
        const int column = c / 4 * 8 + at.q * 2 + c % 2;
        if (column < lo || column >= (c & 2 ? hi1 : hi0)) s[32 * h + c] = -INFINITY;
      }
    }
  }
  // The maximum of each row over this step joins the reference; gives the factors for l and O.
  __device__ __forceinline__ void move_reference(float scale, float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -INFINITY;
#pragma unroll
      for (int c = 0; c < 16; c++) top = fmaxf(top, fmaxf(s[4 * c + 2 * h], s[4 * c + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float moved = safe(fmaxf(m[h], top * scale));
      factor[h] = exp2_unit(m[h] - moved);
      m[h] = moved;
      l[h] *= factor[h];
    }
  }
  // Exponentials of 16 columns, packed: rows g and g + 8 of columns 16 c.. and 16 c + 8...
  __device__ __forceinline__ uint4 exponentials(int c, float scale, float (&sum)[4]) const {
    float e[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      e[j] = exp2_unit(fmaf(s[8 * c + j], scale, -m[j / 2 % 2]));
      sum[j % 4] = c == 0 && j < 4 ? e[j] : sum[j % 4] + e[j];
    }
    return make_uint4(pack<T>(e[0], e[1]), pack<T>(e[2], e[3]), pack<T>(e[4], e[5]),
                      pack<T>(e[6], e[7]));
  }
};

// The bits of `Words` for the step under way, kept in registers for 16 steps.
struct Flags {
  uint32_t k_sparse = 0, masked = 0, v_sparse = 0, chunk = 0;  // chunk: of the item's first block

  __device__ __forceinline__ void read_k(const Words* words, int step) {
    if (step % 16) return;
    const Words& now = words[(chunk + step / 16) % 4];
    k_sparse = uniform(int(now.k_sparse));
    masked = uniform(int(now.masked));
  }
  __device__ __forceinline__ void read_v(const Words* words, int step) {
    if (step % 16) return;
    v_sparse = uniform(int(words[(chunk + step / 16) % 4].v_sparse));
  }
  __device__ __forceinline__ static uint32_t of_step(uint32_t bits, int step) {
    return bits >> step % 16 * 2 & 3;
  }
  __device__ __forceinline__ void next_item(int steps) { chunk += (steps + 15) / 16; }
};

// Sparse V, dense K: P through shared memory, O^T in registers.
template <class C>
__device__ void consume_rows(const Params& p, char* smem, uint32_t base, const Barriers<C>& bar,
                             const Place& at) {
  using T = typename C::T;
  constexpr int kStageBytes = 2 * C::kDenseBytes;
  const int wg = at.warpgroup;
  const float scale = p.scale_log2;
  float* columns = reinterpret_cast<float*>(smem + C::kColumns) + wg * 4 * kWarpgroupRows;
  const auto* infos = reinterpret_cast<const StepInfo*>(smem + C::kInfo);
  const auto* words = reinterpret_cast<const Words*>(smem + C::kWords);
  const uint32_t p_base = base + C::kP + wg * 2 * C::kPBytes;
  Ring<C::kStages> kr;
  uint32_t items = 0;
  Flags flags;
  uint32_t p_row;  // where this lane's rows of matrices of P go; column group i is at p_row ^ 32 i
  {
    const int row = at.warp * 16 + at.lane % 16;
    p_row = p_base + row * 128 + ((at.lane / 16 ^ row % 8) << 4);
  }
  for (;;) {
    barrier_wait(bar.item_full(items & 1), items >> 1 & 1);
    const Item& item = *reinterpret_cast<const Item*>(smem + C::kItems + (items & 1) * 48);
    const int& head =
        *reinterpret_cast<const int*>(smem + C::kItems + (items & 1) * 48 + sizeof(Item));
    if (uniform(head) < 0) return;
    const int steps = uniform((item.blocks + 1) / 2);
    const int first_row = item.start + wg * kWarpgroupRows;

    RowScores<C> x;
    float o[C::kChunks][32];
#pragma unroll
    for (int c = 0; c < C::kChunks; c++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[c][i] = 0.f;
    barrier_wait(bar.q_full(), items & 1);
    x.begin(smem, base, at);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.q_empty());

    // Exponentials of block h of a step to P, their sums to `sum`.
    auto store_half = [&](int h, uint32_t p_offset, float (&sum)[4]) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint4 e = x.exponentials(4 * h + c, scale, sum);
        store_matrices<false>((p_row + p_offset ^ c * 32) + h * (kWarpgroupRows * 128), e.x, e.y,
                              e.z, e.w);
      }
    };
    // Blocks of V of the step before this one.
    auto v_offset = [&](int h) { return C::kV + kr.before() * kStageBytes + h * C::kDenseBytes; };
    auto load_v = [&](auto sparse, int h) {
      SparseBlock<C> v;
      if constexpr (decltype(sparse)::value) v.template load<Side::V>(smem + v_offset(h), at);
      return v;
    };
    // O^T += V^T P^T of block h.
    auto multiply_half = [&](auto sparse, const SparseBlock<C>& v, int h, uint32_t p_offset) {
      multiply_v<C, decltype(sparse)::value>(o, v, base + v_offset(h),
                                             p_base + p_offset + h * (kWarpgroupRows * 128));
    };
    auto finish_half = [&](uint32_t sparse_bits, int h, uint32_t p_offset) {
      if (sparse_bits >> h & 1) {
        multiply_half(std::true_type{}, load_v(std::true_type{}, h), h, p_offset);
        wgmma_wait<0>();
        pin_all(o);
      } else {
        multiply_half(std::false_type{}, load_v(std::false_type{}, h), h, p_offset);
        wgmma_wait<0>();
        pin_all(o);
      }
    };
    // All products in flight must have ended: O is scaled at once.
    auto restart_step = [&](uint32_t p_offset) {
      float factor[2];
      x.move_reference(scale, factor);
      if (at.q == 0) {
        columns[at.warp * 16 + at.g] = factor[0];
        columns[at.warp * 16 + at.g + 8] = factor[1];
      }
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      store_half(0, p_offset, sum);
      store_half(1, p_offset, sum);
      fence_async_proxy();
      x.l[0] += sum[0] + sum[1], x.l[1] += sum[2] + sum[3];
      warpgroup_barrier(1 + wg);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 f = *reinterpret_cast<const float2*>(columns + 8 * i + 2 * at.q);
#pragma unroll
        for (int c = 0; c < C::kChunks; c++) {
          o[c][4 * i] *= f.x, o[c][4 * i + 1] *= f.y;
          o[c][4 * i + 2] *= f.x, o[c][4 * i + 3] *= f.y;
        }
      }
    };

    // First step: its maxima are the reference.
    barrier_wait(bar.k_full(kr.slot), kr.parity);
    flags.read_k(words, 0);
    x.multiply_k(base + C::kK + kr.slot * kStageBytes);
    wgmma_wait<0>();
    pin(x.s);
    if (flags.masked & 3) x.mask(infos[kr.slot], first_row);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.k_empty(kr.slot));
    kr.next();
    restart_step(0);

    auto step = [&](auto sparse_0, auto sparse_1, int i, uint32_t p_offset) {
      const SparseBlock<C> v_0 = load_v(sparse_0, 0);
      barrier_wait(bar.k_full(kr.slot), kr.parity);
      flags.read_k(words, i);
      x.multiply_k(base + C::kK + kr.slot * kStageBytes);
      multiply_half(sparse_0, v_0, 0, C::kPBytes - p_offset);
      wgmma_wait<1>();
      pin(x.s);
      if (Flags::of_step(flags.masked, i)) x.mask(infos[kr.slot], first_row);
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      store_half(0, p_offset, sum);
      wgmma_wait<0>();
      pin_all(o);
      multiply_half(sparse_1, load_v(sparse_1, 1), 1, C::kPBytes - p_offset);
      store_half(1, p_offset, sum);
      fence_async_proxy();
      sum[0] += sum[1], sum[2] += sum[3];
      const bool moved = warpgroup_any(1 + wg, !(fmaxf(sum[0], sum[2]) < kSumLimit<T>));
      wgmma_wait<0>();
      pin_all(o);
      if (!moved) x.l[0] += sum[0], x.l[1] += sum[2];
      return moved;
    };
    for (int i = 1; i < steps; i++) {
      const uint32_t p_offset = (i & 1) * C::kPBytes;
      barrier_wait(bar.v_full(kr.before()), kr.parity_before());
      flags.read_v(words, i - 1);
      const uint32_t sparse_bits = Flags::of_step(flags.v_sparse, i - 1);
      bool moved;
      const std::true_type yes;
      const std::false_type no;
      if (sparse_bits == 3)
        moved = step(yes, yes, i, p_offset);
      else if (sparse_bits == 0)
        moved = step(no, no, i, p_offset);
      else if (sparse_bits == 1)
        moved = step(yes, no, i, p_offset);
      else
        moved = step(no, yes, i, p_offset);
      if (uniform(moved)) {  // rare: the scores are gone, so they are computed again
        x.multiply_k(base + C::kK + kr.slot * kStageBytes);
        wgmma_wait<0>();
        pin(x.s);
        if (Flags::of_step(flags.masked, i)) x.mask(infos[kr.slot], first_row);
        restart_step(p_offset);
      }
      __syncwarp();
      if (at.lane == 0) {
        barrier_arrive(bar.v_empty(kr.before()));
        barrier_arrive(bar.k_empty(kr.slot));
      }
      kr.next();
    }
    barrier_wait(bar.v_full(kr.before()), kr.parity_before());
    flags.read_v(words, steps - 1);
    {
      const uint32_t p_offset = (steps - 1 & 1) * C::kPBytes;
      const uint32_t sparse_bits = Flags::of_step(flags.v_sparse, steps - 1);
      finish_half(sparse_bits, 0, p_offset);
      finish_half(sparse_bits, 1, p_offset);
    }
    flags.next_item(steps);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = x.l[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = at.warp * 16 + at.g + 8 * h;
      if (at.q == 0) {
        columns[row] = 1.f / sum;
        write_lse(p, item, head, first_row + row, x.m[h], sum);
      }
    }
    wgmma_wait<0>();
    pin_all(o);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.v_empty(kr.before()));
    warpgroup_barrier(1 + wg);
    // Staged in the second P buffer: the next item writes it only after a further barrier.
    {
      const Place at = place_now();
      const uint32_t row = at.lane % 8 + at.lane / 16 * 8;
      const uint32_t to =
          p_base + C::kPBytes + row * 128 + ((2 * at.warp + at.lane / 8 % 2 ^ row % 8) << 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 f = *reinterpret_cast<const float2*>(columns + 16 * i + 2 * at.q);
        const float2 h = *reinterpret_cast<const float2*>(columns + 16 * i + 8 + 2 * at.q);
#pragma unroll
        for (int c = 0; c < C::kChunks; c++) {
          const float* d = o[c] + 8 * i;
          store_matrices<true>(to + c * kWarpgroupRows * 128 + i * 16 * 128,
                               pack<T>(d[0] * f.x, d[1] * f.y), pack<T>(d[2] * f.x, d[3] * f.y),
                               pack<T>(d[4] * h.x, d[5] * h.y), pack<T>(d[6] * h.x, d[7] * h.y));
        }
      }
    }
    warpgroup_barrier(1 + wg);
    write_rows<C>(p, item, head, smem + C::kP + (2 * wg + 1) * C::kPBytes, kWarpgroupRows * 128);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.item_empty(items & 1));
    items++;
  }
}

// Sparse K: S^T = K Q^T. A thread has tokens g and g + 8 of its warp's 16 in either block and the
// queries 8 c + 2 q, + 1, which are also its columns of O^T.
template <class C>
__device__ void consume_columns(const Params& p, char* smem, uint32_t base, const Barriers<C>& bar,
                                const Place& at) {
  using T = typename C::T;
  constexpr int kStageBytes = 2 * C::kDenseBytes;
  const int wg = at.warpgroup;
  const float scale = p.scale_log2;
  float* columns = reinterpret_cast<float*>(smem + C::kColumns) + wg * 4 * kWarpgroupRows;
  const auto* infos = reinterpret_cast<const StepInfo*>(smem + C::kInfo);
  const auto* words = reinterpret_cast<const Words*>(smem + C::kWords);
  const uint32_t p_base = base + C::kP + wg * 2 * C::kPBytes;
  const uint64_t q_desc = swizzled(base + C::kQ + wg * kWarpgroupRows * 128);
  Ring<C::kStages> kr;
  uint32_t items = 0;
  Flags flags;
  // Where transposed matrices of P go: rows are queries, this warp's two 8-token pieces.
  const uint32_t p_row = at.lane % 8 + at.lane / 16 * 8;
  const uint32_t p_to = p_base + p_row * 128 + ((2 * at.warp + at.lane / 8 % 2 ^ p_row % 8) << 4);
  for (;;) {
    barrier_wait(bar.item_full(items & 1), items >> 1 & 1);
    const Item& item = *reinterpret_cast<const Item*>(smem + C::kItems + (items & 1) * 48);
    const int& head =
        *reinterpret_cast<const int*>(smem + C::kItems + (items & 1) * 48 + sizeof(Item));
    if (uniform(head) < 0) return;
    const int steps = uniform((item.blocks + 1) / 2);
    const int first_row = item.start + wg * kWarpgroupRows;

    float s[2][32], o[C::kChunks][32], m[16], l[16];
#pragma unroll
    for (int c = 0; c < C::kChunks; c++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[c][i] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = -INFINITY, l[i] = 0.f;
    barrier_wait(bar.q_full(), items & 1);

    // Blocks of K of this step, and their scores.
    auto k_offset = [&](int h) { return C::kK + kr.slot * kStageBytes + h * C::kDenseBytes; };
    auto load_k = [&](auto sparse, int h) {
      SparseBlock<C> k;
      if constexpr (decltype(sparse)::value) k.template load<Side::K>(smem + k_offset(h), at);
      return k;
    };
    auto multiply_k_half = [&](auto sparse, const SparseBlock<C>& k, int h) {
      multiply_k<C, decltype(sparse)::value>(s[h], k, base + k_offset(h), q_desc);
    };
    auto finish_k_half = [&](uint32_t sparse_bits, int h) {
      if (sparse_bits >> h & 1) {
        multiply_k_half(std::true_type{}, load_k(std::true_type{}, h), h);
        wgmma_wait<0>();
        pin(s[h]);
      } else {
        multiply_k_half(std::false_type{}, load_k(std::false_type{}, h), h);
        wgmma_wait<0>();
        pin(s[h]);
      }
    };
    auto mask = [&](const StepInfo& info) {
      const Place at = place_now();
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int4 block = info.block[h];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int token = at.warp * 16 + at.g + 8 * r;
          const bool out = token < block.y || token >= block.z;
          const int first =
              block.x + token - first_row - 2 * at.q;  // queries before it see nothing
#pragma unroll
          for (int c = 0; c < 16; c++)
            if (out || c / 2 * 8 + c % 2 < first) s[h][c / 2 * 4 + 2 * r + c % 2] = -INFINITY;
        }
      }
    };
    float before = 0.f;  // total() after the step before
    auto exponential = [&](int h, int i, int column) {
      return exp2_unit(fmaf(s[h][i], scale, -m[column]));
    };
    // Exponentials of block h of a step to P, their sums to l.
    auto store_half = [&](int h, uint32_t p_offset) {
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        float e[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const int column = 2 * c + j / 4 * 2 + j % 2;
          e[j] = exponential(h, 4 * c + j, column);
          l[column] += e[j];
        }
        store_matrices<true>(p_to + p_offset + h * (kWarpgroupRows * 128) + c * 8 * 128,
                             pack<T>(e[0], e[1]), pack<T>(e[2], e[3]), pack<T>(e[4], e[5]),
                             pack<T>(e[6], e[7]));
      }
    };
    auto total = [&] {
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < 16; c++) sum += l[c];
      return sum;
    };
    // Blocks of V of the step before this one.
    auto v_offset = [&](int h) { return C::kV + kr.before() * kStageBytes + h * C::kDenseBytes; };
    auto load_v = [&](auto sparse, int h) {
      SparseBlock<C> v;
      if constexpr (decltype(sparse)::value) v.template load<Side::V>(smem + v_offset(h), at);
      return v;
    };
    // O^T += V^T P^T of block h.
    auto multiply_half = [&](auto sparse, const SparseBlock<C>& v, int h, uint32_t p_offset) {
      multiply_v<C, decltype(sparse)::value>(o, v, base + v_offset(h),
                                             p_base + p_offset + h * (kWarpgroupRows * 128));
    };
    auto finish_half = [&](uint32_t sparse_bits, int h, uint32_t p_offset) {
      if (sparse_bits >> h & 1) {
        multiply_half(std::true_type{}, load_v(std::true_type{}, h), h, p_offset);
        wgmma_wait<0>();
        pin_all(o);
      } else {
        multiply_half(std::false_type{}, load_v(std::false_type{}, h), h, p_offset);
        wgmma_wait<0>();
        pin_all(o);
      }
    };
    // `l` holds this step's sums already: they are taken out again. What rounding (or an infinite
    // sum) loses thereby of the older sums is nothing beside the sums that made it necessary.
    auto take_back = [&] {
#pragma unroll
      for (int c = 0; c < 16; c++) {
        const int i = c / 2 * 4 + c % 2;
        const float sum = exponential(0, i, c) + exponential(0, i + 2, c) + exponential(1, i, c) +
                          exponential(1, i + 2, c);
        l[c] = sum < INFINITY ? fmaxf(l[c] - sum, 0.f) : 0.f;
      }
    };
    auto restart_step = [&](uint32_t p_offset) {
      float top[16];
#pragma unroll
      for (int c = 0; c < 16; c++) {
        const int i = c / 2 * 4 + c % 2;
        float t = fmaxf(fmaxf(s[0][i], s[0][i + 2]), fmaxf(s[1][i], s[1][i + 2]));
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 4));
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 8));
        top[c] = fmaxf(t, __shfl_xor_sync(~0u, t, 16));
      }
      if (at.g == 0) {
#pragma unroll
        for (int c = 0; c < 8; c++)
          *reinterpret_cast<float2*>(columns + at.warp * kWarpgroupRows + 8 * c + 2 * at.q) =
              make_float2(top[2 * c], top[2 * c + 1]);
      }
      warpgroup_barrier(1 + wg);
#pragma unroll
      for (int c = 0; c < 16; c++) {
        const int column = c / 2 * 8 + 2 * at.q + c % 2;
        float t = fmaxf(columns[column], columns[kWarpgroupRows + column]);
        t = fmaxf(
            t, fmaxf(columns[2 * kWarpgroupRows + column], columns[3 * kWarpgroupRows + column]));
        const float moved = safe(fmaxf(m[c], t * scale));
        const float f = exp2_unit(m[c] - moved);
        m[c] = moved;
        l[c] *= f;
#pragma unroll
        for (int k = 0; k < C::kChunks; k++) {
          o[k][c / 2 * 4 + c % 2] *= f;
          o[k][c / 2 * 4 + c % 2 + 2] *= f;
        }
      }
      store_half(0, p_offset);
      store_half(1, p_offset);
      fence_async_proxy();
      before = total();
      warpgroup_barrier(1 + wg);
    };

    barrier_wait(bar.k_full(kr.slot), kr.parity);
    flags.read_k(words, 0);
    finish_k_half(flags.k_sparse, 0);
    finish_k_half(flags.k_sparse, 1);
    if (flags.masked & 3) mask(infos[kr.slot]);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.k_empty(kr.slot));
    kr.next();
    restart_step(0);

    // Steps that mix kinds take the slow form, which decides inside and waits for each product.
    auto step = [&](auto settled, auto sparse, int i, uint32_t p_offset) {
      const uint32_t v_bits = Flags::of_step(flags.v_sparse, i - 1);
      if constexpr (decltype(settled)::value) {
        const SparseBlock<C> k_0 = load_k(sparse, 0), k_1 = load_k(sparse, 1),
                             v_0 = load_v(sparse, 0);
        multiply_k_half(sparse, k_0, 0);
        multiply_k_half(sparse, k_1, 1);
        multiply_half(sparse, v_0, 0, C::kPBytes - p_offset);
        wgmma_wait<1>();
      } else {
        const uint32_t k_bits = Flags::of_step(flags.k_sparse, i);
        finish_k_half(k_bits, 0);
        finish_k_half(k_bits, 1);
        finish_half(v_bits, 0, C::kPBytes - p_offset);
      }
      pin_all(s);
      if (Flags::of_step(flags.masked, i)) mask(infos[kr.slot]);
      store_half(0, p_offset);
      wgmma_wait<0>();
      pin_all(o);
      if constexpr (decltype(settled)::value)
        multiply_half(sparse, load_v(sparse, 1), 1, C::kPBytes - p_offset);
      else
        finish_half(v_bits, 1, C::kPBytes - p_offset);
      store_half(1, p_offset);
      fence_async_proxy();
      const float after = total();
      const bool moved = warpgroup_any(1 + wg, !(after - before < kSumLimit<T>));
      before = after;
      wgmma_wait<0>();
      pin_all(o);
      return moved;
    };
    for (int i = 1; i < steps; i++) {
      const uint32_t p_offset = (i & 1) * C::kPBytes;
      barrier_wait(bar.v_full(kr.before()), kr.parity_before());
      barrier_wait(bar.k_full(kr.slot), kr.parity);
      flags.read_v(words, i - 1);
      flags.read_k(words, i);
      const uint32_t v_bits = Flags::of_step(flags.v_sparse, i - 1);
      const uint32_t k_bits = Flags::of_step(flags.k_sparse, i);
      bool moved;
      const std::true_type yes;
      const std::false_type no;
      if ((v_bits & k_bits) == 3)
        moved = step(yes, yes, i, p_offset);
      else if ((v_bits | k_bits) == 0)
        moved = step(yes, no, i, p_offset);
      else
        moved = step(no, no, i, p_offset);
      if (uniform(moved)) {  // rare: the scores are gone, so they are computed again
        finish_k_half(k_bits, 0);
        finish_k_half(k_bits, 1);
        if (Flags::of_step(flags.masked, i)) mask(infos[kr.slot]);
        take_back();
        restart_step(p_offset);
      }
      __syncwarp();
      if (at.lane == 0) {
        barrier_arrive(bar.v_empty(kr.before()));
        barrier_arrive(bar.k_empty(kr.slot));
      }
      kr.next();
    }
    barrier_wait(bar.v_full(kr.before()), kr.parity_before());
    flags.read_v(words, steps - 1);
    {
      const uint32_t p_offset = (steps - 1 & 1) * C::kPBytes;
      const uint32_t sparse_bits = Flags::of_step(flags.v_sparse, steps - 1);
      finish_half(sparse_bits, 0, p_offset);
      finish_half(sparse_bits, 1, p_offset);
    }
    flags.next_item(steps);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.q_empty());
#pragma unroll
    for (int c = 0; c < 16; c++) {
      l[c] += __shfl_xor_sync(~0u, l[c], 4);
      l[c] += __shfl_xor_sync(~0u, l[c], 8);
      l[c] += __shfl_xor_sync(~0u, l[c], 16);
    }
    if (at.g == 0) {
#pragma unroll
      for (int c = 0; c < 8; c++)
        *reinterpret_cast<float2*>(columns + at.warp * kWarpgroupRows + 8 * c + 2 * at.q) =
            make_float2(l[2 * c], l[2 * c + 1]);
    }
    wgmma_wait<0>();
    pin_all(o);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.v_empty(kr.before()));
    warpgroup_barrier(1 + wg);
#pragma unroll
    for (int c = 0; c < 16; c++) {
      const int column = c / 2 * 8 + 2 * at.q + c % 2;
      const float sum = columns[column] + columns[kWarpgroupRows + column] +
                        columns[2 * kWarpgroupRows + column] + columns[3 * kWarpgroupRows + column];
      if (at.warp == 0 && at.g == 0) write_lse(p, item, head, first_row + column, m[c], sum);
      l[c] = 1.f / sum;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int c = 0; c < C::kChunks; c++) {
        const float* d = o[c] + 8 * i;
        const float* f = l + 4 * i;
        store_matrices<true>(p_to + C::kPBytes + c * kWarpgroupRows * 128 + i * 16 * 128,
                             pack<T>(d[0] * f[0], d[1] * f[1]), pack<T>(d[2] * f[0], d[3] * f[1]),
                             pack<T>(d[4] * f[2], d[5] * f[3]), pack<T>(d[6] * f[2], d[7] * f[3]));
      }
    warpgroup_barrier(1 + wg);
    write_rows<C>(p, item, head, smem + C::kP + (2 * wg + 1) * C::kPBytes, kWarpgroupRows * 128);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.item_empty(items & 1));
    items++;
  }
}

// Dense K and V: P stays in registers, O = P V. Everything about softmax is local to a warp.
template <class C>
__device__ void consume_dense(const Params& p, char* smem, uint32_t base, const Barriers<C>& bar,
                              const Place& at) {
  using T = typename C::T;
  constexpr int kStageBytes = 2 * C::kDenseBytes;
  const int wg = at.warpgroup;
  const float scale = p.scale_log2;
  const auto* infos = reinterpret_cast<const StepInfo*>(smem + C::kInfo);
  const auto* words = reinterpret_cast<const Words*>(smem + C::kWords);
  Ring<C::kStages> kr;
  uint32_t items = 0;
  Flags flags;
  if (wg == 0) turn_end(1);
  for (;;) {
    barrier_wait(bar.item_full(items & 1), items >> 1 & 1);
    const Item& item = *reinterpret_cast<const Item*>(smem + C::kItems + (items & 1) * 48);
    const int& head =
        *reinterpret_cast<const int*>(smem + C::kItems + (items & 1) * 48 + sizeof(Item));
    if (uniform(head) < 0) return;
    const int steps = uniform((item.blocks + 1) / 2);
    const int first_row = item.start + wg * kWarpgroupRows;

    RowScores<C> x;
    float o[C::D / 2];
    uint4 even[8], odd[8];  // P of even and odd steps
#pragma unroll
    for (int i = 0; i < C::D / 2; i++) o[i] = 0.f;
    barrier_wait(bar.q_full(), items & 1);
    x.begin(smem, base, at);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.q_empty());

    auto exponentials = [&](uint4(&to)[8]) {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < 8; c++) to[c] = x.exponentials(c, scale, sum);
      return make_float2(sum[0] + sum[1], sum[2] + sum[3]);
    };
    auto restart_step = [&](uint4(&to)[8]) {
      float factor[2];
      x.move_reference(scale, factor);
      const float2 sum = exponentials(to);
      x.l[0] += sum.x, x.l[1] += sum.y;
#pragma unroll
      for (int i = 0; i < C::D / 2; i++) o[i] *= factor[i / 2 % 2];
    };
    auto multiply_v_dense = [&](int st, const uint4(&from)[8]) {
      const uint64_t v_desc = swizzled(base + C::kV + st * kStageBytes, 1024, kChunkBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; k++)
        wgmma_rs<T, 1, true>(o, from[k], v_desc + (k / 4 * C::kDenseBytes + k % 4 * 2048) / 16);
      wgmma_commit();
    };
    auto step = [&](int i, const uint4(&before)[8], uint4(&after)[8]) {
      barrier_wait(bar.k_full(kr.slot), kr.parity);
      flags.read_k(words, i);
      turn_begin(wg);
      x.multiply_k(base + C::kK + kr.slot * kStageBytes);
      barrier_wait(bar.v_full(kr.before()), kr.parity_before());
      multiply_v_dense(kr.before(), before);
      turn_end(wg);
      wgmma_wait<1>();
      pin(x.s);
      if (Flags::of_step(flags.masked, i)) x.mask(infos[kr.slot], first_row);
      __syncwarp();
      if (at.lane == 0) barrier_arrive(bar.k_empty(kr.slot));
      const float2 sum = exponentials(after);
      const bool moved = __any_sync(~0u, !(fmaxf(sum.x, sum.y) < kSumLimit<T>));
      wgmma_wait<0>();
      pin(o);
      __syncwarp();
      if (at.lane == 0) barrier_arrive(bar.v_empty(kr.before()));
      kr.next();
      if (moved)
        restart_step(after);
      else
        x.l[0] += sum.x, x.l[1] += sum.y;
    };
    auto finish = [&](const uint4(&last)[8]) {
      barrier_wait(bar.v_full(kr.before()), kr.parity_before());
      multiply_v_dense(kr.before(), last);
      wgmma_wait<0>();
      pin(o);
    };

    barrier_wait(bar.k_full(kr.slot), kr.parity);
    flags.read_k(words, 0);
    turn_begin(wg);
    x.multiply_k(base + C::kK + kr.slot * kStageBytes);
    turn_end(wg);
    wgmma_wait<0>();
    pin(x.s);
    if (flags.masked & 3) x.mask(infos[kr.slot], first_row);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.k_empty(kr.slot));
    kr.next();
    restart_step(even);
    int i = 1;
    for (; i + 1 < steps; i += 2) {
      step(i, even, odd);
      step(i + 1, odd, even);
    }
    if (i < steps) {
      step(i, even, odd);
      finish(odd);
    } else {
      finish(even);
    }
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.v_empty(kr.before()));

    flags.next_item(steps);
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = x.l[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[h] = 1.f / sum;
      if (at.q == 0) write_lse(p, item, head, first_row + at.warp * 16 + at.g + 8 * h, x.m[h], sum);
    }
    write_fragments<C>(p, item, head, o, inverse);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(bar.item_empty(items & 1));
    items++;
  }
}

template <class C, bool Pair>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const uint32_t base = smem_address(smem);
  if (base % 1024) __trap();  // what the swizzle counts on
  const Barriers<C> bar{base + C::kBarriers};
  if (threadIdx.x == 0) {
    barrier_init(bar.q_full(), 1);
    barrier_init(bar.begun(), 1);
    barrier_init(bar.q_empty(), 4 * kConsumers);
    for (int s = 0; s < C::kStages; s++) {
      barrier_init(bar.k_full(s), 1);
      barrier_init(bar.k_empty(s), 4 * kConsumers);
      barrier_init(bar.v_full(s), 1);
      barrier_init(bar.v_empty(s), 4 * kConsumers);
    }
    for (int s = 0; s < 2; s++) {
      barrier_init(bar.item_full(s), 1);
      barrier_init(bar.item_empty(s), 2 + 4 * kConsumers);
    }
    for (int s = 0; s < 2 * C::kStages + 1; s++) barrier_init(bar.k_ready(s), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (Pair) cluster_barrier();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_dec<kProducerRegisters>();
    produce<C, Pair>(p, smem, base, bar);
  } else {
    registers_inc<kConsumerRegisters>();
    const Place at = place_now();
    if constexpr (C::kMixedK)
      consume_columns<C>(p, smem, base, bar, at);
    else if constexpr (C::kMixedV)
      consume_rows<C>(p, smem, base, bar, at);
    else
      consume_dense<C>(p, smem, base, bar, at);
  }
  if constexpr (Pair) cluster_barrier();  // no one leaves whom the other may still write to
}

// --- launch --------------------------------------------------------------------------------------

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode encoder() {
  static Encode found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                           cudaEnableDefault, &result);
    return e == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(symbol)
               : nullptr;
  }();
  return found;
}

// A [tokens, heads, D] tensor in boxes of `rows` tokens x 1 head x 64 channels, or with heads = 0 a
// [tokens, D] one. Strides in elements. Tokens outside read as zero.
bool encode(CUtensorMap* map, const void* data, bool half, int D, int heads, int64_t tokens,
            int64_t head_stride, int64_t token_stride, int rows) {
  const bool flat = heads == 0;
  const cuuint64_t dims[3] = {cuuint64_t(D), cuuint64_t(flat ? tokens : heads), cuuint64_t(tokens)};
  const cuuint64_t strides[2] = {cuuint64_t(flat ? token_stride : head_stride) * 2,
                                 cuuint64_t(token_stride) * 2};
  const cuuint32_t box[3] = {kChunk, cuuint32_t(flat ? rows : 1), cuuint32_t(rows)};
  const cuuint32_t ones[3] = {1, 1, 1};
  return encoder()(map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   flat ? 2 : 3, const_cast<void*>(data), dims, strides, box, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// How many clusters of two fit on the device at a time, or a negative cudaError_t.
template <class C>
int clusters_of_two(cudaLaunchConfig_t config) {
  static const int most = [&] {
    cudaError_t e = cudaFuncSetAttribute(
        prefill_kernel<C, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
    int found = 0;
    if (e == cudaSuccess)
      e = cudaOccupancyMaxActiveClusters(&found, prefill_kernel<C, true>, &config);
    return e == cudaSuccess ? found : -int(e);
  }();
  return most;
}

// Pairs of CTAs that take two query heads of one kv head and share what they load. Does nothing
// where clusters would leave more than two multiprocessors idle.
template <class C>
int launch_pairs(const Params& p, int multiprocessors, cudaStream_t stream, bool& done) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 2, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(multiprocessors / 2 * 2);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = C::kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const int clusters = clusters_of_two<C>(config);
  if (clusters < 0) return -clusters;
  if (2 * clusters < multiprocessors - 2) return cudaSuccess;
  config.gridDim = dim3(p.num_items < 2 * clusters ? p.num_items : 2 * clusters);
  done = true;
  return cudaLaunchKernelEx(&config, prefill_kernel<C, true>, p);
}

template <class C>
int launch(const Params& p, int multiprocessors, cudaStream_t stream) {
  // Not with sparse K: what bounds that kernel is shared memory, and pairs cost it 2.5 %.
  if constexpr (!C::kMixedK) {
    if (p.q_heads / p.kv_heads % 2 == 0) {
      bool done = false;
      const int e = launch_pairs<C>(p, multiprocessors, stream, done);
      if (e != cudaSuccess || done) return e;
    }
  }
  static const cudaError_t raised = cudaFuncSetAttribute(
      prefill_kernel<C, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (raised != cudaSuccess) return raised;
  const int grid = p.num_items < multiprocessors ? p.num_items : multiprocessors;
  prefill_kernel<C, false><<<grid, kThreads, C::kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T, int D>
int launch_kinds(const Params& p, int mixed_k, int mixed_v, int multiprocessors,
                 cudaStream_t stream) {
  if (mixed_k) return launch<Config<T, D, true, true>>(p, multiprocessors, stream);
  if (mixed_v) return launch<Config<T, D, false, true>>(p, multiprocessors, stream);
  return launch<Config<T, D, false, false>>(p, multiprocessors, stream);
}

}  // namespace
}  // namespace hs

// Launches on `stream`. Pointers are device pointers; strides count elements. `workspace` has
// 8 + 12 * tiles ints. `mixed_k` and `mixed_v` are 0 only if every ref of that side below a frontier
// is dense; a sparse one then traps. Gives 0, a cudaError_t, or a negative number: -1 no driver
// entry point, -2 a tensor map was refused, -3 no instance for this head dimension.
HS_EXPORT int hs_prefill_attention(
    void* out, float* lse, const void* q, const void* k, const void* v, const void* arena,
    long long arena_bytes, const int* refs, long long refs_of_side, const int* page_table,
    int page_table_stride, const int* tail_first, const int* tail_slots, int max_tail,
    const int* cu_seqlens, const int* prefix_lens, const int* tile_offsets, const int* frontiers,
    int requests, int tiles, int tokens, int q_heads, int kv_heads, int head_dim, int dtype,
    long long q_token_stride, long long q_head_stride, long long k_token_stride,
    long long k_head_stride, long long v_token_stride, long long v_head_stride, float scale,
    int mixed_k, int mixed_v, int* workspace, int multiprocessors, void* stream_handle) {
  using namespace hs;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (head_dim != 64 && head_dim != 128) return -3;
  if (encoder() == nullptr) return -1;
  Params p{};
  const int D = head_dim;
  const bool half = dtype == kFloat16;
  if (!encode(&p.q, q, half, D, q_heads, tokens, q_head_stride, q_token_stride, kRows) ||
      !encode(&p.k, k, half, D, kv_heads, tokens, k_head_stride, k_token_stride, kBlockSize) ||
      !encode(&p.v, v, half, D, kv_heads, tokens, v_head_stride, v_token_stride, kBlockSize) ||
      !encode(&p.arena, arena, half, D, 0, arena_bytes / (2 * D), 0, D, kBlockSize))
    return -2;
  p.arena_bytes = static_cast<const char*>(arena);
  p.out = out;
  p.lse = lse;
  p.refs[0] = refs;
  p.refs[1] = refs + refs_of_side;
  p.page_table = page_table;
  p.page_table_stride = page_table_stride;
  p.tail_first = tail_first;
  p.tail_slots = tail_slots;
  p.max_tail = max_tail;
  p.next = workspace;
  const auto items = reinterpret_cast<Item*>(workspace + 8);
  const auto spans = reinterpret_cast<Span*>(workspace + 8 + 8 * tiles);
  p.items = items;
  p.spans = spans;
  p.num_items = tiles * q_heads;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.scale_log2 = scale * kLog2e;
  const Plan plan{cu_seqlens, prefix_lens, tile_offsets, frontiers, requests, tiles, kv_heads,
                  q_heads / kv_heads, 4 * D};
  schedule_kernel<<<(tiles + 255) / 256, 256, 0, stream>>>(plan, items, spans, workspace);
  if (const cudaError_t e = cudaGetLastError()) return e;
#if defined(HS_SMOKE)  // one head dimension and type, to see that the source compiles
  if (D != 128 || half) return -3;
  return launch_kinds<__nv_bfloat16, 128>(p, mixed_k, mixed_v, multiprocessors, stream);
#else
  if (D == 64)
    return half ? launch_kinds<__half, 64>(p, mixed_k, mixed_v, multiprocessors, stream)
                : launch_kinds<__nv_bfloat16, 64>(p, mixed_k, mixed_v, multiprocessors, stream);
  return half ? launch_kinds<__half, 128>(p, mixed_k, mixed_v, multiprocessors, stream)
              : launch_kinds<__nv_bfloat16, 128>(p, mixed_k, mixed_v, multiprocessors, stream);
#endif
}

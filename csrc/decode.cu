// Split-KV decode attention over mixed dense and 2:4-sparse blocks.
//
// Bound: bytes of the cache. A block of D = 128 is 16,384 B dense and 9,216 B sparse, and the
// arithmetic on it is a few hundred MMA instructions, so everything here serves one aim: always
// enough bytes in flight.
//
// The trick: S^T = K Q^T and O^T = V^T P^T, so that K and V are the *first* operands, which may
// be sparse, and the query heads of one kv head are the (padded) columns. One CTA for each SM; each
// warp owns whole 64-token blocks, its own softmax state and its own ring of shared-memory units.
// A unit is as large as a sparse block; a dense block takes two of them, 32 tokens each. The units
// are filled in the order of use by bulk copies (sm_90: sparse blocks as they lie, dense halves
// through a tensor map that swizzles) or by cp.async (sm_80/86/89), and each is refilled as soon as
// the warp has read it. Warps do not wait for each other: at the end of a (request, kv head) each
// leaves its state in shared memory and goes on, and the last one to do so merges them. At the end
// of the share there is nothing to go on to, so all of them merge.
//
// Work is cut into equal shares of bytes by `plan`, once per step, on the device: nothing
// host-side depends on lengths, so launches may be captured. A share may begin and end inside a
// (request, kv head); the CTA with its last blocks joins the fp32 partials. Under the traffic of
// the copies a fence or an atomic takes microseconds, so there are none: a partial is there when
// its words differ from `kAbsent`, and who has read it makes it absent again. A CTA thus waits
// for CTAs of lower index only, which were launched before it.
//
// On sm_90 a launch overlaps with the end of the kernel before it (programmatic dependent launch):
// the plan, refs and blocks that were written before that kernel are read at once, all else after
// `wait_for_kernels_before`. So the kernel in front must write no input but Q and the blocks of
// last tokens, and be launched without overlap itself, as hs_store_tokens is. Or it is this one or
// the plan.
//
// With block means (design: V is stored without the mean of each channel over the block) the mean
// comes with the block, and sum(P) x mean is one more step of the product.

#include <cudaTypedefs.h>

#include "hs/block.cuh"
#include "hs/launch.h"
#include "hs/ptx.cuh"

namespace hs {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kHalf = kBlockSize / 2;  // tokens of a unit that holds half a dense block
constexpr int kMinShare = 4;           // blocks of a CTA, while there is work for several
constexpr int kDenseCost = 16;         // relative bytes of a dense and a sparse block
constexpr int kSparseCost = 9;
constexpr int kFirstPages = 256;       // of a share, looked up by the plan
constexpr std::uint32_t kAbsent = 0xffffffffu;  // a NaN that no instruction gives

// Boundary c of the plan: where CTA c begins and CTA c - 1 ends.
struct __align__(16) Boundary {
  int row;        // request
  int of_row;     // pair of the request: kv head * column groups + column group
  int block;      // of the pair
  int position;   // blocks before it, over all pairs
  int length;     // of the row, in tokens
  int first_cta;  // the CTAs that share the pair, if block > 0
  int last_cta;   // joins
  int target;     // of `block`: relative bytes of the pair before it
};
static_assert(sizeof(Boundary) == 32);

__host__ __device__ constexpr int blocks_of(int length) {
  return (length + kBlockSize - 1) / kBlockSize;
}

// A block of the batch, in the order of work: requests, their pairs, blocks.
struct Cursor {
  int row, of_row, block;
  int blocks;  // of the row

  // `by` blocks on, over row ends and empty rows.
  __device__ void advance(int by, const int* seq_lens, int rows, int pairs_per_row) {
    block += by;
    if (block < blocks) return;
    while (row < rows) {
      const int left = (pairs_per_row - of_row) * blocks;
      if (block < left) {
        of_row += block / blocks;
        block %= blocks;
        return;
      }
      block -= left;
      of_row = 0;
      blocks = ++row < rows ? blocks_of(__ldg(seq_lens + row)) : 0;
    }
  }

  __device__ int page(const int* page_table, int table_stride, int rows) const {
    if (row >= rows) return 0;
    return __ldg(page_table + static_cast<std::int64_t>(row) * table_stride + block);
  }
};

// --- the plan ------------------------------------------------------------------------------------

struct PlanParams {
  const int* refs;        // [2, P, Hkv] of one layer: counts are the same in all layers and heads
  const int* page_table;  // [R, table_stride]
  const int* seq_lens;    // [R]
  int* costs;             // [R]
  Boundary* boundaries;   // [ctas + 1]
  int* first_pages;       // [ctas, kFirstPages]: of the first blocks of each share and what follows
  int rows, pages, heads, pairs_per_row, table_stride, ctas;
};

__global__ void plan_costs(PlanParams p) {
  const int row = blockIdx.x;
  const int blocks = blocks_of(p.seq_lens[row]);
  int cost = 0;
  for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
    const std::int64_t page = p.page_table[static_cast<std::int64_t>(row) * p.table_stride + i];
    const int k = p.refs[page * p.heads], v = p.refs[(page + p.pages) * p.heads];
    cost += (is_dense(k) ? kDenseCost : kSparseCost) + (is_dense(v) ? kDenseCost : kSparseCost);
  }
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  cost = __reduce_add_sync(~0u, cost);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, cost);  // of integers: the order does not matter
  __syncthreads();
  if (threadIdx.x == 0) p.costs[row] = total;
}

constexpr int kPlanThreads = 1024;

// One CTA. `prefix` [rows + 1] holds the cost, `position` [rows + 1] the blocks before a row.
__global__ void plan_boundaries(PlanParams p) {
  extern __shared__ std::int64_t prefix[];
  int* position = reinterpret_cast<int*>(prefix + p.rows + 1);
  int* pair = position + p.rows + 1;
  int* block = pair + p.ctas + 1;
  __shared__ std::int64_t warp_cost[32];
  __shared__ int warp_blocks[32];

  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  std::int64_t carried_cost = 0;
  int carried_blocks = 0;
  for (int base = 0; base < p.rows; base += kPlanThreads) {
    const int row = base + t;
    std::int64_t cost = row < p.rows ? std::int64_t{p.costs[row]} * p.pairs_per_row : 0;
    int blocks = row < p.rows ? blocks_of(p.seq_lens[row]) * p.pairs_per_row : 0;
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t c = __shfl_up_sync(~0u, cost, step);
      const int b = __shfl_up_sync(~0u, blocks, step);
      if (lane >= step) cost += c, blocks += b;
    }
    if (lane == 31) warp_cost[warp] = cost, warp_blocks[warp] = blocks;
    __syncthreads();
    for (int w = 0; w < warp; ++w) cost += warp_cost[w], blocks += warp_blocks[w];
    if (row < p.rows) {
      prefix[row + 1] = carried_cost + cost;
      position[row + 1] = carried_blocks + blocks;
    }
    for (int w = 0; w < 32; ++w) carried_cost += warp_cost[w], carried_blocks += warp_blocks[w];
    __syncthreads();
  }
  if (t == 0) prefix[0] = 0, position[0] = 0;
  __syncthreads();

  const std::int64_t total = carried_cost;
  int shares = min(p.ctas, max(1, carried_blocks / kMinShare));
  // Few pairs: shares that end where (equal) pairs end save merges, which count there. A few idle
  // CTAs cost no bandwidth.
  const int pairs = p.rows * p.pairs_per_row;
  if (8 * pairs <= shares) shares = shares / pairs * pairs;
  for (int c = t; c <= p.ctas; c += kPlanThreads) {
    Boundary b = {p.rows, 0, 0, carried_blocks, 0, 0, 0, 0};
    if (c < shares && total > 0) {
      const std::int64_t target = total * c / shares;
      int low = 0, high = p.rows;  // prefix[low] <= target < prefix[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (prefix[middle] <= target) low = middle; else high = middle;
      }
      const std::int64_t cost = p.costs[low], rest = target - prefix[low];
      const int blocks = blocks_of(p.seq_lens[low]);
      const int of_row = static_cast<int>(rest / cost);
      b.row = low;
      b.of_row = of_row;
      // Refined by plan_blocks, to 1 .. blocks - 1. A share has two blocks at least, so boundaries
      // stay apart; a pair of one block is not divided.
      b.target = blocks > 1 ? static_cast<int>(rest % cost) : 0;
      b.block = b.target > 0;
      b.position = position[low] + of_row * blocks;
      b.length = p.seq_lens[low];
    }
    pair[c] = b.row * p.pairs_per_row + b.of_row, block[c] = b.block;
    p.boundaries[c] = b;
  }
  __syncthreads();
  for (int c = t; c < p.ctas; c += kPlanThreads) {
    if (block[c] == 0) continue;
    int first = c - 1, last = c;
    while (pair[first] == pair[c] && block[first] > 0) --first;
    while (pair[last + 1] == pair[c]) ++last;
    p.boundaries[c].first_cta = first;
    p.boundaries[c].last_cta = last;
  }
}

// One CTA for each share. A boundary inside a pair moves to the block up to which the pair's bytes
// reach `target`. Dense blocks lie together (sinks, windows), so the average of the row would not
// do. Then the share's first pages are looked up, which saves every layer a load before the copies.
__global__ void plan_blocks(PlanParams p) {
  Boundary b = p.boundaries[blockIdx.x];
  const int target = b.target;
  __shared__ int warp_cost[kPlanThreads / 32];
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = blocks_of(b.length);
  int before = 0;
  for (int base = 0; target > 0 && base < blocks && before <= target; base += kPlanThreads) {
    const int i = base + threadIdx.x;
    int own = 0;
    if (i < blocks) {
      const std::int64_t page = p.page_table[static_cast<std::int64_t>(b.row) * p.table_stride + i];
      const int k = p.refs[page * p.heads], v = p.refs[(page + p.pages) * p.heads];
      own = (is_dense(k) ? kDenseCost : kSparseCost) + (is_dense(v) ? kDenseCost : kSparseCost);
    }
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    __syncthreads();
    if (lane == 31) warp_cost[warp] = sum;
    __syncthreads();
    int total = before;
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w == warp) sum += total;
      total += warp_cost[w];
    }
    if (i < blocks && sum - own <= target && target < sum) found = i;
    before = total;
  }
  __syncthreads();
  if (target > 0) {
    b.block = max(1, found);  // `found` is below `blocks`, which is 2 or more
    if (threadIdx.x == 0) {
      p.boundaries[blockIdx.x].block = b.block;
      p.boundaries[blockIdx.x].position = b.position + b.block;
    }
  }
  if (threadIdx.x < kFirstPages) {
    Cursor cursor = {b.row, b.of_row, b.block, blocks};
    cursor.advance(threadIdx.x, p.seq_lens, p.rows, p.pairs_per_row);
    p.first_pages[blockIdx.x * kFirstPages + threadIdx.x] =
        cursor.page(p.page_table, p.table_stride, p.rows);
  }
  __threadfence();  // attention may be launched when this ends, before its caches are flushed
}

// --- attention ----------------------------------------------------------------------------------

struct DecodeParams {
  const void* q;                 // [R, Hq, D]
  const std::uint8_t* arena;
  const int* refs;               // [2, P, Hkv]
  const int* page_table;         // [R, table_stride]
  const int* seq_lens;           // [R]
  const Boundary* boundaries;    // [gridDim.x + 1]
  const int* first_pages;        // [gridDim.x, kFirstPages]
  const void* means;             // [sparse slots, Hkv, D], of V blocks, or null
  float* partials;               // [2 * gridDim.x, N, D], not normalised; kAbsent between launches
  float2* states;                // [2 * gridDim.x, N]: maximum (log 2) and sum; kAbsent likewise
  void* out;                     // [R, Hq, D]
  float* lse;                    // [R, Hq]
  int rows, pages, heads, group, column_groups, table_stride;
  float scale_log2;
};

// Units that a warp fills before the kernel in front has ended: with more the queries, which are
// loaded afterwards, wait behind them.
constexpr int kEarlyUnits = 1;

// Warps of a CTA and units of a warp. About 150 KiB in flight for each SM: more only lengthens the
// queue in front of memory, and with it every ordinary load (NOTES.md). A dense block needs two
// units. The Ampere path stays below the 99 KiB of sm_86 and sm_89.
template <int D, int N, bool kBulk>
struct Ring {
  static constexpr int kUnitBytes = (Block16<D>::kSparseBytes + 1023) / 1024 * 1024;
  // Whether a launch overlaps with the kernel before it; N = 24 has no registers for that.
  static constexpr bool kOverlaps = kBulk && (D != 128 || N <= 16);
#if defined(HS_DECODE_WARPS)
  static constexpr int kWarps = HS_DECODE_WARPS;
  static constexpr int kUnits = HS_DECODE_UNITS;
#else
  static constexpr int kWarps =
      kBulk ? (D == 256 ? 4 : D == 128 && N > 16 ? 6 : 8) : (D == 256 ? 2 : 3);
  static constexpr int kUnits = D == 64 ? 4 : 2;
#endif
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMeanBytes = D * 2;
  static constexpr int kColumnStride = D + 4;  // floats; +4 keeps the columns of a quad apart
  static constexpr int kMergeBytes = N * kColumnStride * 4;

  struct Bookkeeping {
    std::uint64_t barriers[kWarps][kUnits];
    float maximum[kWarps][N];
    float sum[kWarps][N];
    int arrived;  // warps whose states of one pair lie in the merge buffers
    int merged;   // pairs of several warps that have been merged
  };
  static constexpr int kBytes =
      kWarps * (kUnits * (kUnitBytes + kMeanBytes) + kMergeBytes) + int{sizeof(Bookkeeping)};
};

template <int D, int N, typename T, bool kBulk>
struct DecodeKernel {
  using R = Ring<D, N, kBulk>;
  using KOperand = Operand<D, Side::K>;
  using VOperand = Operand<D, Side::V>;
  using Format = Block16<D>;
  static constexpr int kWarps = R::kWarps, kUnits = R::kUnits;
  static constexpr int kTiles = N / 8;           // column tiles of an MMA
  static constexpr int kKSteps = D / 32;         // sparse k-steps of K; V has two
  static constexpr int kVStrips = D / 16;        // strips of V^T; K has four
  static constexpr int kWords = D / 64;          // 16-byte metadata vectors of a lane
  const DecodeParams& p;
  const void* dense_map;
  const int lane, warp;
  // Shared-memory addresses: this warp's ring, the means of its units, its merge buffer.
  const std::uint32_t units, unit_means, merge_buffer;
  typename R::Bookkeeping& book;
  std::uint64_t policy;

  // The CTA's share: from one boundary to the next.
  Boundary begin, end;
  int share;

  // Filling: item i of this warp is block warp + kWarps * i of the share.
  int items, filling = 0, part = 0;  // part: 2 * side + half
  int fill_unit = 0, pending = kUnits;     // units that wait to be filled
  std::uint32_t dense_k = 0, dense_v = 0;  // bit i % 32: kind of item i

  // Refs of 64 items from item 32 * max(0, looked - 2) on, one in each lane; lookups run ahead.
  int looked = 1;  // batches of 32 items whose refs are here or on the way
  int ref_k, ref_v, head_now, next_ref_k, next_ref_v, head_next;
  int next_page, head_last;                                      // of batch `looked`
  Cursor cursor;                                                 // of the page loaded last

  // Using.
  int unit = 0;
  std::uint32_t parity = 0;

  __device__ DecodeKernel(const DecodeParams& params, const void* map, unsigned char* shared)
      : p(params),
        dense_map(map),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        units(smem_address(shared) + warp * kUnits * R::kUnitBytes),
        unit_means(smem_address(shared) + kWarps * kUnits * R::kUnitBytes +
                   warp * kUnits * R::kMeanBytes),
        merge_buffer(smem_address(shared) + kWarps * kUnits * (R::kUnitBytes + R::kMeanBytes) +
                     warp * R::kMergeBytes),
        book(*reinterpret_cast<typename R::Bookkeeping*>(
            shared + R::kBytes - int{sizeof(typename R::Bookkeeping)})) {}

  __device__ int pairs_per_row() const { return p.heads * p.column_groups; }
  __device__ int head_of(int of_row) const {
    return p.column_groups == 1 ? of_row : of_row / p.column_groups;
  }
  __device__ int first_column(int of_row) const {
    return p.column_groups == 1 ? 0 : of_row % p.column_groups * N;
  }

  __device__ Boundary load_boundary(int c) const {
    const int4* words = reinterpret_cast<const int4*>(p.boundaries + c);
    const int4 a = __ldcg(words), b = __ldcg(words + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, 0};
  }

  __device__ void load_refs(int page, int head, int& k, int& v) const {
    k = __ldg(p.refs + static_cast<std::int64_t>(page) * p.heads + head);
    v = __ldg(p.refs + (static_cast<std::int64_t>(page) + p.pages) * p.heads + head);
  }

  __device__ void advance(int by) { cursor.advance(by, p.seq_lens, p.rows, pairs_per_row()); }

  // Lane l of batch b looks up item 32 b + l.
  __device__ void begin_lookups(int page) {
    cursor = {begin.row, begin.of_row, begin.block, blocks_of(begin.length)};
    advance(warp + kWarps * lane);
    head_now = head_of(cursor.of_row);
    load_refs(page, head_now, ref_k, ref_v);
    head_last = head_now;
    next_page = 0;
    // Until one of the first items is filled, its bit says that it has its request's last token.
    dense_v = __ballot_sync(~0u, cursor.block + 1 == cursor.blocks);
  }

  __device__ void look_up_page() {
    advance(kWarps * 32);
    head_last = head_of(cursor.of_row);
    next_page = cursor.page(p.page_table, p.table_stride, p.rows);
  }

  // Called when the last batch of refs is begun: the one after it is loaded, from pages that were
  // looked up a batch earlier.
  __device__ void look_ahead() {
    if (looked == 1) {
      look_up_page();
    } else {
      ref_k = next_ref_k, ref_v = next_ref_v, head_now = head_next;
    }
    head_next = head_last;
    load_refs(next_page, head_next, next_ref_k, next_ref_v);
    look_up_page();
    ++looked;
  }

  // Where 16-byte chunk `chunk` of row `token` lies in a unit with half a dense block.
  static __device__ __forceinline__ int dense_place(int token, int chunk) {
    return chunk / 8 * (kHalf * 128) + token * 128 + ((chunk ^ token) & 7) * 16;
  }

  // Starts the copy of the next unit in order into the unit that was used first.
  __device__ void fill_next() {
    if (filling < items) {
      const int from = filling % 32;
      const bool later = filling - 32 * max(0, looked - 2) >= 32;
      const int side = part / 2;
      const int mine = side == 0 ? (later ? next_ref_k : ref_k) : (later ? next_ref_v : ref_v);
      const int ref = __shfl_sync(~0u, mine, from);
      const int head = __shfl_sync(~0u, later ? head_next : head_now, from);
      const std::uint32_t to = units + fill_unit * R::kUnitBytes;
      const bool dense = is_dense(ref);
      if (part == 0) dense_k = (dense_k & ~(1u << from)) | (std::uint32_t{dense} << from);
      if (part == 2) dense_v = (dense_v & ~(1u << from)) | (std::uint32_t{dense} << from);
      const std::int64_t block = static_cast<std::int64_t>(slot_of(ref)) * p.heads + head;
      const bool mean = side == 1 && !dense && p.means != nullptr;
      if constexpr (kBulk) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (lane == 0) {
          const std::uint32_t barrier = smem_address(&book.barriers[warp][fill_unit]);
          if (dense) {
            barrier_expect(barrier, Format::kDenseBytes / 2);
            const int row = static_cast<int>(block * kBlockSize) + part % 2 * kHalf;
            copy_tensor_3d(to, dense_map, 0, row, 0, barrier, policy);
          } else {
            barrier_expect(barrier, Format::kSparseBytes + (mean ? R::kMeanBytes : 0));
            copy_bulk(to, p.arena + block * Format::kSparseBytes, Format::kSparseBytes, barrier,
                      policy);
            if (mean)
              copy_bulk(unit_means + fill_unit * R::kMeanBytes,
                        static_cast<const T*>(p.means) + block * D, R::kMeanBytes, barrier, policy);
          }
        }
#endif
      } else if (dense) {
        // In the order that the tensor map gives.
        const std::uint8_t* source =
            p.arena + block * Format::kDenseBytes + part % 2 * (Format::kDenseBytes / 2);
#pragma unroll
        for (int i = 0; i < Format::kDenseBytes / 2 / 512; ++i) {
          const int chunk = i * 32 + lane, row = chunk / (D / 8), column = chunk % (D / 8);
          copy_async_16(to + dense_place(row, column), source + chunk * 16);
        }
      } else {
        const std::uint8_t* source = p.arena + block * Format::kSparseBytes;
#pragma unroll
        for (int i = 0; i < Format::kSparseBytes / 512; ++i)
          copy_async_16(to + (i * 32 + lane) * 16, source + (i * 32 + lane) * 16);
        if (mean && lane < D / 8)
          copy_async_16(unit_means + fill_unit * R::kMeanBytes + lane * 16,
                        static_cast<const T*>(p.means) + block * D + lane * 8);
      }
      // Next: the second half of a dense block, else V after K, else the next item.
      if (dense && part % 2 == 0) {
        ++part;
      } else {
        part = side == 0 ? 2 : 0;
        filling += side;
      }
    }
    if constexpr (!kBulk) commit_copies();  // an empty group keeps the count of groups right
    fill_unit = fill_unit + 1 == kUnits ? 0 : fill_unit + 1;
  }

  __device__ void fill_pending() {
#pragma unroll 1
    for (; pending > 0; --pending) fill_next();
  }

  // The same at the beginning: until the kernels in front have ended, units of settled blocks only.
  __device__ void fill_first(bool waited) {
#pragma unroll 1
    for (; pending > 0; --pending) {
      if (!waited && (pending + kEarlyUnits <= kUnits || (part == 0 && dense_v >> filling & 1)))
        break;
      fill_next();
    }
  }

  // Waits for the next unit, of the kBehind + 1 that will be taken together.
  template <int kBehind>
  __device__ std::uint32_t take_unit() {
    const std::uint32_t address = units + unit * R::kUnitBytes;
    if constexpr (kBulk) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      barrier_wait(smem_address(&book.barriers[warp][unit]), parity);
#endif
    } else {
      wait_copies<kUnits - 1 - kBehind>();
      __syncwarp();
    }
    unit = unit + 1 == kUnits ? 0 : unit + 1;
    if (unit == 0) parity ^= 1;
    return address;
  }

  // Queries of one pair: B fragments, column n of tile j is query head 8 j + n of the group.
  std::uint32_t q_fragment[kTiles][D / 8];
  float o[kVStrips][kTiles][4];
  float maximum[kTiles][2], sum[kTiles][2];

  __device__ std::int64_t first_query(int row, int of_row) const {
    return (static_cast<std::int64_t>(row) * p.heads + head_of(of_row)) * p.group +
           first_column(of_row);
  }

  static __device__ __forceinline__ unsigned load_pair(const T* q) {
    const unsigned* from = reinterpret_cast<const unsigned*>(q);
    return R::kOverlaps ? *from : __ldg(from);  // it may be written while this kernel waits
  }

  __device__ void load_q(std::uint32_t (&to)[kTiles][D / 8], int row, int of_row) const {
    const int columns = min(N, p.group - first_column(of_row));
    const T* q = static_cast<const T*>(p.q) + first_query(row, of_row) * D;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int column = 8 * j + lane / 4;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        to[j][i] = column < columns ? load_pair(q + column * D + 8 * i + 2 * (lane % 4)) : 0u;
    }
  }

  // Under the load of the copies an ordinary load takes 5 us, so the queries of the next pair are
  // fetched with those of this one, where registers allow.
  static constexpr bool kFetchAhead = N == 8 && D <= 128;
  std::uint32_t next_q[kFetchAhead ? kTiles : 1][D / 8];
  int fetched_row = -1, fetched_of_row = 0;  // of next_q

  __device__ void begin_pair(int row, int of_row, bool another) {
    if constexpr (kFetchAhead) {
      if (row == fetched_row && of_row == fetched_of_row) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) q_fragment[0][i] = next_q[0][i];
      } else {
        load_q(q_fragment, row, of_row);
      }
      if (another) {
        fetched_row = row, fetched_of_row = of_row + 1;
        if (fetched_of_row == pairs_per_row()) ++fetched_row, fetched_of_row = 0;
        if (fetched_row < p.rows) load_q(next_q, fetched_row, fetched_of_row);
      }
    } else {
      load_q(q_fragment, row, of_row);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < kVStrips; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][j][c] = 0.f;
      maximum[j][0] = maximum[j][1] = -INFINITY;
      sum[j][0] = sum[j][1] = 0.f;
    }
  }

  // One block of 64 tokens, of which `valid` count. Leaves the units of V pending.
  __device__ void attend_block(int item, int valid) {
    float s[4][kTiles][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[i][j][c] = 0.f;

    if (dense_k >> (item % 32) & 1) {
      const std::uint32_t tiles[2] = {take_unit<1>(), take_unit<0>()};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t tile = tiles[half];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int k = 0; k < D / 16; ++k) {
            const int token = 16 * i + lane % 16, chunk = 2 * k + lane / 16;
            std::uint32_t a[4];
            load_matrix(a, tile + dense_place(token, chunk));
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
              Mma<T>::dense(s[2 * half + i][j], a, q_fragment[j][2 * k], q_fragment[j][2 * k + 1]);
          }
      }
      pending = 2;
    } else {
      const std::uint32_t base = take_unit<0>();
      std::uint32_t words[4 * kWords];
      load_words(words, base);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < kKSteps; k += 2) {
          const std::uint32_t word = words[KOperand::word(i, k, 0) / 128 * 4 +
                                           KOperand::word(i, k, 0) % 4];
          const uint4 a = load_shared_16(base + Format::kMetadataBytes +
                                         KOperand::fragment(i, k, 0) * 2 + lane * 16);
          const uint4 b = load_shared_16(base + Format::kMetadataBytes +
                                         KOperand::fragment(i, k + 1, 0) * 2 + lane * 16);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const std::uint32_t* q = &q_fragment[j][4 * k];
            Mma<T>::template sparse<0>(s[i][j], a, q[0], q[1], q[2], q[3], word);
            Mma<T>::template sparse<1>(s[i][j], b, q[4], q[5], q[6], q[7], word);
          }
        }
      pending = 1;
    }
    __syncwarp();  // all lanes have read the units
    fill_pending();

    if (valid < kBlockSize) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (16 * i + lane / 4 + 8 * (c / 2) >= valid)
#pragma unroll
            for (int j = 0; j < kTiles; ++j) s[i][j][c] = -INFINITY;
    }

    std::uint32_t probability[kTiles][8];
    bool raised = false;
    float top[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(s[0][j][c], s[0][j][c + 2]);
#pragma unroll
        for (int i = 1; i < 4; ++i) x = fmaxf(x, fmaxf(s[i][j][c], s[i][j][c + 2]));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
        top[j][c] = fmaxf(maximum[j][c], x * p.scale_log2);
        raised |= top[j][c] > maximum[j][c];
      }
    if (__any_sync(~0u, raised)) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float f0 = exp2_approx(maximum[j][0] - top[j][0]);
        const float f1 = exp2_approx(maximum[j][1] - top[j][1]);
        maximum[j][0] = top[j][0], maximum[j][1] = top[j][1];
        sum[j][0] *= f0, sum[j][1] *= f1;
#pragma unroll
        for (int i = 0; i < kVStrips; ++i) {
          o[i][j][0] *= f0, o[i][j][1] *= f1;
          o[i][j][2] *= f0, o[i][j][3] *= f1;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float e[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          e[c] = exp2_approx(fmaf(s[i][j][c], p.scale_log2, -maximum[j][c % 2]));
          sum[j][c % 2] += e[c];
        }
        probability[j][2 * i] = move_matrix_transposed(pack_pair<T>(e[0], e[1]));
        probability[j][2 * i + 1] = move_matrix_transposed(pack_pair<T>(e[2], e[3]));
      }

    if (dense_v >> (item % 32) & 1) {
      const std::uint32_t tiles[2] = {take_unit<1>(), take_unit<0>()};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t tile = tiles[half];
        if (valid < kBlockSize) clear_rows(tile, valid - kHalf * half);
#pragma unroll
        for (int i = 0; i < kVStrips; ++i)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int token = 16 * k + lane % 8 + lane / 16 * 8, chunk = 2 * i + lane / 8 % 2;
            std::uint32_t a[4];
            load_matrix_transposed(a, tile + dense_place(token, chunk));
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
              Mma<T>::dense(o[i][j], a, probability[j][4 * half + 2 * k],
                            probability[j][4 * half + 2 * k + 1]);
          }
      }
      pending = 2;
    } else {
      const std::uint32_t mean = unit_means + unit * R::kMeanBytes;
      const std::uint32_t base = take_unit<0>();
      std::uint32_t words[4 * kWords];
      load_words(words, base);
#pragma unroll
      for (int i = 0; i < kVStrips; ++i) {
        const std::uint32_t word =
            words[VOperand::word(i, 0, 0) / 128 * 4 + VOperand::word(i, 0, 0) % 4];
        const uint4 a = load_shared_16(base + Format::kMetadataBytes +
                                       VOperand::fragment(i, 0, 0) * 2 + lane * 16);
        const uint4 b = load_shared_16(base + Format::kMetadataBytes +
                                       VOperand::fragment(i, 1, 0) * 2 + lane * 16);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const std::uint32_t* x = probability[j];
          Mma<T>::template sparse<0>(o[i][j], a, x[0], x[1], x[2], x[3], word);
          Mma<T>::template sparse<1>(o[i][j], b, x[4], x[5], x[6], x[7], word);
        }
      }
      if (p.means != nullptr) add_mean(mean, probability);
      pending = 1;
    }
    __syncwarp();
  }

  // O^T += mean x sum(P), as a product: every column of A is the mean, and the eight rows of B sum
  // to the sum of P, its rounded part in the first k-half and what rounding left in the second.
  __device__ void add_mean(std::uint32_t mean, const std::uint32_t (&probability)[kTiles][8]) {
    const std::uint32_t one = pack_pair<T>(1.f, 1.f);
    const std::uint32_t ones[4] = {one, one, one, one};
    std::uint32_t b[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float total[4] = {0.f, 0.f, 0.f, 0.f};  // the same in every row: of columns 2 q and 2 q + 1
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma<T>::dense(total, ones, probability[j][2 * k], probability[j][2 * k + 1]);
      const float x = total[0] * 0.125f, y = total[1] * 0.125f;
      const std::uint32_t rounded = pack_pair<T>(x, y);
      b[j][0] = move_matrix_transposed(rounded);
      b[j][1] = move_matrix_transposed(
          pack_pair<T>(x - unpack_low<T>(rounded), y - unpack_high<T>(rounded)));
    }
#pragma unroll
    for (int i = 0; i < kVStrips; i += 2) {
      std::uint32_t m[4];  // channels 8 c + g of the strip pair, for c = 0 .. 3, twice in a word
      load_matrix_transposed(m, mean + i * 32 + lane / 8 * 16);
      const std::uint32_t low[4] = {m[0], m[1], m[0], m[1]}, high[4] = {m[2], m[3], m[2], m[3]};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Mma<T>::dense(o[i][j], low, b[j][0], b[j][1]);
        Mma<T>::dense(o[i + 1][j], high, b[j][0], b[j][1]);
      }
    }
  }

  __device__ void load_words(std::uint32_t (&words)[4 * kWords], std::uint32_t base) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint4 x = load_shared_16(base + (i * 32 + lane) * 16);
      words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
  }

  // V rows past the end of a sequence may hold anything, NaN included, and 0 * NaN is NaN.
  __device__ void clear_rows(std::uint32_t tile, int first) const {
    for (int row = max(first, 0); row < kHalf; ++row)
      if (lane < D / 8)
        store_shared_16(tile + dense_place(row, lane), make_uint4(0, 0, 0, 0));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kBulk) fence_async_proxy();
#endif
    __syncwarp();
  }

  // The end of a pair of which this CTA has blocks [first, last), the block at `first` being number
  // `done` of the share, for a warp that took part. `merges` counts the pairs of several warps
  // before this one. What ends with the share is merged by merge_last.
  __device__ void finish_pair(int row, int of_row, int first, int last, int blocks, int done,
                              int& merges) {
    const int count = last - first;
    leave_state(merges);
    if (done + count == share) return;
    unsigned took_part = 1u << warp;
    if (count > 1) {
      int before = 0;
      if (lane == 0) {
        __threadfence_block();
        before = atomicAdd(&book.arrived, 1);
        __threadfence_block();
      }
      ++merges;
      if (__shfl_sync(~0u, before, 0) != min(count, kWarps) - 1) return;
      __syncwarp();
      took_part = warps_of(done, count);
    }
    merge_warps(row, of_row, first, last, blocks, took_part, lane, 32);
    __syncwarp();
    if (count > 1 && lane == 0) {
      book.arrived = 0;
      __threadfence_block();
      volatile_store(book.merged, merges);
    }
  }

  // The same for the last pair of the share, by all warps at once: the next launch waits for it.
  __device__ void merge_last(int row, int of_row, int first, int last, int blocks, int done) {
    __syncthreads();
    merge_warps(row, of_row, first, last, blocks, warps_of(done, last - first), threadIdx.x,
                R::kThreads);
  }

  // The warps that have one of `count` blocks from number `done` of the share on.
  static __device__ unsigned warps_of(int done, int count) {
    const unsigned warps = (1u << min(count, kWarps)) - 1;  // from done % kWarps on, cyclically
    const int turn = done % kWarps;
    return (warps << turn | warps >> (kWarps - turn)) & ((1u << kWarps) - 1);
  }

  // This warp's state, for merge_warps.
  __device__ __forceinline__ void leave_state(int merges) {
    while (volatile_load(book.merged) < merges) {  // the buffers may be in use
    }
    __syncwarp();
    const std::uint32_t stride = R::kColumnStride * 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * j + 2 * (lane % 4) + c;
#pragma unroll
        for (int i = 0; i < kVStrips; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            store_shared_f32(merge_buffer + column * stride + (16 * i + lane / 4 + 8 * h) * 4,
                             o[i][j][c + 2 * h]);
        float x = sum[j][c];
        x += __shfl_xor_sync(~0u, x, 4);
        x += __shfl_xor_sync(~0u, x, 8);
        x += __shfl_xor_sync(~0u, x, 16);
        if (lane < 4) {
          book.maximum[warp][column] = maximum[j][c];
          book.sum[warp][column] = x;
        }
      }
    __syncwarp();
  }

  // Sums the states of the warps that took part, in their order, and writes the outcome for blocks
  // [first, last) of the pair. This thread sums outputs `from`, `from` + `step`, ...
  __device__ __forceinline__ void merge_warps(int row, int of_row, int first, int last, int blocks,
                                              unsigned took_part, int from, int step) const {
    const bool whole = first == 0 && last == blocks;
    const int slot = 2 * blockIdx.x + (first == 0);
    const int columns = min(N, p.group - first_column(of_row));
    const std::int64_t query = first_query(row, of_row);
    const std::uint32_t buffers = merge_buffer - warp * R::kMergeBytes;
#pragma unroll 2
    for (int i = from; i < columns * (D / 4); i += step) {
      const int column = i / (D / 4), channel = i % (D / 4) * 4;
      float weight[kWarps], top = -INFINITY, weight_sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        weight[w] = took_part >> w & 1 ? book.maximum[w][column] : -INFINITY;
        top = fmaxf(top, weight[w]);
      }
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (!(took_part >> w & 1)) continue;  // its buffer may hold anything
        const float f = exp2_approx(weight[w] - top);
        const float4 x = load_shared_f32x4(buffers + w * R::kMergeBytes +
                                           (column * R::kColumnStride + channel) * 4);
        total.x += f * x.x, total.y += f * x.y, total.z += f * x.z, total.w += f * x.w;
        weight_sum += f * book.sum[w][column];
      }
      if (whole) {
        write_result(query + column, channel, total, top, weight_sum);
      } else {
        const std::int64_t at = static_cast<std::int64_t>(slot) * N + column;
        publish(p.partials + at * D + channel, total);
        if (channel == 0) publish(p.states + at, make_float2(top, weight_sum));
      }
    }
  }

  // Sums the partials of CTAs [first, last] that share a pair: half-warps take every other share,
  // which keeps enough loads in flight for the 17 or so shares of one long request.
  __device__ void join_shares(std::int64_t query, int columns, int first, int last) {
    // One warp waits for the last of them, and gently: polling takes bandwidth from those who work.
    if (warp == 0)
      for (int cta = first + lane; cta <= last; cta += 32) {
        const std::int64_t at = static_cast<std::int64_t>(2 * cta + (cta == first)) * N;
        while (!is_present(load_published(p.states + at).y)) __nanosleep(100);
      }
    __syncthreads();
    constexpr int kBatch = 10;
    const int half = lane / 16;
    // The bound is a multiple of 16, so a warp stays together.
#pragma unroll 1
    for (int i = warp * 16 + lane % 16; i < columns * (D / 4); i += R::kThreads / 2) {
      const int column = i / (D / 4), channel = i % (D / 4) * 4;
      float top = -INFINITY, weight_sum = 0.f;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int base = first + half; base <= last; base += 2 * kBatch) {
        float2 state[kBatch];
        float4 x[kBatch];
        bool complete;
        do {
          complete = true;
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            // Past the end the first one again, which this thread alone makes absent.
            const int cta = base + 2 * b <= last ? base + 2 * b : base;
            const std::int64_t at = static_cast<std::int64_t>(2 * cta + (cta == first)) * N +
                                    column;
            state[b] = load_published(p.states + at);
            x[b] = load_published(p.partials + at * D + channel);
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b)
            complete = complete && is_present(state[b].x) && is_present(state[b].y) &&
                       is_present(x[b].x) && is_present(x[b].y) && is_present(x[b].z) &&
                       is_present(x[b].w);
        } while (!complete);
        float higher = top;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) higher = fmaxf(higher, state[b].x);
        const float g = exp2_approx(top - higher);
        total.x *= g, total.y *= g, total.z *= g, total.w *= g, weight_sum *= g;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const float f = base + 2 * b <= last ? exp2_approx(state[b].x - higher) : 0.f;
          total.x += f * x[b].x, total.y += f * x[b].y;
          total.z += f * x[b].z, total.w += f * x[b].w;
          weight_sum += f * state[b].y;
        }
        top = higher;
        for (int cta = base; cta <= min(last, base + 2 * kBatch - 2); cta += 2) {
          const std::int64_t at = static_cast<std::int64_t>(2 * cta + (cta == first)) * N + column;
          const float absent = __uint_as_float(kAbsent);
          store_relaxed(p.partials + at * D + channel,
                        make_float4(absent, absent, absent, absent));
        }
      }
      // A shared pair has two shares at least, so both halves have a finite maximum.
      const float higher = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      const float f = exp2_approx(top - higher);
      float* const values[5] = {&total.x, &total.y, &total.z, &total.w, &weight_sum};
#pragma unroll
      for (int v = 0; v < 5; ++v) {
        *values[v] *= f;
        *values[v] += __shfl_xor_sync(~0u, *values[v], 16);
      }
      if (half == 0) write_result(query + column, channel, total, higher, weight_sum);
    }
    __syncthreads();  // every thread has read the states
    for (int i = threadIdx.x; i < columns * (last - first + 1); i += R::kThreads) {
      const int cta = first + i / columns;
      const float absent = __uint_as_float(kAbsent);
      store_relaxed(p.states + static_cast<std::int64_t>(2 * cta + (cta == first)) * N + i % columns,
                    make_float2(absent, absent));
    }
  }

  static __device__ __forceinline__ bool is_present(float x) {
    return __float_as_uint(x) != kAbsent;
  }
  static __device__ __forceinline__ float present(float x) {
    return is_present(x) ? x : __uint_as_float(0x7fffffffu);  // a NaN stays one
  }
  static __device__ __forceinline__ void publish(float* to, float4 x) {
    store_relaxed(to, make_float4(present(x.x), present(x.y), present(x.z), present(x.w)));
  }
  static __device__ __forceinline__ void publish(float2* to, float2 x) {
    store_relaxed(to, make_float2(present(x.x), present(x.y)));
  }
  static __device__ __forceinline__ float4 load_published(const float* from) {
    return load_relaxed(reinterpret_cast<const float4*>(from));
  }
  static __device__ __forceinline__ float2 load_published(const float2* from) {
    return load_relaxed(from);
  }

  __device__ void write_result(std::int64_t query, int channel, float4 total, float top,
                               float weight_sum) const {
    const float f = 1.f / weight_sum;
    const uint2 x = make_uint2(pack_pair<T>(total.x * f, total.y * f),
                               pack_pair<T>(total.z * f, total.w * f));
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + query * D + channel) = x;
    if (channel == 0) p.lse[query] = (top + log2f(weight_sum)) * kLn2;
  }

  // Rows without tokens, such as the padding of a captured batch, get 0 and -inf.
  __device__ void clear_empty_rows() const {
    const int per_row = p.heads * p.group;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
      if (__ldg(p.seq_lens + row) > 0) continue;
      uint4* out = reinterpret_cast<uint4*>(static_cast<T*>(p.out)) +
                   static_cast<std::int64_t>(row) * per_row * (D / 8);
#pragma unroll 1
      for (int i = threadIdx.x; i < per_row * (D / 8); i += R::kThreads)
        out[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int i = threadIdx.x; i < per_row; i += R::kThreads)
        p.lse[static_cast<std::int64_t>(row) * per_row + i] = -INFINITY;
    }
  }

  __device__ void run() {
    if constexpr (kBulk) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      if constexpr (R::kOverlaps) allow_next_kernel();
      policy = evict_first_policy();
      if (lane == 0) {
        for (int i = 0; i < kUnits; ++i) barrier_init(smem_address(&book.barriers[warp][i]), 1);
        barrier_init_visible();
      }
      __syncwarp();
#endif
    }
    static_assert(kWarps * 32 <= kFirstPages);
    const int first_page = __ldg(p.first_pages + blockIdx.x * kFirstPages + warp + kWarps * lane);
    begin = load_boundary(blockIdx.x), end = load_boundary(blockIdx.x + 1);
    if (threadIdx.x == 0) book.arrived = 0, book.merged = 0;
    share = end.position - begin.position;
    items = share > warp ? (share - warp + kWarps - 1) / kWarps : 0;
    if (items > 0) begin_lookups(first_page);
    __syncthreads();  // while the refs are on their way

    int row = begin.row, of_row = begin.of_row, block = begin.block;
    int item = 0, done = 0, count = 0;
    int merges = R::kOverlaps ? -1 : 0;  // -1: the kernels in front may not have ended
    int length = begin.length, length_row = row, next_length = 0;  // of length_row + 1
    bool took_part = false, cleared = false;
    for (;;) {
      const bool may_load = !R::kOverlaps || merges >= 0;
      if (count == 0 && done < share && may_load) {  // a new pair
        if (row != length_row) {
          length = row == length_row + 1 ? next_length : __ldg(p.seq_lens + row);
          length_row = row;
          next_length = row + 1 < p.rows ? __ldg(p.seq_lens + row + 1) : 0;
        }
        count = min(blocks_of(length) - block, share - done);
        if (count == 0) {  // an empty row
          ++row, of_row = 0;
          continue;
        }
        took_part = warp + kWarps * item < done + count;
        // Loads before fills: behind them they would wait for all the bytes in flight.
        if (took_part) begin_pair(row, of_row, done + count < share);
        if (done == 0 && row + 1 < p.rows) next_length = __ldg(p.seq_lens + row + 1);
      }
      // Here, and after K, the units that were read are filled again.
      fill_first(!R::kOverlaps || merges >= 0);
      if (filling >= 32 * (looked - 1) && 32 * looked < items) look_ahead();
      if constexpr (R::kOverlaps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (merges < 0) {  // from here on all may be read and written
          wait_for_kernels_before();
          merges = 0;
          continue;
        }
#endif
      }
      if (!cleared) {
        clear_empty_rows();
        cleared = true;
      }
      if (done >= share) break;
      const int at = warp + kWarps * item;  // of the share
      if (at < done + count) {
        attend_block(item, min(length - (block + at - done) * kBlockSize, kBlockSize));
        ++item;
        if (at + kWarps < done + count) continue;
      }
      const int last = block + count;
      if (took_part)
        finish_pair(row, of_row, block, last, blocks_of(length), done, merges);
      else
        merges += count > 1;
      if (done + count == share) merge_last(row, of_row, block, last, blocks_of(length), done);
      done += count, count = 0, block = 0;
      if (++of_row == pairs_per_row()) ++row, of_row = 0;
    }
    if constexpr (!kBulk) wait_copies<0>();
    // Nobody polls before all warps are done: it would hinder them.
    if (begin.block > 0 && begin.last_cta == static_cast<int>(blockIdx.x))
      join_shares(first_query(begin.row, begin.of_row),
                  min(N, p.group - first_column(begin.of_row)), begin.first_cta, begin.last_cta);
  }
};

template <int D, int N, typename T, bool kBulk>
__global__ void __launch_bounds__(Ring<D, N, kBulk>::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ CUtensorMap dense_map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DecodeKernel<D, N, T, kBulk> kernel(params, &dense_map, shared);
  kernel.run();
}

// --- launchers ----------------------------------------------------------------------------------

// Dense blocks of the arena as [D / 64][rows][64]; a box is half a block, one swizzled tile for
// each 64 channels. No L2 promotion: it costs 6 % of the bandwidth (NOTES.md).
cudaError_t make_dense_map(CUtensorMap* map, const void* arena, std::int64_t arena_bytes, int D) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (encode == nullptr) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }
  const cuuint64_t row_bytes = D * 2;
  const cuuint64_t size[3] = {64, arena_bytes / row_bytes, static_cast<cuuint64_t>(D / 64)};
  const cuuint64_t stride[2] = {row_bytes, 128};
  const cuuint32_t box[3] = {64, kHalf, static_cast<cuuint32_t>(D / 64)};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(arena), size, stride, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int D, int N, typename T, bool kBulk>
cudaError_t launch(const DecodeParams& params, const CUtensorMap& map, int ctas,
                   cudaStream_t stream) {
  constexpr int bytes = Ring<D, N, kBulk>::kBytes;
  static_assert(bytes <= (kBulk ? 227 : 99) * 1024);
  const auto kernel = decode_kernel<D, N, T, kBulk>;
  static bool ready[64] = {};  // for each device: the attribute sticks to its context
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!ready[device % 64]) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && kBulk)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    ready[device % 64] = true;
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas), config.blockDim = dim3(Ring<D, N, kBulk>::kThreads);
  config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &overlap, config.numAttrs = Ring<D, N, kBulk>::kOverlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params, map);
}

#if defined(HS_SMOKE)
constexpr bool kSmoke = true;  // one instance, to see that the source compiles for a target
#else
constexpr bool kSmoke = false;
#endif
#if defined(HS_AMPERE_COPIES)
constexpr bool kBulkCopies = false;
#else
constexpr bool kBulkCopies = true;
#endif

template <int D, typename T>
cudaError_t launch_columns(int columns, const DecodeParams& params, const CUtensorMap& map,
                           int ctas, cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch<D, 8, T, kBulkCopies>(params, map, ctas, stream);
    case 16:
      if constexpr (D <= 128 && !kSmoke)
        return launch<D, 16, T, kBulkCopies>(params, map, ctas, stream);
      break;
    case 24:
      if constexpr (D <= 128 && !kSmoke)
        return launch<D, 24, T, kBulkCopies>(params, map, ctas, stream);
      break;
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_head_dim(int D, int columns, const DecodeParams& params, const CUtensorMap& map,
                            int ctas, cudaStream_t stream) {
  switch (D) {
    case 64:
      if constexpr (!kSmoke) return launch_columns<64, T>(columns, params, map, ctas, stream);
      break;
    case 128:
      return launch_columns<128, T>(columns, params, map, ctas, stream);
    case 256:
      if constexpr (!kSmoke) return launch_columns<256, T>(columns, params, map, ctas, stream);
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace hs

// Columns of an MMA that `group` query heads for each kv head are packed into.
HS_EXPORT int hs_decode_columns(int head_dim, int group) {
  if (group <= 8 || head_dim > 128) return 8;
  return group <= 16 ? 16 : 24;
}

// Cuts the batch into shares of equal bytes. boundaries int32 [ctas + 1, 8], costs int32 [R],
// first_pages int32 [ctas, 256].
HS_EXPORT int hs_decode_plan(const int* refs, const int* page_table, const int* seq_lens,
                             int* costs, int* boundaries, int* first_pages, int rows, int pages,
                             int heads, int pairs_per_row, int table_stride, int ctas,
                             void* stream) {
  using namespace hs;
  if (rows == 0) return cudaSuccess;
  const PlanParams params = {refs,  page_table, seq_lens,      costs,
                             reinterpret_cast<Boundary*>(boundaries),
                             first_pages,
                             rows,  pages,      heads,         pairs_per_row,
                             table_stride, ctas};
  plan_costs<<<rows, 256, 0, static_cast<cudaStream_t>(stream)>>>(params);
  const int bytes = (rows + 1) * 12 + (ctas + 1) * 8 + 8;
  if (bytes > 48 * 1024) return cudaErrorInvalidValue;
  plan_boundaries<<<1, kPlanThreads, bytes, static_cast<cudaStream_t>(stream)>>>(params);
  plan_blocks<<<ctas, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

// All bits of partials and states must be set before the first launch; every launch leaves them so.
HS_EXPORT int hs_decode_attention(int dtype, int head_dim, const void* q, const void* arena,
                                  long long arena_bytes, const int* refs, const int* page_table,
                                  const int* seq_lens, const int* boundaries,
                                  const int* first_pages, const void* means, float* partials,
                                  float* states, void* out, float* lse, int rows, int pages,
                                  int heads, int group, int table_stride, int ctas, float scale,
                                  void* stream) {
  using namespace hs;
  if (rows == 0) return cudaSuccess;
  const int columns = hs_decode_columns(head_dim, group);
  const DecodeParams params = {q,
                               static_cast<const std::uint8_t*>(arena),
                               refs,
                               page_table,
                               seq_lens,
                               reinterpret_cast<const Boundary*>(boundaries),
                               first_pages,
                               means,
                               partials,
                               reinterpret_cast<float2*>(states),
                               out,
                               lse,
                               rows,
                               pages,
                               heads,
                               group,
                               (group + columns - 1) / columns,
                               table_stride,
                               scale * kLog2E};
  CUtensorMap map = {};
  if (kBulkCopies) {
    const cudaError_t error = make_dense_map(&map, arena, arena_bytes, head_dim);
    if (error != cudaSuccess) return error;
  }
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (dtype == kBFloat16)
    return launch_head_dim<__nv_bfloat16>(head_dim, columns, params, map, ctas, s);
  if constexpr (!kSmoke)
    if (dtype == kFloat16) return launch_head_dim<__half>(head_dim, columns, params, map, ctas, s);
  return cudaErrorInvalidValue;
}

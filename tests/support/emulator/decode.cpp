// Decode on the emulator: the plan's kernels one CTA at a time, attention with all CTAs at once.
#include "device.h"
#include "decode.inc"  // csrc/decode.cu without its launchers

namespace {

template <int D, int N, typename T, bool kBulk>
void attend(const hs::DecodeParams& params, int ctas) {
  using Ring = hs::Ring<D, N, kBulk>;
  const hs::DenseMap source = {params.arena, D};
  CUtensorMap map = {};
  std::memcpy(&map, &source, sizeof(source));
  launch_grid({static_cast<unsigned>(ctas)}, Ring::kThreads, Ring::kBytes, true,
              [&] { hs::decode_kernel<D, N, T, kBulk>(params, map); });
}

template <bool kBulk>
bool attend_any(int head_dim, int columns, const hs::DecodeParams& p, int ctas) {
  if (head_dim == 128 && columns == 8) {
    attend<128, 8, __nv_bfloat16, kBulk>(p, ctas);
  } else if (head_dim == 128 && columns == 24) {
    attend<128, 24, __nv_bfloat16, kBulk>(p, ctas);
  } else if (head_dim == 64 && columns == 16) {
    attend<64, 16, __half, kBulk>(p, ctas);
  } else if (head_dim == 256 && columns == 8) {
    attend<256, 8, __half, kBulk>(p, ctas);
  } else {
    return false;
  }
  return true;
}

}  // namespace

extern "C" void plan_decode(const int* refs, const int* page_table, const int* seq_lens, int* costs,
                            int* boundaries, int* first_pages, int rows, int pages, int heads,
                            int pairs_per_row, int table_stride, int ctas) {
  using namespace hs;
  const PlanParams p = {refs,  page_table, seq_lens,      costs,
                        reinterpret_cast<Boundary*>(boundaries), first_pages,
                        rows,  pages,      heads,         pairs_per_row,
                        table_stride, ctas};
  launch_grid({static_cast<unsigned>(rows)}, 256, 0, false, [&] { plan_costs(p); });
  const std::size_t bytes = (rows + 1) * 12 + (ctas + 1) * 8 + 8;
  launch_grid({1}, kPlanThreads, bytes, false, [&] { plan_boundaries(p); });
  launch_grid({static_cast<unsigned>(ctas)}, kPlanThreads, 0, false, [&] { plan_blocks(p); });
}

// Gives false for a (head dim, columns) that has no instance here: bf16 at 128, f16 elsewhere.
// `bulk`: with the copies of Hopper, else of Ampere. With `before` a kernel in front changes arena
// [arena_bytes] to `arena_after` and q [q_bytes] to `q_after`.
extern "C" bool decode_attention(unsigned seed, bool bulk, int head_dim, int columns, const void* q,
                                 const std::uint8_t* arena, const int* refs, const int* page_table,
                                 const int* seq_lens, const int* boundaries,
                                 const int* first_pages, const void* means, float* partials,
                                 float* states, void* out, float* lse, int rows, int pages,
                                 int heads, int group, int table_stride, int ctas, float scale,
                                 bool before, const void* q_after, long long q_bytes,
                                 const void* arena_after, long long arena_bytes) {
  using namespace hs;
  chance.seed(seed);
  kernel_before = nullptr;
  if (before)
    kernel_before = [=] {
      const long long values = static_cast<long long>(rows) * heads * group;
      for (long long i = 0; i < values; ++i)
        if (lse[i] == lse[i]) fail("written before the kernel in front had ended");
      std::memcpy(const_cast<void*>(q), q_after, q_bytes);
      std::memcpy(const_cast<std::uint8_t*>(arena), arena_after, arena_bytes);
    };
  const DecodeParams p = {q,
                          arena,
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
  return bulk ? attend_any<true>(head_dim, columns, p, ctas)
              : attend_any<false>(head_dim, columns, p, ctas);
}

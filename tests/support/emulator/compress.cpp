// Compression on the emulator, one CTA at a time.
#include "device.h"
#include "compress.inc"  // csrc/compress.cu without its launchers

namespace {

using hs::Rule, hs::Side, hs::StoreParams;

template <int D, Side S, typename T, Rule kRule, bool kCentered>
void store(const StoreParams& p) {
  constexpr int kBlocks = hs::Stage<D, S>::kBlocks;
  const Dimensions grid = {static_cast<unsigned>((p.blocks_count * p.heads + kBlocks - 1) / kBlocks)};
  launch_grid(grid, hs::kStoreThreads, 0, false, [&] {
    if (p.losses != nullptr) {
      hs::store_kernel<D, S, T, kRule, true, kCentered>(p);
    } else {
      hs::store_kernel<D, S, T, kRule, false, kCentered>(p);
    }
  });
}

template <int D, typename T>
void store_any(int side, int rule, bool centered, const StoreParams& p) {
  if (side == 0) {
    if (rule == hs::kMagnitude) store<D, Side::K, T, hs::kMagnitude, false>(p);
    if (rule == hs::kWeighted) store<D, Side::K, T, hs::kWeighted, false>(p);
    if (rule == hs::kGiven) store<D, Side::K, T, hs::kGiven, false>(p);
  } else if (centered) {
    if (rule == hs::kMagnitude) store<D, Side::V, T, hs::kMagnitude, true>(p);
    if (rule == hs::kByToken) store<D, Side::V, T, hs::kByToken, true>(p);
  } else {
    if (rule == hs::kMagnitude) store<D, Side::V, T, hs::kMagnitude, false>(p);
    if (rule == hs::kGiven) store<D, Side::V, T, hs::kGiven, false>(p);
    if (rule == hs::kByToken) store<D, Side::V, T, hs::kByToken, false>(p);
  }
}

template <int D, typename T>
void weigh(const hs::TokenWeightParams& p, int blocks_count) {
  const int rows = blocks_count * p.heads * hs::kBlockSize;
  launch_grid({static_cast<unsigned>(rows * (D / 8) / hs::kTokenWeightThreads)},
              hs::kTokenWeightThreads, 0, false, [&] { hs::token_weights_kernel<D, T>(p); });
}

}  // namespace

// bf16 at 128, f16 elsewhere. The arguments are those of hs_store_blocks.
extern "C" void store_blocks(int head_dim, int side, int rule, const void* blocks,
                             long long block_stride, long long head_stride, long long token_stride,
                             const std::uint8_t* keep, const float* weights, std::uint8_t* arena,
                             const int* refs, bool centered, void* means, float* losses,
                             int blocks_count, int heads, int layers) {
  const StoreParams p = {blocks, block_stride, head_stride, token_stride, keep,   weights,
                         arena,  refs,         1,           means,        losses, blocks_count,
                         heads,  blocks_count / layers};
  if (head_dim == 64) store_any<64, __half>(side, rule, centered, p);
  if (head_dim == 128) store_any<128, __nv_bfloat16>(side, rule, centered, p);
  if (head_dim == 256) store_any<256, __half>(side, rule, centered, p);
}

extern "C" void token_weights(int head_dim, const void* keys, long long block_stride,
                              long long head_stride, long long token_stride, const float* query,
                              float* weights, int blocks_count, int heads, int layers) {
  const hs::TokenWeightParams p = {keys,  block_stride, head_stride, token_stride,
                                   query, weights,      heads,       blocks_count / layers};
  if (head_dim == 64) weigh<64, __half>(p, blocks_count);
  if (head_dim == 128) weigh<128, __nv_bfloat16>(p, blocks_count);
  if (head_dim == 256) weigh<256, __half>(p, blocks_count);
}

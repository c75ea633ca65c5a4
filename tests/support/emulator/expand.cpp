// The unpacking of blocks on the emulator, one CTA at a time.
#include "device.h"
#include "expand.inc"  // csrc/expand.cu without its launchers

namespace {

template <int D, typename T>
void expand(const hs::ExpandParams& p) {
  const Dimensions grid = {static_cast<unsigned>(p.blocks), 2 * static_cast<unsigned>(p.heads)};
  launch_grid(grid, hs::kExpandThreads, 0, false, [&] { hs::expand_kernel<D, T>(p); });
}

}  // namespace

// bf16 at 128, f16 elsewhere. The arguments are those of hs_expand_blocks.
extern "C" void expand_blocks(int head_dim, const std::uint8_t* arena, const int* refs,
                              const void* means, std::uint8_t* out, int blocks, int heads) {
  const hs::ExpandParams p = {arena, refs, means, out, blocks, heads};
  if (head_dim == 64) expand<64, __half>(p);
  if (head_dim == 128) expand<128, __nv_bfloat16>(p);
  if (head_dim == 256) expand<256, __half>(p);
}

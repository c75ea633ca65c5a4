// K compensation on the emulator, one CTA at a time.
#include "device.h"
#include "compensate.inc"  // csrc/compensate.cu without its launchers

namespace {

template <int D, typename T>
void compensate(const hs::CompensateParams& p) {
  launch_grid({2, static_cast<unsigned>(p.layers * p.heads)}, hs::kStoreThreads,
              sizeof(typename hs::Plan<D>::Shared), false,
              [&] { hs::compensate_kernel<D, T>(p); });
}

}  // namespace

// bf16 at 128, f16 elsewhere. The arguments are those of hs_store_compensated.
extern "C" void store_compensated(int head_dim, const void* blocks, long long block_stride,
                                  long long head_stride, long long token_stride,
                                  const float* weights, const float* factor, std::uint8_t* arena,
                                  const int* refs, int blocks_count, int heads, int layers) {
  const hs::CompensateParams p = {blocks, block_stride, head_stride, token_stride, weights,
                                  factor, arena,        refs,        blocks_count / layers, heads, layers};
  if (head_dim == 64) compensate<64, __half>(p);
  if (head_dim == 128) compensate<128, __nv_bfloat16>(p);
  if (head_dim == 256) compensate<256, __half>(p);
}

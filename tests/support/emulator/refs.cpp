// The storing of a decode step's tokens on the emulator.
#include "device.h"
#include "refs.inc"  // csrc/refs.cu without its launchers

// The arguments are those of hs_store_tokens.
extern "C" void store_tokens(const std::uint8_t* k, long long k_token, long long k_head,
                             const std::uint8_t* v, long long v_token, long long v_head,
                             const std::uint8_t* q, long long q_token, long long q_head,
                             std::uint8_t* q_out, std::uint8_t* arena, const int* refs,
                             long long side_refs, const std::int64_t* locations,
                             const int* permutation, int count, int heads, int q_heads,
                             int row_bytes) {
  const int rows = 2 * heads + (permutation != nullptr ? q_heads : 0);
  launch_grid({static_cast<unsigned>((count * rows * 32 + 255) / 256)}, 256, 0, false, [&] {
    hs::store_tokens_kernel({k, k_token, k_head}, {v, v_token, v_head}, {q, q_token, q_head}, q_out,
                            arena, refs, side_refs, locations, permutation, count, heads, q_heads,
                            row_bytes);
  });
}

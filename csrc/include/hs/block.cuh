// Where a block lies in the arena. Its layout is the generated block_format.h.
#pragma once

#include <cstdint>

#include "hs/block_format.h"

namespace hs {

template <int D>
using Block16 = BlockFormat<D, 2>;  // blocks of f16 or bf16

template <int D>
__device__ __forceinline__ std::uint8_t* sparse_block(const std::uint8_t* arena, int slot,
                                                      int heads, int head) {
  return const_cast<std::uint8_t*>(arena) +
         (static_cast<std::int64_t>(slot) * heads + head) * Block16<D>::kSparseBytes;
}

template <int D>
__device__ __forceinline__ std::uint8_t* dense_block(const std::uint8_t* arena, int slot,
                                                     int heads, int head) {
  return const_cast<std::uint8_t*>(arena) +
         (static_cast<std::int64_t>(slot) * heads + head) * Block16<D>::kDenseBytes;
}

}  // namespace hs

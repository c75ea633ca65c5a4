// A pruned block on its way from natural order to the order of MMA fragments, in shared memory.
#pragma once

#include <cstdint>

#include "hs/block.cuh"

namespace hs {

constexpr int kStoreThreads = 128;

template <int D, Side S>
struct alignas(16) Stage {
  using Op = Operand<D, S>;
  static constexpr int kThreads = D / 2;  // of one block
  static constexpr int kBlocks = kStoreThreads / kThreads;
  static constexpr int kGroups = Op::kDepth / kGroup;  // of a row
  // Rows are 4 words apart beyond their length, and eight rows another 4, so that neither the
  // writes by group nor the reads by fragment meet in a bank.
  static constexpr int kStride = kGroups + 4;
  static constexpr int kWords = Op::kRows * kStride + Op::kRows / 8 * 4;
  std::uint32_t pairs[kWords];
  std::uint16_t nibbles[Op::kRows][kGroups / 4];
  double loss[kThreads / 32];  // of warps
  float sums[S == Side::V ? 4 : 1][S == Side::V ? D : 1];  // of quarters, for the means

  static __device__ int place(int row, int group) {
    return row * kStride + row / 8 * 4 + group;
  }
};

__device__ __forceinline__ uint4 load_16(const void* p) {
  return __ldg(static_cast<const uint4*>(p));
}

// Writes the staged block in fragment order: metadata, then nonzeros.
template <int D, Side S>
__device__ void write_sparse(const Stage<D, S>& stage, std::uint8_t* block, int t) {
  using Op = Operand<D, S>;
  const int lane = t % 32, warp = t / 32, g = lane / 4, q = lane % 4;
  constexpr int kWarps = Stage<D, S>::kThreads / 32;
  for (int v = warp; v < Op::kLaneWords; v += kWarps) {
    std::uint32_t word[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // The inverse of Operand::word: which strip and pair of steps word 4 v + c belongs to.
      const int lin = 4 * v + c, rest = lin % Op::kLaneWords;
      const int strip = lin / Op::kLaneWords + 4 * (rest / (Op::kSteps / 2));
      const int steps = rest % (Op::kSteps / 2);
      const int row = strip * kStrip + g;
      word[c] = stage.nibbles[row][4 * steps + q] |
                std::uint32_t{stage.nibbles[row + 8][4 * steps + q]} << 16;
    }
    *reinterpret_cast<uint4*>(block + (v * 32 + lane) * 16) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
  std::uint8_t* nonzeros = block + Block16<D>::kMetadataBytes;
#pragma unroll 4
  for (int f = warp; f < Op::kStrips * Op::kSteps; f += kWarps) {
    const int row = f / Op::kSteps * kStrip + g, group = f % Op::kSteps * 8 + q;
    *reinterpret_cast<uint4*>(nonzeros + (f * 32 + lane) * 16) = make_uint4(
        stage.pairs[stage.place(row, group)], stage.pairs[stage.place(row + 8, group)],
        stage.pairs[stage.place(row, group + 4)], stage.pairs[stage.place(row + 8, group + 4)]);
  }
}

}  // namespace hs

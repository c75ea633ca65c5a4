// Generated from kernels/hs_kernels/block_format.py, which explains it; do not edit.
// To write it anew, from the root of the repository (PYTHONPATH=kernels):
//   python -c "import hs_kernels.block_format as f; print(f.render_header(), end='')" > THIS
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HS_HOST_DEVICE __host__ __device__
#else
#define HS_HOST_DEVICE
#endif

namespace hs {

enum class Side : int { K = 0, V = 1 };
enum class BlockKind : int { DENSE = 0, SPARSE_2_4 = 1 };

inline constexpr int kBlockSize = 64;
inline constexpr int kGroup = 4;  // elements of a 2:4 group
inline constexpr int kKept = 2;
inline constexpr int kStrip = 16;  // rows of one MMA instruction
inline constexpr int kStep = 32;   // depth of one sparse MMA instruction
inline constexpr int kLanes = 32;
inline constexpr std::uint32_t kDummyMetadata = 0x44444444u;  // what ref 0 reads
inline constexpr std::int32_t kDummyRef = 0;

// The sign of a ref carries the kind; 0, the dummy, is read as sparse slot 0.
HS_HOST_DEVICE constexpr bool is_dense(std::int32_t ref) { return ref > 0; }
HS_HOST_DEVICE constexpr std::int32_t slot_of(std::int32_t ref) { return ref > 0 ? ref : -ref; }

HS_HOST_DEVICE constexpr std::int64_t gcd(std::int64_t a, std::int64_t b) {
  return b == 0 ? a : gcd(b, a % b);
}

// One K or V block of one kv head, of elements of ItemSize bytes.
template <int HeadDim, int ItemSize>
struct BlockFormat {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kItemSize = ItemSize;
  static constexpr int kElements = kBlockSize * HeadDim;
  static constexpr int kDenseBytes = kElements * ItemSize;
  static constexpr int kMetadataBytes = kElements / kGroup / 2;
  static constexpr int kNonzeroBytes = kElements * kKept / kGroup * ItemSize;
  static constexpr int kSparseBytes = kMetadataBytes + kNonzeroBytes;
  static constexpr std::int64_t kSuperblockBytes =
      std::int64_t{kDenseBytes} / gcd(kDenseBytes, kSparseBytes) * kSparseBytes;
  static constexpr int kDensePerSuperblock = static_cast<int>(kSuperblockBytes / kDenseBytes);
  static constexpr int kSparsePerSuperblock = static_cast<int>(kSuperblockBytes / kSparseBytes);
};

// The sparse operand of a block: Rows x Depth, 2:4 along Depth.
template <int HeadDim, Side S>
struct Operand {
  static constexpr int kRows = S == Side::K ? kBlockSize : HeadDim;
  static constexpr int kDepth = S == Side::K ? HeadDim : kBlockSize;
  static constexpr int kStrips = kRows / kStrip;
  static constexpr int kSteps = kDepth / kStep;
  static constexpr int kLaneWords = HeadDim / kBlockSize;  // metadata words of a lane and warp

  // Nonzero elements of one strip and step: 8 for each lane, consecutive.
  HS_HOST_DEVICE static constexpr int fragment(int strip, int step, int lane) {
    return ((strip * kSteps + step) * kLanes + lane) * 8;
  }
  // Nonzero element of compressed column cc (0 .. kDepth / 2) of a row.
  HS_HOST_DEVICE static constexpr int nonzero(int row, int cc) {
    const int r = row % kStrip, c = cc % (kStep / 2);
    const int lane = 4 * (r % 8) + c % 8 / 2;
    return fragment(row / kStrip, cc / (kStep / 2), lane) + c % 2 + 2 * (r / 8) + 4 * (c / 8);
  }
  // Metadata word of a lane, for steps 2 * (step / 2) and 2 * (step / 2) + 1 of a strip; the
  // sparsity selector of the instruction is step % 2.
  HS_HOST_DEVICE static constexpr int word(int strip, int step, int lane) {
    const int lin = strip % 4 * kLaneWords + strip / 4 * (kSteps / 2) + step / 2;
    return lin / 4 * 128 + lane * 4 + lin % 4;
  }
  // Metadata word and lowest bit of a group (0 .. kDepth / 4) of a row.
  HS_HOST_DEVICE static constexpr int group_word(int row, int group) {
    const int step = group / 8, j = group % 8;
    return word(row / kStrip, step, 4 * (row % 8) + 2 * (step % 2) + j / 4);
  }
  HS_HOST_DEVICE static constexpr int group_shift(int row, int group) {
    return 16 * (row / 8 % 2) + 4 * (group % 4);
  }
};

static_assert(BlockFormat<64, 2>::kDenseBytes == 8192);
static_assert(BlockFormat<64, 2>::kSparseBytes == 4608);
static_assert(BlockFormat<64, 2>::kSuperblockBytes == 73728);
static_assert(BlockFormat<64, 4>::kDenseBytes == 16384);
static_assert(BlockFormat<64, 4>::kSparseBytes == 8704);
static_assert(BlockFormat<64, 4>::kSuperblockBytes == 278528);
static_assert(BlockFormat<128, 2>::kDenseBytes == 16384);
static_assert(BlockFormat<128, 2>::kSparseBytes == 9216);
static_assert(BlockFormat<128, 2>::kSuperblockBytes == 147456);
static_assert(BlockFormat<128, 4>::kDenseBytes == 32768);
static_assert(BlockFormat<128, 4>::kSparseBytes == 17408);
static_assert(BlockFormat<128, 4>::kSuperblockBytes == 557056);
static_assert(BlockFormat<256, 2>::kDenseBytes == 32768);
static_assert(BlockFormat<256, 2>::kSparseBytes == 18432);
static_assert(BlockFormat<256, 2>::kSuperblockBytes == 294912);
static_assert(BlockFormat<256, 4>::kDenseBytes == 65536);
static_assert(BlockFormat<256, 4>::kSparseBytes == 34816);
static_assert(BlockFormat<256, 4>::kSuperblockBytes == 1114112);

}  // namespace hs

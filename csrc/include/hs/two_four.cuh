// One 2:4 group: which two of four 16-bit elements stay, and how they are stored.
//
// The tie rule lives here and in reference.py: the lower index wins. Scores are compared as
// unsigned integers, which orders magnitudes as their values and puts NaN on top.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace hs {

// Two elements of 16 bits in one register, the earlier one in the low half.
struct Group {
  std::uint32_t low, high;  // elements 0, 1 and 2, 3
};

struct Kept {
  std::uint32_t pair;    // the two values, the earlier one in the low half
  std::uint32_t nibble;  // first index | second index << 2
  std::uint32_t mask;    // bit i: element i is kept
};

template <typename T>
__device__ __forceinline__ float to_float(std::uint32_t bits) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(bits << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
}

__device__ __forceinline__ std::uint32_t element(Group g, int i) {
  const std::uint32_t word = i < 2 ? g.low : g.high;
  return i % 2 ? word >> 16 : word & 0xffffu;
}

__device__ __forceinline__ std::uint32_t pick_pair(Group g, std::uint32_t first,
                                                   std::uint32_t second) {
  return __byte_perm(g.low, g.high, (0x10 + 0x22 * first) | (0x10 + 0x22 * second) << 8);
}

// The places of the two highest of four scores, in order.
__device__ __forceinline__ void two_highest(const std::uint32_t (&score)[4], std::uint32_t& first,
                                            std::uint32_t& second) {
  const bool a = score[1] > score[0], b = score[3] > score[2];
  const std::uint32_t high01 = max(score[0], score[1]), low01 = min(score[0], score[1]);
  const std::uint32_t high23 = max(score[2], score[3]), low23 = min(score[2], score[3]);
  const std::uint32_t best01 = a, other01 = !a, best23 = 2u + b, other23 = 3u - b;
  // Without a strict win of the later element the earlier one stands.
  const bool c = high23 > high01;
  const std::uint32_t x = c ? best23 : best01;
  const std::uint32_t y = c ? (low23 > high01 ? other23 : best01)
                            : (high23 > low01 ? best23 : other01);
  first = min(x, y), second = max(x, y);
}

__device__ __forceinline__ Kept keep_two(Group g, const std::uint32_t (&score)[4]) {
  std::uint32_t first, second;
  two_highest(score, first, second);
  return {pick_pair(g, first, second), first | second << 2, 1u << first | 1u << second};
}

// The two of largest magnitude, and the bits of the other two. The index rides in the low bits of
// the compared keys, reversed, so that keys differ and the lower index wins a tie.
__device__ __forceinline__ Kept keep_two_largest(Group g, std::uint32_t (&dropped)[2]) {
  constexpr std::uint32_t kMagnitude = 0x7fffu << 2;
  const std::uint32_t k0 = (g.low << 2 & kMagnitude) | 3u, k1 = (g.low >> 14 & kMagnitude) | 2u;
  const std::uint32_t k2 = (g.high << 2 & kMagnitude) | 1u, k3 = g.high >> 14 & kMagnitude;
  const std::uint32_t high01 = max(k0, k1), low01 = min(k0, k1);
  const std::uint32_t high23 = max(k2, k3), low23 = min(k2, k3);
  // Sorted: the larger high, then these two in some order, then the smaller low.
  const std::uint32_t lower_high = min(high01, high23), higher_low = max(low01, low23);
  const std::uint32_t x = max(high01, high23) & 3u, y = max(lower_high, higher_low) & 3u;
  dropped[0] = min(lower_high, higher_low) >> 2;
  dropped[1] = min(low01, low23) >> 2;
  const std::uint32_t first = max(x, y), second = min(x, y);  // 3 - index
  const std::uint32_t selector = 0x1010u + 3u * 0x2222u - 0x22u * first - 0x2200u * second;
  return {__byte_perm(g.low, g.high, selector), 15u - first - 4u * second, 0u};
}

// A given mask of at most two elements. A group with fewer stores zeros at its lowest free places.
__device__ __forceinline__ Kept keep_given(Group g, std::uint32_t mask) {
  const std::uint32_t nibble = 0x498E4DCC49884444ull >> (4 * mask) & 15u;
  const std::uint32_t first = nibble & 3u, second = nibble >> 2;
  std::uint32_t pair = pick_pair(g, first, second);
  if (!(mask >> first & 1u)) pair &= 0xffff0000u;
  if (!(mask >> second & 1u)) pair &= 0x0000ffffu;
  return {pair, nibble, mask};
}

}  // namespace hs

// The instructions of csrc/include/hs/ptx.cuh for the emulator, from their documentation.
#pragma once

#include <cstdint>
#include <cstring>

namespace hs {

inline std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(p) - current->cta->shared);
}
inline unsigned char* at_shared(std::uint32_t address) { return current->cta->shared + address; }

inline uint4 load_shared_16(std::uint32_t address) {
  uint4 v;
  std::memcpy(&v, at_shared(address), 16);
  return v;
}
inline void store_shared_16(std::uint32_t address, uint4 v) {
  std::memcpy(at_shared(address), &v, 16);
}
inline void store_shared_f32(std::uint32_t address, float v) {
  std::memcpy(at_shared(address), &v, 4);
}
inline float4 load_shared_f32x4(std::uint32_t address) {
  float4 v;
  std::memcpy(&v, at_shared(address), 16);
  return v;
}

inline int volatile_load(const int& x) {
  yield();
  return x;
}
inline void volatile_store(int& x, int value) { x = value; }

template <typename V>
inline V load_relaxed(const V* p) {
  yield();
  return *p;
}
inline void store_relaxed(float* p, float4 v) { std::memcpy(p, &v, 16); }
inline void store_relaxed(float2* p, float2 v) { *p = v; }

inline std::uint32_t half_word(std::uint32_t word, int i) {
  return i ? word >> 16 : word & 0xffffu;
}
template <typename T>
inline float element_of(std::uint32_t bits) {
  const auto narrow = static_cast<std::uint16_t>(bits);
  T value;
  std::memcpy(&value, &narrow, 2);
  return static_cast<float>(value);
}
template <typename T>
inline std::uint32_t pack_pair(float low, float high) {
  const T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  std::uint32_t word;
  std::memcpy(&word, pair, 4);
  return word;
}
template <typename T>
inline float unpack_low(std::uint32_t pair) {
  return element_of<T>(pair & 0xffffu);
}
template <typename T>
inline float unpack_high(std::uint32_t pair) {
  return element_of<T>(pair >> 16);
}
inline float exp2_approx(float x) { return std::exp2(x); }

// --- matrices: lane l = 4 g + q holds row g, columns 2 q and 2 q + 1 of an 8x8 tile --------------

inline std::uint32_t shared_element(std::uint32_t row_address, int column) {
  std::uint16_t bits;
  std::memcpy(&bits, at_shared(row_address) + 2 * column, 2);
  return bits;
}
inline void load_matrix(std::uint32_t (&r)[4], std::uint32_t address) {
  const Exchanged* shown = meet({{address}});
  const int g = current->lane / 4, q = current->lane % 4;
  for (int m = 0; m < 4; ++m) {
    const std::uint32_t row = shown[8 * m + g].words[0];
    r[m] = shared_element(row, 2 * q) | shared_element(row, 2 * q + 1) << 16;
  }
}
inline void load_matrix_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  const Exchanged* shown = meet({{address}});
  const int g = current->lane / 4, q = current->lane % 4;
  for (int m = 0; m < 4; ++m)
    r[m] = shared_element(shown[8 * m + 2 * q].words[0], g) |
           shared_element(shown[8 * m + 2 * q + 1].words[0], g) << 16;
}
inline std::uint32_t move_matrix_transposed(std::uint32_t x) {
  const Exchanged* shown = meet({{x}});
  const int g = current->lane / 4, q = current->lane % 4;
  const auto at = [&](int row, int column) {
    return half_word(shown[4 * row + column / 2].words[0], column % 2);
  };
  return at(2 * q, g) | at(2 * q + 1, g) << 16;
}

template <typename T>
struct Mma {
  // Element (row, k) of A, 16 x 16 or the stored half of 16 x 32, and (k, column) of B.
  static float a_at(const Exchanged* shown, int row, int k) {
    const Exchanged& lane = shown[4 * (row % 8) + k % 8 / 2];
    return element_of<T>(half_word(lane.words[k / 8 * 2 + row / 8], k % 2));
  }
  static float b_at(const Exchanged* shown, int k, int column) {
    const Exchanged& lane = shown[4 * column + k % 8 / 2];
    return element_of<T>(half_word(lane.words[4 + k / 8], k % 2));
  }
  static void dense_from(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                         std::uint32_t b1, const float (&c)[4]) {
    const Exchanged* shown = meet({{a[0], a[1], a[2], a[3], b0, b1}});
    for (int i = 0; i < 4; ++i) {
      const int row = current->lane / 4 + i / 2 * 8, column = current->lane % 4 * 2 + i % 2;
      float sum = c[i];
      for (int k = 0; k < 16; ++k) sum += a_at(shown, row, k) * b_at(shown, k, column);
      d[i] = sum;
    }
  }
  static void dense(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                    std::uint32_t b1) {
    const float c[4] = {d[0], d[1], d[2], d[3]};
    dense_from(d, a, b0, b1, c);
  }
  template <int kSelector>
  static void sparse(float (&d)[4], uint4 a, std::uint32_t b0, std::uint32_t b1, std::uint32_t b2,
                     std::uint32_t b3, std::uint32_t metadata) {
    const Exchanged* shown = meet({{a.x, a.y, a.z, a.w, b0, b1, b2, b3, metadata}});
    for (int i = 0; i < 4; ++i) {
      const int row = current->lane / 4 + i / 2 * 8, column = current->lane % 4 * 2 + i % 2;
      for (int group = 0; group < 8; ++group) {
        const Exchanged& lane = shown[4 * (row % 8) + 2 * kSelector + group / 4];
        const std::uint32_t nibble = lane.words[8] >> (row / 8 * 16 + group % 4 * 4);
        const int first = nibble & 3, second = nibble >> 2 & 3;
        if (first >= second) fail("metadata that a device does not define");
        d[i] += a_at(shown, row, 2 * group) * b_at(shown, 4 * group + first, column);
        d[i] += a_at(shown, row, 2 * group + 1) * b_at(shown, 4 * group + second, column);
      }
    }
  }
};

// --- copies --------------------------------------------------------------------------------------

// Ampere's land as late as they may: when their thread waits for their group.
inline void copy_async_16(std::uint32_t to, const void* from) {
  if (to % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) fail("bad alignment");
  unsigned char* at = at_shared(to);
  std::memset(at, 0xff, 16);
  current->groups.back().push_back([=] { std::memcpy(at, from, 16); });
}
inline void commit_copies() { current->groups.push_back({}); }
template <int kPending>
inline void wait_copies() {
  while (current->groups.size() > kPending + 1) {
    for (const auto& land : current->groups.front()) land();
    current->groups.erase(current->groups.begin());
  }
}

inline void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  current->cta->barriers[barrier] = {0, count, count, 0};
}
inline void barrier_init_visible() {}
inline void barrier_advance(CopyBarrier& b) {
  if (b.missing == 0 && b.bytes == 0) b.phase ^= 1, b.missing = b.arrivals;
}
inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  CopyBarrier& b = current->cta->barriers.at(barrier);
  b.bytes += bytes, --b.missing;
  barrier_advance(b);
}
inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (current->cta->barriers.at(barrier).phase == static_cast<int>(parity)) yield();
}
inline void allow_next_kernel() {}
inline void wait_for_kernels_before() {
  ++waiting;
  while (kernel_before) yield();
}
inline void fence_async_proxy() {}
inline std::uint64_t evict_first_policy() { return 0; }

template <typename Move>
void start_copy(std::uint32_t to, std::uint32_t bytes, std::uint32_t barrier, Move move) {
  Cta* cta = current->cta;
  std::memset(cta->shared + to, 0xff, bytes);
  copies.push_back([=] {
    move(cta->shared + to);
    CopyBarrier& b = cta->barriers.at(barrier);
    b.bytes -= bytes;
    barrier_advance(b);
  });
}
inline void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes,
                      std::uint32_t barrier, std::uint64_t) {
  if (to % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) fail("bad alignment");
  start_copy(to, bytes, barrier, [=](unsigned char* at) { std::memcpy(at, from, bytes); });
}

// A map of decode's: half a dense block as swizzled tiles of 64 channels.
struct DenseMap {
  const std::uint8_t* arena;
  int head_dim;
};
inline void copy_tensor_3d(std::uint32_t to, const void* tensor_map, int x, int y, int z,
                           std::uint32_t barrier, std::uint64_t) {
  const DenseMap map = *static_cast<const DenseMap*>(tensor_map);
  if (to % 1024 || x != 0 || z != 0) fail("bad box");
  start_copy(to, 64 * map.head_dim, barrier, [=](unsigned char* at) {
    for (int row = 0; row < 32; ++row)
      for (int chunk = 0; chunk < map.head_dim / 8; ++chunk)
        std::memcpy(at + chunk / 8 * (32 * 128) + row * 128 + ((chunk ^ row) & 7) * 16,
                    map.arena + (static_cast<std::int64_t>(y + row) * map.head_dim + chunk * 8) * 2,
                    16);
  });
}

}  // namespace hs

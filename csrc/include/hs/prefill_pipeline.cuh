// Barriers and copies between the producer warps and the consumer warpgroups of the prefill
// kernel: mbarriers in shared memory, tensor-map boxes and plain bulk copies that complete on them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace hs {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Makes this thread's ordinary writes to shared memory visible to wgmma and to bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// With `Both`, to the same place in both CTAs of a cluster, completing on the same barrier in each.
#define HS_COPY(SHAPE, COORDINATES, N, ...)                                                        \
  if constexpr (Both)                                                                              \
    asm volatile("cp.async.bulk" SHAPE ".shared::cluster.global.mbarrier::complete_tx::bytes"      \
                 ".multicast::cluster [%0], " COORDINATES ", [%2], %" N ";" ::__VA_ARGS__,         \
                 "h"(kBoth)                                                                        \
                 : "memory");                                                                      \
  else                                                                                             \
    asm volatile("cp.async.bulk" SHAPE ".shared::cluster.global.mbarrier::complete_tx::bytes"      \
                 " [%0], " COORDINATES ", [%2];" ::__VA_ARGS__                                     \
                 : "memory")
constexpr uint16_t kBoth = 3;  // mask of CTAs that a copy goes to

template <bool Both>
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int x, int y) {
  HS_COPY(".tensor.2d", "[%1, {%3, %4}]", "5", "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y));
}
template <bool Both>
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int x, int y, int z) {
  HS_COPY(".tensor.3d", "[%1, {%3, %4, %5}]", "6", "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y),
          "r"(z));
}
template <bool Both>
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  if constexpr (Both)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(kBoth)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
#undef HS_COPY

// --- clusters of two CTAs ------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Where `address` of this CTA's shared memory lies in that of CTA `rank`.
__device__ __forceinline__ uint32_t address_in(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// All threads of both CTAs; what they wrote before is visible after.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
// Orders what went before only where other threads have seen it by barriers of their own CTA, as
// copies to a stage do; with .cluster it would fence all memory of the device.
__device__ __forceinline__ void remote_arrive(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// Stores a word and completes its four bytes on `barrier`, both of the same CTA.
__device__ __forceinline__ void remote_store(uint32_t there, int x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there),
      "r"(x), "r"(barrier)
      : "memory");
}

template <int Count>
__device__ __forceinline__ void registers_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void registers_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// Ring position of a stream of stages: slot and phase parity.
template <int Stages>
struct Ring {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == Stages) slot = 0, parity ^= 1;
  }
  // The stage before: V runs one step behind K.
  __device__ __forceinline__ uint32_t before() const { return slot == 0 ? Stages - 1 : slot - 1; }
  __device__ __forceinline__ uint32_t parity_before() const {
    return slot == 0 ? parity ^ 1 : parity;
  }
};

}  // namespace hs

// A GPU in one host thread, to run kernel source where there is no device.
//
// Every GPU thread is a fiber. The scheduler picks warps in random order, so that what depends on
// an order of arrival shows; copies that a kernel starts land later, in random order, and until
// then their target is poison. What is checked is the logic of a kernel, not its memory ordering: a
// fiber is only left where it meets others or polls.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __align__
#undef __grid_constant__
#define __shared__ static  // kernels that have such variables run one CTA at a time
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __grid_constant__
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(current->cta->shared)

struct Dimensions {
  unsigned x = 0, y = 0, z = 0;
};
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

// What a lane shows to its warp.
struct Exchanged {
  std::uint32_t words[10];
};

struct Warp {
  int lanes = 32, arrived = 0;
  unsigned meetings = 0;
  Exchanged shown[2][32];  // of this meeting and the one before, which slow lanes still read
};

struct CopyBarrier {
  int phase, arrivals, missing;
  long bytes;
};

struct Cta {
  unsigned index = 0;
  int threads = 0, arrived = 0;
  unsigned meetings = 0;
  unsigned char* shared = nullptr;
  std::vector<Warp> warps;
  std::unordered_map<std::uint32_t, CopyBarrier> barriers;
  int collected[2];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int thread = 0, lane = 0;
  bool done = false;
  // Groups of this thread's own copies, the last one open.
  std::vector<std::vector<std::function<void()>>> groups = {{}};
};

static Fiber* current;
static ucontext_t scheduler;
static std::mt19937 chance;
static std::vector<std::function<void()>> copies;  // on their way
static const std::function<void()>* kernel;

// The kernel in front of a grid that may overlap with it: runs when all threads wait for it and
// what they copied has landed. Empty where nothing is in front.
static std::function<void()> kernel_before;
static std::size_t waiting;  // threads

static void yield() { swapcontext(&current->context, &scheduler); }

[[noreturn]] static void fail(const char* reason) {
  std::fprintf(stderr, "emulator: %s\n", reason);
  std::abort();
}

static Exchanged* meet(const Exchanged& mine = {}) {
  Warp& warp = *current->warp;
  const unsigned meeting = warp.meetings;
  Exchanged* shown = warp.shown[meeting % 2];
  shown[current->lane] = mine;
  if (++warp.arrived == warp.lanes) {
    warp.arrived = 0, ++warp.meetings;
  } else {
    while (warp.meetings == meeting) yield();
  }
  return shown;
}

template <typename T>
static T from_lane(T value, int lane) {
  Exchanged mine;
  std::memcpy(mine.words, &value, sizeof(T));
  const Exchanged* shown = meet(mine);
  std::memcpy(&value, shown[lane].words, sizeof(T));
  return value;
}

static void __syncwarp(unsigned = ~0u) { meet(); }
static void __syncthreads() {
  Cta& cta = *current->cta;
  const unsigned meeting = cta.meetings;
  if (++cta.arrived == cta.threads) {
    cta.arrived = 0, ++cta.meetings;
  } else {
    while (cta.meetings == meeting) yield();
  }
}
static int __syncthreads_or(int value) {
  int& collected = current->cta->collected[0];
  __syncthreads();
  collected = 0;
  __syncthreads();
  collected |= value;
  __syncthreads();
  return collected;
}
template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
  return from_lane(value, lane % 32);
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return from_lane(value, current->lane ^ mask);
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, int by) {
  return from_lane(value, current->lane >= by ? current->lane - by : current->lane);
}
template <typename T>
static T __shfl_down_sync(unsigned, T value, int by) {
  return from_lane(value, current->lane + by < 32 ? current->lane + by : current->lane);
}
static int __reduce_add_sync(unsigned, int value) {
  const Exchanged* shown = meet({{static_cast<std::uint32_t>(value)}});
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<int>(shown[lane].words[0]);
  return sum;
}
static unsigned __ballot_sync(unsigned, int value) {
  const Exchanged* shown = meet({{value != 0}});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= shown[lane].words[0] << lane;
  return bits;
}
static int __any_sync(unsigned mask, int value) { return __reduce_add_sync(mask, value != 0) > 0; }

template <typename T>
static T __ldg(const T* p) {
  return *p;
}
template <typename T>
static T __ldcg(const T* p) {
  return *p;
}
template <typename T>
static T atomicAdd(T* p, T value) {
  const T before = *p;
  *p += value;
  return before;
}
static void __threadfence_block() {}
static void __threadfence() {}
static void __nanosleep(unsigned) { yield(); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
using std::max, std::min;

static void enter() {
  (*kernel)();
  current->done = true;
  for (;;) yield();
}

// Runs `body` as a grid. `together`: its CTAs are all resident at once, else one after the other.
static void launch_grid(Dimensions grid, int threads, std::size_t shared_bytes, bool together,
                        const std::function<void()>& body) {
  constexpr std::size_t kStackBytes = 64 * 1024;
  kernel = &body;
  gridDim = grid, blockDim = {static_cast<unsigned>(threads), 1, 1};
  const int warps = (threads + 31) / 32, all = static_cast<int>(grid.x * std::max(1u, grid.y));
  for (int first = 0; first < all; first += together ? all : 1) {
    const int count = together ? all : 1;
    std::vector<Cta> ctas(count);
    std::vector<Fiber> fibers(static_cast<std::size_t>(count) * threads);
    const std::size_t room = (shared_bytes / 1024 + 2) * 1024;
    for (int c = 0; c < count; ++c) {
      ctas[c].index = first + c, ctas[c].threads = threads;
      ctas[c].warps.resize(warps);
      ctas[c].shared = static_cast<unsigned char*>(std::aligned_alloc(1024, room));
      std::memset(ctas[c].shared, 0xff, room);
      for (int t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[static_cast<std::size_t>(c) * threads + t];
        fiber.cta = &ctas[c], fiber.warp = &ctas[c].warps[t / 32];
        fiber.thread = t, fiber.lane = t % 32;
        fiber.stack.reset(new char[kStackBytes]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
      }
    }
    std::vector<int> order(static_cast<std::size_t>(count) * warps);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::size_t running = fibers.size();
    for (int round = 0; running > 0; ++round) {
      if (round > 1000000) fail("no thread makes progress");
      std::shuffle(order.begin(), order.end(), chance);
      for (const int index : order) {
        if (chance() % 4 == 0) continue;  // this warp is slow
        const std::size_t base =
            static_cast<std::size_t>(index / warps) * threads + index % warps * 32;
        const int lanes = std::min(32, threads - index % warps * 32);
        for (int turns = 1 + chance() % 40; turns > 0; --turns)
          for (int lane = 0; lane < lanes; ++lane) {
            Fiber& fiber = fibers[base + lane];
            if (fiber.done) continue;
            current = &fiber;
            threadIdx.x = fiber.thread;
            blockIdx.x = fiber.cta->index % grid.x, blockIdx.y = fiber.cta->index / grid.x;
            swapcontext(&scheduler, &fiber.context);
            running -= fiber.done;
            if (fiber.done && kernel_before) fail("a thread ended before the kernel in front");
          }
      }
      if (kernel_before && waiting == fibers.size()) {
        for (const auto& land : copies) land();
        copies.clear();
        kernel_before();
        kernel_before = nullptr;
      }
      std::vector<std::function<void()>> under_way;
      under_way.swap(copies);
      for (const auto& land : under_way)
        if (chance() % 3 == 0) land(); else copies.push_back(land);
    }
    if (!copies.empty()) fail("a kernel ended before its copies");
    waiting = 0;
    for (Cta& cta : ctas) std::free(cta.shared);
  }
}

// Warpgroup matrix instructions of sm_90a, dense and 2:4-sparse, for f16 and bf16 operands with
// fp32 accumulators. One wrapper for each shape that the prefill kernel issues.
//
// The left operand A is read from shared memory (ss) or from registers (rs, sp); B always comes
// from shared memory through a descriptor. Accumulators may not be touched, and register operands
// not be overwritten, between the instruction and the `wgmma_wait` that covers its group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hs {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving reads of accumulators above the wait.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory operand in the 128-byte swizzle. `sbo` is the stride in bytes between groups of 8
// rows (K-major) or 8 steps of depth (M/N-major); `lbo`, used by M/N-major operands wider than 64,
// the stride between chunks of 64 columns. K-major: 16 elements of depth are 32 bytes of address.
__device__ __forceinline__ uint64_t swizzled(uint32_t address, uint32_t sbo = 1024,
                                             uint32_t lbo = 16) {
  return uint64_t(address >> 4 & 0x3FFF) | uint64_t(lbo >> 4) << 16 | uint64_t(sbo >> 4) << 32 |
         uint64_t(1) << 62;
}

#define HS_D8(m, o) \
  m(d[o]), m(d[o + 1]), m(d[o + 2]), m(d[o + 3]), m(d[o + 4]), m(d[o + 5]), m(d[o + 6]), m(d[o + 7])
#define HS_D32(m) HS_D8(m, 0), HS_D8(m, 8), HS_D8(m, 16), HS_D8(m, 24)
#define HS_D64(m) HS_D32(m), HS_D8(m, 32), HS_D8(m, 40), HS_D8(m, 48), HS_D8(m, 56)
#define HS_SUM(x) "+f"(x)
#define HS_NEW(x) "=f"(x)
#define HS_P32                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define HS_P64                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,"    \
  "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// `Sum` false writes the accumulators without reading them, so that the old ones are free before.
#define HS_CASES(CALL, N, ...)                                            \
  constexpr bool kHalf = std::is_same_v<T, __half>;                       \
  if constexpr (kHalf && Sum) CALL("f16", N, "1", HS_SUM, __VA_ARGS__);   \
  if constexpr (kHalf && !Sum) CALL("f16", N, "0", HS_NEW, __VA_ARGS__);  \
  if constexpr (!kHalf && Sum) CALL("bf16", N, "1", HS_SUM, __VA_ARGS__); \
  if constexpr (!kHalf && !Sum) CALL("bf16", N, "0", HS_NEW, __VA_ARGS__);

#define HS_SS(TYPE, N, SUM, M, P, OPS, a, b, ta, tb)                                        \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " SUM                                         \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " P ", %" a \
               ", %" b ", p, 1, 1, %" ta ", %" tb ";}\n"                                    \
               : OPS(M)                                                                     \
               : "l"(desc_a), "l"(desc_b), "n"(TransA), "n"(TransB))
#define HS_RS(TYPE, N, SUM, M, P, OPS, a0, a1, a2, a3, b, tb)                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " SUM                                           \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " P ", {%" a0 \
               ",%" a1 ",%" a2 ",%" a3 "}, %" b ", p, 1, 1, %" tb ";}\n"                      \
               : OPS(M)                                                                       \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(desc_b), "n"(TransB))
#define HS_SP(TYPE, N, SUM, M, P, OPS, a0, a1, a2, a3, b, e, f)                                  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " SUM                                              \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sp.sync.aligned.m64n" N "k32.f32." TYPE "." TYPE " " P ", {%" a0 \
               ",%" a1 ",%" a2 ",%" a3 "}, %" b ", %" e ", %" f ", p, 1, 1, 0;}\n"               \
               : OPS(M)                                                                          \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(desc_b), "r"(metadata),             \
                 "n"(Selector))

// D (+)= A B, A [64 x 16] and B [16 x N] from shared memory, N = 64 for 32 accumulators and 128 for
// 64. TransA: A is M-major. TransB: B is N-major.
template <class T, int TransA, int TransB, bool Sum>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t desc_a, uint64_t desc_b) {
  HS_CASES(HS_SS, "64", HS_P32, HS_D32, "32", "33", "34", "35")
}
template <class T, int TransA, int TransB, bool Sum>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t desc_a, uint64_t desc_b) {
  HS_CASES(HS_SS, "128", HS_P64, HS_D64, "64", "65", "66", "67")
}

// The same with A from registers.
template <class T, int TransB, bool Sum>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], uint4 a, uint64_t desc_b) {
  HS_CASES(HS_RS, "64", HS_P32, HS_D32, "32", "33", "34", "35", "36", "37")
}
template <class T, int TransB, bool Sum>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint4 a, uint64_t desc_b) {
  HS_CASES(HS_RS, "128", HS_P64, HS_D64, "64", "65", "66", "67", "68", "69")
}

// D (+)= A B, A [64 x 32] 2:4 along its depth, B [32 x 64]: `a` holds the nonzeros, `metadata` the
// word of block_format.h, `Selector` is the parity of the step that the word serves.
template <class T, int Selector, bool Sum>
__device__ __forceinline__ void wgmma_sp(float (&d)[32], uint4 a, uint64_t desc_b,
                                         uint32_t metadata) {
  HS_CASES(HS_SP, "64", HS_P32, HS_D32, "32", "33", "34", "35", "36", "37", "38")
}

#undef HS_CASES
#undef HS_SP
#undef HS_RS
#undef HS_SS
#undef HS_P64
#undef HS_P32
#undef HS_NEW
#undef HS_SUM
#undef HS_D64
#undef HS_D32
#undef HS_D8

}  // namespace hs

// The part of the C interface that belongs to no kernel. Callers bind with ctypes and need neither
// Python headers nor torch's, so one library serves every Python.

#include "hs/launch.h"

HS_EXPORT const char* hs_error_string(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

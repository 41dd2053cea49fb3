// Which sequence owns a token. Boundaries on a GPU are not trusted: whatever they hold, no index leaves the tensors.
#pragma once

#include <cstdint>

#include "common/packing.h"
#include "cuda/common/launch.cuh"

namespace packfree {

// Tokens [bos, eos) of a sequence; bos == eos if it is empty.
struct Bounds {
  int64_t bos;
  int64_t eos;
};

__device__ __forceinline__ Bounds BoundsOf(const PackingView& packing, int64_t sequence) {
  const int64_t first = packing.cu_seqlens[sequence], last = packing.cu_seqlens[sequence + 1];
  const int64_t bos = first < 0 ? 0 : first;
  const int64_t eos = last > packing.tokens ? packing.tokens : last;
  return {bos, eos < bos ? bos : eos};
}

// The sequence with cu_seqlens[n] <= token < cu_seqlens[n + 1], or -1: padding.
__device__ __forceinline__ int32_t SequenceOf(const PackingView& packing, int64_t token) {
  int64_t low = 0, high = packing.num_sequences;
  if (packing.cu_seqlens[low] > token || packing.cu_seqlens[high] <= token) return -1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (packing.cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return static_cast<int32_t>(low);
}

// owners [tokens]: the sequence of each token. 4 bytes a token, read by every block from the second-level cache; a
// search in each of them would wait some twenty times for memory instead.
static __global__ void __launch_bounds__(kElementThreads) OwnersKernel(PackingView packing, int32_t* owners) {
  for (int64_t token = FirstElement(); token < packing.tokens; token += ElementStride()) {
    owners[token] = SequenceOf(packing, token);
  }
}

inline void RunOwners(Launcher& launcher, const PackingView& packing, int32_t* owners) {
  launcher.Run(&OwnersKernel, ElementBlocks(packing.tokens), kElementThreads, packing, owners);
}

}  // namespace packfree

// Functions that run on a GPU too, where a compiler for one reads them.
#pragma once

#ifdef __CUDACC__
#define PACKFREE_DEVICE __device__ __forceinline__
#define PACKFREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PACKFREE_DEVICE inline
#define PACKFREE_HOST_DEVICE inline
#endif

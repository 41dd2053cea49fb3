// HIP has CUDA's names here.
#pragma once

#include "cuda_runtime.h"

#include <hip/hip_fp16.h>

// float16 on the host.
#pragma once

#include "cuda_runtime.h"
#include "half.h"

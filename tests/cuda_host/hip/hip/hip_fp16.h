// float16 on the host.
#pragma once

#include "half.h"

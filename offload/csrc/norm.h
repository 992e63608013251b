#pragma once

#include <cstdint>
#include <span>

#include "halves.h"

namespace tierzero::kernels {

// Returns the fp64 sum of squares of the logical elements of one parameter that start at
// first_index, by the rule of offload/kernels.py, [Note: block norm]: the same for any
// thread_count. Values are fp32, bf16 (as its 16 bits) or fp16.
template <typename Value>
double sum_squares(std::span<const Value> values, uint64_t first_index, uint64_t thread_count);

}  // namespace tierzero::kernels

#pragma once

#include <cstdint>
#include <span>

namespace tierzero::kernels {

// Return the fp64 sum of squares of the logical elements of one parameter that start at
// first_index, by the rule of offload/kernels.py, [Note: block norm]: the same for any
// thread_count. bf16 values travel as their 16 bits.
double sum_squares(std::span<const float> values, uint64_t first_index, uint64_t thread_count);
double sum_squares(std::span<const uint16_t> values, uint64_t first_index, uint64_t thread_count);

}  // namespace tierzero::kernels

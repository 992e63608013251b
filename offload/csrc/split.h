#pragma once

#include <cstdint>
#include <span>

#include "halves.h"

namespace tierzero::kernels {

// All spans of a call have one length, and no two overlap.

// Writes each master as a bf16 parameter and its residual, a NaN made quiet first.
void split_master(std::span<const float> master,
                  std::span<uint16_t> param,
                  std::span<int16_t> residual,
                  uint64_t thread_count);

// Writes the masters that parameters and residuals are together.
void join_master(std::span<const uint16_t> param,
                 std::span<const int16_t> residual,
                 std::span<float> master,
                 uint64_t thread_count);

// Writes each master as the fp16 nearest to it.
void round_to_fp16(std::span<const float> master, std::span<Fp16> out, uint64_t thread_count);

}  // namespace tierzero::kernels

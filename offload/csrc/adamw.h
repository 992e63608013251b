#pragma once

#include <cstdint>
#include <span>

#include "halves.h"

namespace tierzero::kernels {

// The scalars of one step, rounded to fp32 by the caller.
struct AdamWScalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay_factor;
  float step_size;
  float bias_correction2_sqrt;
  float eps;
  float grad_scale;
};

// The two moments of the elements updated.
struct Moments {
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
};

// All spans of a call have one length, and no two overlap. bf16 travels as its 16 bits.
// Gradients of 16-bit parameters have their type or are fp32; adamw.cpp names every pair.
// The formulas are in offload/kernels.py, [Note: same bits], [Note: exact split] and [Note: fp16].

// Updates fp32 parameters, which are their own master.
void adamw_fp32(std::span<float> param,
                std::span<const float> grad,
                Moments moments,
                const AdamWScalars& scalars,
                uint64_t thread_count);

// Updates bf16 parameters and the residuals that complete them to fp32.
template <typename Grad>
void adamw_exact(std::span<uint16_t> param,
                 std::span<int16_t> residual,
                 std::span<const Grad> grad,
                 Moments moments,
                 const AdamWScalars& scalars,
                 uint64_t thread_count);

// Updates fp32 masters and writes the bf16 or fp16 parameters from them.
template <typename Half, typename Grad>
void adamw_master(std::span<Half> param,
                  std::span<float> master,
                  std::span<const Grad> grad,
                  Moments moments,
                  const AdamWScalars& scalars,
                  uint64_t thread_count);

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

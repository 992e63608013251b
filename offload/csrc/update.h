#pragma once

#include <cstdint>
#include <span>

#include "halves.h"

namespace tierzero::kernels {

// Which optimizer an update is; the formulas are in offload/rules.py, [Note: update rules].
enum class Rule : uint32_t { kAdamW, kAdam, kLion, kAdagrad, kSgd };

// The scalars of one step, rounded to fp32 by the caller; a rule reads those that it has.
struct Scalars {
  Rule rule = Rule::kAdamW;
  float beta1 = 0.0F;
  float one_minus_beta1 = 0.0F;
  float beta2 = 0.0F;
  float one_minus_beta2 = 0.0F;
  float decay_factor = 1.0F;
  float step_size = 0.0F;
  float bias_correction2_sqrt = 1.0F;
  float eps = 0.0F;
  float grad_scale = 1.0F;
  float l2 = 0.0F;
  float initial = 0.0F;
  bool nesterov = false;
};

// What the random bits of an update depend on; element i has the number first + i.
struct RoundingKey {
  uint32_t low;
  uint32_t high;
  uint32_t first;
};

// The moments of the elements updated; a rule does without one that is empty.
template <typename Value>
struct Moments {
  std::span<Value> exp_avg;
  std::span<Value> exp_avg_sq;
};

// 8-bit moments, and the base of the codes of each block of kCodeBlock elements.
struct CodedMoments {
  Moments<uint8_t> codes;
  Moments<uint16_t> bases;
};

constexpr uint64_t kCodeBlock = 32;

// All spans of a call have one length (bases: one a block), and no two overlap. bf16 travels as its
// 16 bits. Gradients of 16-bit parameters have their type or are fp32; the update_*.cpp name every
// pair. How a master is kept is in offload/kernels.py, [Note: exact split], [Note: fp16], and
// offload/codes.py, [Note: codes].

// Updates fp32 parameters, which are their own master.
void update_own(std::span<float> param,
                std::span<const float> grad,
                Moments<float> moments,
                const Scalars& scalars,
                uint64_t thread_count);

// Updates bf16 parameters and the residuals that complete them to fp32.
template <typename Grad>
void update_exact(std::span<uint16_t> param,
                  std::span<int16_t> residual,
                  std::span<const Grad> grad,
                  Moments<float> moments,
                  const Scalars& scalars,
                  uint64_t thread_count);

// Updates fp32 masters and writes the bf16 or fp16 parameters from them.
template <typename Half, typename Grad>
void update_master(std::span<Half> param,
                   std::span<float> master,
                   std::span<const Grad> grad,
                   Moments<float> moments,
                   const Scalars& scalars,
                   uint64_t thread_count);

// Updates bf16 parameters and residuals as update_exact does, with moments kept in bf16.
template <typename Grad>
void update_bf16(std::span<uint16_t> param,
                 std::span<int16_t> residual,
                 std::span<const Grad> grad,
                 Moments<uint16_t> moments,
                 const Scalars& scalars,
                 RoundingKey key,
                 uint64_t thread_count);

// Updates bf16 parameters, 8-bit residuals and 8-bit moments.
template <typename Grad>
void update_compact(std::span<uint16_t> param,
                    std::span<int8_t> residual,
                    std::span<const Grad> grad,
                    CodedMoments moments,
                    const Scalars& scalars,
                    RoundingKey key,
                    uint64_t thread_count);

}  // namespace tierzero::kernels

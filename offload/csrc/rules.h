#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "halves.h"
#include "update.h"

#define TIERZERO_INLINE [[gnu::always_inline]] inline

namespace tierzero::kernels {

// One element between load and store.
struct Element {
  float master;
  float exp_avg;
  float exp_avg_sq;
};

// Each rule says which moments it keeps, and updates one element by the formula of its name in
// offload/rules.py, [Note: update rules].

struct AdamW {
  static constexpr bool kHasExpAvg = true;
  static constexpr bool kHasExpAvgSq = true;

  TIERZERO_INLINE static Element moved(Element old, float g, float p, const Scalars& scalars) {
    const float m = old.exp_avg * scalars.beta1 + g * scalars.one_minus_beta1;
    const float v = old.exp_avg_sq * scalars.beta2 + (g * g) * scalars.one_minus_beta2;
    const float denominator = std::sqrt(v) / scalars.bias_correction2_sqrt + scalars.eps;
    return {p - scalars.step_size * (m / denominator), m, v};
  }

  TIERZERO_INLINE static Element updated(Element old, float grad, const Scalars& scalars) {
    const float g = grad * scalars.grad_scale;
    return moved(old, g, old.master * scalars.decay_factor, scalars);
  }
};

struct Adam {
  static constexpr bool kHasExpAvg = true;
  static constexpr bool kHasExpAvgSq = true;

  TIERZERO_INLINE static Element updated(Element old, float grad, const Scalars& scalars) {
    const float g = grad * scalars.grad_scale + old.master * scalars.l2;
    return AdamW::moved(old, g, old.master, scalars);
  }
};

struct Lion {
  static constexpr bool kHasExpAvg = true;
  static constexpr bool kHasExpAvgSq = false;

  // Returns 1 with the sign of a number; zeros and NaNs are returned as they are.
  TIERZERO_INLINE static float sign_of(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & ~kSignBit;
    const bool is_number = magnitude - 1 < kInfinityBits;
    return std::bit_cast<float>(is_number ? (bits & kSignBit) | 0x3F80'0000U : bits);
  }

  TIERZERO_INLINE static Element updated(Element old, float grad, const Scalars& scalars) {
    const float g = grad * scalars.grad_scale;
    const float p = old.master * scalars.decay_factor;
    const float c = old.exp_avg * scalars.beta1 + g * scalars.one_minus_beta1;
    const float m = old.exp_avg * scalars.beta2 + g * scalars.one_minus_beta2;
    return {p - scalars.step_size * sign_of(c), m, old.exp_avg_sq};
  }
};

struct Adagrad {
  static constexpr bool kHasExpAvg = false;
  static constexpr bool kHasExpAvgSq = true;

  TIERZERO_INLINE static Element updated(Element old, float grad, const Scalars& scalars) {
    const float g = grad * scalars.grad_scale + old.master * scalars.l2;
    const float v = old.exp_avg_sq + g * g;
    const float denominator = std::sqrt(v + scalars.initial) + scalars.eps;
    return {old.master - scalars.step_size * (g / denominator), old.exp_avg, v};
  }
};

struct Sgd {
  static constexpr bool kHasExpAvg = true;
  static constexpr bool kHasExpAvgSq = false;

  TIERZERO_INLINE static Element updated(Element old, float grad, const Scalars& scalars) {
    const float g = grad * scalars.grad_scale + old.master * scalars.l2;
    const float m = old.exp_avg * scalars.beta1 + g * scalars.one_minus_beta1;
    const float ahead = g + m * scalars.beta1;
    const float change = scalars.nesterov ? ahead : m;
    return {old.master - scalars.step_size * change, m, old.exp_avg_sq};
  }
};

// Calls work with the rule that the scalars name.
template <typename Work>
void with_rule(Rule rule, const Work& work) {
  switch (rule) {
    case Rule::kAdamW:
      return work(AdamW{});
    case Rule::kAdam:
      return work(Adam{});
    case Rule::kLion:
      return work(Lion{});
    case Rule::kAdagrad:
      return work(Adagrad{});
    case Rule::kSgd:
      return work(Sgd{});
  }
}

}  // namespace tierzero::kernels

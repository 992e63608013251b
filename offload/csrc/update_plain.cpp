#include <bit>

#include "clones.h"
#include "parallel.h"
#include "rules.h"
#include "update.h"

// The exact formats: one loop a way to keep the master, for every rule.

namespace tierzero::kernels {
namespace {

// An empty moment has no address to go on from.
float* from(std::span<float> values, uint64_t start) {
  return values.empty() ? nullptr : &values[start];
}

template <typename Rule>
TIERZERO_INLINE Element
loaded(float master, const float* exp_avg, const float* exp_avg_sq, size_t i) {
  return {master, Rule::kHasExpAvg ? exp_avg[i] : 0.0F, Rule::kHasExpAvgSq ? exp_avg_sq[i] : 0.0F};
}

template <typename Rule>
TIERZERO_INLINE void store(const Element& element, float* exp_avg, float* exp_avg_sq, size_t i) {
  if constexpr (Rule::kHasExpAvg) {
    exp_avg[i] = with_one_nan(element.exp_avg);
  }
  if constexpr (Rule::kHasExpAvgSq) {
    exp_avg_sq[i] = with_one_nan(element.exp_avg_sq);
  }
}

template <typename Rule>
TIERZERO_CLONES void run_own(float* __restrict param,
                             const float* __restrict grad,
                             float* __restrict exp_avg,
                             float* __restrict exp_avg_sq,
                             const Scalars scalars,
                             size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const Element old = loaded<Rule>(param[i], exp_avg, exp_avg_sq, i);
    const Element result = Rule::updated(old, grad[i], scalars);
    param[i] = with_one_nan(result.master);
    store<Rule>(result, exp_avg, exp_avg_sq, i);
  }
}

template <typename Rule, typename Grad>
TIERZERO_CLONES void run_exact(uint16_t* __restrict param,
                               int16_t* __restrict residual,
                               const Grad* __restrict grad,
                               float* __restrict exp_avg,
                               float* __restrict exp_avg_sq,
                               const Scalars scalars,
                               size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto master = std::bit_cast<float>(joined(param[i], residual[i]));
    const Element old = loaded<Rule>(master, exp_avg, exp_avg_sq, i);
    const Element result = Rule::updated(old, widen(grad[i]), scalars);
    const auto bits = std::bit_cast<uint32_t>(with_one_nan(result.master));
    param[i] = rounded<uint16_t>(bits);
    residual[i] = residual_half(bits);
    store<Rule>(result, exp_avg, exp_avg_sq, i);
  }
}

template <typename Rule, typename Half, typename Grad>
TIERZERO_CLONES void run_master(Half* __restrict param,
                                float* __restrict master,
                                const Grad* __restrict grad,
                                float* __restrict exp_avg,
                                float* __restrict exp_avg_sq,
                                const Scalars scalars,
                                size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const Element old = loaded<Rule>(master[i], exp_avg, exp_avg_sq, i);
    const Element result = Rule::updated(old, widen(grad[i]), scalars);
    master[i] = with_one_nan(result.master);
    param[i] = rounded<Half>(std::bit_cast<uint32_t>(master[i]));
    store<Rule>(result, exp_avg, exp_avg_sq, i);
  }
}

}  // namespace

void update_own(std::span<float> param,
                std::span<const float> grad,
                Moments<float> moments,
                const Scalars& scalars,
                uint64_t thread_count) {
  with_rule(scalars.rule, [&]<typename Rule>(Rule) {
    for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
      run_own<Rule>(&param[start],
                    &grad[start],
                    from(moments.exp_avg, start),
                    from(moments.exp_avg_sq, start),
                    scalars,
                    numel);
    });
  });
}

template <typename Grad>
void update_exact(std::span<uint16_t> param,
                  std::span<int16_t> residual,
                  std::span<const Grad> grad,
                  Moments<float> moments,
                  const Scalars& scalars,
                  uint64_t thread_count) {
  with_rule(scalars.rule, [&]<typename Rule>(Rule) {
    for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
      run_exact<Rule>(&param[start],
                      &residual[start],
                      &grad[start],
                      from(moments.exp_avg, start),
                      from(moments.exp_avg_sq, start),
                      scalars,
                      numel);
    });
  });
}

template <typename Half, typename Grad>
void update_master(std::span<Half> param,
                   std::span<float> master,
                   std::span<const Grad> grad,
                   Moments<float> moments,
                   const Scalars& scalars,
                   uint64_t thread_count) {
  with_rule(scalars.rule, [&]<typename Rule>(Rule) {
    for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
      run_master<Rule>(&param[start],
                       &master[start],
                       &grad[start],
                       from(moments.exp_avg, start),
                       from(moments.exp_avg_sq, start),
                       scalars,
                       numel);
    });
  });
}

template decltype(update_exact<uint16_t>) update_exact<uint16_t>;
template decltype(update_exact<float>) update_exact<float>;
template decltype(update_master<uint16_t, uint16_t>) update_master<uint16_t, uint16_t>;
template decltype(update_master<uint16_t, float>) update_master<uint16_t, float>;
template decltype(update_master<Fp16, Fp16>) update_master<Fp16, Fp16>;
template decltype(update_master<Fp16, float>) update_master<Fp16, float>;

}  // namespace tierzero::kernels

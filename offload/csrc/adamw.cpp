#include "adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "clones.h"
#include "halves.h"
#include "parallel.h"

namespace tierzero::kernels {
namespace {

constexpr uint64_t kChunkNumel = 1 << 16;

struct Element {
  float master;
  float exp_avg;
  float exp_avg_sq;
};

inline float with_one_nan(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(is_nan(bits) ? kQuietNanBits : bits);
}

inline int16_t residual_half(uint32_t bits) {
  return static_cast<int16_t>(bits & 0xFFFF);
}

inline uint32_t joined(uint16_t param, int16_t residual) {
  return (uint32_t{param} << 16) + static_cast<uint32_t>(int32_t{residual});
}

inline Element updated(Element old, float grad, const AdamWScalars& scalars) {
  const float g = grad * scalars.grad_scale;
  const float p = old.master * scalars.decay_factor;
  const float m = old.exp_avg * scalars.beta1 + g * scalars.one_minus_beta1;
  const float v = old.exp_avg_sq * scalars.beta2 + (g * g) * scalars.one_minus_beta2;
  const float denominator = std::sqrt(v) / scalars.bias_correction2_sqrt + scalars.eps;
  return {
      with_one_nan(p - scalars.step_size * (m / denominator)), with_one_nan(m), with_one_nan(v)};
}

TIERZERO_CLONES
void update_fp32(float* __restrict param,
                 const float* __restrict grad,
                 float* __restrict exp_avg,
                 float* __restrict exp_avg_sq,
                 const AdamWScalars scalars,
                 size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const Element result = updated({param[i], exp_avg[i], exp_avg_sq[i]}, grad[i], scalars);
    param[i] = result.master;
    exp_avg[i] = result.exp_avg;
    exp_avg_sq[i] = result.exp_avg_sq;
  }
}

template <typename Grad>
TIERZERO_CLONES void update_exact(uint16_t* __restrict param,
                                  int16_t* __restrict residual,
                                  const Grad* __restrict grad,
                                  float* __restrict exp_avg,
                                  float* __restrict exp_avg_sq,
                                  const AdamWScalars scalars,
                                  size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto master = std::bit_cast<float>(joined(param[i], residual[i]));
    const Element result = updated({master, exp_avg[i], exp_avg_sq[i]}, widen(grad[i]), scalars);
    const auto bits = std::bit_cast<uint32_t>(result.master);
    param[i] = rounded<uint16_t>(bits);
    residual[i] = residual_half(bits);
    exp_avg[i] = result.exp_avg;
    exp_avg_sq[i] = result.exp_avg_sq;
  }
}

template <typename Half, typename Grad>
TIERZERO_CLONES void update_master(Half* __restrict param,
                                   float* __restrict master,
                                   const Grad* __restrict grad,
                                   float* __restrict exp_avg,
                                   float* __restrict exp_avg_sq,
                                   const AdamWScalars scalars,
                                   size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const Element result = updated({master[i], exp_avg[i], exp_avg_sq[i]}, widen(grad[i]), scalars);
    param[i] = rounded<Half>(std::bit_cast<uint32_t>(result.master));
    master[i] = result.master;
    exp_avg[i] = result.exp_avg;
    exp_avg_sq[i] = result.exp_avg_sq;
  }
}

TIERZERO_CLONES
void split(const float* __restrict master,
           uint16_t* __restrict param,
           int16_t* __restrict residual,
           size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto given = std::bit_cast<uint32_t>(master[i]);
    const uint32_t bits = is_nan(given) ? (given & kSignBit) | kQuietNanBits : given;
    param[i] = rounded<uint16_t>(bits);
    residual[i] = residual_half(bits);
  }
}

TIERZERO_CLONES
void join(const uint16_t* __restrict param,
          const int16_t* __restrict residual,
          float* __restrict master,
          size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    master[i] = std::bit_cast<float>(joined(param[i], residual[i]));
  }
}

TIERZERO_CLONES
void round_all(const float* __restrict master, Fp16* __restrict out, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    out[i] = rounded<Fp16>(std::bit_cast<uint32_t>(master[i]));
  }
}

// Calls work(start, numel) for chunks that tile `numel` elements.
template <typename Work>
void for_each_range(uint64_t numel, uint64_t thread_count, const Work& work) {
  const uint64_t chunk_count = numel / kChunkNumel + (numel % kChunkNumel != 0);
  for_each_chunk(chunk_count, thread_count, [&](uint64_t chunk) {
    const uint64_t start = chunk * kChunkNumel;
    work(start, std::min(kChunkNumel, numel - start));
  });
}

}  // namespace

void adamw_fp32(std::span<float> param,
                std::span<const float> grad,
                Moments moments,
                const AdamWScalars& scalars,
                uint64_t thread_count) {
  for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    update_fp32(&param[start],
                &grad[start],
                &moments.exp_avg[start],
                &moments.exp_avg_sq[start],
                scalars,
                numel);
  });
}

template <typename Grad>
void adamw_exact(std::span<uint16_t> param,
                 std::span<int16_t> residual,
                 std::span<const Grad> grad,
                 Moments moments,
                 const AdamWScalars& scalars,
                 uint64_t thread_count) {
  for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    update_exact(&param[start],
                 &residual[start],
                 &grad[start],
                 &moments.exp_avg[start],
                 &moments.exp_avg_sq[start],
                 scalars,
                 numel);
  });
}

template <typename Half, typename Grad>
void adamw_master(std::span<Half> param,
                  std::span<float> master,
                  std::span<const Grad> grad,
                  Moments moments,
                  const AdamWScalars& scalars,
                  uint64_t thread_count) {
  for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    update_master(&param[start],
                  &master[start],
                  &grad[start],
                  &moments.exp_avg[start],
                  &moments.exp_avg_sq[start],
                  scalars,
                  numel);
  });
}

void split_master(std::span<const float> master,
                  std::span<uint16_t> param,
                  std::span<int16_t> residual,
                  uint64_t thread_count) {
  for_each_range(master.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    split(&master[start], &param[start], &residual[start], numel);
  });
}

void join_master(std::span<const uint16_t> param,
                 std::span<const int16_t> residual,
                 std::span<float> master,
                 uint64_t thread_count) {
  for_each_range(master.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    join(&param[start], &residual[start], &master[start], numel);
  });
}

void round_to_fp16(std::span<const float> master, std::span<Fp16> out, uint64_t thread_count) {
  for_each_range(master.size(), thread_count, [&](uint64_t start, uint64_t numel) {
    round_all(&master[start], &out[start], numel);
  });
}

template decltype(adamw_exact<uint16_t>) adamw_exact<uint16_t>;
template decltype(adamw_exact<float>) adamw_exact<float>;
template decltype(adamw_master<uint16_t, uint16_t>) adamw_master<uint16_t, uint16_t>;
template decltype(adamw_master<uint16_t, float>) adamw_master<uint16_t, float>;
template decltype(adamw_master<Fp16, Fp16>) adamw_master<Fp16, Fp16>;
template decltype(adamw_master<Fp16, float>) adamw_master<Fp16, float>;

}  // namespace tierzero::kernels

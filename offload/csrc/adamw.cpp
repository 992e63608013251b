#include "adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "clones.h"
#include "parallel.h"

namespace tierzero::kernels {
namespace {

constexpr uint64_t kChunkNumel = 1 << 16;
constexpr uint32_t kSignBit = 0x8000'0000;
constexpr uint32_t kInfinityBits = 0x7F80'0000;
constexpr uint32_t kQuietNanBits = 0x7FC0'0000;

struct Element {
  float master;
  float exp_avg;
  float exp_avg_sq;
};

// NaNs are found and replaced in integers, by a select, so that loops have no branch.
inline bool is_nan(uint32_t bits) {
  return (bits & ~kSignBit) > kInfinityBits;
}

inline float with_one_nan(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(is_nan(bits) ? kQuietNanBits : bits);
}

inline float widen(uint16_t bf16) {
  return std::bit_cast<float>(uint32_t{bf16} << 16);
}

inline uint16_t rounded_half(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
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

TIERZERO_CLONES
void update_exact(uint16_t* __restrict param,
                  int16_t* __restrict residual,
                  const uint16_t* __restrict grad,
                  float* __restrict exp_avg,
                  float* __restrict exp_avg_sq,
                  const AdamWScalars scalars,
                  size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto master = std::bit_cast<float>(joined(param[i], residual[i]));
    const Element result = updated({master, exp_avg[i], exp_avg_sq[i]}, widen(grad[i]), scalars);
    const auto bits = std::bit_cast<uint32_t>(result.master);
    param[i] = rounded_half(bits);
    residual[i] = residual_half(bits);
    exp_avg[i] = result.exp_avg;
    exp_avg_sq[i] = result.exp_avg_sq;
  }
}

TIERZERO_CLONES
void update_master(uint16_t* __restrict param,
                   float* __restrict master,
                   const uint16_t* __restrict grad,
                   float* __restrict exp_avg,
                   float* __restrict exp_avg_sq,
                   const AdamWScalars scalars,
                   size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const Element result = updated({master[i], exp_avg[i], exp_avg_sq[i]}, widen(grad[i]), scalars);
    param[i] = rounded_half(std::bit_cast<uint32_t>(result.master));
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
    param[i] = rounded_half(bits);
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

void adamw_exact(std::span<uint16_t> param,
                 std::span<int16_t> residual,
                 std::span<const uint16_t> grad,
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

void adamw_master(std::span<uint16_t> param,
                  std::span<float> master,
                  std::span<const uint16_t> grad,
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

}  // namespace tierzero::kernels

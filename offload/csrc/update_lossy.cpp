#include <algorithm>
#include <array>
#include <bit>

#include "clones.h"
#include "parallel.h"
#include "rounding.h"
#include "rules.h"
#include "update.h"

// The formats that do not keep every bit; how they round is in offload/codes.py, [Note: codes].

namespace tierzero::kernels {
namespace {

constexpr uint32_t kMagnitude = 0x7FFF'FFFF;

template <typename Value>
Value* from(std::span<Value> values, uint64_t start) {
  return values.empty() ? nullptr : &values[start];
}

// Calls work(start, count, words) for runs of elements with their random words.
template <typename Work>
TIERZERO_INLINE void with_words(RoundingKey key, size_t numel, const Work& work) {
  for (size_t start = 0; start < numel; start += kWordsAtOnce) {
    const RoundingKey here{key.low, key.high, key.first + static_cast<uint32_t>(start)};
    const Words words = random_words(here);
    work(start, std::min<size_t>(kWordsAtOnce, numel - start), words);
  }
}

template <typename Value>
Value* from(Value* values, uint64_t start) {
  return values == nullptr ? nullptr : values + start;
}

template <typename Rule, typename Grad>
TIERZERO_CLONES void run_bf16(uint16_t* __restrict param,
                              int16_t* __restrict residual,
                              const Grad* __restrict grad,
                              uint16_t* __restrict exp_avg,
                              uint16_t* __restrict exp_avg_sq,
                              const Scalars scalars,
                              const RoundingKey key,
                              size_t numel) {
  with_words(key,
             numel,
             [&](size_t start, size_t count, const Words& words) __attribute__((always_inline)) {
               for (size_t i = start; i < start + count; ++i) {
                 const uint32_t noise = words[i - start];
                 Element old{std::bit_cast<float>(joined(param[i], residual[i])), 0.0F, 0.0F};
                 if constexpr (Rule::kHasExpAvg) {
                   old.exp_avg = widen(exp_avg[i]);
                 }
                 if constexpr (Rule::kHasExpAvgSq) {
                   old.exp_avg_sq = widen(exp_avg_sq[i]);
                 }
                 const Element result = Rule::updated(old, widen(grad[i]), scalars);
                 const auto bits = std::bit_cast<uint32_t>(with_one_nan(result.master));
                 param[i] = rounded<uint16_t>(bits);
                 residual[i] = residual_half(bits);
                 if constexpr (Rule::kHasExpAvg) {
                   const auto m = std::bit_cast<uint32_t>(with_one_nan(result.exp_avg));
                   exp_avg[i] = static_cast<uint16_t>((m + (noise & 0xFFFF)) >> 16);
                 }
                 if constexpr (Rule::kHasExpAvgSq) {
                   const auto v = std::bit_cast<uint32_t>(with_one_nan(result.exp_avg_sq));
                   exp_avg_sq[i] = static_cast<uint16_t>((v + (noise >> 16)) >> 16);
                 }
               }
             });
}

static_assert(kWordsAtOnce % kCodeBlock == 0);

// One block of 32 elements in registers: values and what will be written of them.
template <typename Value>
using Block = std::array<Value, kCodeBlock>;

struct CodedBlock {
  Block<float> exp_avg;
  Block<float> exp_avg_sq;
  Block<uint32_t> signs;     // of exp_avg
  Block<uint32_t> signed_u;  // the rounded upper bits of exp_avg, without the sign
  Block<uint32_t> unsigned_u;
};

TIERZERO_INLINE uint32_t greatest(const Block<uint32_t>& values, size_t count) {
  uint32_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    found = std::max(found, values[i]);
  }
  return found;
}

TIERZERO_INLINE uint32_t base_of(uint32_t greatest_u, uint32_t code_count) {
  return greatest_u - std::min(greatest_u, code_count);
}

TIERZERO_INLINE float decoded_signed(uint32_t code, uint32_t base) {
  const uint32_t magnitude = code & 0x7F;
  const uint32_t bits = magnitude == 0 ? 0 : (base + magnitude) << 20;
  return std::bit_cast<float>(bits | (code & 0x80) << 24);
}

TIERZERO_INLINE float decoded_unsigned(uint32_t code, uint32_t base) {
  return std::bit_cast<float>((base + code) << 19);
}

// Updates up to 32 elements; a whole block has a count that the compiler knows.
template <typename Rule, typename Grad>
TIERZERO_INLINE void update_block(uint16_t* __restrict param,
                                  int8_t* __restrict residual,
                                  const Grad* __restrict grad,
                                  uint8_t* __restrict m_codes,
                                  uint16_t* __restrict m_base,
                                  uint8_t* __restrict v_codes,
                                  uint16_t* __restrict v_base,
                                  const Scalars& scalars,
                                  const uint32_t* __restrict words,
                                  size_t count) {
  CodedBlock block;
  const uint32_t old_m_base = Rule::kHasExpAvg ? *m_base : 0U;
  const uint32_t old_v_base = Rule::kHasExpAvgSq ? *v_base : 0U;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = words[i];
    const uint32_t kept =
        (uint32_t{param[i]} << 16) + (static_cast<uint32_t>(int32_t{residual[i]}) << 8);
    Element old{std::bit_cast<float>(kept), 0.0F, 0.0F};
    if constexpr (Rule::kHasExpAvg) {
      old.exp_avg = decoded_signed(m_codes[i], old_m_base);
    }
    if constexpr (Rule::kHasExpAvgSq) {
      old.exp_avg_sq = decoded_unsigned(v_codes[i], old_v_base);
    }
    const Element result = Rule::updated(old, widen(grad[i]), scalars);
    const auto bits = std::bit_cast<uint32_t>(with_one_nan(result.master));
    const uint32_t shorter = (bits + (word & 0xFF)) >> 8;
    param[i] = static_cast<uint16_t>((shorter + 0x80) >> 8);
    residual[i] = static_cast<int8_t>(shorter & 0xFF);
    const auto m = std::bit_cast<uint32_t>(with_one_nan(result.exp_avg));
    block.signs[i] = m >> 31;
    block.signed_u[i] = ((m & kMagnitude) + (word & 0xF'FFFF)) >> 20;
    const auto v = std::bit_cast<uint32_t>(with_one_nan(result.exp_avg_sq)) & kMagnitude;
    block.unsigned_u[i] = (v + (word >> 13)) >> 19;
  }
  if constexpr (Rule::kHasExpAvg) {
    const uint32_t base = base_of(greatest(block.signed_u, count), 0x7F);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t code = std::max(block.signed_u[i], base) - base;
      m_codes[i] = static_cast<uint8_t>(code | block.signs[i] << 7);
    }
    *m_base = static_cast<uint16_t>(base);
  }
  if constexpr (Rule::kHasExpAvgSq) {
    const uint32_t base = base_of(greatest(block.unsigned_u, count), 0xFF);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t code = std::max(block.unsigned_u[i], base) - base;
      v_codes[i] = static_cast<uint8_t>(code);
    }
    *v_base = static_cast<uint16_t>(base);
  }
}

template <typename Rule, typename Grad>
TIERZERO_CLONES void run_compact(uint16_t* __restrict param,
                                 int8_t* __restrict residual,
                                 const Grad* __restrict grad,
                                 const Moments<uint8_t> codes,
                                 const Moments<uint16_t> bases,
                                 const Scalars scalars,
                                 const RoundingKey key,
                                 size_t numel) {
  with_words(
      key, numel, [&](size_t first, size_t run, const Words& words) __attribute__((always_inline)) {
        for (size_t start = first; start < first + run; start += kCodeBlock) {
          const auto update = [&](size_t count) __attribute__((always_inline)) {
            update_block<Rule>(param + start,
                               residual + start,
                               grad + start,
                               from(codes.exp_avg.data(), start),
                               from(bases.exp_avg.data(), start / kCodeBlock),
                               from(codes.exp_avg_sq.data(), start),
                               from(bases.exp_avg_sq.data(), start / kCodeBlock),
                               scalars,
                               &words[start - first],
                               count);
          };
          if (first + run - start >= kCodeBlock) {
            update(kCodeBlock);
          } else {
            update(first + run - start);
          }
        }
      });
}

}  // namespace

template <typename Grad>
void update_bf16(std::span<uint16_t> param,
                 std::span<int16_t> residual,
                 std::span<const Grad> grad,
                 Moments<uint16_t> moments,
                 const Scalars& scalars,
                 RoundingKey key,
                 uint64_t thread_count) {
  with_rule(scalars.rule, [&]<typename Rule>(Rule) {
    for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
      run_bf16<Rule>(&param[start],
                     &residual[start],
                     &grad[start],
                     from(moments.exp_avg, start),
                     from(moments.exp_avg_sq, start),
                     scalars,
                     {key.low, key.high, key.first + static_cast<uint32_t>(start)},
                     numel);
    });
  });
}

template <typename Grad>
void update_compact(std::span<uint16_t> param,
                    std::span<int8_t> residual,
                    std::span<const Grad> grad,
                    CodedMoments moments,
                    const Scalars& scalars,
                    RoundingKey key,
                    uint64_t thread_count) {
  const auto part = []<typename Value>(std::span<Value> values, uint64_t start) {
    return values.empty() ? values : values.subspan(start);
  };
  with_rule(scalars.rule, [&]<typename Rule>(Rule) {
    for_each_range(param.size(), thread_count, [&](uint64_t start, uint64_t numel) {
      const uint64_t block = start / kCodeBlock;
      run_compact<Rule>(&param[start],
                        &residual[start],
                        &grad[start],
                        {part(moments.codes.exp_avg, start), part(moments.codes.exp_avg_sq, start)},
                        {part(moments.bases.exp_avg, block), part(moments.bases.exp_avg_sq, block)},
                        scalars,
                        {key.low, key.high, key.first + static_cast<uint32_t>(start)},
                        numel);
    });
  });
}

template decltype(update_bf16<uint16_t>) update_bf16<uint16_t>;
template decltype(update_bf16<float>) update_bf16<float>;
template decltype(update_compact<uint16_t>) update_compact<uint16_t>;
template decltype(update_compact<float>) update_compact<float>;

}  // namespace tierzero::kernels

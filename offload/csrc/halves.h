#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace tierzero::kernels {

// An IEEE binary16 as its bits. bf16, the upper half of an fp32, travels as a plain uint16_t.
struct Fp16 {
  uint16_t bits;

  friend bool operator==(const Fp16&, const Fp16&) = default;
};

constexpr uint32_t kSignBit = 0x8000'0000;
constexpr uint32_t kInfinityBits = 0x7F80'0000;
constexpr uint32_t kQuietNanBits = 0x7FC0'0000;

// Conversions are selects between integers: around an operation on floats, which may trap, GCC
// would leave a branch. So loops of them vectorise on any instruction set. Those of fp16 have one
// such operation, exact or rounded to nearest even, from which nothing that counts is denormal.

inline bool is_nan(uint32_t bits) {
  return (bits & ~kSignBit) > kInfinityBits;
}

inline float widen(float value) {
  return value;
}

inline float widen(uint16_t bf16) {
  return std::bit_cast<float>(uint32_t{bf16} << 16);
}

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

// The parts of an fp32, as integers, that conversions of fp16 add and compare.
constexpr int32_t kExponentMask = 0x7F80'0000;
constexpr int32_t kExponentBias = (127 - 15) << 23;
constexpr int32_t kThirteenDoublings = 13 << 23;
constexpr int32_t kLeastNormal = 0x3880'0000;  // 2^-14
constexpr int32_t kBeyond = 0x4780'0000;       // 2^16

inline float widen(Fp16 half) {
  const int32_t magnitude = half.bits & 0x7FFF;
  const bool is_subnormal = magnitude < 0x0400;
  const bool is_finite = magnitude < 0x7C00;
  // A subnormal is read as 2^-14 more than it is, a normal number, and then corrected.
  const int32_t bias = is_subnormal ? kLeastNormal : is_finite ? kExponentBias : 2 * kExponentBias;
  const int32_t excess = is_subnormal ? kLeastNormal : 0;
  const float value = std::bit_cast<float>((magnitude << 13) + bias) - std::bit_cast<float>(excess);
  const uint32_t sign = (half.bits & 0x8000U) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// Returns the 16-bit number nearest to an fp32, given as its bits.
template <typename Half>
Half rounded(uint32_t bits);

// bf16: ties away from zero. A NaN must be quiet.
template <>
inline uint16_t rounded<uint16_t>(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

// fp16: ties to even. A NaN becomes the quiet one with its sign.
template <>
inline Fp16 rounded<Fp16>(uint32_t bits) {
  const auto magnitude = static_cast<int32_t>(bits & ~kSignBit);
  // The power of two at or below the number, kept within fp16's. A sum of 2^13 times that power
  // and the number has the unit of the fp16 wanted, and so is rounded as that is.
  const int32_t power = std::min(std::max(magnitude & kExponentMask, kLeastNormal), kBeyond);
  const int32_t large = power + kThirteenDoublings;
  const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(large);
  const int32_t units = std::bit_cast<int32_t>(sum) - large;
  const int32_t number = std::min(((power - kLeastNormal) >> 13) + units, 0x7C00);
  const int32_t nan_bits = magnitude > kExponentMask ? 0x7E00 : 0;
  const uint32_t sign = (bits & kSignBit) >> 16;
  return {static_cast<uint16_t>(sign | static_cast<uint32_t>(number | nan_bits))};
}

}  // namespace tierzero::kernels

#pragma once

#include <array>
#include <cstdint>

#include "rules.h"
#include "update.h"

namespace tierzero::kernels {

// The random words of elements, by offload/codes.py, [Note: random bits].

inline constexpr uint32_t kGroupNumel = 8;
inline constexpr uint32_t kWordsAtOnce = 512;  // two kilobytes
inline constexpr std::array<uint32_t, kGroupNumel> kFactors{0x9E37'79B8U,
                                                            0x85EB'CA69U,
                                                            0xC2B2'AE3AU,
                                                            0x27D4'EB2BU,
                                                            0x1656'67BCU,
                                                            0xD3A2'646DU,
                                                            0xFD70'46C6U,
                                                            0xB55A'4F0FU};

TIERZERO_INLINE uint32_t mixed(uint32_t bits, uint32_t high) {
  bits ^= bits >> 16;
  bits *= 0x7FEB'352DU;
  bits ^= (bits >> 15) ^ high;
  bits *= 0x846C'A68BU;
  bits ^= bits >> 16;
  bits *= 0x3184'8BABU;
  return bits ^ (bits >> 15);
}

TIERZERO_INLINE uint32_t mixed_again(uint32_t bits) {
  bits *= 0xAC4C'1B51U;
  bits ^= bits >> 14;
  bits *= 0x9E37'79B1U;
  return bits ^ (bits >> 16);
}

using Words = std::array<uint32_t, kWordsAtOnce>;

// Returns the words of as many elements, the first of which has a number that 8 divides.
TIERZERO_INLINE Words random_words(RoundingKey key) {
  constexpr uint32_t kGroups = kWordsAtOnce / kGroupNumel;
  std::array<uint32_t, kGroups> x;
  std::array<uint32_t, kGroups> y;
  for (uint32_t group = 0; group < kGroups; ++group) {
    x[group] = mixed(key.first / kGroupNumel + group + key.low, key.high);
    y[group] = mixed_again(x[group]);
  }
  Words words;
  for (uint32_t group = 0; group < kGroups; ++group) {
    for (uint32_t i = 0; i < kGroupNumel; ++i) {
      words[group * kGroupNumel + i] = x[group] * kFactors[i] + y[group];
    }
  }
  return words;
}

}  // namespace tierzero::kernels

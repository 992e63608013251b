#pragma once

#include <cstdint>

#include "rules.h"
#include "update.h"

namespace tierzero::kernels {

// The random bits of one element, by offload/codes.py, [Note: random bits].

TIERZERO_INLINE uint32_t mixed(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x85EB'CA6BU;
  bits ^= bits >> 13;
  bits *= 0xC2B2'AE35U;
  return bits ^ (bits >> 16);
}

TIERZERO_INLINE uint32_t first_noise(RoundingKey key, uint32_t index) {
  return mixed(mixed(key.first + index + key.low) ^ key.high);
}

TIERZERO_INLINE uint32_t second_noise(uint32_t first) {
  return mixed(first + 0x9E37'79B9U);
}

}  // namespace tierzero::kernels

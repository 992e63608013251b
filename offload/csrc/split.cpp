#include "split.h"

#include <bit>

#include "clones.h"
#include "halves.h"
#include "parallel.h"

namespace tierzero::kernels {
namespace {

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

}  // namespace

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

}  // namespace tierzero::kernels

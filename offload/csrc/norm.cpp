#include "norm.h"

#include <algorithm>
#include <array>
#include <vector>

#include "clones.h"
#include "halves.h"
#include "parallel.h"

namespace tierzero::kernels {
namespace {

constexpr uint64_t kBlockNumel = 4096;
constexpr uint64_t kLaneCount = 64;
constexpr uint64_t kBlocksPerChunk = 16;
// Lanes summed together: few enough that their sums stay in registers.
constexpr uint64_t kGroupLanes = 32;

using Lanes = std::array<double, kLaneCount>;

// Adds the squares of whole rows of 64 elements to the lanes, each lane in row order.
template <typename Value>
TIERZERO_CLONES void add_rows(const Value* values, size_t row_count, Lanes& lanes) {
  for (size_t group = 0; group < kLaneCount; group += kGroupLanes) {
    double sums[kGroupLanes];
    for (size_t lane = 0; lane < kGroupLanes; ++lane) {
      sums[lane] = lanes[group + lane];
    }
    for (size_t row = 0; row < row_count; ++row) {
      for (size_t lane = 0; lane < kGroupLanes; ++lane) {
        const double value{widen(values[row * kLaneCount + group + lane])};
        sums[lane] += value * value;
      }
    }
    for (size_t lane = 0; lane < kGroupLanes; ++lane) {
      lanes[group + lane] = sums[lane];
    }
  }
}

template <typename Value>
void add_part_of_row(std::span<const Value> values, uint64_t first_lane, Lanes& lanes) {
  for (size_t i = 0; i < values.size(); ++i) {
    const double value{widen(values[i])};
    lanes[first_lane + i] += value * value;
  }
}

double folded(Lanes& lanes) {
  for (size_t half = kLaneCount / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Sums values that lie in one block, the first of them in first_lane.
template <typename Value>
double block_sum(std::span<const Value> values, uint64_t first_lane) {
  Lanes lanes{};
  if (first_lane != 0) {
    const uint64_t head = std::min<uint64_t>(kLaneCount - first_lane, values.size());
    add_part_of_row(values.first(head), first_lane, lanes);
    values = values.subspan(head);
  }
  const uint64_t row_count = values.size() / kLaneCount;
  add_rows(values.data(), row_count, lanes);
  add_part_of_row(values.subspan(row_count * kLaneCount), 0, lanes);
  return folded(lanes);
}

}  // namespace

template <typename Value>
double sum_squares(std::span<const Value> values, uint64_t first_index, uint64_t thread_count) {
  const uint64_t lead = first_index % kBlockNumel;  // elements of the first block not given
  const uint64_t end = lead + values.size();
  const uint64_t block_count = end / kBlockNumel + (end % kBlockNumel != 0);
  std::vector<double> block_sums(block_count);
  const uint64_t chunk_count = (block_count + kBlocksPerChunk - 1) / kBlocksPerChunk;
  for_each_chunk(chunk_count, thread_count, [&](uint64_t chunk) {
    const uint64_t stop_block = std::min(block_count, (chunk + 1) * kBlocksPerChunk);
    for (uint64_t block = chunk * kBlocksPerChunk; block < stop_block; ++block) {
      const uint64_t start = std::max(block * kBlockNumel, lead);
      const uint64_t stop = std::min((block + 1) * kBlockNumel, end);
      block_sums[block] = block_sum(values.subspan(start - lead, stop - start), start % kLaneCount);
    }
  });
  double total = 0.0;
  for (const double sum : block_sums) {
    total += sum;
  }
  return total;
}

template double sum_squares(std::span<const float>, uint64_t, uint64_t);
template double sum_squares(std::span<const uint16_t>, uint64_t, uint64_t);
template double sum_squares(std::span<const Fp16>, uint64_t, uint64_t);

}  // namespace tierzero::kernels

#include "driver.h"

namespace tierzero::aio {
namespace {

uint64_t count_of(uint64_t size_bytes, uint64_t block_bytes) {
  return align_up(size_bytes, block_bytes) / block_bytes;
}

}  // namespace

Transfer::Transfer(const Block& whole, uint64_t block_bytes)
    : whole_(whole),
      block_bytes_(align_up(block_bytes, whole.alignment_bytes)),
      middle_stop_bytes_(whole.size_bytes) {
  if (whole.edge_descriptor >= 0) {
    const uint64_t alignment_bytes = whole.alignment_bytes;
    const uint64_t stop_bytes = whole.offset_bytes + whole.size_bytes;
    const uint64_t first_bytes = align_up(whole.offset_bytes, alignment_bytes);
    const uint64_t last_bytes = stop_bytes - stop_bytes % alignment_bytes;
    const auto address = reinterpret_cast<uintptr_t>(whole.data);
    const bool in_step = address % alignment_bytes == whole.offset_bytes % alignment_bytes;
    if (in_step && first_bytes < last_bytes) {
      middle_start_bytes_ = first_bytes - whole.offset_bytes;
      middle_stop_bytes_ = last_bytes - whole.offset_bytes;
    } else {
      middle_stop_bytes_ = 0;  // there is no middle: all of it is buffered
    }
  }
  blocks_left_ = count_of(middle_start_bytes_, block_bytes_) +
                 count_of(middle_stop_bytes_ - middle_start_bytes_, block_bytes_) +
                 count_of(whole.size_bytes - middle_stop_bytes_, block_bytes_);
}

// 0 when all are taken.
uint64_t Transfer::next_block_bytes() const {
  const uint64_t stop_bytes = taken_bytes_ < middle_start_bytes_   ? middle_start_bytes_
                              : taken_bytes_ >= middle_stop_bytes_ ? whole_.size_bytes
                                                                   : middle_stop_bytes_;
  return std::min(block_bytes_, stop_bytes - taken_bytes_);
}

Block Transfer::take_block() {
  const bool in_middle = taken_bytes_ >= middle_start_bytes_ && taken_bytes_ < middle_stop_bytes_;
  const uint64_t part_bytes = next_block_bytes();
  Block block = whole_.part(taken_bytes_, part_bytes);
  if (!in_middle) {
    block.descriptor = whole_.edge_descriptor;
    block.file_slot = -1;
    block.alignment_bytes = 1;
  }
  taken_bytes_ += part_bytes;
  return block;
}

// Returns whether this was the last block.
bool Transfer::add(const Result& block_result) {
  result_.moved_bytes += block_result.moved_bytes;
  if (result_.error_number == 0) {
    result_.error_number = block_result.error_number;
    result_.ended_early = block_result.ended_early;
  }
  if (--blocks_left_ > 0) {
    return false;
  }
  done_.store(true, std::memory_order_release);
  return true;
}

}  // namespace tierzero::aio

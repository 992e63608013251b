// Which of the waiting transfers may give the next block to the kernel: reads or writes.
//
// [Note: mixed or alternating]
// Some devices are fastest when reads and writes mix, others when bursts of one kind alternate with
// bursts of the other (DESIGN 9). Mixed: whichever kind has fewer bytes with the kernel goes next,
// reads first, so that a page-in does not wait behind a queue of page-outs. Alternating: one kind
// goes until it has had its burst or has nothing left, then the other, once what is with the kernel
// is over. A window bounds the bytes of a kind that are with the kernel at once; one block always
// fits.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "transfer.h"

namespace tierzero::aio {

struct Schedule {
  uint64_t read_window_bytes = UINT64_MAX;
  uint64_t write_window_bytes = UINT64_MAX;
  uint64_t burst_bytes = 0;  // 0: reads and writes mix
};

// Single-threaded: whoever uses it holds a mutex.
class Chooser {
 public:
  void set(const Schedule& schedule) {
    schedule_ = schedule;
    burst_left_bytes_ = schedule.burst_bytes;
  }

  // The kind of the next block, or none while something has to be over first. The arguments are the
  // sizes of the next block of each kind, 0 where none waits.
  std::optional<Operation> choose(uint64_t read_bytes, uint64_t write_bytes) {
    return schedule_.burst_bytes == 0 ? choose_mixed(read_bytes, write_bytes)
                                      : choose_alternating(read_bytes, write_bytes);
  }

  void taken(Operation operation, uint64_t size_bytes) {
    with_kernel(operation) += size_bytes;
    if (operation == direction_) {
      burst_left_bytes_ -= size_bytes < burst_left_bytes_ ? size_bytes : burst_left_bytes_;
    }
  }

  void over(Operation operation, uint64_t size_bytes) { with_kernel(operation) -= size_bytes; }

 private:
  static Operation other(Operation operation) {
    return operation == Operation::kRead ? Operation::kWrite : Operation::kRead;
  }
  uint64_t& with_kernel(Operation operation) {
    return with_kernel_bytes_[operation == Operation::kRead ? 0 : 1];
  }
  bool fits(Operation operation, uint64_t size_bytes) {
    const uint64_t window_bytes =
        operation == Operation::kRead ? schedule_.read_window_bytes : schedule_.write_window_bytes;
    const uint64_t used_bytes = with_kernel(operation);
    return size_bytes > 0 && (used_bytes == 0 || (used_bytes < window_bytes &&
                                                  size_bytes <= window_bytes - used_bytes));
  }

  std::optional<Operation> choose_mixed(uint64_t read_bytes, uint64_t write_bytes) {
    const bool may_read = fits(Operation::kRead, read_bytes);
    const bool may_write = fits(Operation::kWrite, write_bytes);
    if (may_read && may_write) {
      return with_kernel(Operation::kRead) <= with_kernel(Operation::kWrite) ? Operation::kRead
                                                                             : Operation::kWrite;
    }
    return may_read    ? std::optional(Operation::kRead)
           : may_write ? std::optional(Operation::kWrite)
                       : std::nullopt;
  }

  std::optional<Operation> choose_alternating(uint64_t read_bytes, uint64_t write_bytes) {
    const std::array<uint64_t, 2> waiting_bytes = {read_bytes, write_bytes};
    const auto waiting = [&](Operation operation) {
      return waiting_bytes[operation == Operation::kRead ? 0 : 1];
    };
    const Operation next = other(direction_);
    const bool turns = waiting(next) > 0 && (burst_left_bytes_ == 0 || waiting(direction_) == 0);
    if (turns) {
      if (with_kernel(direction_) > 0) {
        return std::nullopt;
      }
      direction_ = next;
      burst_left_bytes_ = schedule_.burst_bytes;
    }
    return fits(direction_, waiting(direction_)) ? std::optional(direction_) : std::nullopt;
  }

  Schedule schedule_;
  std::array<uint64_t, 2> with_kernel_bytes_ = {0, 0};
  Operation direction_ = Operation::kRead;
  uint64_t burst_left_bytes_ = 0;
};

}  // namespace tierzero::aio

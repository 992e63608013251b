// What moves: blocks, and the one loop that moves a block however many calls the kernel needs.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tierzero::aio {

enum class Operation { kRead, kWrite };

// Bytes of a file and the memory they go to or come from. `alignment_bytes` is what direct I/O on
// the file needs, 1 for a buffered file.
struct Block {
  Operation operation;
  int descriptor;
  uint64_t offset_bytes;
  std::byte* data;
  uint64_t size_bytes;
  uint64_t alignment_bytes;

  Block part(uint64_t start_bytes, uint64_t part_bytes) const {
    return {operation,
            descriptor,
            offset_bytes + start_bytes,
            data + start_bytes,
            part_bytes,
            alignment_bytes};
  }
};

// What came of a block or of a whole transfer; `error_number` is 0 when every byte moved.
struct Result {
  uint64_t moved_bytes = 0;
  int error_number = 0;
  bool ended_early = false;
};

// One system call: returns the bytes moved, or the negated errno.
using MoveOnce = std::function<int64_t(const Block&)>;

inline int64_t move_with_kernel(const Block& block) {
  const auto offset = static_cast<off_t>(block.offset_bytes);
  const ssize_t moved = block.operation == Operation::kRead
                            ? pread(block.descriptor, block.data, block.size_bytes, offset)
                            : pwrite(block.descriptor, block.data, block.size_bytes, offset);
  return moved < 0 ? -static_cast<int64_t>(errno) : static_cast<int64_t>(moved);
}

// A kernel that only ever answers "again" is an error, not an endless loop.
inline constexpr int kAgainLimit = 1000;

// Direct I/O can only go on from a sector boundary, so the rest of a short transfer starts at the
// last whole sector. A call that does not even move one sector has met the end of the file.
inline Result move_block(const Block& block, const MoveOnce& move_once) {
  Result result;
  int again_count = 0;
  uint64_t position = 0;
  while (position < block.size_bytes) {
    const uint64_t left_bytes = block.size_bytes - position;
    const int64_t answer = move_once(block.part(position, left_bytes));
    if (answer == -EINTR) {
      continue;
    }
    if (answer == -EAGAIN && ++again_count <= kAgainLimit) {
      sched_yield();
      continue;
    }
    if (answer < 0) {
      result.error_number = static_cast<int>(-answer);
      return result;
    }
    again_count = 0;
    const auto moved_bytes = static_cast<uint64_t>(answer);
    result.moved_bytes = std::max(result.moved_bytes, position + moved_bytes);
    const uint64_t advance_bytes =
        moved_bytes == left_bytes ? moved_bytes : moved_bytes - moved_bytes % block.alignment_bytes;
    if (advance_bytes == 0) {
      result.error_number = EIO;
      result.ended_early = true;
      return result;
    }
    position += advance_bytes;
  }
  return result;
}

}  // namespace tierzero::aio

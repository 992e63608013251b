// What moves: blocks, and the one place that knows how a block goes on however many calls it needs.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace tierzero::aio {

enum class Operation { kRead, kWrite };

constexpr uint64_t align_up(uint64_t size_bytes, uint64_t alignment_bytes) {
  return (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

// Bytes of a file and the memory they go to or come from. `alignment_bytes` is what direct I/O on
// the file needs, 1 for a buffered file.
struct Block {
  Operation operation;
  int descriptor;
  uint64_t offset_bytes;
  std::byte* data;
  uint64_t size_bytes;
  uint64_t alignment_bytes;
  int file_slot = -1;        // where the queue has the file registered, or -1
  int edge_descriptor = -1;  // the same file buffered, for what is not aligned, or -1
  bool further = false;      // a piece of a transfer that has its place in the queue depth already

  Block part(uint64_t start_bytes, uint64_t part_bytes) const {
    Block block = *this;
    block.offset_bytes += start_bytes;
    block.data += start_bytes;
    block.size_bytes = part_bytes;
    return block;
  }
};

// What came of a block or of a whole transfer; `error_number` is 0 when every byte moved.
struct Result {
  uint64_t moved_bytes = 0;
  int error_number = 0;
  bool ended_early = false;
};

// A kernel that only ever answers "again" is an error, not an endless loop.
inline constexpr int kAgainLimit = 1000;

// How far a block has come. Direct I/O can only go on from a sector boundary, so the rest of a
// short call starts at the last whole sector. A call that does not even move one sector has met the
// end of the file.
class Progress {
 public:
  explicit Progress(const Block& block) : block_(block) {}

  Block rest() const { return block_.part(position_, block_.size_bytes - position_); }
  const Result& result() const { return result_; }

  // Takes what a call for rest() answered: the bytes moved, or the negated errno. Returns whether
  // the block is over.
  bool add(int64_t answer) {
    if (answer == -EINTR || (answer == -EAGAIN && ++again_count_ <= kAgainLimit)) {
      return false;
    }
    if (answer < 0) {
      result_.error_number = static_cast<int>(-answer);
      return true;
    }
    again_count_ = 0;
    const uint64_t left_bytes = block_.size_bytes - position_;
    const auto moved_bytes = static_cast<uint64_t>(answer);
    result_.moved_bytes = std::max(result_.moved_bytes, position_ + moved_bytes);
    const uint64_t advance_bytes = moved_bytes == left_bytes
                                       ? moved_bytes
                                       : moved_bytes - moved_bytes % block_.alignment_bytes;
    if (advance_bytes == 0) {
      result_.error_number = EIO;
      result_.ended_early = true;
      return true;
    }
    position_ += advance_bytes;
    return position_ == block_.size_bytes;
  }

 private:
  Block block_;
  uint64_t position_ = 0;
  int again_count_ = 0;
  Result result_;
};

}  // namespace tierzero::aio

// A queue of one blocking call, for the engine that is a pool of threads.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "queue.h"

namespace tierzero::aio {

// One system call: returns the bytes moved, or the negated errno.
using MoveOnce = std::function<int64_t(const Block&)>;

inline int64_t move_with_kernel(const Block& block) {
  const auto offset = static_cast<off_t>(block.offset_bytes);
  const ssize_t moved = block.operation == Operation::kRead
                            ? pread(block.descriptor, block.data, block.size_bytes, offset)
                            : pwrite(block.descriptor, block.data, block.size_bytes, offset);
  return moved < 0 ? -static_cast<int64_t>(errno) : static_cast<int64_t>(moved);
}

class CallQueue final : public Queue {
 public:
  explicit CallQueue(MoveOnce move_once) : move_once_(std::move(move_once)) {}

  uint64_t depth() const override { return 1; }

  Answer submit(uint64_t token, const Block& block) override {
    if (taken_.has_value()) {
      return Answer::kBusy;
    }
    token_ = token;
    taken_ = block;
    return Answer::kTaken;
  }

  void reap(std::vector<Completion>& completions) override {
    if (taken_.has_value()) {
      completions.push_back({token_, move_safely(*taken_)});
      taken_.reset();
    }
  }

  void wake() override {}  // its driver never waits here with room for another call

 private:
  // Whatever a call throws becomes the block's error.
  int64_t move_safely(const Block& block) noexcept {
    try {
      return move_once_(block);
    } catch (const std::system_error& error) {
      return error.code().value() > 0 ? -error.code().value() : -EIO;
    } catch (...) {
      return -EIO;
    }
  }

  const MoveOnce move_once_;
  uint64_t token_ = 0;
  std::optional<Block> taken_;
};

}  // namespace tierzero::aio

// What every engine is to its driver: a queue of calls that the kernel answers in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transfer.h"

namespace tierzero::aio {

enum class Answer { kTaken, kBusy };

struct Completion {
  uint64_t token;
  int64_t answer;  // the bytes moved, or the negated errno
};

// Single-threaded but for `wake`. The memory of a call that was taken stays in use until `reap` has
// returned its completion; a queue is only destroyed when every call that it took is complete.
class Queue {
 public:
  Queue() = default;
  virtual ~Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // The number of calls that may be taken and not yet reaped.
  virtual uint64_t depth() const = 0;

  // Takes one call; `token` is below depth() and not in use. Busy: reap, then try again.
  virtual Answer submit(uint64_t token, const Block& block) = 0;

  // Hands what was taken to the kernel, all at once, and appends what is complete. Returns when
  // there is at least one completion or `wake` was called. Throws only when the queue is broken.
  virtual void reap(std::vector<Completion>& completions) = 0;

  // Makes a `reap` return, the present one or the next. Callable from any thread.
  virtual void wake() = 0;
};

}  // namespace tierzero::aio

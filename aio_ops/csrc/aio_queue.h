// A queue on the kernel's older asynchronous I/O (io_submit), by its raw system calls. It is only
// asynchronous on direct files: elsewhere io_submit itself moves the bytes.
#pragma once

#include <linux/aio_abi.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "handle.h"
#include "queue.h"

namespace tierzero::aio {

// Each returns what the kernel does, or the negated errno; tests put their own in place.
struct AioCalls {
  AioCalls();

  std::function<int(unsigned, aio_context_t*)> setup;
  std::function<int(aio_context_t, int64_t, iocb**)> submit;
  std::function<int(aio_context_t, int64_t, int64_t, io_event*)> get_events;
  std::function<int(aio_context_t)> destroy;
};

class AioQueue final : public Queue {
 public:
  // Takes up to `depth` calls at once. Throws EAGAIN when the machine has no context left.
  explicit AioQueue(uint64_t depth, AioCalls calls = {});
  ~AioQueue() override;

  uint64_t depth() const override { return calls_of_token_.size(); }
  Answer submit(uint64_t token, const Block& block) override;
  void reap(std::vector<Completion>& completions) override;
  void wake() override { wake_counter_.raise(); }

 private:
  void arm_wake();
  void hand_over(std::vector<Completion>& completions);
  void wait(std::vector<Completion>& completions);

  const AioCalls calls_;
  WakeCounter wake_counter_;
  aio_context_t context_ = 0;
  std::vector<iocb> calls_of_token_;
  iocb wake_call_ = {};
  std::vector<iocb*> waiting_;  // taken, but not yet in the kernel
  std::vector<io_event> events_;
  uint64_t in_kernel_ = 0;  // calls, without the poll
  bool wake_armed_ = false;
  bool woken_ = false;
  int refusals_ = 0;  // in a row, of a kernel with nothing of ours under way
};

}  // namespace tierzero::aio

// A queue on io_uring, from Linux 5.4 on, by its raw system calls.
//
// [Note: the memory of a ring]
// The kernel and we write to the same mapping. Each side publishes what it wrote by a release store
// of an index and sees what the other wrote after an acquire load of the other index: we write
// entries, then the submission tail; we read the completion tail, then entries, then write the
// completion head. Only the thread that drives the queue touches the mapping.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "handle.h"
#include "queue.h"
#include "uring_calls.h"
#include "uring_registry.h"

namespace tierzero::aio {

// [Note: polling]
// Submission polling: a thread of the kernel looks for entries, so that submitting needs no system
// call while it is awake; it costs that thread's CPU time. Completion polling: whoever reaps asks
// the device instead of waiting for its interrupt, on devices with polled queues and files on
// direct I/O alone. Such a ring takes reads and writes only, so there is no poll of a wake counter:
// a wake is seen at the next completion. What is not direct, the ragged edges, is moved by plain
// calls.
struct Polling {
  bool submission = false;
  bool completion = false;
};

class UringQueue final : public Queue {
 public:
  // Takes up to `depth` calls at once, fewer when the memory that may be locked does not allow it.
  // Throws what the kernel reports when it has no io_uring for us.
  explicit UringQueue(uint64_t depth, Polling polling = {}, UringCalls calls = {});
  ~UringQueue() override;

  uint64_t depth() const override { return depth_; }
  Answer submit(uint64_t token, const Block& block) override;
  void reap(std::vector<Completion>& completions) override;
  void wake() override;

  const std::shared_ptr<UringRegistry>& registry() const { return registry_; }

 private:
  uring::Submission* next_entry();
  void arm_wake();
  void enter(bool wait);
  void enter_polled(bool wait);
  void take_completions(std::vector<Completion>& completions);
  bool completion_waits() const;
  uint32_t unsubmitted() const;
  bool has_operation(uint8_t operation) const;

  const UringCalls calls_;
  const Polling polling_;
  uring::Parameters params_;
  uint64_t depth_;
  Handle ring_;
  WakeCounter wake_counter_;
  std::unique_ptr<SharedMapping> rings_;
  std::unique_ptr<SharedMapping> entries_;
  uint32_t* submission_head_;
  uint32_t* submission_tail_;
  uint32_t* submission_flags_;
  uint32_t* completion_head_;
  uint32_t* completion_tail_;
  uint32_t tail_ = 0;   // of the submission ring, ours before it is published
  uint64_t taken_ = 0;  // calls that are not reaped
  bool wake_armed_ = false;
  bool woken_ = false;
  std::vector<Completion> moved_;  // by plain calls [Note: polling]
  int refusals_ = 0;               // in a row, of a kernel with nothing of ours under way
  bool plain_operations_;          // READ and WRITE, from Linux 5.6 on
  std::vector<iovec> vectors_;     // by token, for READV and WRITEV
  std::shared_ptr<UringRegistry> registry_;
};

}  // namespace tierzero::aio

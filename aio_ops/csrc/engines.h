// The native engines: a driver with the queues that make it one or the other.
#pragma once

#include "call_queue.h"
#include "driver.h"
#include "uring_queue.h"

namespace tierzero::aio {

struct Settings {
  uint64_t thread_count;
  uint64_t block_bytes;
  uint64_t queue_depth;  // transfers in flight
};

// Positioned reads and writes on a pool of threads.
class ThreadEngine : public Driver {
 public:
  explicit ThreadEngine(const Settings& settings, MoveOnce move_once = move_with_kernel);
};

// One io_uring, driven by one thread. At most queue_depth blocks are in the kernel at once.
class UringEngine : public Driver {
 public:
  UringEngine(const Limits& limits, Polling polling = {}, const UringCalls& calls = {});

  // [see UringRegistry] In a forked child these do nothing: the ring belongs to the parent.
  int add_file(int descriptor);
  void remove_file(int slot);
  int add_memory(uint64_t address, uint64_t size_bytes);
  void remove_memory(uint64_t address);

 private:
  UringEngine(const Limits& limits, std::unique_ptr<UringQueue>&& queue);
  UringEngine(const Limits& limits,
              std::unique_ptr<UringQueue>&& queue,
              std::shared_ptr<UringRegistry> registry);

  const std::shared_ptr<UringRegistry> registry_;
};

// Linux kernel AIO. Reads and writes have a context and a thread each, because io_submit may block.
class AioEngine : public Driver {
 public:
  explicit AioEngine(const Limits& limits);
};

}  // namespace tierzero::aio

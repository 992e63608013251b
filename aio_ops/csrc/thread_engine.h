// An engine of positioned reads and writes on a pool of threads.
//
// [Note: what the mutex guards]
// One mutex guards the queue, the counts and the unfinished part of every transfer. A transfer's
// result is written under it before `done` is set and never again, so whoever has seen `done` may
// read the result, and the memory that was moved, without the mutex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "transfer.h"

namespace tierzero::aio {

// Made by ThreadEngine::try_submit; it outlives the engine if someone still holds it.
class Transfer {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // Meaningful once done() holds.
  const Result& result() const noexcept { return result_; }

 private:
  friend class ThreadEngine;

  Transfer(const Block& whole, uint64_t block_bytes);
  Block take_block();
  bool all_taken() const { return taken_bytes_ == whole_.size_bytes; }
  bool add(const Result& block_result);

  const Block whole_;
  const uint64_t block_bytes_;
  uint64_t taken_bytes_ = 0;
  uint64_t blocks_left_;
  Result result_;
  std::atomic<bool> done_ = false;
};

struct Settings {
  uint64_t thread_count;
  uint64_t block_bytes;
  uint64_t queue_depth;  // transfers in flight
};

// Safe to call from several threads. In a forked child every call but the destructor throws, and
// the destructor does nothing: the threads do not exist there and the mutex may be locked forever.
// The caller keeps the memory and the descriptor of a transfer valid until it is done.
class ThreadEngine {
 public:
  using Duration = std::chrono::nanoseconds;

  explicit ThreadEngine(const Settings& settings, MoveOnce move_once = move_with_kernel);
  ~ThreadEngine();
  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  // Returns null when queue_depth transfers are in flight. Throws when the engine is closed.
  std::shared_ptr<Transfer> try_submit(const Block& whole);

  // Each waits at most `timeout` and returns whether what it waits for holds.
  bool wait_for_room(Duration timeout);
  bool wait(const Transfer& transfer, Duration timeout);
  bool drain(Duration timeout);

  uint64_t in_flight() const;

  // From here on try_submit throws; what is in flight goes on.
  void refuse_more();

  // Refuses more, finishes what is in flight, ends the threads. Idempotent.
  void close();

 private:
  struct State;

  void require_same_process() const;
  static void work(State& state) noexcept;

  std::unique_ptr<State> state_;
};

}  // namespace tierzero::aio

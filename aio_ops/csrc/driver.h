// What all native engines share: transfers cut into blocks, and the threads that drive queues.
//
// [Note: what the mutex guards]
// One mutex guards the feeds, the counts and the unfinished part of every transfer. A transfer's
// result is written under it before `done` is set and never again, so whoever has seen `done` may
// read the result, and the memory that was moved, without the mutex. A queue and the blocks that it
// has taken belong to the one thread that drives it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "queue.h"
#include "schedule.h"
#include "transfer.h"

namespace tierzero::aio {

// Made by Driver::try_submit; it outlives the driver if someone still holds it.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // Meaningful once done() holds.
  const Result& result() const noexcept { return result_; }

 private:
  friend class Driver;

  Transfer(const Block& whole, uint64_t block_bytes);
  uint64_t next_block_bytes() const;
  Block take_block();
  bool all_taken() const { return taken_bytes_ == whole_.size_bytes; }
  bool takes_place() const { return !whole_.further; }
  bool add(const Result& block_result);

  const Block whole_;
  const uint64_t block_bytes_;
  uint64_t middle_start_bytes_ = 0;  // what lies before it and from its stop on is buffered
  uint64_t middle_stop_bytes_;
  uint64_t taken_bytes_ = 0;
  uint64_t blocks_left_;
  uint64_t waiter_count_ = 0;
  Result result_;
  std::atomic<bool> done_ = false;
};

struct Limits {
  uint64_t block_bytes;
  uint64_t queue_depth;  // transfers in flight, without further pieces of any
};

// What a driver is doing, for whoever wonders why nothing happens.
struct Activity {
  uint64_t in_flight;       // transfers
  uint64_t blocks_taken;    // by queues
  uint64_t moved_bytes;     // by blocks that are over, since the beginning
  double busy_s;            // with something in flight, since the beginning
  double since_progress_s;  // since a block was over, or since there was something in flight
};

// Who takes what. Each queue gets a thread.
enum class Lanes {
  kShared,      // all take both reads and writes
  kByOperation  // the first queue only reads and the second only writes
};

// Safe to call from several threads. In a forked child every call but the destructor throws, and
// the destructor does nothing: the threads do not exist there and the mutex may be locked forever.
// The caller keeps the memory and the descriptors of a transfer valid until it is done.
class Driver {
 public:
  using Duration = std::chrono::nanoseconds;

  Driver(const Limits& limits, std::vector<std::unique_ptr<Queue>> queues, Lanes lanes);
  virtual ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // From here on blocks go to the kernel by this schedule [Note: mixed or alternating].
  void set_schedule(const Schedule& schedule);

  // Returns null when queue_depth transfers are in flight. Throws when the engine is closed.
  std::shared_ptr<Transfer> try_submit(const Block& whole);

  // Takes as many transfers as there is room for, from the first on.
  std::vector<std::shared_ptr<Transfer>> try_submit(std::span<const Block> wholes);

  // Each waits at most `timeout` and returns whether what it waits for holds.
  bool wait_for_room(Duration timeout);
  bool wait(Transfer& transfer, Duration timeout);
  bool drain(Duration timeout);

  uint64_t in_flight() const;
  Activity activity() const;

  // From here on try_submit throws; what is in flight goes on.
  void refuse_more();

  // Refuses more, finishes what is in flight, ends the threads. Idempotent.
  void close();

 protected:
  bool in_same_process() const;

 private:
  struct State;
  struct Operations;
  class Feed;
  class Lane;

  void require_same_process() const;

  std::unique_ptr<State> state_;
};

}  // namespace tierzero::aio

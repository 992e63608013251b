#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tierzero::kernels {

// When a call began and ended, in seconds of the steady clock.
struct CallTimes {
  double begin_seconds = 0.0;
  double end_seconds = 0.0;
};

// Runs calls one after the other, in the order they were submitted, on a thread of its own. The
// number of a call, from 1 on, is its ticket. Memory that a call uses is its submitter's to keep.
//
// A call that throws ends the queue: those behind it are dropped, and whoever asks for any of them,
// or submits another, gets what was thrown.
class KernelQueue {
 public:
  using Call = std::function<void()>;

  KernelQueue();
  KernelQueue(const KernelQueue&) = delete;
  KernelQueue& operator=(const KernelQueue&) = delete;
  ~KernelQueue();

  // Returns the ticket of the call.
  uint64_t submit(Call call);

  // Tells whether a call, and so all before it, is over.
  bool done(uint64_t ticket);

  // Waits up to `most_seconds` for a call and tells whether it is over.
  bool wait(uint64_t ticket, double most_seconds);

  // Returns the times of a call that is over.
  CallTimes times(uint64_t ticket);

  // Drops calls that have not begun, waits for the one that runs, and ends the thread.
  void close();

 private:
  void run();
  void check(uint64_t ticket) const;

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable finished_;
  std::deque<Call> calls_;
  std::vector<CallTimes> times_;  // of calls that are over
  uint64_t submitted_count_ = 0;
  std::exception_ptr failure_;
  bool is_closing_ = false;
  std::thread thread_;  // last: it uses what is above
};

}  // namespace tierzero::kernels

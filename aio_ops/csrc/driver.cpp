#include "driver.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace tierzero::aio {
namespace {

// Threads inherit the mask of the one that starts them: with signals blocked there, handlers run
// on the caller's threads. Faults stay open, because the kernel kills silently when they are not.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

uint64_t count_of(uint64_t size_bytes, uint64_t block_bytes) {
  return align_up(size_bytes, block_bytes) / block_bytes;
}

}  // namespace

Transfer::Transfer(const Block& whole, uint64_t block_bytes)
    : whole_(whole),
      block_bytes_(align_up(block_bytes, whole.alignment_bytes)),
      middle_stop_bytes_(whole.size_bytes) {
  if (whole.edge_descriptor >= 0) {
    const uint64_t alignment_bytes = whole.alignment_bytes;
    const uint64_t stop_bytes = whole.offset_bytes + whole.size_bytes;
    const uint64_t first_bytes = align_up(whole.offset_bytes, alignment_bytes);
    const uint64_t last_bytes = stop_bytes - stop_bytes % alignment_bytes;
    const auto address = reinterpret_cast<uintptr_t>(whole.data);
    const bool in_step = address % alignment_bytes == whole.offset_bytes % alignment_bytes;
    if (in_step && first_bytes < last_bytes) {
      middle_start_bytes_ = first_bytes - whole.offset_bytes;
      middle_stop_bytes_ = last_bytes - whole.offset_bytes;
    } else {
      middle_stop_bytes_ = 0;  // there is no middle: all of it is buffered
    }
  }
  blocks_left_ = count_of(middle_start_bytes_, block_bytes_) +
                 count_of(middle_stop_bytes_ - middle_start_bytes_, block_bytes_) +
                 count_of(whole.size_bytes - middle_stop_bytes_, block_bytes_);
}

Block Transfer::take_block() {
  const bool before = taken_bytes_ < middle_start_bytes_;
  const bool after = taken_bytes_ >= middle_stop_bytes_;
  const uint64_t stop_bytes = before  ? middle_start_bytes_
                              : after ? whole_.size_bytes
                                      : middle_stop_bytes_;
  const uint64_t part_bytes = std::min(block_bytes_, stop_bytes - taken_bytes_);
  Block block = whole_.part(taken_bytes_, part_bytes);
  if (before || after) {
    block.descriptor = whole_.edge_descriptor;
    block.file_slot = -1;
    block.alignment_bytes = 1;
  }
  taken_bytes_ += part_bytes;
  return block;
}

// Returns whether this was the last block.
bool Transfer::add(const Result& block_result) {
  result_.moved_bytes += block_result.moved_bytes;
  if (result_.error_number == 0) {
    result_.error_number = block_result.error_number;
    result_.ended_early = block_result.ended_early;
  }
  if (--blocks_left_ > 0) {
    return false;
  }
  done_.store(true, std::memory_order_release);
  return true;
}

// Transfers with blocks that no lane has taken, and the lanes that take from them.
struct Driver::Feed {
  std::deque<std::shared_ptr<Transfer>> transfers;
  std::condition_variable arrived;
  std::vector<Lane*> lanes;
};

struct Driver::State {
  explicit State(const Limits& given) : process_id(getpid()), limits(given) {}

  const pid_t process_id;
  const Limits limits;

  std::mutex mutex;  // [Note: what the mutex guards]
  std::condition_variable transfer_done;
  std::vector<std::unique_ptr<Feed>> feeds;
  uint64_t in_flight = 0;
  bool refusing = false;
  bool stopping = false;

  uint64_t blocks_taken = 0;
  uint64_t moved_bytes = 0;
  double busy_s = 0;  // without the present time with something in flight
  Clock::time_point busy_since;
  Clock::time_point progress_at;

  std::vector<std::unique_ptr<Lane>> lanes;  // fixed once the threads run

  std::mutex join_mutex;  // held while `threads` changes
  std::vector<std::thread> threads;

  Feed& feed_of(Operation operation) {
    return *feeds[feeds.size() > 1 && operation == Operation::kWrite ? 1 : 0];
  }

  void count_in() {
    if (in_flight++ == 0) {
      busy_since = progress_at = Clock::now();
    }
  }

  void count_out() {
    if (--in_flight == 0) {
      busy_s += seconds_since(busy_since);
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      for (const auto& feed : feeds) {
        feed->arrived.notify_all();
      }
    }
    const std::lock_guard lock(join_mutex);
    for (std::thread& thread : threads) {
      thread.join();
    }
    threads.clear();
    lanes.clear();  // gives the queues back to the kernel; nobody is let in any more
  }
};

// One queue and the thread that drives it: takes blocks, submits, reaps, goes on with short ones.
class Driver::Lane {
 public:
  Lane(State& state, Feed& feed, std::unique_ptr<Queue> queue)
      : state_(state), feed_(feed), queue_(std::move(queue)), works_(queue_->depth()) {
    if (works_.empty()) {
      throw std::system_error(EINVAL, std::generic_category(), "a queue needs room for one call");
    }
    free_.reserve(works_.size());
    ready_.reserve(works_.size());
    for (uint64_t token = works_.size(); token > 0; --token) {
      free_.push_back(token - 1);
    }
    completions_.reserve(works_.size());
    over_.reserve(works_.size());
  }

  void run() noexcept {
    while (take_blocks()) {
      try {
        if (broken_ == 0) {
          submit_ready();
          queue_->reap(completions_);
        }
      } catch (const std::system_error& error) {
        broken_ = error.code().value() > 0 ? error.code().value() : EIO;
      } catch (...) {
        broken_ = EIO;
      }
      settle();
    }
  }

  // Called with the mutex held when the feed has got more.
  void nudge() {
    if (waits_with_room_) {
      waits_with_room_ = false;
      queue_->wake();
    }
  }

 private:
  struct Work {
    std::shared_ptr<Transfer> transfer;
    std::optional<Progress> progress;
  };

  // Fills the free places, waiting only when nothing else is under way. False: all is over.
  bool take_blocks() {
    std::unique_lock lock(state_.mutex);
    waits_with_room_ = false;
    if (free_.size() == works_.size()) {
      feed_.arrived.wait(lock, [this] { return state_.stopping || !feed_.transfers.empty(); });
      if (feed_.transfers.empty()) {
        return false;
      }
    }
    while (!free_.empty() && !feed_.transfers.empty()) {
      const std::shared_ptr<Transfer> transfer = feed_.transfers.front();
      const uint64_t token = free_.back();
      free_.pop_back();
      works_[token].progress.emplace(transfer->take_block());
      works_[token].transfer = transfer;
      ready_.push_back(token);
      ++state_.blocks_taken;
      if (transfer->all_taken()) {
        feed_.transfers.pop_front();
      }
    }
    waits_with_room_ = !free_.empty();
    return true;
  }

  void submit_ready() {
    uint64_t taken = 0;
    while (taken < ready_.size() &&
           queue_->submit(ready_[taken], works_[ready_[taken]].progress->rest()) ==
               Answer::kTaken) {
      ++taken;
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken));
  }

  void settle() {
    bool again = false;
    over_.clear();
    for (const Completion& completion : completions_) {
      if (works_[completion.token].progress->add(completion.answer)) {
        over_.push_back(completion.token);
      } else {
        again = again || completion.answer == -EAGAIN;
        ready_.push_back(completion.token);
      }
    }
    completions_.clear();
    if (broken_ != 0) {
      fail_all();
    }
    finish_over();
    if (again) {
      sched_yield();
    }
  }

  // The queue answers no more: every block that it has not finished fails with what it said.
  void fail_all() {
    ready_.clear();
    for (uint64_t token = 0; token < works_.size(); ++token) {
      const bool in_use = works_[token].transfer != nullptr;
      if (in_use && std::find(over_.begin(), over_.end(), token) == over_.end()) {
        works_[token].progress->add(broken_ == EINTR || broken_ == EAGAIN ? -EIO : -broken_);
        over_.push_back(token);
      }
    }
  }

  void finish_over() {
    if (over_.empty()) {
      return;
    }
    const std::lock_guard lock(state_.mutex);
    bool any_done = false;
    state_.progress_at = Clock::now();
    state_.blocks_taken -= over_.size();
    for (const uint64_t token : over_) {
      Work& work = works_[token];
      state_.moved_bytes += work.progress->result().moved_bytes;
      if (work.transfer->add(work.progress->result())) {
        state_.count_out();
        any_done = true;
      }
      work.transfer.reset();
      work.progress.reset();
      free_.push_back(token);
    }
    if (any_done) {
      state_.transfer_done.notify_all();
    }
  }

  State& state_;
  Feed& feed_;
  const std::unique_ptr<Queue> queue_;
  std::vector<Work> works_;      // by token
  std::vector<uint64_t> free_;   // tokens
  std::vector<uint64_t> ready_;  // tokens to submit
  std::vector<uint64_t> over_;   // tokens whose block is over
  std::vector<Completion> completions_;
  int broken_ = 0;                // the errno that the queue broke with
  bool waits_with_room_ = false;  // [Note: what the mutex guards]
};

Driver::Driver(const Limits& limits, std::vector<std::unique_ptr<Queue>> queues, Lanes lanes)
    : state_(std::make_unique<State>(limits)) {
  const uint64_t feed_count = lanes == Lanes::kShared ? 1 : 2;
  if (limits.block_bytes == 0 || limits.queue_depth == 0 || queues.size() < feed_count) {
    throw std::system_error(
        EINVAL, std::generic_category(), "an engine needs threads, blocks and a queue");
  }
  for (uint64_t index = 0; index < feed_count; ++index) {
    state_->feeds.push_back(std::make_unique<Feed>());
  }
  for (uint64_t index = 0; index < queues.size(); ++index) {
    Feed& feed = *state_->feeds[index % feed_count];
    state_->lanes.push_back(std::make_unique<Lane>(*state_, feed, std::move(queues[index])));
    feed.lanes.push_back(state_->lanes.back().get());
  }
  const SignalsBlocked signals_blocked;
  state_->threads.reserve(state_->lanes.size());
  try {
    for (const auto& lane : state_->lanes) {
      state_->threads.emplace_back([lane = lane.get()] { lane->run(); });
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

Driver::~Driver() {
  if (in_same_process()) {
    close();
  } else {
    static_cast<void>(state_.release());  // its threads are not here, and its mutex may be locked
  }
}

bool Driver::in_same_process() const {
  return getpid() == state_->process_id;
}

void Driver::require_same_process() const {
  if (!in_same_process()) {
    throw std::system_error(
        EPERM, std::generic_category(), "the engine belongs to the process that forked this one");
  }
}

std::shared_ptr<Transfer> Driver::try_submit(const Block& whole) {
  require_same_process();
  if (whole.size_bytes == 0 || whole.alignment_bytes == 0) {
    throw std::system_error(EINVAL, std::generic_category(), "a transfer needs at least one byte");
  }
  const std::lock_guard lock(state_->mutex);
  if (state_->refusing) {
    throw std::system_error(ESHUTDOWN, std::generic_category(), "engine is closed");
  }
  if (state_->in_flight >= state_->limits.queue_depth) {
    return nullptr;
  }
  std::shared_ptr<Transfer> transfer(new Transfer(whole, state_->limits.block_bytes));
  Feed& feed = state_->feed_of(whole.operation);
  feed.transfers.push_back(transfer);
  state_->count_in();
  if (transfer->blocks_left_ == 1) {
    feed.arrived.notify_one();
  } else {
    feed.arrived.notify_all();
  }
  for (Lane* lane : feed.lanes) {
    lane->nudge();
  }
  return transfer;
}

bool Driver::wait_for_room(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [this] {
    return state_->refusing || state_->in_flight < state_->limits.queue_depth;
  });
}

bool Driver::wait(const Transfer& transfer, Duration timeout) {
  if (transfer.done()) {
    return true;
  }
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [&transfer] { return transfer.done(); });
}

bool Driver::drain(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [this] { return state_->in_flight == 0; });
}

uint64_t Driver::in_flight() const {
  require_same_process();
  const std::lock_guard lock(state_->mutex);
  return state_->in_flight;
}

Activity Driver::activity() const {
  require_same_process();
  const std::lock_guard lock(state_->mutex);
  const bool busy = state_->in_flight > 0;
  return {state_->in_flight,
          state_->blocks_taken,
          state_->moved_bytes,
          state_->busy_s + (busy ? seconds_since(state_->busy_since) : 0),
          busy ? seconds_since(state_->progress_at) : 0};
}

void Driver::refuse_more() {
  require_same_process();
  {
    const std::lock_guard lock(state_->mutex);
    state_->refusing = true;
  }
  state_->transfer_done.notify_all();  // those who wait for room
}

void Driver::close() {
  refuse_more();
  state_->stop();  // threads end only when their feed is empty
}

}  // namespace tierzero::aio

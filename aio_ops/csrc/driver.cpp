#include "driver.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <array>
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

// Counts one up while it lives; made and unmade with the mutex of what it counts held.
class Counted {
 public:
  explicit Counted(uint64_t& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  uint64_t& count_;
};

}  // namespace

// What a lane takes.
struct Driver::Operations {
  bool reads = true;
  bool writes = true;

  bool include(Operation operation) const { return operation == Operation::kRead ? reads : writes; }
};

// Transfers with blocks that no lane has taken. Everything here is guarded by the mutex.
class Driver::Feed {
 public:
  using Entry = std::shared_ptr<Transfer>;

  bool empty() const { return queues_[0].empty() && queues_[1].empty(); }
  bool has(Operations operations) const {
    return (operations.reads && !queues_[0].empty()) || (operations.writes && !queues_[1].empty());
  }
  void add(const Entry& transfer, Operation operation) {
    queues_[index_of(operation)].push_back(transfer);
  }

  // The transfer whose block goes next, if it is one of these operations.
  std::optional<Entry> next(Operations operations, Chooser& chooser) const {
    const std::optional<Operation> chosen = chooser.choose(waiting_bytes(0), waiting_bytes(1));
    const bool wanted = chosen.has_value() && operations.include(*chosen);
    return wanted ? std::optional(queues_[index_of(*chosen)].front()) : std::nullopt;
  }
  void remove_first(Operation operation) { queues_[index_of(operation)].pop_front(); }

 private:
  static std::size_t index_of(Operation operation) { return operation == Operation::kRead ? 0 : 1; }
  uint64_t waiting_bytes(std::size_t index) const {
    return queues_[index].empty() ? 0 : queues_[index].front()->next_block_bytes();
  }

  std::array<std::deque<Entry>, 2> queues_;
};

struct Driver::State {
  State(const Limits& given, Lanes given_kind)
      : process_id(getpid()), limits(given), kind(given_kind) {}

  const pid_t process_id;
  const Limits limits;
  const Lanes kind;

  std::mutex mutex;                 // [Note: what the mutex guards]
  std::condition_variable arrived;  // for lanes
  std::condition_variable transfer_done;
  Feed feed;
  Chooser chooser;
  bool held_back = false;  // a lane left what waits alone until something else is over
  uint64_t room_waiter_count = 0;
  uint64_t drain_waiter_count = 0;
  uint64_t in_flight = 0;
  uint64_t places_used = 0;  // of the queue depth
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

  // With the mutex held, like the counting below.
  void wake_lanes();
  void wake_for(const Transfer& arrival);

  void count_in(const Transfer& transfer) {
    places_used += transfer.takes_place() ? 1 : 0;
    if (in_flight++ == 0) {
      busy_since = progress_at = Clock::now();
    }
  }

  void count_out(const Transfer& transfer) {
    places_used -= transfer.takes_place() ? 1 : 0;
    if (--in_flight == 0) {
      busy_s += seconds_since(busy_since);
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      arrived.notify_all();
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
  Lane(State& state, Operations operations, std::unique_ptr<Queue> queue)
      : state_(state), operations_(operations), queue_(std::move(queue)), works_(queue_->depth()) {
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
    Operation operation = Operation::kRead;
    uint64_t size_bytes = 0;
  };

  // The transfer that this lane takes from next. Notes when it has to leave one that waits.
  std::optional<std::shared_ptr<Transfer>> next_transfer() {
    std::optional<std::shared_ptr<Transfer>> next = state_.feed.next(operations_, state_.chooser);
    state_.held_back = state_.held_back || (!next.has_value() && state_.feed.has(operations_));
    return next;
  }

  // Fills the free places, waiting only when nothing else is under way. False: all is over.
  bool take_blocks() {
    std::unique_lock lock(state_.mutex);
    waits_with_room_ = false;
    std::optional<std::shared_ptr<Transfer>> next = next_transfer();
    while (!next.has_value() && free_.size() == works_.size()) {
      if (state_.stopping && !state_.feed.has(operations_)) {
        return false;
      }
      state_.arrived.wait(lock);
      next = next_transfer();
    }
    while (!free_.empty() && next.has_value()) {
      take(**next);
      next = next_transfer();
    }
    waits_with_room_ = !free_.empty();
    return true;
  }

  void take(Transfer& transfer) {
    const uint64_t token = free_.back();
    free_.pop_back();
    const Block block = transfer.take_block();
    works_[token] = {
        transfer.shared_from_this(), Progress(block), block.operation, block.size_bytes};
    ready_.push_back(token);
    ++state_.blocks_taken;
    state_.chooser.taken(block.operation, block.size_bytes);
    if (transfer.all_taken()) {
      state_.feed.remove_first(block.operation);
    }
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
    bool awaited = false;
    state_.progress_at = Clock::now();
    state_.blocks_taken -= over_.size();
    for (const uint64_t token : over_) {
      Work& work = works_[token];
      state_.moved_bytes += work.progress->result().moved_bytes;
      state_.chooser.over(work.operation, work.size_bytes);
      if (work.transfer->add(work.progress->result())) {
        state_.count_out(*work.transfer);
        awaited = awaited || work.transfer->waiter_count_ > 0;
      }
      work = {};
      free_.push_back(token);
    }
    if (awaited || state_.room_waiter_count > 0 ||
        (state_.drain_waiter_count > 0 && state_.in_flight == 0)) {
      state_.transfer_done.notify_all();
    }
    if (state_.held_back) {
      state_.wake_lanes();
    }
  }

  State& state_;
  const Operations operations_;
  const std::unique_ptr<Queue> queue_;
  std::vector<Work> works_;      // by token
  std::vector<uint64_t> free_;   // tokens
  std::vector<uint64_t> ready_;  // tokens to submit
  std::vector<uint64_t> over_;   // tokens whose block is over
  std::vector<Completion> completions_;
  int broken_ = 0;                // the errno that the queue broke with
  bool waits_with_room_ = false;  // [Note: what the mutex guards]
};

void Driver::State::wake_lanes() {
  held_back = false;
  arrived.notify_all();
  for (const auto& lane : lanes) {
    lane->nudge();
  }
}

// A single block needs a single lane, if any will do.
void Driver::State::wake_for(const Transfer& arrival) {
  if (kind == Lanes::kShared && arrival.blocks_left_ == 1 && !held_back) {
    arrived.notify_one();
    for (const auto& lane : lanes) {
      lane->nudge();
    }
  } else {
    wake_lanes();
  }
}

Driver::Driver(const Limits& limits, std::vector<std::unique_ptr<Queue>> queues, Lanes lanes)
    : state_(std::make_unique<State>(limits, lanes)) {
  const uint64_t kind_count = lanes == Lanes::kShared ? 1 : 2;
  if (limits.block_bytes == 0 || limits.queue_depth == 0 || queues.size() < kind_count) {
    throw std::system_error(
        EINVAL, std::generic_category(), "an engine needs threads, blocks and a queue");
  }
  for (uint64_t index = 0; index < queues.size(); ++index) {
    Operations operations;
    if (lanes == Lanes::kByOperation) {
      operations = {index % 2 == 0, index % 2 == 1};
    }
    state_->lanes.push_back(std::make_unique<Lane>(*state_, operations, std::move(queues[index])));
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

void Driver::set_schedule(const Schedule& schedule) {
  require_same_process();
  const std::lock_guard lock(state_->mutex);
  state_->chooser.set(schedule);
  state_->wake_lanes();  // what was held back may go now
}

std::shared_ptr<Transfer> Driver::try_submit(const Block& whole) {
  const std::vector<std::shared_ptr<Transfer>> taken = try_submit(std::span(&whole, 1));
  return taken.empty() ? nullptr : taken.front();
}

std::vector<std::shared_ptr<Transfer>> Driver::try_submit(std::span<const Block> wholes) {
  require_same_process();
  for (const Block& whole : wholes) {
    if (whole.size_bytes == 0 || whole.alignment_bytes == 0) {
      throw std::system_error(
          EINVAL, std::generic_category(), "a transfer needs at least one byte");
    }
  }
  std::vector<std::shared_ptr<Transfer>> taken;
  taken.reserve(wholes.size());
  const std::lock_guard lock(state_->mutex);
  if (state_->refusing) {
    throw std::system_error(ESHUTDOWN, std::generic_category(), "engine is closed");
  }
  for (const Block& whole : wholes) {
    if (!whole.further && state_->places_used >= state_->limits.queue_depth) {
      break;
    }
    taken.emplace_back(new Transfer(whole, state_->limits.block_bytes));
    state_->feed.add(taken.back(), whole.operation);
    state_->count_in(*taken.back());
  }
  if (taken.size() == 1) {
    state_->wake_for(*taken.front());
  } else if (!taken.empty()) {
    state_->wake_lanes();
  }
  return taken;
}

bool Driver::wait_for_room(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  const Counted counted(state_->room_waiter_count);
  return state_->transfer_done.wait_for(lock, timeout, [this] {
    return state_->refusing || state_->places_used < state_->limits.queue_depth;
  });
}

bool Driver::wait(Transfer& transfer, Duration timeout) {
  if (transfer.done()) {
    return true;
  }
  require_same_process();
  std::unique_lock lock(state_->mutex);
  const Counted counted(transfer.waiter_count_);
  return state_->transfer_done.wait_for(lock, timeout, [&transfer] { return transfer.done(); });
}

bool Driver::drain(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  const Counted counted(state_->drain_waiter_count);
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

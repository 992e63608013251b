#include "thread_engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace tierzero::aio {
namespace {

uint64_t align_up(uint64_t size_bytes, uint64_t alignment_bytes) {
  return (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

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

// No exception may leave a worker thread: whatever a call throws becomes the block's error.
Result move_block_safely(const Block& block, const MoveOnce& move_once) noexcept {
  Result result;
  try {
    return move_block(block, move_once);
  } catch (const std::system_error& error) {
    result.error_number = error.code().value() > 0 ? error.code().value() : EIO;
  } catch (...) {
    result.error_number = EIO;
  }
  return result;
}

}  // namespace

Transfer::Transfer(const Block& whole, uint64_t block_bytes)
    : whole_(whole),
      block_bytes_(align_up(block_bytes, whole.alignment_bytes)),
      blocks_left_(align_up(whole.size_bytes, block_bytes_) / block_bytes_) {}

Block Transfer::take_block() {
  const uint64_t part_bytes = std::min(block_bytes_, whole_.size_bytes - taken_bytes_);
  const Block block = whole_.part(taken_bytes_, part_bytes);
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

struct ThreadEngine::State {
  State(const Settings& settings, MoveOnce move)
      : process_id(getpid()), limits(settings), move_once(std::move(move)) {}

  const pid_t process_id;
  const Settings limits;
  const MoveOnce move_once;

  std::mutex mutex;  // [Note: what the mutex guards]
  std::condition_variable work_arrived;
  std::condition_variable transfer_done;
  std::deque<std::shared_ptr<Transfer>> queue;  // with blocks that no thread has taken
  uint64_t in_flight = 0;
  bool refusing = false;
  bool stopping = false;

  std::mutex join_mutex;  // held while `threads` changes
  std::vector<std::thread> threads;

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work_arrived.notify_all();
    const std::lock_guard lock(join_mutex);
    for (std::thread& thread : threads) {
      thread.join();
    }
    threads.clear();
  }
};

ThreadEngine::ThreadEngine(const Settings& settings, MoveOnce move_once)
    : state_(std::make_unique<State>(settings, std::move(move_once))) {
  if (settings.thread_count == 0 || settings.block_bytes == 0 || settings.queue_depth == 0) {
    throw std::system_error(
        EINVAL, std::generic_category(), "an engine needs threads, blocks and a queue");
  }
  const SignalsBlocked signals_blocked;
  state_->threads.reserve(settings.thread_count);
  try {
    for (uint64_t index = 0; index < settings.thread_count; ++index) {
      state_->threads.emplace_back([state = state_.get()] { work(*state); });
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

ThreadEngine::~ThreadEngine() {
  if (getpid() == state_->process_id) {
    close();
  } else {
    static_cast<void>(state_.release());  // its threads are not here, and its mutex may be locked
  }
}

void ThreadEngine::require_same_process() const {
  if (getpid() != state_->process_id) {
    throw std::system_error(
        EPERM, std::generic_category(), "the engine belongs to the process that forked this one");
  }
}

std::shared_ptr<Transfer> ThreadEngine::try_submit(const Block& whole) {
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
  state_->queue.push_back(transfer);
  ++state_->in_flight;
  if (transfer->blocks_left_ == 1) {
    state_->work_arrived.notify_one();
  } else {
    state_->work_arrived.notify_all();
  }
  return transfer;
}

bool ThreadEngine::wait_for_room(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [this] {
    return state_->refusing || state_->in_flight < state_->limits.queue_depth;
  });
}

bool ThreadEngine::wait(const Transfer& transfer, Duration timeout) {
  if (transfer.done()) {
    return true;
  }
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [&transfer] { return transfer.done(); });
}

bool ThreadEngine::drain(Duration timeout) {
  require_same_process();
  std::unique_lock lock(state_->mutex);
  return state_->transfer_done.wait_for(lock, timeout, [this] { return state_->in_flight == 0; });
}

uint64_t ThreadEngine::in_flight() const {
  require_same_process();
  const std::lock_guard lock(state_->mutex);
  return state_->in_flight;
}

void ThreadEngine::refuse_more() {
  require_same_process();
  {
    const std::lock_guard lock(state_->mutex);
    state_->refusing = true;
  }
  state_->transfer_done.notify_all();  // those who wait for room
}

void ThreadEngine::close() {
  refuse_more();
  state_->stop();  // threads end only when the queue is empty
}

void ThreadEngine::work(State& state) noexcept {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.work_arrived.wait(lock, [&state] { return state.stopping || !state.queue.empty(); });
    if (state.queue.empty()) {
      return;
    }
    const std::shared_ptr<Transfer> transfer = state.queue.front();
    const Block block = transfer->take_block();
    if (transfer->all_taken()) {
      state.queue.pop_front();
    }
    lock.unlock();
    const Result result = move_block_safely(block, state.move_once);
    lock.lock();
    if (transfer->add(result)) {
      --state.in_flight;
      state.transfer_done.notify_all();
    }
  }
}

}  // namespace tierzero::aio

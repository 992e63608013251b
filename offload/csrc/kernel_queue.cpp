#include "kernel_queue.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace tierzero::kernels {
namespace {

double now_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

KernelQueue::KernelQueue() : thread_([this] { run(); }) {}

KernelQueue::~KernelQueue() {
  close();
}

uint64_t KernelQueue::submit(Call call) {
  const std::scoped_lock lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  if (is_closing_) {
    throw std::runtime_error("a kernel was submitted to a queue that is closed");
  }
  calls_.push_back(std::move(call));
  submitted_.notify_one();
  return ++submitted_count_;
}

bool KernelQueue::done(uint64_t ticket) {
  return wait(ticket, 0.0);
}

bool KernelQueue::wait(uint64_t ticket, double most_seconds) {
  std::unique_lock lock(mutex_);
  check(ticket);
  const auto is_over = [&] { return failure_ != nullptr || times_.size() >= ticket; };
  if (!is_over() && most_seconds > 0.0) {
    finished_.wait_for(lock, std::chrono::duration<double>(most_seconds), is_over);
  }
  if (times_.size() >= ticket) {
    return true;
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  return false;
}

CallTimes KernelQueue::times(uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  check(ticket);
  if (ticket == 0 || times_.size() < ticket) {
    throw std::invalid_argument("call " + std::to_string(ticket) + " is not over");
  }
  return times_[ticket - 1];
}

void KernelQueue::close() {
  {
    const std::scoped_lock lock(mutex_);
    is_closing_ = true;
    calls_.clear();
    submitted_.notify_one();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void KernelQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return is_closing_ || !calls_.empty(); });
    if (is_closing_) {
      return;
    }
    const Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    CallTimes times{.begin_seconds = now_seconds()};
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
    }
    times.end_seconds = now_seconds();
    lock.lock();
    if (failure) {
      failure_ = failure;
      calls_.clear();
    } else {
      times_.push_back(times);
    }
    finished_.notify_all();
  }
}

void KernelQueue::check(uint64_t ticket) const {
  if (ticket > submitted_count_) {
    throw std::out_of_range("ticket " + std::to_string(ticket) + " was not given: " +
                            std::to_string(submitted_count_) + " calls were submitted");
  }
}

}  // namespace tierzero::kernels

#include "aio_queue.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>

#include <algorithm>
#include <utility>

namespace tierzero::aio {
namespace {

constexpr uint64_t kWakeToken = UINT64_MAX;
constexpr uint16_t kPollCommand = 5;  // IOCB_CMD_POLL of newer kernel headers
constexpr uint64_t kLargestDepth = 1024;

int answer_of(long result) {
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace

AioCalls::AioCalls()
    : setup([](unsigned depth, aio_context_t* context) {
        return answer_of(syscall(SYS_io_setup, depth, context));
      }),
      submit([](aio_context_t context, int64_t count, iocb** calls) {
        return answer_of(syscall(SYS_io_submit, context, count, calls));
      }),
      get_events([](aio_context_t context, int64_t least, int64_t most, io_event* events) {
        return answer_of(syscall(SYS_io_getevents, context, least, most, events, nullptr));
      }),
      destroy([](aio_context_t context) { return answer_of(syscall(SYS_io_destroy, context)); }) {}

AioQueue::AioQueue(uint64_t depth, AioCalls calls)
    : calls_(std::move(calls)), calls_of_token_(std::min(depth, kLargestDepth)) {
  const uint64_t event_count = calls_of_token_.size() + 1;  // and the poll of the wake counter
  events_.resize(event_count);
  waiting_.reserve(event_count);
  const int answer = calls_.setup(static_cast<unsigned>(event_count), &context_);
  if (answer < 0) {
    throw_errno(-answer, "io_setup");
  }
}

AioQueue::~AioQueue() {
  calls_.destroy(context_);
}

Answer AioQueue::submit(uint64_t token, const Block& block) {
  if (in_kernel_ + waiting_.size() >= calls_of_token_.size()) {
    return Answer::kBusy;
  }
  iocb& call = calls_of_token_[token];
  call = {};
  call.aio_data = token;
  call.aio_lio_opcode = block.operation == Operation::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
  call.aio_fildes = static_cast<uint32_t>(block.descriptor);
  call.aio_buf = reinterpret_cast<uint64_t>(block.data);
  call.aio_nbytes = block.size_bytes;
  call.aio_offset = static_cast<int64_t>(block.offset_bytes);
  waiting_.push_back(&call);
  return Answer::kTaken;
}

// First among those that wait: a call before it may block in io_submit for long.
void AioQueue::arm_wake() {
  if (wake_armed_) {
    return;
  }
  wake_call_ = {};
  wake_call_.aio_data = kWakeToken;
  wake_call_.aio_lio_opcode = kPollCommand;
  wake_call_.aio_fildes = static_cast<uint32_t>(wake_counter_.descriptor());
  wake_call_.aio_buf = POLLIN;
  waiting_.insert(waiting_.begin(), &wake_call_);
  wake_armed_ = true;
}

// Submits until the kernel has all or wants no more for now. A call that the kernel refuses
// outright, such as one on a closed descriptor, is complete with that answer.
void AioQueue::hand_over(std::vector<Completion>& completions) {
  std::size_t done = 0;
  while (done < waiting_.size()) {
    const auto left = static_cast<int64_t>(waiting_.size() - done);
    const int answer = calls_.submit(context_, left, waiting_.data() + done);
    if (answer > 0) {
      refusals_ = 0;
      for (const std::size_t stop = done + static_cast<std::size_t>(answer); done < stop; ++done) {
        in_kernel_ += waiting_[done] == &wake_call_ ? 0 : 1;
      }
      continue;
    }
    if (answer == -EINTR) {
      continue;
    }
    if (answer == 0 || answer == -EAGAIN) {  // no room: the rest goes once something completes
      if (in_kernel_ > 0 || !completions.empty() || ++refusals_ <= kAgainLimit) {
        break;
      }
    }
    iocb* const refused = waiting_[done];
    if (refused == &wake_call_) {
      throw_errno(answer < 0 ? -answer : EIO, "io_submit of the wake call");
    }
    completions.push_back({refused->aio_data, answer < 0 ? answer : -EAGAIN});
    ++done;
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(done));
}

void AioQueue::wait(std::vector<Completion>& completions) {
  const bool may_wait = completions.empty() && (in_kernel_ > 0 || waiting_.empty());
  const int answer = calls_.get_events(
      context_, may_wait ? 1 : 0, static_cast<int64_t>(events_.size()), events_.data());
  if (answer < 0 && answer != -EINTR) {
    throw_errno(-answer, "io_getevents");
  }
  for (int index = 0; index < answer; ++index) {
    const io_event& event = events_[static_cast<std::size_t>(index)];
    if (event.data == kWakeToken) {
      wake_counter_.clear();
      wake_armed_ = false;
      woken_ = true;
    } else {
      completions.push_back({event.data, event.res});
      --in_kernel_;
    }
  }
  if (answer == 0) {
    sched_yield();  // nothing is under way and the kernel took nothing
  }
}

void AioQueue::reap(std::vector<Completion>& completions) {
  const std::size_t before = completions.size();
  woken_ = false;
  do {
    arm_wake();
    hand_over(completions);
    wait(completions);
  } while (completions.size() == before && !woken_);
}

}  // namespace tierzero::aio

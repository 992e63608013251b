#include "uring_queue.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "call_queue.h"

namespace tierzero::aio {
namespace {

constexpr uint64_t kWakeToken = UINT64_MAX;
constexpr uint64_t kLargestDepth = 4096;
constexpr uint64_t kSmallestDepth = 8;

// Fewer interrupts of the driver, and no batch cut short; left out where the kernel is older.
constexpr unsigned kWantedFlags = uring::kSetupCoopTaskrun | uring::kSetupSubmitAll;

constexpr unsigned kThreadIdleMs = 20;  // without work, before the kernel's thread sleeps

uint32_t load_acquire(const uint32_t* index) {
  return __atomic_load_n(index, __ATOMIC_ACQUIRE);
}

void store_release(uint32_t* index, uint32_t value) {
  __atomic_store_n(index, value, __ATOMIC_RELEASE);
}

// One entry more than calls: for the poll of the wake counter.
int set_up(const UringCalls& calls, Polling polling, uint64_t& depth, uring::Parameters& params) {
  depth = std::min(depth, kLargestDepth);
  const unsigned polling_flags = (polling.submission ? uring::kSetupSubmissionPolling : 0U) |
                                 (polling.completion ? uring::kSetupCompletionPolling : 0U);
  // The kernel's thread runs no task work of ours.
  unsigned flags = polling.submission ? uring::kSetupSubmitAll : kWantedFlags;
  for (;;) {
    params = {};
    params.flags = flags | polling_flags;
    params.thread_idle_ms = polling.submission ? kThreadIdleMs : 0;
    const int answer = calls.setup(static_cast<unsigned>(std::bit_ceil(depth + 1)), &params);
    if (answer >= 0) {
      return answer;
    }
    if (answer == -EINVAL && flags != 0) {
      flags = 0;
    } else if (answer == -ENOMEM && depth > kSmallestDepth) {
      depth = std::max(depth / 2, kSmallestDepth);
    } else if (answer != -EINTR) {
      throw_errno(-answer, "io_uring_setup");
    }
  }
}

}  // namespace

UringQueue::UringQueue(uint64_t depth, Polling polling, UringCalls calls)
    : calls_(std::move(calls)),
      polling_(polling),
      params_{},
      depth_(depth),
      ring_(set_up(calls_, polling, depth_, params_)) {
  if ((params_.features & uring::kFeatureSingleMmap) == 0) {
    throw_errno(EOPNOTSUPP, "this io_uring is older than Linux 5.4");
  }
  if (polling.submission && (params_.features & uring::kFeatureUnregisteredPolling) == 0) {
    throw_errno(EOPNOTSUPP, "submission polling on this kernel, which is older than Linux 5.11");
  }
  const uint64_t submission_bytes =
      params_.submission.array + params_.submission_entries * sizeof(uint32_t);
  const uint64_t completion_bytes =
      params_.completion.entries + params_.completion_entries * sizeof(uring::Completed);
  rings_ = std::make_unique<SharedMapping>(
      ring_.number(), std::max(submission_bytes, completion_bytes), uring::kRingsAt);
  entries_ = std::make_unique<SharedMapping>(
      ring_.number(), params_.submission_entries * sizeof(uring::Submission), uring::kEntriesAt);
  submission_head_ = rings_->at<uint32_t>(params_.submission.head);
  submission_tail_ = rings_->at<uint32_t>(params_.submission.tail);
  submission_flags_ = rings_->at<uint32_t>(params_.submission.flags);
  completion_head_ = rings_->at<uint32_t>(params_.completion.head);
  completion_tail_ = rings_->at<uint32_t>(params_.completion.tail);
  tail_ = *submission_tail_;
  uint32_t* const order = rings_->at<uint32_t>(params_.submission.array);
  for (uint32_t index = 0; index < params_.submission_entries; ++index) {
    order[index] = index;
  }
  plain_operations_ = has_operation(uring::kRead) && has_operation(uring::kWrite);
  vectors_.resize(depth_);
  registry_ = std::make_shared<UringRegistry>(ring_.number(), params_.features, calls_);
}

UringQueue::~UringQueue() {
  registry_->close();
}

bool UringQueue::has_operation(uint8_t operation) const {
  uring::Probe probe = {};
  const int answer = calls_.register_with(
      ring_.number(), uring::kRegisterProbe, &probe, uring::Probe::kOperations);
  return answer >= 0 && operation < probe.count &&
         (probe.operations[operation].flags & uring::kOperationSupported) != 0;
}

uint32_t UringQueue::unsubmitted() const {
  return tail_ - load_acquire(submission_head_);
}

// Null when the ring is full.
uring::Submission* UringQueue::next_entry() {
  if (unsubmitted() >= params_.submission_entries) {
    return nullptr;
  }
  uring::Submission* const entry =
      entries_->at<uring::Submission>(0) + (tail_ & (params_.submission_entries - 1));
  std::memset(entry, 0, sizeof *entry);
  return entry;
}

Answer UringQueue::submit(uint64_t token, const Block& block) {
  if (polling_.completion && block.alignment_bytes == 1) {
    moved_.push_back({token, move_with_kernel(block)});
    return Answer::kTaken;
  }
  uring::Submission* const entry = taken_ < depth_ ? next_entry() : nullptr;
  if (entry == nullptr) {
    return Answer::kBusy;
  }
  const bool reads = block.operation == Operation::kRead;
  const auto address = reinterpret_cast<uint64_t>(block.data);
  const int piece = registry_->find_memory(address, block.size_bytes);
  entry->file = block.descriptor;
  if (block.file_slot >= 0) {
    entry->file = block.file_slot;
    entry->flags = uring::kEntryFixedFile;
  }
  entry->offset = block.offset_bytes;
  entry->token = token;
  entry->address = address;
  entry->size = static_cast<uint32_t>(block.size_bytes);
  if (piece >= 0) {
    entry->operation = reads ? uring::kReadFixed : uring::kWriteFixed;
    entry->buffer = static_cast<uint16_t>(piece);
  } else if (plain_operations_) {
    entry->operation = reads ? uring::kRead : uring::kWrite;
  } else {
    vectors_[token] = {block.data, block.size_bytes};
    entry->operation = reads ? uring::kReadVector : uring::kWriteVector;
    entry->address = reinterpret_cast<uint64_t>(&vectors_[token]);
    entry->size = 1;
  }
  store_release(submission_tail_, ++tail_);  // [Note: the memory of a ring]
  ++taken_;
  return Answer::kTaken;
}

void UringQueue::wake() {
  if (!polling_.completion) {
    wake_counter_.raise();
  }
}

void UringQueue::arm_wake() {
  const bool needless = wake_armed_ || polling_.completion;
  uring::Submission* const entry = needless ? nullptr : next_entry();
  if (entry == nullptr) {
    return;
  }
  entry->operation = uring::kPollAdd;
  entry->file = wake_counter_.descriptor();
  entry->call_flags = POLLIN;
  entry->token = kWakeToken;
  store_release(submission_tail_, ++tail_);
  wake_armed_ = true;
}

bool UringQueue::completion_waits() const {
  return load_acquire(completion_tail_) != *completion_head_;
}

void UringQueue::take_completions(std::vector<Completion>& completions) {
  const uint32_t stop = load_acquire(completion_tail_);
  const uring::Completed* const entries = rings_->at<uring::Completed>(params_.completion.entries);
  for (uint32_t head = *completion_head_; head != stop; ++head) {
    const uring::Completed& entry = entries[head & (params_.completion_entries - 1)];
    if (entry.token == kWakeToken) {
      wake_counter_.clear();
      wake_armed_ = false;
      woken_ = true;
    } else {
      completions.push_back({entry.token, entry.answer});
      --taken_;
    }
  }
  store_release(completion_head_, stop);
}

// One call into the kernel, which may take a part of what is there, or nothing for now.
void UringQueue::enter(bool wait) {
  const uint32_t count = unsubmitted();
  const int answer =
      calls_.enter(ring_.number(), count, wait ? 1 : 0, wait ? uring::kEnterGetEvents : 0);
  if (answer >= 0 || answer == -EINTR) {
    refusals_ = 0;
    return;
  }
  if (answer != -EAGAIN && answer != -EBUSY && answer != -ENOMEM) {
    throw_errno(-answer, "io_uring_enter");
  }
  if (taken_ > count) {  // something of ours is under way and makes room when it completes
    const int waited = calls_.enter(ring_.number(), 0, 1, uring::kEnterGetEvents);
    if (waited < 0 && waited != -EINTR && waited != -EAGAIN && waited != -EBUSY) {
      throw_errno(-waited, "io_uring_enter");
    }
    return;
  }
  if (++refusals_ > kAgainLimit) {
    throw_errno(-answer, "io_uring_enter");
  }
  sched_yield();
}

// With submission polling the kernel takes entries by itself, once its thread is awake.
void UringQueue::enter_polled(bool wait) {
  __sync_synchronize();  // our tail before its flags
  const bool sleeps = (load_acquire(submission_flags_) & uring::kThreadSleeps) != 0;
  const unsigned flags =
      (wait ? uring::kEnterGetEvents : 0U) | (sleeps ? uring::kEnterWakeThread : 0U);
  if (flags == 0) {
    return;
  }
  const int answer = calls_.enter(ring_.number(), unsubmitted(), wait ? 1 : 0, flags);
  if (answer < 0 && answer != -EINTR && answer != -EAGAIN && answer != -EBUSY) {
    throw_errno(-answer, "io_uring_enter");
  }
}

void UringQueue::reap(std::vector<Completion>& completions) {
  const std::size_t before = completions.size();
  woken_ = false;
  completions.insert(completions.end(), moved_.begin(), moved_.end());
  moved_.clear();
  do {
    arm_wake();
    const bool wait = completions.size() == before && !completion_waits();
    if (polling_.submission) {
      enter_polled(wait);
    } else if (unsubmitted() > 0 || wait) {
      enter(wait);
    }
    // Without interrupts completions only appear to whoever asks for them.
    take_completions(completions);
  } while (completions.size() == before && !woken_ && taken_ + (wake_armed_ ? 1 : 0) > 0);
}

}  // namespace tierzero::aio

#include "engines.h"

#include <utility>

#include "aio_queue.h"

namespace tierzero::aio {
namespace {

using Queues = std::vector<std::unique_ptr<Queue>>;

Queues call_queues(uint64_t count, const MoveOnce& move_once) {
  Queues queues;
  for (uint64_t index = 0; index < count; ++index) {
    queues.push_back(std::make_unique<CallQueue>(move_once));
  }
  return queues;
}

Queues aio_queues(uint64_t depth) {
  Queues queues;
  queues.push_back(std::make_unique<AioQueue>(depth));
  queues.push_back(std::make_unique<AioQueue>(depth));
  return queues;
}

Queues one(std::unique_ptr<Queue> queue) {
  Queues queues;
  queues.push_back(std::move(queue));
  return queues;
}

}  // namespace

ThreadEngine::ThreadEngine(const Settings& settings, MoveOnce move_once)
    : Driver({settings.block_bytes, settings.queue_depth},
             call_queues(settings.thread_count, move_once),
             Lanes::kShared) {}

UringEngine::UringEngine(const Limits& limits, Polling polling, const UringCalls& calls)
    : UringEngine(limits, std::make_unique<UringQueue>(limits.queue_depth, polling, calls)) {}

UringEngine::UringEngine(const Limits& limits, std::unique_ptr<UringQueue>&& queue)
    : UringEngine(limits, std::move(queue), queue->registry()) {}  // the first is a reference

UringEngine::UringEngine(const Limits& limits,
                         std::unique_ptr<UringQueue>&& queue,
                         std::shared_ptr<UringRegistry> registry)
    : Driver(limits, one(std::move(queue)), Lanes::kShared), registry_(std::move(registry)) {}

int UringEngine::add_file(int descriptor) {
  return in_same_process() ? registry_->add_file(descriptor) : -EPERM;
}

void UringEngine::remove_file(int slot) {
  if (in_same_process()) {
    registry_->remove_file(slot);
  }
}

int UringEngine::add_memory(uint64_t address, uint64_t size_bytes) {
  return in_same_process() ? registry_->add_memory(address, size_bytes) : EPERM;
}

void UringEngine::remove_memory(uint64_t address) {
  if (in_same_process()) {
    registry_->remove_memory(address);
  }
}

AioEngine::AioEngine(const Limits& limits)
    : Driver(limits, aio_queues(limits.queue_depth), Lanes::kByOperation) {}

}  // namespace tierzero::aio

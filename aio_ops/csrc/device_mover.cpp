#include "device_mover.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace tierzero::aio {
namespace {

constexpr Driver::Duration kSlice = std::chrono::seconds(1);

}  // namespace

DeviceLane::DeviceLane(std::shared_ptr<Cuda> cuda,
                       Driver& driver,
                       Operation operation,
                       const std::vector<std::byte*>& slots,
                       uint64_t slot_bytes)
    : cuda_(std::move(cuda)),
      driver_(driver),
      writes_(operation == Operation::kWrite),
      slot_bytes_(slot_bytes) {
  for (std::byte* const data : slots) {
    slots_.push_back({data});
  }
  for (Slot& slot : slots_) {
    free_.push_back(&slot);
  }
  std::promise<int> ready;
  std::future<int> answer = ready.get_future();
  thread_ = std::thread([this, &ready] { run(std::move(ready)); });
  const int error = answer.get();
  if (error != 0) {
    thread_.join();
    throw std::system_error(EIO, std::generic_category(), cuda_->calls.describe(error));
  }
}

// What the thread has of the device: its context, a stream, an event for each slot.
int DeviceLane::set_up() {
  int error = cuda_->calls.push_context(cuda_->context());
  error = error != 0 ? error : cuda_->calls.create_stream(&stream_);
  for (Slot& slot : slots_) {
    error = error != 0 ? error : cuda_->calls.create_event(&slot.copied);
  }
  return error;
}

void DeviceLane::tear_down() {
  for (const Slot& slot : slots_) {
    if (slot.copied != nullptr) {
      cuda_->calls.destroy_event(slot.copied);
    }
  }
  if (stream_ != nullptr) {
    cuda_->calls.destroy_stream(stream_);
  }
}

void DeviceLane::submit(const std::shared_ptr<DeviceTransfer>& transfer) {
  const std::lock_guard lock(mutex_);
  if (stopping_) {
    throw std::system_error(ESHUTDOWN, std::generic_category(), "the mover is closed");
  }
  waiting_.push_back(transfer);
  ++in_flight_;
  changed_.notify_all();
}

bool DeviceLane::wait(const DeviceTransfer& transfer, Driver::Duration timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&transfer] { return transfer.done(); });
}

bool DeviceLane::drain(Driver::Duration timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return in_flight_ == 0; });
}

void DeviceLane::close() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void DeviceLane::run(std::promise<int> ready) noexcept {
  const int error = set_up();
  ready.set_value(error);
  for (bool over = error != 0; !over;) {
    const bool idle = copying_.empty() && moving_.empty();
    if (next_transfer(idle) == nullptr && idle) {
      over = true;
      continue;
    }
    while (start_chunk()) {
    }
    advance();
  }
  tear_down();
}

// The transfer whose chunks start next, or null: there is none, and with `may_wait` none will come.
std::shared_ptr<DeviceTransfer> DeviceLane::next_transfer(bool may_wait) {
  std::unique_lock lock(mutex_);
  if (may_wait) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
  }
  return waiting_.empty() ? nullptr : waiting_.front();
}

// Starts one more chunk, if there is a slot and something to move.
bool DeviceLane::start_chunk() {
  const std::shared_ptr<DeviceTransfer> transfer = free_.empty() ? nullptr : next_transfer(false);
  if (transfer == nullptr) {
    return false;
  }
  const Block& whole = transfer->whole_;
  const uint64_t left_bytes = whole.size_bytes - transfer->started_bytes_;
  Chunk chunk{
      transfer, free_.back(), transfer->started_bytes_, std::min(left_bytes, slot_bytes_), nullptr};
  free_.pop_back();
  const bool is_first = transfer->started_bytes_ == 0;
  transfer->started_bytes_ += chunk.size_bytes;
  if (transfer->started_bytes_ == whole.size_bytes) {
    const std::lock_guard lock(mutex_);
    waiting_.pop_front();
  }
  if (is_first && transfer->after_ != nullptr) {
    check(chunk, cuda_->calls.wait_for_event(stream_, transfer->after_));
  }
  if (writes_) {
    copy(chunk);
  } else {
    move(chunk);
  }
  return true;
}

// Brings a chunk one station on: one whose copy was started, for copies are soon over, else the one
// whose transfer to or from the file was started first.
void DeviceLane::advance() {
  const bool copied = !copying_.empty();
  std::deque<Chunk>& from = copied ? copying_ : moving_;
  if (from.empty()) {
    return;
  }
  Chunk chunk = std::move(from.front());
  from.pop_front();
  if (copied) {
    check(chunk, cuda_->calls.synchronize_event(chunk.slot->copied));
  } else {
    finish_move(chunk);
  }
  if (copied != writes_) {  // the last station
    settle(chunk);
  } else if (writes_) {
    move(chunk);
  } else {
    copy(chunk);
  }
}

// Notes the driver's refusal; returns whether there was none.
bool DeviceLane::check(Chunk& chunk, int error) {
  if (error == 0) {
    return true;
  }
  if (chunk.transfer->result_.error_number == 0) {
    chunk.transfer->result_.error_number = EIO;
    chunk.transfer->detail_ = cuda_->calls.describe(error);
  }
  return false;
}

// Between slot and file. A chunk whose copy has failed is not written.
void DeviceLane::move(Chunk& chunk) {
  if (chunk.transfer->result_.error_number == 0) {
    Block block = chunk.transfer->whole_.part(chunk.offset_bytes, chunk.size_bytes);
    block.data = chunk.slot->data;
    try {
      while ((chunk.moving = driver_.try_submit(block)) == nullptr) {
        driver_.wait_for_room(kSlice);
      }
    } catch (const std::system_error& error) {
      chunk.transfer->result_.error_number = error.code().value();
    }
  }
  moving_.push_back(std::move(chunk));
}

void DeviceLane::finish_move(Chunk& chunk) {
  if (chunk.moving == nullptr) {
    return;
  }
  while (!driver_.wait(*chunk.moving, kSlice)) {
  }
  const Result& moved = chunk.moving->result();
  Result& result = chunk.transfer->result_;
  result.moved_bytes += moved.moved_bytes;
  if (result.error_number == 0) {
    result.error_number = moved.error_number;
    result.ended_early = moved.ended_early;
  }
}

// Between device and slot. What has failed is not copied to the device.
void DeviceLane::copy(Chunk& chunk) {
  const auto device = reinterpret_cast<uint64_t>(chunk.transfer->whole_.data) + chunk.offset_bytes;
  std::byte* const host = chunk.slot->data;
  const bool fine =
      chunk.transfer->result_.error_number == 0 &&
      check(chunk,
            writes_ ? cuda_->calls.copy_to_host(host, device, chunk.size_bytes, stream_)
                    : cuda_->calls.copy_to_device(device, host, chunk.size_bytes, stream_));
  if (fine) {
    check(chunk, cuda_->calls.record_event(chunk.slot->copied, stream_));
  }
  copying_.push_back(std::move(chunk));
}

// The chunk is over: its slot is free, and its transfer is done if it was the last.
void DeviceLane::settle(Chunk& chunk) {
  free_.push_back(chunk.slot);
  const std::lock_guard lock(mutex_);
  DeviceTransfer& transfer = *chunk.transfer;
  transfer.settled_bytes_ += chunk.size_bytes;
  if (transfer.settled_bytes_ == transfer.whole_.size_bytes) {
    transfer.done_.store(true, std::memory_order_release);
    --in_flight_;
    changed_.notify_all();
  }
}

DeviceMover::DeviceMover(const std::shared_ptr<Cuda>& cuda,
                         Driver& driver,
                         std::byte* memory,
                         uint64_t slot_bytes,
                         uint64_t slots_each)
    : process_id_(getpid()) {
  std::vector<std::byte*> slots(2 * slots_each);
  for (uint64_t index = 0; index < slots.size(); ++index) {
    slots[index] = memory + index * slot_bytes;
  }
  const auto middle = slots.begin() + static_cast<std::ptrdiff_t>(slots_each);
  reads_ = std::make_unique<DeviceLane>(
      cuda, driver, Operation::kRead, std::vector(slots.begin(), middle), slot_bytes);
  writes_ = std::make_unique<DeviceLane>(
      cuda, driver, Operation::kWrite, std::vector(middle, slots.end()), slot_bytes);
}

DeviceMover::~DeviceMover() {
  if (getpid() != process_id_) {  // its threads are not here
    static_cast<void>(reads_.release());
    static_cast<void>(writes_.release());
  }
}

void DeviceMover::require_same_process() const {
  if (getpid() != process_id_) {
    throw std::system_error(
        EPERM, std::generic_category(), "the mover belongs to the process that forked this one");
  }
}

std::shared_ptr<DeviceTransfer> DeviceMover::submit(const Block& whole, CudaEvent after) {
  require_same_process();
  if (whole.size_bytes == 0 || whole.alignment_bytes == 0) {
    throw std::system_error(EINVAL, std::generic_category(), "a transfer needs at least one byte");
  }
  std::shared_ptr<DeviceTransfer> transfer(new DeviceTransfer(whole, after));
  lane_of(whole.operation).submit(transfer);
  return transfer;
}

bool DeviceMover::wait(const DeviceTransfer& transfer, Driver::Duration timeout) {
  if (transfer.done()) {
    return true;
  }
  require_same_process();
  return lane_of(transfer.whole_.operation).wait(transfer, timeout);
}

bool DeviceMover::drain(Driver::Duration timeout) {
  require_same_process();
  return reads_->drain(timeout) && writes_->drain(timeout);
}

void DeviceMover::close() {
  require_same_process();
  reads_->close();
  writes_->close();
}

}  // namespace tierzero::aio

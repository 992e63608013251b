// Bytes between files and the memory of a device, through bounce slots of registered host memory.
//
// [Note: bounce slots]
// Reads and writes have a thread, a stream and slots each, so that both directions of the link are
// busy at once. A chunk of a write is copied from the device into a slot, by a stream that first
// waits, on the device, for what the caller asked to wait for; then the slot is written to the file
// by the engine. A read goes the other way. With more than two slots a copy, which is faster than
// any drive, hides behind the transfers of the slots before it. Chunks of one direction start in
// the order of submission.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda.h"
#include "driver.h"

namespace tierzero::aio {

// A transfer between a file and a device. Its result is written before `done` is set.
class DeviceTransfer {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  const Result& result() const noexcept { return result_; }
  const std::string& detail() const noexcept { return detail_; }  // what the CUDA driver said

 private:
  friend class DeviceLane;
  friend class DeviceMover;

  // `whole.data` is an address of the device; `after` an event to wait for first, or null.
  DeviceTransfer(const Block& whole, CudaEvent after) : whole_(whole), after_(after) {}

  const Block whole_;
  const CudaEvent after_;
  uint64_t started_bytes_ = 0;
  uint64_t settled_bytes_ = 0;  // of chunks that are over, whatever came of them
  Result result_;
  std::string detail_;
  std::atomic<bool> done_ = false;
};

// One direction: a thread with a stream and slots.
class DeviceLane {
 public:
  DeviceLane(std::shared_ptr<Cuda> cuda,
             Driver& driver,
             Operation operation,
             const std::vector<std::byte*>& slots,
             uint64_t slot_bytes);
  ~DeviceLane() { close(); }
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  void submit(const std::shared_ptr<DeviceTransfer>& transfer);
  bool wait(const DeviceTransfer& transfer, Driver::Duration timeout);
  bool drain(Driver::Duration timeout);

  // Finishes what was submitted and ends the thread.
  void close();

 private:
  struct Slot {
    std::byte* data;
    CudaEvent copied = nullptr;
  };
  struct Chunk {
    std::shared_ptr<DeviceTransfer> transfer;
    Slot* slot;
    uint64_t offset_bytes;  // in the transfer
    uint64_t size_bytes;
    std::shared_ptr<Transfer> moving;
  };

  void run(std::promise<int> ready) noexcept;
  int set_up();
  void tear_down();
  std::shared_ptr<DeviceTransfer> next_transfer(bool may_wait);
  bool start_chunk();
  void advance();
  bool check(Chunk& chunk, int error);
  void move(Chunk& chunk);
  void finish_move(Chunk& chunk);
  void copy(Chunk& chunk);
  void settle(Chunk& chunk);

  const std::shared_ptr<Cuda> cuda_;
  Driver& driver_;
  const bool writes_;
  const uint64_t slot_bytes_;
  CudaStream stream_ = nullptr;
  std::vector<Slot> slots_;
  std::vector<Slot*> free_;
  std::deque<Chunk> copying_;  // to or from a slot
  std::deque<Chunk> moving_;   // between slot and file

  std::mutex mutex_;  // guards what follows; the rest, transfers too, is the thread's until done
  std::condition_variable changed_;
  std::deque<std::shared_ptr<DeviceTransfer>> waiting_;
  uint64_t in_flight_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

// Both directions. The driver must outlive it. In a forked child every call but the destructor
// throws, and that one does nothing.
class DeviceMover {
 public:
  DeviceMover(const std::shared_ptr<Cuda>& cuda,
              Driver& driver,
              std::byte* memory,
              uint64_t slot_bytes,
              uint64_t slots_each);
  ~DeviceMover();
  DeviceMover(const DeviceMover&) = delete;
  DeviceMover& operator=(const DeviceMover&) = delete;

  std::shared_ptr<DeviceTransfer> submit(const Block& whole, CudaEvent after);
  bool wait(const DeviceTransfer& transfer, Driver::Duration timeout);
  bool drain(Driver::Duration timeout);
  void close();

 private:
  DeviceLane& lane_of(Operation operation) const {
    return operation == Operation::kRead ? *reads_ : *writes_;
  }

  void require_same_process() const;

  const pid_t process_id_;
  std::unique_ptr<DeviceLane> reads_;
  std::unique_ptr<DeviceLane> writes_;
};

}  // namespace tierzero::aio

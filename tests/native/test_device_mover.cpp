// Bytes between files and a device that is simulated: streams that run late, events that fire when
// the test says so, a driver that refuses. The real one is tested where there is a GPU.
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "aio_ops/csrc/device_mover.h"
#include "aio_ops/csrc/engines.h"
#include "tests/native/aio_support.h"

namespace {

using namespace tierzero::aio;
using namespace tierzero::aio::testing;

// Streams are threads that run their work in order; an event is done when its number has been seen.
class SimulatedCuda {
 public:
  SimulatedCuda() = default;
  ~SimulatedCuda() { CHECK(streams_.empty() && live_events_ == 0); }
  SimulatedCuda(const SimulatedCuda&) = delete;
  SimulatedCuda& operator=(const SimulatedCuda&) = delete;

  std::string failing;  // the call that answers 700
  int fails_after = 0;  // calls that still work

  CudaCalls calls() {
    CudaCalls calls;
    calls.push_context = [this](CudaContext) { return answer("push_context"); };
    calls.pop_context = [] { return 0; };
    calls.register_host = [](void*, std::size_t) { return 0; };
    calls.unregister_host = [](void*) { return 0; };
    calls.create_stream = [this](CudaStream* stream) { return create_stream(stream); };
    calls.destroy_stream = [this](CudaStream stream) { return destroy_stream(stream); };
    calls.create_event = [this](CudaEvent* event) {
      *event = new_event();
      return answer("create_event");
    };
    calls.destroy_event = [this](CudaEvent event) {
      delete static_cast<Event*>(event);
      --live_events_;
      return 0;
    };
    calls.record_event = [this](CudaEvent event, CudaStream stream) {
      const uint64_t target = ++static_cast<Event*>(event)->recorded;
      push(stream, [this, event, target] { reach(event, target); });
      return answer("record_event");
    };
    calls.wait_for_event = [this](CudaStream stream, CudaEvent event) {
      push(stream, [this, event] { wait_for(event); });
      return answer("wait_for_event");
    };
    calls.synchronize_event = [this](CudaEvent event) {
      wait_for(event);
      return answer("synchronize_event");
    };
    calls.copy_to_host = [this](void* host, uint64_t device, std::size_t size, CudaStream stream) {
      const int error = answer("copy_to_host");
      if (error == 0) {
        push(stream, [=] { std::memcpy(host, reinterpret_cast<void*>(device), size); });
      }
      return error;
    };
    calls.copy_to_device =
        [this](uint64_t device, const void* host, std::size_t size, CudaStream stream) {
          const int error = answer("copy_to_device");
          if (error == 0) {
            push(stream, [=] { std::memcpy(reinterpret_cast<void*>(device), host, size); });
          }
          return error;
        };
    calls.describe = [](int error) { return "simulated " + std::to_string(error); };
    return calls;
  }

  // An event that is not done until `fire`.
  CudaEvent new_pending_event() {
    CudaEvent event = new_event();
    static_cast<Event*>(event)->recorded = 1;
    return event;
  }
  void fire(CudaEvent event) { reach(event, 1); }
  void forget(CudaEvent event) {
    delete static_cast<Event*>(event);
    --live_events_;
  }

 private:
  struct Event {
    std::atomic<uint64_t> recorded = 0;
    uint64_t reached = 0;
  };
  struct Stream {
    std::deque<std::function<void()>> work;
    bool stopping = false;
    std::thread thread;
  };

  CudaEvent new_event() {
    ++live_events_;
    return new Event;
  }
  int answer(const std::string& call) {
    const std::lock_guard lock(mutex_);
    return call == failing && fails_after-- <= 0 ? 700 : 0;
  }
  int create_stream(CudaStream* handle) {
    auto stream = std::make_unique<Stream>();
    Stream* const raw = stream.get();
    raw->thread = std::thread([this, raw] { run(*raw); });
    const std::lock_guard lock(mutex_);
    streams_[raw] = std::move(stream);
    *handle = raw;
    return 0;
  }
  int destroy_stream(CudaStream handle) {
    auto* const stream = static_cast<Stream*>(handle);
    {
      const std::lock_guard lock(mutex_);
      stream->stopping = true;
      changed_.notify_all();
    }
    stream->thread.join();
    const std::lock_guard lock(mutex_);
    streams_.erase(stream);
    return 0;
  }
  void push(CudaStream handle, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    static_cast<Stream*>(handle)->work.push_back(std::move(work));
    changed_.notify_all();
  }
  void run(Stream& stream) {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&stream] { return stream.stopping || !stream.work.empty(); });
        if (stream.work.empty()) {
          return;
        }
        work = std::move(stream.work.front());
        stream.work.pop_front();
      }
      if (++runs_ % 7 == 0) {
        usleep(300);
      }
      work();
    }
  }
  void reach(CudaEvent event, uint64_t target) {
    const std::lock_guard lock(mutex_);
    auto* const own = static_cast<Event*>(event);
    own->reached = std::max(own->reached, target);
    changed_.notify_all();
  }
  void wait_for(CudaEvent event) {
    auto* const own = static_cast<Event*>(event);
    std::unique_lock lock(mutex_);
    const uint64_t target = own->recorded;
    changed_.wait(lock, [=] { return own->reached >= target; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Stream*, std::unique_ptr<Stream>> streams_;
  std::atomic<int> live_events_ = 0;
  std::atomic<int> runs_ = 0;
};

constexpr uint64_t kSlotBytes = 2 * kSector;
constexpr uint64_t kSlots = 3;

struct Bench {
  explicit Bench(SimulatedCuda& simulated)
      : cuda(std::make_shared<Cuda>(simulated.calls())), memory(2 * kSlots * kSlotBytes) {}

  DeviceMover& mover() {
    if (made == nullptr) {
      made = std::make_unique<DeviceMover>(cuda, engine, memory.data(), kSlotBytes, kSlots);
    }
    return *made;
  }
  Result run(const Block& block, CudaEvent after = nullptr) {
    const auto transfer = mover().submit(block, after);
    CHECK(mover().wait(*transfer, kForever));
    return transfer->result();
  }

  std::shared_ptr<Cuda> cuda;
  Bytes memory;
  ThreadEngine engine{{2, kSector, 2}};
  std::unique_ptr<DeviceMover> made;
};

void bytes_go_there_and_back() {
  SimulatedCuda simulated;
  Bench bench(simulated);
  std::mt19937 random(1);
  for (const uint64_t size_bytes : {uint64_t{1}, kSlotBytes, 10 * kSlotBytes + 77}) {
    TemporaryFile file(8 * size_bytes);
    Bytes device = pattern(8 * size_bytes, static_cast<unsigned>(size_bytes));
    Bytes back(device.size());
    std::vector<std::shared_ptr<DeviceTransfer>> transfers;
    for (uint64_t index = 0; index < 8; ++index) {
      Block block = block_of(device, Operation::kWrite, file.descriptor());
      transfers.push_back(
          bench.mover().submit(block.part(index * size_bytes, size_bytes), nullptr));
    }
    CHECK(bench.mover().drain(kForever));
    for (uint64_t index = 8; index-- > 0;) {
      Block block = block_of(back, Operation::kRead, file.descriptor());
      transfers.push_back(
          bench.mover().submit(block.part(index * size_bytes, size_bytes), nullptr));
      if (random() % 2 == 0) {
        CHECK(bench.mover().wait(*transfers.back(), kForever));
      }
    }
    CHECK(bench.mover().drain(kForever));
    for (const auto& transfer : transfers) {
      CHECK(transfer->done() && transfer->result().error_number == 0);
      CHECK(transfer->result().moved_bytes == size_bytes);
    }
    CHECK(device == back);
  }
}

void a_write_starts_when_its_event_is_done() {
  SimulatedCuda simulated;
  Bench bench(simulated);
  TemporaryFile file(5 * kSlotBytes);
  Bytes device(5 * kSlotBytes, std::byte{1});
  const CudaEvent event = simulated.new_pending_event();
  const auto transfer =
      bench.mover().submit(block_of(device, Operation::kWrite, file.descriptor()), event);
  usleep(20000);
  CHECK(!transfer->done());
  std::fill(device.begin(), device.end(), std::byte{2});  // the computation that it waits for
  simulated.fire(event);
  CHECK(bench.mover().wait(*transfer, kForever));
  Bytes back(device.size());
  CHECK(bench.run(block_of(back, Operation::kRead, file.descriptor())).error_number == 0);
  CHECK(back == device);
  bench.made.reset();
  simulated.forget(event);
}

void what_fails_says_so_and_the_rest_goes_on() {
  for (const char* const call :
       {"copy_to_host", "copy_to_device", "record_event", "wait_for_event", "synchronize_event"}) {
    for (const int after : {0, 2}) {
      SimulatedCuda simulated;
      Bench bench(simulated);
      TemporaryFile file(5 * kSlotBytes);
      Bytes device = pattern(5 * kSlotBytes, 1);
      const CudaEvent event = simulated.new_pending_event();
      simulated.fire(event);
      bench.mover();
      simulated.failing = call;
      simulated.fails_after = after;
      bool failed = false;
      for (const Operation operation : {Operation::kWrite, Operation::kRead}) {
        for (int round = 0; round < 3; ++round) {
          const auto transfer =
              bench.mover().submit(block_of(device, operation, file.descriptor()), event);
          CHECK(bench.mover().wait(*transfer, kForever));
          if (transfer->result().error_number != 0) {
            CHECK(transfer->result().error_number == EIO);
            CHECK(transfer->detail() == "simulated 700");
            failed = true;
          }
        }
      }
      CHECK(failed);
      simulated.failing.clear();
      const Result last = bench.run(block_of(device, Operation::kWrite, file.descriptor()));
      CHECK(last.error_number == 0 && last.moved_bytes == device.size());
      bench.made.reset();
      simulated.forget(event);
    }
  }
}

void errors_of_files_arrive() {
  SimulatedCuda simulated;
  Bench bench(simulated);
  TemporaryFile file(3 * kSlotBytes);
  Bytes device(5 * kSlotBytes);
  const Result early = bench.run(block_of(device, Operation::kRead, file.descriptor()));
  CHECK(early.error_number == EIO && early.ended_early && early.moved_bytes == 3 * kSlotBytes);
  const Result closed = bench.run(block_of(device, Operation::kWrite, -1));
  CHECK(closed.error_number == EBADF && closed.moved_bytes == 0);
}

void a_device_that_refuses_is_an_error_at_once() {
  for (const char* const call : {"push_context", "create_event"}) {
    SimulatedCuda simulated;
    Bench bench(simulated);
    simulated.failing = call;
    CHECK(error_of([&] { bench.mover(); }) == EIO);
  }
}

void closing_finishes_what_was_submitted() {
  SimulatedCuda simulated;
  Bench bench(simulated);
  TemporaryFile file(20 * kSlotBytes);
  Bytes device = pattern(20 * kSlotBytes, 4);
  const auto transfer =
      bench.mover().submit(block_of(device, Operation::kWrite, file.descriptor()), nullptr);
  bench.mover().close();
  CHECK(transfer->done() && transfer->result().moved_bytes == device.size());
  CHECK(error_of([&] { bench.mover().submit(block_of(device), nullptr); }) == ESHUTDOWN);
}

}  // namespace

int main() {
  bytes_go_there_and_back();
  a_write_starts_when_its_event_is_done();
  what_fails_says_so_and_the_rest_goes_on();
  errors_of_files_arrive();
  a_device_that_refuses_is_an_error_at_once();
  closing_finishes_what_was_submitted();
  return 0;
}

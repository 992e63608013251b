// The Python face of the native engines. It adds two things: the owner of each transfer's memory
// and descriptor is held here until the transfer is done, and long waits stay interruptible.
//
// [Note: owners the garbage collector cannot see]
// Owners are held in a plain C++ vector, which Python's cycle collector does not traverse. So
// memory in flight is never part of a garbage cycle, and is freed only after the destructor below
// has drained, even if engine, tickets and arena become garbage together.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "engines.h"

namespace nb = nanobind;

namespace tierzero::aio {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = Driver::Duration;

constexpr Duration kSignalInterval = std::chrono::milliseconds(100);
constexpr double kLongestWaitSeconds = 1e9;

// Calls `wait_for(slice)` without the interpreter lock until it returns true or the time is over,
// and `look` with it after every slice.
template <typename WaitFor, typename Look>
bool wait_interruptibly(std::optional<double> timeout_s,
                        const WaitFor& wait_for,
                        const Look& look) {
  std::optional<Clock::time_point> deadline;
  if (timeout_s.has_value()) {
    const double bounded_s = *timeout_s > 0 ? std::min(*timeout_s, kLongestWaitSeconds) : 0;
    deadline = Clock::now() +
               std::chrono::duration_cast<Duration>(std::chrono::duration<double>(bounded_s));
  }
  for (;;) {
    Duration slice = kSignalInterval;
    if (deadline.has_value()) {
      slice = std::clamp<Duration>(*deadline - Clock::now(), Duration::zero(), kSignalInterval);
    }
    bool holds = false;
    {
      const nb::gil_scoped_release released;
      holds = wait_for(slice);
    }
    if (holds) {
      return true;
    }
    if (PyErr_CheckSignals() != 0) {
      throw nb::python_error();
    }
    look();
    if (deadline.has_value() && Clock::now() >= *deadline) {
      return false;
    }
  }
}

// Makes what the kernel refuses an OSError with its errno.
template <typename Engine, typename... Arguments>
std::unique_ptr<Engine> make_engine(const Arguments&... arguments) {
  try {
    return std::make_unique<Engine>(arguments...);
  } catch (const std::system_error& error) {
    const nb::object raised = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, raised.ptr());
    throw nb::python_error();
  }
}

class OwningEngine {
 public:
  explicit OwningEngine(std::unique_ptr<Driver> engine) : engine_(std::move(engine)) {}

  virtual ~OwningEngine() {
    const nb::gil_scoped_release released;
    engine_.reset();  // drains; only then are the owners let go
  }
  OwningEngine(const OwningEngine&) = delete;
  OwningEngine& operator=(const OwningEngine&) = delete;

  using Piece = std::tuple<uint64_t, uint64_t, uint64_t>;  // offset, address, size in bytes

  // Takes transfers between one file and several pieces of memory, waiting for room where needed.
  std::vector<std::shared_ptr<Transfer>> submit(const std::vector<nb::object>& owners,
                                                const std::vector<Piece>& pieces,
                                                bool writes,
                                                int descriptor,
                                                uint64_t alignment_bytes,
                                                int file_slot,
                                                int edge_descriptor) {
    if (owners.size() != pieces.size()) {
      throw nb::value_error("there must be an owner for every piece");
    }
    std::vector<Block> wholes;
    wholes.reserve(pieces.size());
    for (const auto& [offset_bytes, address, size_bytes] : pieces) {
      wholes.push_back({writes ? Operation::kWrite : Operation::kRead,
                        descriptor,
                        offset_bytes,
                        reinterpret_cast<std::byte*>(address),
                        size_bytes,
                        alignment_bytes,
                        file_slot,
                        edge_descriptor});
    }
    owned_.reserve(owned_.size() + wholes.size());  // so that nothing fails once they are taken
    std::vector<std::shared_ptr<Transfer>> transfers;
    transfers.reserve(wholes.size());
    for (;;) {
      const std::size_t first = transfers.size();
      for (auto& transfer : engine_->try_submit(std::span(wholes).subspan(first))) {
        owned_.emplace_back(owners[transfers.size()], transfer);
        transfers.push_back(std::move(transfer));
      }
      if (transfers.size() == wholes.size()) {
        return transfers;
      }
      wait_watchfully(std::nullopt,
                      [this](Duration slice) { return engine_->wait_for_room(slice); });
      owned_.reserve(owned_.size() + wholes.size() - transfers.size());
    }
  }

  void set_schedule(uint64_t read_window_bytes, uint64_t write_window_bytes, uint64_t burst_bytes) {
    engine_->set_schedule({read_window_bytes, write_window_bytes, burst_bytes});
  }

  std::optional<Result> wait(const std::shared_ptr<Transfer>& transfer,
                             std::optional<double> timeout_s) {
    const bool done = transfer->done() || wait_watchfully(timeout_s, [&](Duration slice) {
                        return engine_->wait(*transfer, slice);
                      });
    return done ? std::optional(transfer->result()) : std::nullopt;
  }

  std::vector<std::pair<nb::object, Result>> take_finished() {
    const auto first = std::stable_partition(
        owned_.begin(), owned_.end(), [](const Owned& owned) { return !owned.second->done(); });
    // Out of the table before Python code can run: letting an owner go may call back into here.
    const std::vector<Owned> finished(std::make_move_iterator(first),
                                      std::make_move_iterator(owned_.end()));
    owned_.erase(first, owned_.end());
    std::vector<std::pair<nb::object, Result>> results;
    results.reserve(finished.size());
    for (const auto& [owner, transfer] : finished) {
      results.emplace_back(owner, transfer->result());
    }
    return results;
  }

  void drain() {
    wait_watchfully(std::nullopt, [this](Duration slice) { return engine_->drain(slice); });
  }

  void close() {
    const nb::gil_scoped_release released;
    engine_->close();
  }

  uint64_t in_flight() const { return engine_->in_flight(); }
  Activity activity() const { return engine_->activity(); }

  // From here on whoever waits calls `on_stall` once nothing has completed for `stall_s`, and again
  // after each further such time. `on_stall` must not refer to this object: see the note above.
  void watch(double stall_s, const nb::object& on_stall) {
    stall_s_ = stall_s;
    on_stall_ = on_stall;
  }

 private:
  template <typename WaitFor>
  bool wait_watchfully(std::optional<double> timeout_s, const WaitFor& wait_for) {
    return wait_interruptibly(timeout_s, wait_for, [this] { look(); });
  }

  void look() {
    if (!on_stall_.is_valid() || on_stall_.is_none()) {
      return;
    }
    const Activity now = engine_->activity();
    if (now.since_progress_s < stall_s_) {
      warn_from_s_ = stall_s_;
    } else if (now.since_progress_s >= warn_from_s_) {
      warn_from_s_ = now.since_progress_s + stall_s_;
      on_stall_(now);
    }
  }

  double stall_s_ = 0;
  double warn_from_s_ = 0;
  nb::object on_stall_;
  using Owned = std::pair<nb::object, std::shared_ptr<Transfer>>;

  std::vector<Owned> owned_;  // [Note: owners the garbage collector cannot see]
  std::unique_ptr<Driver> engine_;
};

class OwningThreads final : public OwningEngine {
 public:
  OwningThreads(uint64_t thread_count, uint64_t block_bytes, uint64_t queue_depth)
      : OwningEngine(make_engine<ThreadEngine>(Settings{thread_count, block_bytes, queue_depth})) {}
};

class OwningUring final : public OwningEngine {
 public:
  OwningUring(uint64_t block_bytes,
              uint64_t queue_depth,
              bool submission_polling,
              bool completion_polling)
      : OwningUring(make_engine<UringEngine>(Limits{block_bytes, queue_depth},
                                             Polling{submission_polling, completion_polling})) {}

  int add_file(int descriptor) {
    return unlocked([&] { return ring_->add_file(descriptor); });
  }
  void remove_file(int slot) {
    const nb::gil_scoped_release released;
    ring_->remove_file(slot);
  }
  int add_memory(uint64_t address, uint64_t size_bytes) {
    return unlocked([&] { return ring_->add_memory(address, size_bytes); });
  }
  void remove_memory(uint64_t address) {
    const nb::gil_scoped_release released;
    ring_->remove_memory(address);
  }

 private:
  explicit OwningUring(std::unique_ptr<UringEngine> ring) : OwningUring(ring.get(), ring) {}
  OwningUring(UringEngine* ring, std::unique_ptr<UringEngine>& owned)
      : OwningEngine(std::move(owned)), ring_(ring) {}

  template <typename Call>
  static int unlocked(const Call& call) {
    const nb::gil_scoped_release released;
    return call();
  }

  UringEngine* const ring_;  // the engine of the base
};

class OwningAio final : public OwningEngine {
 public:
  OwningAio(uint64_t block_bytes, uint64_t queue_depth)
      : OwningEngine(make_engine<AioEngine>(Limits{block_bytes, queue_depth})) {}
};

}  // namespace
}  // namespace tierzero::aio

NB_MODULE(_native, module) {
  using namespace nb::literals;
  using tierzero::aio::Activity;
  using tierzero::aio::OwningAio;
  using tierzero::aio::OwningEngine;
  using tierzero::aio::OwningThreads;
  using tierzero::aio::OwningUring;
  using tierzero::aio::Result;
  using tierzero::aio::Transfer;

  // An engine kept in a global until exit is not worth a message.
  nb::set_leak_warnings(false);

  nb::class_<Result>(module, "Result")
      .def_ro("moved_bytes", &Result::moved_bytes)
      .def_ro("error_number", &Result::error_number)
      .def_ro("ended_early", &Result::ended_early);

  nb::class_<Transfer>(module, "Transfer");

  nb::class_<Activity>(module, "Activity")
      .def_ro("in_flight", &Activity::in_flight)
      .def_ro("blocks_taken", &Activity::blocks_taken)
      .def_ro("moved_bytes", &Activity::moved_bytes)
      .def_ro("busy_s", &Activity::busy_s)
      .def_ro("since_progress_s", &Activity::since_progress_s);

  nb::class_<OwningEngine>(module, "Engine")
      .def_prop_ro("in_flight", &OwningEngine::in_flight)
      .def_prop_ro("activity", &OwningEngine::activity)
      .def("watch", &OwningEngine::watch, "stall_s"_a, "on_stall"_a)
      .def("set_schedule",
           &OwningEngine::set_schedule,
           nb::kw_only(),
           "read_window_bytes"_a,
           "write_window_bytes"_a,
           "burst_bytes"_a)
      .def("submit",
           &OwningEngine::submit,
           "owners"_a,
           "pieces"_a,
           nb::kw_only(),
           "writes"_a,
           "descriptor"_a,
           "alignment_bytes"_a,
           "file_slot"_a = -1,
           "edge_descriptor"_a = -1)
      .def("wait", &OwningEngine::wait, "transfer"_a, "timeout_s"_a.none())
      .def("take_finished", &OwningEngine::take_finished)
      .def("drain", &OwningEngine::drain)
      .def("close", &OwningEngine::close);

  nb::class_<OwningThreads, OwningEngine>(module, "ThreadEngine")
      .def(nb::init<uint64_t, uint64_t, uint64_t>(),
           "thread_count"_a,
           "block_bytes"_a,
           "queue_depth"_a);

  nb::class_<OwningUring, OwningEngine>(module, "UringEngine")
      .def(nb::init<uint64_t, uint64_t, bool, bool>(),
           "block_bytes"_a,
           "queue_depth"_a,
           "submission_polling"_a = false,
           "completion_polling"_a = false)
      .def("add_file", &OwningUring::add_file, "descriptor"_a)
      .def("remove_file", &OwningUring::remove_file, "slot"_a)
      .def("add_memory", &OwningUring::add_memory, "address"_a, "size_bytes"_a)
      .def("remove_memory", &OwningUring::remove_memory, "address"_a);

  nb::class_<OwningAio, OwningEngine>(module, "AioEngine")
      .def(nb::init<uint64_t, uint64_t>(), "block_bytes"_a, "queue_depth"_a);
}

// The Python face of ThreadEngine. It adds two things: the owner of each transfer's memory and
// descriptor is held here until the transfer is done, and long waits stay interruptible.
//
// [Note: owners the garbage collector cannot see]
// Owners are held in a plain C++ vector, which Python's cycle collector does not traverse. So
// memory in flight is never part of a garbage cycle, and is freed only after the destructor below
// has drained, even if engine, tickets and arena become garbage together.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "thread_engine.h"

namespace nb = nanobind;

namespace tierzero::aio {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = ThreadEngine::Duration;

constexpr Duration kSignalInterval = std::chrono::milliseconds(100);
constexpr double kLongestWaitSeconds = 1e9;

// Calls `wait_for(slice)` without the interpreter lock until it returns true or the time is over.
template <typename WaitFor>
bool wait_interruptibly(std::optional<double> timeout_s, const WaitFor& wait_for) {
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
    if (deadline.has_value() && Clock::now() >= *deadline) {
      return false;
    }
  }
}

class OwningEngine {
 public:
  OwningEngine(uint64_t thread_count, uint64_t block_bytes, uint64_t queue_depth)
      : engine_(std::make_unique<ThreadEngine>(Settings{thread_count, block_bytes, queue_depth})) {}

  ~OwningEngine() {
    const nb::gil_scoped_release released;
    engine_.reset();  // drains; only then are the owners let go
  }

  std::shared_ptr<Transfer> submit(const nb::object& owner,
                                   bool writes,
                                   int descriptor,
                                   uint64_t offset_bytes,
                                   uint64_t address,
                                   uint64_t size_bytes,
                                   uint64_t alignment_bytes) {
    const Block whole{writes ? Operation::kWrite : Operation::kRead,
                      descriptor,
                      offset_bytes,
                      reinterpret_cast<std::byte*>(address),
                      size_bytes,
                      alignment_bytes};
    for (;;) {
      owned_.reserve(owned_.size() + 1);  // so that nothing can fail once the transfer is taken
      if (std::shared_ptr<Transfer> transfer = engine_->try_submit(whole)) {
        owned_.emplace_back(owner, transfer);
        return transfer;
      }
      wait_interruptibly(std::nullopt,
                         [this](Duration slice) { return engine_->wait_for_room(slice); });
    }
  }

  std::optional<Result> wait(const std::shared_ptr<Transfer>& transfer,
                             std::optional<double> timeout_s) {
    const bool done = transfer->done() || wait_interruptibly(timeout_s, [&](Duration slice) {
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
    wait_interruptibly(std::nullopt, [this](Duration slice) { return engine_->drain(slice); });
  }

  void close() {
    const nb::gil_scoped_release released;
    engine_->close();
  }

  uint64_t in_flight() const { return engine_->in_flight(); }

 private:
  using Owned = std::pair<nb::object, std::shared_ptr<Transfer>>;

  std::vector<Owned> owned_;  // [Note: owners the garbage collector cannot see]
  std::unique_ptr<ThreadEngine> engine_;
};

}  // namespace
}  // namespace tierzero::aio

NB_MODULE(_native, module) {
  using namespace nb::literals;
  using tierzero::aio::OwningEngine;
  using tierzero::aio::Result;
  using tierzero::aio::Transfer;

  // An engine kept in a global until exit is not worth a message.
  nb::set_leak_warnings(false);

  nb::class_<Result>(module, "Result")
      .def_ro("moved_bytes", &Result::moved_bytes)
      .def_ro("error_number", &Result::error_number)
      .def_ro("ended_early", &Result::ended_early);

  nb::class_<Transfer>(module, "Transfer");

  nb::class_<OwningEngine>(module, "ThreadEngine")
      .def(nb::init<uint64_t, uint64_t, uint64_t>(),
           "thread_count"_a,
           "block_bytes"_a,
           "queue_depth"_a)
      .def_prop_ro("in_flight", &OwningEngine::in_flight)
      .def("submit",
           &OwningEngine::submit,
           nb::kw_only(),
           "owner"_a,
           "writes"_a,
           "descriptor"_a,
           "offset"_a,
           "address"_a,
           "size_bytes"_a,
           "alignment_bytes"_a)
      .def("wait", &OwningEngine::wait, "transfer"_a, "timeout_s"_a.none())
      .def("take_finished", &OwningEngine::take_finished)
      .def("drain", &OwningEngine::drain)
      .def("close", &OwningEngine::close);
}

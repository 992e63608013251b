// What the Python face adds to an engine: the owner of each transfer's memory and descriptor is
// held here until the transfer is done, and long waits stay interruptible.
//
// [Note: owners the garbage collector cannot see]
// Owners are held in a plain C++ vector, which Python's cycle collector does not traverse. So
// memory in flight is never part of a garbage cycle, and is freed only after the destructor below
// has drained, even if engine, tickets and arena become garbage together.
#pragma once

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
                                                int edge_descriptor,
                                                bool further) {
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
                        edge_descriptor,
                        further});
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

  Driver& driver() { return *engine_; }
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

}  // namespace tierzero::aio

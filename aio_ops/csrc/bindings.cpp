// The Python face of the native engines.
#include "owning_engine.h"

namespace tierzero::aio {

void bind_devices(nb::module_& module);

namespace {

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
           "edge_descriptor"_a = -1,
           "further"_a = false)
      .def("wait", &OwningEngine::wait, "transfer"_a, "timeout_s"_a.none())
      .def("take_finished", &OwningEngine::take_finished)
      .def("drain", &OwningEngine::drain)
      .def("close", &OwningEngine::close);

  tierzero::aio::bind_devices(module);

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

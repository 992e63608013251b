// The Python face of a CUDA device: registration of host memory, and transfers of device memory.
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "device_mover.h"
#include "owning_engine.h"

namespace tierzero::aio {
namespace {

// Like OwningEngine: owners are held here until their transfer is done. The engine is kept, too.
class OwningDeviceMover {
 public:
  OwningDeviceMover(const nb::object& engine,
                    const std::shared_ptr<Cuda>& cuda,
                    const nb::object& memory_owner,
                    uint64_t memory,
                    uint64_t slot_bytes,
                    uint64_t slots_each)
      : engine_(engine), memory_owner_(memory_owner) {
    Driver& driver = nb::cast<OwningEngine&>(engine).driver();
    try {
      const nb::gil_scoped_release released;
      mover_ = std::make_unique<DeviceMover>(
          cuda, driver, reinterpret_cast<std::byte*>(memory), slot_bytes, slots_each);
    } catch (const std::system_error& error) {
      const nb::object raised = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, raised.ptr());
      throw nb::python_error();
    }
  }
  ~OwningDeviceMover() {
    const nb::gil_scoped_release released;
    mover_.reset();  // finishes; only then are the owners let go
  }
  OwningDeviceMover(const OwningDeviceMover&) = delete;
  OwningDeviceMover& operator=(const OwningDeviceMover&) = delete;

  std::shared_ptr<DeviceTransfer> submit(const nb::object& owner,
                                         const OwningEngine::Piece& piece,
                                         bool writes,
                                         int descriptor,
                                         uint64_t alignment_bytes,
                                         int edge_descriptor,
                                         uint64_t after) {
    const auto& [offset_bytes, address, size_bytes] = piece;
    const Block whole{writes ? Operation::kWrite : Operation::kRead,
                      descriptor,
                      offset_bytes,
                      reinterpret_cast<std::byte*>(address),
                      size_bytes,
                      alignment_bytes,
                      -1,
                      edge_descriptor};
    owned_.reserve(owned_.size() + 1);
    std::shared_ptr<DeviceTransfer> transfer =
        mover_->submit(whole, reinterpret_cast<CudaEvent>(after));
    owned_.emplace_back(owner, transfer);
    return transfer;
  }

  bool wait(const std::shared_ptr<DeviceTransfer>& transfer, std::optional<double> timeout_s) {
    return transfer->done() ||
           wait_interruptibly(
               timeout_s, [&](Duration slice) { return mover_->wait(*transfer, slice); }, [] {});
  }

  using Finished = std::tuple<nb::object, Result, std::string>;

  std::vector<Finished> take_finished() {
    const auto first = std::stable_partition(
        owned_.begin(), owned_.end(), [](const Owned& owned) { return !owned.second->done(); });
    const std::vector<Owned> finished(std::make_move_iterator(first),
                                      std::make_move_iterator(owned_.end()));
    owned_.erase(first, owned_.end());
    std::vector<Finished> results;
    results.reserve(finished.size());
    for (const auto& [owner, transfer] : finished) {
      results.emplace_back(owner, transfer->result(), transfer->detail());
    }
    return results;
  }

  void drain() {
    wait_interruptibly(
        std::nullopt, [this](Duration slice) { return mover_->drain(slice); }, [] {});
  }

  void close() {
    const nb::gil_scoped_release released;
    mover_->close();
  }

 private:
  using Owned = std::pair<nb::object, std::shared_ptr<DeviceTransfer>>;

  const nb::object engine_;
  const nb::object memory_owner_;
  std::vector<Owned> owned_;
  std::unique_ptr<DeviceMover> mover_;
};

}  // namespace

void bind_devices(nb::module_& module) {
  using namespace nb::literals;

  nb::class_<Cuda>(module, "Cuda")
      .def_prop_ro("pci_bus_id", &Cuda::pci_bus_id)
      .def(
          "register_host",
          [](const Cuda& cuda, uint64_t address, uint64_t size_bytes) {
            const nb::gil_scoped_release released;
            return cuda.register_host(reinterpret_cast<void*>(address), size_bytes);
          },
          "address"_a,
          "size_bytes"_a)
      .def(
          "unregister_host",
          [](const Cuda& cuda, uint64_t address) {
            const nb::gil_scoped_release released;
            return cuda.unregister_host(reinterpret_cast<void*>(address));
          },
          "address"_a)
      .def("describe", [](const Cuda& cuda, int error) { return cuda.calls.describe(error); });

  module.def(
      "open_cuda",
      [](int device) {
        std::string refusal;
        std::shared_ptr<Cuda> cuda;
        {
          const nb::gil_scoped_release released;
          cuda = Cuda::open(device, refusal);
        }
        return std::pair(cuda, refusal);
      },
      "device"_a);

  nb::class_<DeviceTransfer>(module, "DeviceTransfer");

  nb::class_<OwningDeviceMover>(module, "DeviceMover")
      .def(nb::init<const nb::object&,
                    const std::shared_ptr<Cuda>&,
                    const nb::object&,
                    uint64_t,
                    uint64_t,
                    uint64_t>(),
           "engine"_a,
           "cuda"_a,
           nb::kw_only(),
           "memory_owner"_a,
           "memory"_a,
           "slot_bytes"_a,
           "slots_each"_a)
      .def("submit",
           &OwningDeviceMover::submit,
           "owner"_a,
           "piece"_a,
           nb::kw_only(),
           "writes"_a,
           "descriptor"_a,
           "alignment_bytes"_a,
           "edge_descriptor"_a = -1,
           "after"_a = 0)
      .def("wait", &OwningDeviceMover::wait, "transfer"_a, "timeout_s"_a.none())
      .def("take_finished", &OwningDeviceMover::take_finished)
      .def("drain", &OwningDeviceMover::drain)
      .def("close", &OwningDeviceMover::close);
}

}  // namespace tierzero::aio

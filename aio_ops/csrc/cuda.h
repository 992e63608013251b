// The part of the CUDA driver that is used here, opened at run time: one build serves machines with
// and without a GPU. Each call returns the driver's CUresult, 0 when all is well; tests put a
// driver of their own in their place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tierzero::aio {

using CudaStream = void*;
using CudaEvent = void*;
using CudaContext = void*;

struct CudaCalls {
  std::function<int(CudaContext)> push_context;
  std::function<int()> pop_context;
  std::function<int(void* address, std::size_t size_bytes)> register_host;  // for all contexts
  std::function<int(void* address)> unregister_host;
  std::function<int(CudaStream*)> create_stream;
  std::function<int(CudaStream)> destroy_stream;
  std::function<int(CudaEvent*)> create_event;
  std::function<int(CudaEvent)> destroy_event;
  std::function<int(CudaEvent, CudaStream)> record_event;
  std::function<int(CudaStream, CudaEvent)> wait_for_event;  // on the device, not by the caller
  std::function<int(CudaEvent)> synchronize_event;
  std::function<int(void* host, uint64_t device, std::size_t, CudaStream)> copy_to_host;
  std::function<int(uint64_t device, const void* host, std::size_t, CudaStream)> copy_to_device;
  std::function<std::string(int)> describe;
};

// Makes a context the thread's own for a block. `error` is what came of that.
class CudaScope {
 public:
  explicit CudaScope(const CudaCalls& calls, CudaContext context)
      : error(calls.push_context(context)), calls_(calls) {}
  ~CudaScope() {
    if (error == 0) {
      calls_.pop_context();
    }
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  const int error;

 private:
  const CudaCalls& calls_;
};

// One device by its primary context, the one that torch uses.
class Cuda {
 public:
  // Returns null, and in `refusal` why, when there is no driver or no such device.
  static std::shared_ptr<Cuda> open(int device, std::string& refusal);

  // For tests.
  explicit Cuda(CudaCalls given) : calls(std::move(given)) {}
  ~Cuda();
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;

  CudaContext context() const { return context_; }

  // Let the device copy to and from host memory by itself; each returns the driver's answer.
  int register_host(void* address, std::size_t size_bytes) const;
  int unregister_host(void* address) const;

  // Where the device is on the PCI bus, as in /sys/bus/pci/devices, or empty.
  const std::string& pci_bus_id() const { return pci_bus_id_; }

  const CudaCalls calls;

 private:
  int device_ = -1;
  CudaContext context_ = nullptr;
  std::string pci_bus_id_;
  std::function<int(int)> release_;
};

}  // namespace tierzero::aio

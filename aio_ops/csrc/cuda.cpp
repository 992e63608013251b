#include "cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace tierzero::aio {
namespace {

constexpr unsigned kPortable = 1;       // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kBlockingWait = 1;   // CU_EVENT_BLOCKING_SYNC
constexpr int kBusIdCharacters = 32;

// The functions of libcuda by the names of their present versions.
class Library {
 public:
  Library() : handle_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}

  bool loaded() const { return handle_ != nullptr; }
  bool complete() const { return complete_; }

  template <typename Signature>
  Signature* find(const char* name) {
    void* const symbol = dlsym(handle_, name);
    complete_ = complete_ && symbol != nullptr;
    return reinterpret_cast<Signature*>(symbol);
  }

 private:
  void* const handle_;  // never closed: the driver must not be unloaded
  bool complete_ = true;
};

struct Functions {
  explicit Functions(Library& library)
      : init(library.find<int(unsigned)>("cuInit")),
        get_device(library.find<int(int*, int)>("cuDeviceGet")),
        get_bus_id(library.find<int(char*, int, int)>("cuDeviceGetPCIBusId")),
        retain(library.find<int(void**, int)>("cuDevicePrimaryCtxRetain")),
        release(library.find<int(int)>("cuDevicePrimaryCtxRelease_v2")),
        push(library.find<int(void*)>("cuCtxPushCurrent_v2")),
        pop(library.find<int(void**)>("cuCtxPopCurrent_v2")),
        register_host(library.find<int(void*, std::size_t, unsigned)>("cuMemHostRegister_v2")),
        unregister_host(library.find<int(void*)>("cuMemHostUnregister")),
        create_stream(library.find<int(void**, unsigned)>("cuStreamCreate")),
        destroy_stream(library.find<int(void*)>("cuStreamDestroy_v2")),
        create_event(library.find<int(void**, unsigned)>("cuEventCreate")),
        destroy_event(library.find<int(void*)>("cuEventDestroy_v2")),
        record(library.find<int(void*, void*)>("cuEventRecord")),
        wait(library.find<int(void*, void*, unsigned)>("cuStreamWaitEvent")),
        synchronize(library.find<int(void*)>("cuEventSynchronize")),
        to_host(library.find<int(void*, uint64_t, std::size_t, void*)>("cuMemcpyDtoHAsync_v2")),
        to_device(
            library.find<int(uint64_t, const void*, std::size_t, void*)>("cuMemcpyHtoDAsync_v2")),
        error_string(library.find<int(int, const char**)>("cuGetErrorString")) {}

  int (*init)(unsigned);
  int (*get_device)(int*, int);
  int (*get_bus_id)(char*, int, int);
  int (*retain)(void**, int);
  int (*release)(int);
  int (*push)(void*);
  int (*pop)(void**);
  int (*register_host)(void*, std::size_t, unsigned);
  int (*unregister_host)(void*);
  int (*create_stream)(void**, unsigned);
  int (*destroy_stream)(void*);
  int (*create_event)(void**, unsigned);
  int (*destroy_event)(void*);
  int (*record)(void*, void*);
  int (*wait)(void*, void*, unsigned);
  int (*synchronize)(void*);
  int (*to_host)(void*, uint64_t, std::size_t, void*);
  int (*to_device)(uint64_t, const void*, std::size_t, void*);
  int (*error_string)(int, const char**);
};

std::string describe(const Functions& driver, int error) {
  const char* text = nullptr;
  const bool known = driver.error_string(error, &text) == 0 && text != nullptr;
  return "CUDA error " + std::to_string(error) + (known ? std::string(": ") + text : "");
}

CudaCalls calls_of(const Functions& driver) {
  CudaCalls calls;
  calls.push_context = driver.push;
  calls.pop_context = [driver] {
    void* context = nullptr;
    return driver.pop(&context);
  };
  calls.register_host = [driver](void* address, std::size_t size_bytes) {
    return driver.register_host(address, size_bytes, kPortable);
  };
  calls.unregister_host = driver.unregister_host;
  calls.create_stream = [driver](CudaStream* stream) {
    return driver.create_stream(stream, kNonBlocking);
  };
  calls.destroy_stream = driver.destroy_stream;
  calls.create_event = [driver](CudaEvent* event) {
    return driver.create_event(event, kDisableTiming | kBlockingWait);
  };
  calls.destroy_event = driver.destroy_event;
  calls.record_event = driver.record;
  calls.wait_for_event = [driver](CudaStream stream, CudaEvent event) {
    return driver.wait(stream, event, 0);
  };
  calls.synchronize_event = driver.synchronize;
  calls.copy_to_host = driver.to_host;
  calls.copy_to_device = driver.to_device;
  calls.describe = [driver](int error) { return describe(driver, error); };
  return calls;
}

}  // namespace

std::shared_ptr<Cuda> Cuda::open(int device, std::string& refusal) {
  static Library library;
  if (!library.loaded()) {
    refusal = "there is no CUDA driver here (libcuda.so.1)";
    return nullptr;
  }
  static const Functions driver(library);
  if (!library.complete()) {
    refusal = "the CUDA driver is older than CUDA 11";
    return nullptr;
  }
  int handle = -1;
  void* context = nullptr;
  int error = driver.init(0);
  error = error != 0 ? error : driver.get_device(&handle, device);
  error = error != 0 ? error : driver.retain(&context, handle);
  if (error != 0) {
    refusal = "device " + std::to_string(device) + " cannot be used: " + describe(driver, error);
    return nullptr;
  }
  auto cuda = std::make_shared<Cuda>(calls_of(driver));
  cuda->device_ = handle;
  cuda->context_ = context;
  cuda->release_ = driver.release;
  std::array<char, kBusIdCharacters> bus_id = {};
  if (driver.get_bus_id(bus_id.data(), kBusIdCharacters, handle) == 0) {
    cuda->pci_bus_id_ = bus_id.data();
    std::transform(cuda->pci_bus_id_.begin(),
                   cuda->pci_bus_id_.end(),
                   cuda->pci_bus_id_.begin(),
                   [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  }
  return cuda;
}

int Cuda::register_host(void* address, std::size_t size_bytes) const {
  const CudaScope scope(calls, context_);
  return scope.error != 0 ? scope.error : calls.register_host(address, size_bytes);
}

int Cuda::unregister_host(void* address) const {
  const CudaScope scope(calls, context_);
  return scope.error != 0 ? scope.error : calls.unregister_host(address);
}

Cuda::~Cuda() {
  if (release_ && device_ >= 0) {
    release_(device_);
  }
}

}  // namespace tierzero::aio

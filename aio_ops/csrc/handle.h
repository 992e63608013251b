// Descriptors and mappings that are given back when their owner goes.
#pragma once

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>

namespace tierzero::aio {

[[noreturn]] inline void throw_errno(int error_number, const char* what) {
  throw std::system_error(error_number, std::generic_category(), what);
}

class Handle {
 public:
  explicit Handle(int number) : number_(number) {}
  ~Handle() {
    if (number_ >= 0) {
      ::close(number_);
    }
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  int number() const { return number_; }

 private:
  int number_;
};

// A counter that one thread polls and any other may raise.
class WakeCounter {
 public:
  WakeCounter() : handle_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (handle_.number() < 0) {
      throw_errno(errno, "eventfd");
    }
  }

  int descriptor() const { return handle_.number(); }

  void raise() const {
    const uint64_t one = 1;
    while (write(handle_.number(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void clear() const {
    uint64_t count = 0;
    while (read(handle_.number(), &count, sizeof count) < 0 && errno == EINTR) {
    }
  }

 private:
  Handle handle_;
};

// A part of a ring that the kernel shares with us. Forked children do not get it.
class SharedMapping {
 public:
  SharedMapping(int descriptor, uint64_t size_bytes, uint64_t at)
      : size_bytes_(size_bytes),
        address_(mmap(nullptr,
                      size_bytes,
                      PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE,
                      descriptor,
                      static_cast<off_t>(at))) {
    if (address_ == MAP_FAILED) {
      throw_errno(errno, "mmap of an io_uring");
    }
    madvise(address_, size_bytes_, MADV_DONTFORK);  // only a precaution: a child does not use it
  }
  ~SharedMapping() { munmap(address_, size_bytes_); }
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  template <typename Type>
  Type* at(uint64_t offset_bytes) const {
    return reinterpret_cast<Type*>(static_cast<std::byte*>(address_) + offset_bytes);
  }

 private:
  const uint64_t size_bytes_;
  void* const address_;
};

}  // namespace tierzero::aio

// What the native tests of aio_ops share. Included by one source file of each test binary.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "aio_ops/csrc/driver.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

namespace tierzero::aio::testing {

using Duration = Driver::Duration;
using Bytes = std::vector<std::byte>;

inline constexpr Duration kPoll = Duration::zero();
inline constexpr Duration kForever = std::chrono::hours(1);
inline constexpr uint64_t kSector = 4096;

// A file in memory or on disk that vanishes with this object.
class TemporaryFile {
 public:
  explicit TemporaryFile(uint64_t size_bytes) {
    std::string name = "/tmp/aio_core_XXXXXX";
    descriptor_ = mkstemp(name.data());
    CHECK(descriptor_ >= 0);
    CHECK(unlink(name.c_str()) == 0);
    CHECK(ftruncate(descriptor_, static_cast<off_t>(size_bytes)) == 0);
  }
  ~TemporaryFile() { CHECK(close(descriptor_) == 0); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

// A door that calls wait at, and that counts them: it makes "still in flight" certain.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void wait_for_arrivals(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, count] { return arrived_ >= count; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  bool open_ = false;
};

inline Block block_of(Bytes& memory, Operation operation = Operation::kWrite, int descriptor = -1) {
  return {operation, descriptor, 0, memory.data(), memory.size(), 1};
}

inline Block direct_block_of(Bytes& memory) {
  Block block = block_of(memory);
  block.alignment_bytes = kSector;
  return block;
}

inline Bytes pattern(uint64_t size_bytes, unsigned seed) {
  Bytes bytes(size_bytes);
  unsigned state = seed * 2654435761U + 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

inline std::shared_ptr<Transfer> submit(Driver& engine, const Block& block) {
  for (;;) {
    if (std::shared_ptr<Transfer> transfer = engine.try_submit(block)) {
      return transfer;
    }
    engine.wait_for_room(kForever);
  }
}

inline Result run(Driver& engine, const Block& block) {
  const std::shared_ptr<Transfer> transfer = submit(engine, block);
  CHECK(engine.wait(*transfer, kForever));
  return transfer->result();
}

template <typename Call>
int error_of(const Call& call) {
  try {
    call();
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

}  // namespace tierzero::aio::testing

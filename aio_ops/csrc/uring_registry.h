// Files and memory that a ring knows beforehand, which saves the kernel work at every call.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "uring_calls.h"

namespace tierzero::aio {

// Safe to call from several threads. Kernels before 5.13 stop the whole ring to register something,
// so there nothing is ever registered, and every call names its descriptor and memory as usual.
class UringRegistry {
 public:
  UringRegistry(int ring, unsigned features, const UringCalls& calls);

  // Returns the slot to put in Block::file_slot, or the negated errno.
  int add_file(int descriptor);
  void remove_file(int slot);

  // Pins the memory; returns 0 or the errno. It is one of ours until `remove_memory`.
  int add_memory(uint64_t address, uint64_t size_bytes);
  void remove_memory(uint64_t address);

  // Returns the registered piece of memory that holds these bytes, or -1.
  int find_memory(uint64_t address, uint64_t size_bytes);

  // Gives everything back; the ring may go. Idempotent.
  void close();

 private:
  struct Piece {
    uint64_t region = 0;  // the address that the caller gave, 0 for a free slot
    uint64_t address = 0;
    uint64_t size_bytes = 0;
  };

  int set_file(int slot, int descriptor);
  int set_piece(unsigned slot, uint64_t address, uint64_t size_bytes);
  void forget_region(uint64_t region);

  std::mutex mutex_;  // guards everything below
  int ring_;          // -1 once closed
  const UringCalls calls_;
  std::vector<bool> file_used_;  // by slot; empty when files cannot be registered
  std::vector<Piece> pieces_;    // by slot; empty when memory cannot be registered
};

}  // namespace tierzero::aio

#include "uring_registry.h"

#include <sys/uio.h>

#include <algorithm>

namespace tierzero::aio {
namespace {

constexpr unsigned kFileSlots = 64;
constexpr unsigned kMemorySlots = 256;
constexpr uint64_t kLargestPieceBytes = uint64_t{1} << 30;  // the kernel's limit for one slot

}  // namespace

UringRegistry::UringRegistry(int ring, unsigned features, const UringCalls& calls)
    : ring_(ring), calls_(calls) {
  if ((features & uring::kFeatureResourceTags) == 0) {
    return;
  }
  const std::vector<int32_t> no_files(kFileSlots, -1);
  if (calls_.register_with(ring_, uring::kRegisterFiles, no_files.data(), kFileSlots) >= 0) {
    file_used_.resize(kFileSlots);
  }
  const std::vector<iovec> no_memory(kMemorySlots, iovec{});
  const std::vector<uint64_t> no_tags(kMemorySlots, 0);
  uring::ResourceTable table = {};
  table.count = kMemorySlots;
  table.data = reinterpret_cast<uint64_t>(no_memory.data());
  table.tags = reinterpret_cast<uint64_t>(no_tags.data());
  if (calls_.register_with(ring_, uring::kRegisterBuffers2, &table, sizeof table) >= 0) {
    pieces_.resize(kMemorySlots);
  }
}

int UringRegistry::set_file(int slot, int descriptor) {
  uring::FilesUpdate update = {};
  update.slot = static_cast<unsigned>(slot);
  update.files = reinterpret_cast<uint64_t>(&descriptor);
  return calls_.register_with(ring_, uring::kUpdateFiles, &update, 1);
}

int UringRegistry::add_file(int descriptor) {
  if (descriptor < 0) {
    return -EBADF;  // the kernel would take it for an empty slot
  }
  const std::lock_guard lock(mutex_);
  const auto free = std::find(file_used_.begin(), file_used_.end(), false);
  if (ring_ < 0 || free == file_used_.end()) {
    return -ENOSPC;
  }
  const auto slot = static_cast<int>(free - file_used_.begin());
  const int answer = set_file(slot, descriptor);
  if (answer < 0) {
    return answer;
  }
  *free = true;
  return slot;
}

void UringRegistry::remove_file(int slot) {
  const std::lock_guard lock(mutex_);
  if (ring_ >= 0 && slot >= 0 && set_file(slot, -1) >= 0) {
    file_used_[static_cast<unsigned>(slot)] = false;
  }
}

int UringRegistry::set_piece(unsigned slot, uint64_t address, uint64_t size_bytes) {
  const iovec memory = {reinterpret_cast<void*>(address), size_bytes};
  const uint64_t no_tag = 0;
  uring::ResourceUpdate update = {};
  update.slot = slot;
  update.data = reinterpret_cast<uint64_t>(&memory);
  update.tags = reinterpret_cast<uint64_t>(&no_tag);
  update.count = 1;
  return calls_.register_with(ring_, uring::kUpdateBuffers, &update, sizeof update);
}

int UringRegistry::add_memory(uint64_t address, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  if (ring_ < 0 || pieces_.empty()) {
    return EOPNOTSUPP;
  }
  if (address == 0 || size_bytes == 0) {
    return EINVAL;
  }
  uint64_t position = 0;
  for (unsigned slot = 0; slot < pieces_.size() && position < size_bytes; ++slot) {
    if (pieces_[slot].region != 0) {
      continue;
    }
    const uint64_t piece_bytes = std::min(kLargestPieceBytes, size_bytes - position);
    const int answer = set_piece(slot, address + position, piece_bytes);
    if (answer < 0) {
      forget_region(address);
      return -answer;
    }
    pieces_[slot] = {address, address + position, piece_bytes};
    position += piece_bytes;
  }
  if (position < size_bytes) {
    forget_region(address);
    return ENOSPC;
  }
  return 0;
}

void UringRegistry::forget_region(uint64_t region) {
  for (unsigned slot = 0; slot < pieces_.size(); ++slot) {
    if (region != 0 && pieces_[slot].region == region && set_piece(slot, 0, 0) >= 0) {
      pieces_[slot] = {};
    }
  }
}

void UringRegistry::remove_memory(uint64_t address) {
  const std::lock_guard lock(mutex_);
  if (ring_ >= 0) {
    forget_region(address);
  }
}

int UringRegistry::find_memory(uint64_t address, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  for (unsigned slot = 0; slot < pieces_.size(); ++slot) {
    const Piece& piece = pieces_[slot];
    if (address >= piece.address && address + size_bytes <= piece.address + piece.size_bytes) {
      return static_cast<int>(slot);
    }
  }
  return -1;
}

void UringRegistry::close() {
  const std::lock_guard lock(mutex_);
  // By hand: a forked child may still hold the ring, and with it what is registered.
  if (ring_ >= 0 && !pieces_.empty()) {
    calls_.register_with(ring_, uring::kUnregisterBuffers, nullptr, 0);
  }
  if (ring_ >= 0 && !file_used_.empty()) {
    calls_.register_with(ring_, uring::kUnregisterFiles, nullptr, 0);
  }
  pieces_.clear();
  file_used_.clear();
  ring_ = -1;
}

}  // namespace tierzero::aio

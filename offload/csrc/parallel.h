#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace tierzero::kernels {

// Calls work(chunk) once for each chunk below chunk_count, on up to thread_count threads, one of
// which is the caller's. Threads live for one call: they inherit the caller's floating-point mode
// and CPU set, and a forked child finds none missing. `work` must not throw.
template <typename Work>
void for_each_chunk(uint64_t chunk_count, uint64_t thread_count, const Work& work) {
  std::atomic<uint64_t> next = 0;
  const auto run = [&]() noexcept {
    for (uint64_t chunk = next++; chunk < chunk_count; chunk = next++) {
      work(chunk);
    }
  };
  const uint64_t wanted = std::min(thread_count, chunk_count);
  std::vector<std::jthread> helpers;
  helpers.reserve(wanted);
  try {
    while (helpers.size() + 1 < wanted) {
      helpers.emplace_back(run);
    }
  } catch (const std::exception&) {
    // No thread or memory is left for another: those that run, and the caller, do all chunks.
  }
  run();
}

constexpr uint64_t kChunkNumel = 1 << 16;

// Calls work(start, numel) for chunks that tile `numel` elements.
template <typename Work>
void for_each_range(uint64_t numel, uint64_t thread_count, const Work& work) {
  const uint64_t chunk_count = numel / kChunkNumel + (numel % kChunkNumel != 0);
  for_each_chunk(chunk_count, thread_count, [&](uint64_t chunk) {
    const uint64_t start = chunk * kChunkNumel;
    work(start, std::min(kChunkNumel, numel - start));
  });
}

}  // namespace tierzero::kernels

// The three system calls of io_uring. Each returns what the kernel does, or the negated errno;
// tests put a kernel of their own in their place.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <functional>

#include "uring_abi.h"

namespace tierzero::aio {

inline int answer_of(long result) {
  return result < 0 ? -errno : static_cast<int>(result);
}

struct UringCalls {
  std::function<int(unsigned, uring::Parameters*)> setup = [](unsigned entries,
                                                              uring::Parameters* params) {
    return answer_of(syscall(uring::kSetupCall, entries, params));
  };
  std::function<int(int, unsigned, unsigned, unsigned)> enter =
      [](int ring, unsigned to_submit, unsigned least_complete, unsigned flags) {
        return answer_of(
            syscall(uring::kEnterCall, ring, to_submit, least_complete, flags, nullptr, 0));
      };
  std::function<int(int, unsigned, const void*, unsigned)> register_with =
      [](int ring, unsigned opcode, const void* argument, unsigned count) {
        return answer_of(syscall(uring::kRegisterCall, ring, opcode, argument, count));
      };
};

}  // namespace tierzero::aio

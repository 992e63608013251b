// The part of the kernel's io_uring interface that is used here, declared by hand so that the build
// does not depend on how new the system's kernel headers are. tests/native compares it with them.
#pragma once

#include <cstdint>

namespace tierzero::aio::uring {

inline constexpr long kSetupCall = 425;
inline constexpr long kEnterCall = 426;
inline constexpr long kRegisterCall = 427;

inline constexpr uint32_t kSetupCompletionPolling = 1U << 0U;
inline constexpr uint32_t kSetupSubmissionPolling = 1U << 1U;
inline constexpr uint32_t kSetupSubmitAll = 1U << 7U;              // Linux 5.18
inline constexpr uint32_t kSetupCoopTaskrun = 1U << 8U;            // Linux 5.19
inline constexpr uint32_t kFeatureSingleMmap = 1U << 0U;           // Linux 5.4
inline constexpr uint32_t kFeatureUnregisteredPolling = 1U << 7U;  // Linux 5.11
inline constexpr uint32_t kFeatureResourceTags = 1U << 10U;        // Linux 5.13
inline constexpr uint32_t kEnterGetEvents = 1U << 0U;
inline constexpr uint32_t kEnterWakeThread = 1U << 1U;
inline constexpr uint32_t kThreadSleeps = 1U << 0U;  // in the flags of the submission ring
inline constexpr uint8_t kEntryFixedFile = 1;
inline constexpr uint64_t kRingsAt = 0;
inline constexpr uint64_t kEntriesAt = 0x10000000;

inline constexpr uint8_t kReadVector = 1;
inline constexpr uint8_t kWriteVector = 2;
inline constexpr uint8_t kReadFixed = 4;
inline constexpr uint8_t kWriteFixed = 5;
inline constexpr uint8_t kPollAdd = 6;
inline constexpr uint8_t kRead = 22;   // Linux 5.6
inline constexpr uint8_t kWrite = 23;  // Linux 5.6

inline constexpr unsigned kUnregisterBuffers = 1;
inline constexpr unsigned kRegisterFiles = 2;
inline constexpr unsigned kUnregisterFiles = 3;
inline constexpr unsigned kUpdateFiles = 6;
inline constexpr unsigned kRegisterProbe = 8;
inline constexpr unsigned kRegisterBuffers2 = 15;
inline constexpr unsigned kUpdateBuffers = 16;
inline constexpr uint16_t kOperationSupported = 1;

struct SubmissionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};

struct CompletionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, entries, flags, reserved;
  uint64_t user_address;
};

struct Parameters {
  uint32_t submission_entries, completion_entries, flags, thread_cpu, thread_idle_ms, features;
  uint32_t other_ring, reserved[3];
  SubmissionOffsets submission;
  CompletionOffsets completion;
};

struct Submission {
  uint8_t operation, flags;
  uint16_t priority;
  int32_t file;
  uint64_t offset, address;
  uint32_t size;
  uint32_t call_flags;  // for a poll its events, in the low half on a little-endian machine
  uint64_t token;
  uint16_t buffer, personality;
  int32_t splice_file;
  uint64_t reserved[2];
};

struct Completed {
  uint64_t token;
  int32_t answer;
  uint32_t flags;
};

struct FilesUpdate {
  uint32_t slot, reserved;
  uint64_t files;
};

struct ResourceTable {
  uint32_t count, flags;
  uint64_t reserved, data, tags;
};

struct ResourceUpdate {
  uint32_t slot, reserved;
  uint64_t data, tags;
  uint32_t count, reserved_too;
};

struct ProbedOperation {
  uint8_t operation, reserved;
  uint16_t flags;
  uint32_t reserved_too;
};

struct Probe {
  static constexpr unsigned kOperations = 64;
  uint8_t last, count;
  uint16_t reserved;
  uint32_t reserved_too[3];
  ProbedOperation operations[kOperations];
};

static_assert(sizeof(Parameters) == 120 && sizeof(Submission) == 64 && sizeof(Completed) == 16);
static_assert(sizeof(ResourceTable) == 32 && sizeof(ResourceUpdate) == 32);
static_assert(sizeof(FilesUpdate) == 16 && sizeof(Probe) == 16 + 64 * 8);

}  // namespace tierzero::aio::uring

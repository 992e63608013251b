// io_uring and kernel AIO without Python: on real files, and on a kernel that refuses, takes only a
// part, or is interrupted. Where the kernel has none of one kind, its tests say so and do not run.
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <thread>

#include "aio_ops/csrc/aio_queue.h"
#include "aio_ops/csrc/engines.h"
#include "tests/native/aio_support.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

namespace {

using namespace tierzero::aio;
using namespace tierzero::aio::testing;

#ifdef IORING_RSRC_REGISTER_SPARSE
static_assert(sizeof(io_uring_params) == sizeof(uring::Parameters));
static_assert(offsetof(io_uring_params, features) == offsetof(uring::Parameters, features));
static_assert(offsetof(io_sqring_offsets, array) == offsetof(uring::SubmissionOffsets, array));
static_assert(offsetof(io_cqring_offsets, cqes) == offsetof(uring::CompletionOffsets, entries));
static_assert(offsetof(io_uring_sqe, user_data) == offsetof(uring::Submission, token));
static_assert(offsetof(io_uring_sqe, buf_index) == offsetof(uring::Submission, buffer));
static_assert(offsetof(io_uring_sqe, poll_events) == offsetof(uring::Submission, call_flags));
static_assert(offsetof(io_uring_rsrc_update2, nr) == offsetof(uring::ResourceUpdate, count));
static_assert(offsetof(io_uring_rsrc_register, tags) == offsetof(uring::ResourceTable, tags));
static_assert(IORING_OP_READ == uring::kRead && IORING_OP_WRITE == uring::kWrite);
static_assert(IORING_OP_WRITE_FIXED == uring::kWriteFixed && IORING_OP_POLL_ADD == uring::kPollAdd);
static_assert(IORING_REGISTER_FILES_UPDATE == uring::kUpdateFiles);
static_assert(IORING_REGISTER_BUFFERS_UPDATE == uring::kUpdateBuffers);
static_assert(IORING_REGISTER_PROBE == uring::kRegisterProbe);
static_assert(IORING_FEAT_RSRC_TAGS == uring::kFeatureResourceTags);
static_assert(IORING_SETUP_COOP_TASKRUN == uring::kSetupCoopTaskrun);
static_assert(IORING_SETUP_SUBMIT_ALL == uring::kSetupSubmitAll);
#endif

using Queues = std::vector<std::unique_ptr<Queue>>;

std::unique_ptr<Driver> uring_driver(const UringCalls& calls, uint64_t depth = 4) {
  Queues queues;
  queues.push_back(std::make_unique<UringQueue>(depth, Polling{}, calls));
  return std::make_unique<Driver>(Limits{kSector, 32}, std::move(queues), Lanes::kShared);
}

std::unique_ptr<Driver> aio_driver(const AioCalls& calls, uint64_t depth = 4) {
  Queues queues;
  queues.push_back(std::make_unique<AioQueue>(depth, calls));
  return std::make_unique<Driver>(Limits{kSector, 32}, std::move(queues), Lanes::kShared);
}

// Writes and reads back many transfers from two threads.
void use(Driver& driver, uint64_t rounds = 12, int file_slot = -1, int given = -1) {
  constexpr uint64_t kExtent = 5 * kSector + 123;
  TemporaryFile own(4 * kExtent);
  const int descriptor = given >= 0 ? given : own.descriptor();
  std::vector<std::thread> threads;
  for (unsigned owner = 0; owner < 2; ++owner) {
    threads.emplace_back([&, owner] {
      for (unsigned round = 0; round < rounds; ++round) {
        std::vector<Bytes> sources;
        std::vector<std::shared_ptr<Transfer>> transfers;
        for (unsigned part = 0; part < 2; ++part) {
          sources.push_back(pattern(kExtent, owner * 1000 + round * 2 + part));
        }
        for (unsigned part = 0; part < 2; ++part) {
          Block out = block_of(sources[part], Operation::kWrite, descriptor);
          out.offset_bytes = (2 * owner + part) * kExtent;
          out.file_slot = file_slot;
          transfers.push_back(submit(driver, out));
        }
        for (unsigned part = 0; part < 2; ++part) {
          CHECK(driver.wait(*transfers[part], kForever));
          CHECK(transfers[part]->result().error_number == 0);
          Bytes target(kExtent);
          Block in = block_of(target, Operation::kRead, descriptor);
          in.offset_bytes = (2 * owner + part) * kExtent;
          in.file_slot = file_slot;
          CHECK(run(driver, in).moved_bytes == kExtent);
          CHECK(target == sources[part]);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(driver.in_flight() == 0);
}

void a_ring_moves_what_it_is_given() {
  for (const uint64_t depth : {1, 3, 64}) {
    use(*uring_driver({}, depth));
  }
}

void a_ring_of_an_older_kernel_uses_vectors() {
  UringCalls calls;
  int setups = 0;
  calls.setup = [&, setup = calls.setup](unsigned entries, uring::Parameters* params) {
    ++setups;
    if (params->flags != 0) {
      return -EINVAL;  // as before Linux 5.18
    }
    const int ring = setup(entries, params);
    params->features = uring::kFeatureSingleMmap;  // as in Linux 5.4
    return ring;
  };
  calls.register_with = [](int, unsigned, const void*, unsigned) { return -EINVAL; };
  use(*uring_driver(calls));
  CHECK(setups == 2);
}

void a_ring_survives_a_kernel_that_takes_little() {
  for (const int refusal : {0, EINTR, EAGAIN, EBUSY, ENOMEM}) {
    std::atomic<int> count = 0;
    UringCalls calls;
    calls.enter = [&, enter = calls.enter](
                      int ring, unsigned to_submit, unsigned least, unsigned flags) {
      if (refusal != 0 && to_submit > 0 && ++count % 2 == 0) {
        return -refusal;
      }
      if (to_submit > 1) {  // a part of the batch, and then no waiting, as the kernel does
        return enter(ring, 1, 0, 0);
      }
      return enter(ring, to_submit, least, flags);
    };
    use(*uring_driver(calls));
  }
}

void a_ring_that_breaks_hangs_nobody() {
  for (const int broken_with : {EAGAIN, EBADF}) {
    UringCalls calls;
    calls.enter = [=](int, unsigned, unsigned, unsigned) { return -broken_with; };
    const auto driver = uring_driver(calls);
    Bytes memory(3 * kSector);
    CHECK(run(*driver, block_of(memory)).error_number != 0);
  }
}

void a_ring_that_is_refused_says_why() {
  for (const int refusal : {EPERM, ENOSYS, ENOMEM}) {
    UringCalls calls;
    unsigned least_entries = 4096;
    calls.setup = [&](unsigned entries, uring::Parameters*) {
      least_entries = std::min(least_entries, entries);
      return -refusal;
    };
    CHECK(error_of([&] { UringEngine({kSector, 256}, {}, calls); }) == refusal);
    CHECK(refusal != ENOMEM || least_entries == 16);  // less memory was tried first
  }
}

void registered_files_and_memory_are_used_and_given_back() {
  UringEngine engine({kSector, 4});
  TemporaryFile file(4 * (5 * kSector + 123));
  const int slot = engine.add_file(file.descriptor());
  if (slot < 0) {
    std::fprintf(stderr, "this kernel registers no files: not tested\n");
    return;
  }
  use(engine, 4, slot, file.descriptor());
  Bytes source = pattern(8 * kSector, 3);
  Bytes target(8 * kSector);
  CHECK(engine.add_memory(reinterpret_cast<uint64_t>(source.data()), source.size()) == 0);
  CHECK(engine.add_memory(0, 0) == EINVAL);
  Block out = block_of(source, Operation::kWrite, file.descriptor());
  Block in = block_of(target, Operation::kRead, -1);  // the slot alone says which file
  in.file_slot = slot;
  CHECK(run(engine, out).moved_bytes == source.size());
  CHECK(run(engine, in).moved_bytes == target.size());
  CHECK(source == target);
  engine.remove_memory(reinterpret_cast<uint64_t>(source.data()));
  engine.remove_file(slot);
  CHECK(run(engine, in).error_number == EBADF);
  CHECK(run(engine, out).moved_bytes == source.size());
  CHECK(engine.add_file(-1) < 0);
  engine.close();
  CHECK(engine.add_file(file.descriptor()) < 0);
  engine.remove_file(slot);
}

// Buffered files, which completion polling leaves to plain calls [Note: polling].
void polling_rings_move_what_they_are_given() {
  for (const Polling polling : {Polling{true, false}, Polling{false, true}, Polling{true, true}}) {
    if (error_of([&] { UringQueue(4, polling); }) != 0) {
      std::fprintf(stderr, "this kernel refuses a ring that polls: not tested\n");
      continue;
    }
    UringEngine engine({kSector, 4}, polling);
    use(engine);
    usleep(50000);  // the kernel's thread falls asleep
    use(engine);
  }
}

void memory_that_may_not_be_locked_is_refused() {
  UringCalls calls;
  calls.register_with = [with = calls.register_with](
                            int ring, unsigned opcode, const void* argument, unsigned count) {
    return opcode == uring::kUpdateBuffers ? -ENOMEM : with(ring, opcode, argument, count);
  };
  UringEngine engine({kSector, 4}, {}, calls);
  Bytes memory(kSector);
  CHECK(engine.add_memory(reinterpret_cast<uint64_t>(memory.data()), memory.size()) == ENOMEM);
  use(engine, 2);
}

void kernel_aio_moves_what_it_is_given() {
  for (const uint64_t depth : {1, 3, 64}) {
    use(*aio_driver({}, depth));
  }
  AioEngine engine({kSector, 8});
  use(engine);
}

void kernel_aio_survives_a_kernel_that_takes_little() {
  for (const int refusal : {0, EINTR, EAGAIN}) {
    std::atomic<int> submits = 0;
    std::atomic<int> waits = 0;
    AioCalls calls;
    calls.submit = [&, submit = calls.submit](aio_context_t context, int64_t left, iocb** all) {
      return refusal != 0 && ++submits % 2 == 0 ? -refusal
                                                : submit(context, std::min<int64_t>(left, 1), all);
    };
    calls.get_events = [&, get = calls.get_events](
                           aio_context_t context, int64_t least, int64_t most, io_event* events) {
      return ++waits % 5 == 0 ? -EINTR : get(context, least, most, events);
    };
    use(*aio_driver(calls));
  }
}

void kernel_aio_without_contexts_says_so() {
  AioCalls calls;
  calls.setup = [](unsigned, aio_context_t*) { return -EAGAIN; };
  CHECK(error_of([&] { AioQueue(4, calls); }) == EAGAIN);
  AioCalls stuck;
  stuck.submit = [](aio_context_t, int64_t, iocb**) { return -EAGAIN; };
  const auto driver = aio_driver(stuck);
  Bytes memory(3 * kSector);
  CHECK(run(*driver, block_of(memory)).error_number != 0);
}

template <typename Engine>
void a_forked_child_may_destroy_but_not_use() {
  auto engine = std::make_unique<Engine>(Limits{kSector, 4});
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    Bytes memory(kSector);
    const bool refused = error_of([&] { engine->try_submit(block_of(memory)); }) == EPERM;
    engine.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  use(*engine, 2);
}

template <typename Engine>
void errors_of_the_kernel_arrive() {
  Engine engine(Limits{kSector, 4});
  Bytes memory(3 * kSector);
  const Result closed = run(engine, block_of(memory, Operation::kRead, -1));
  CHECK(closed.error_number == EBADF && closed.moved_bytes == 0);
  TemporaryFile file(kSector + 100);
  const Result early = run(engine, block_of(memory, Operation::kRead, file.descriptor()));
  CHECK(early.error_number == EIO && early.ended_early && early.moved_bytes == kSector + 100);
}

bool works(const char* name, const std::function<void()>& make) {
  const int error_number = error_of(make);
  if (error_number != 0) {
    std::fprintf(stderr, "%s is refused here (errno %d): not tested\n", name, error_number);
  }
  return error_number == 0;
}

}  // namespace

int main() {
  a_ring_that_is_refused_says_why();
  if (works("io_uring", [] { UringQueue(4); })) {
    a_ring_moves_what_it_is_given();
    a_ring_of_an_older_kernel_uses_vectors();
    a_ring_survives_a_kernel_that_takes_little();
    a_ring_that_breaks_hangs_nobody();
    registered_files_and_memory_are_used_and_given_back();
    polling_rings_move_what_they_are_given();
    memory_that_may_not_be_locked_is_refused();
    a_forked_child_may_destroy_but_not_use<UringEngine>();
    errors_of_the_kernel_arrive<UringEngine>();
  }
  if (works("kernel AIO", [] { AioQueue(4); })) {
    kernel_aio_moves_what_it_is_given();
    kernel_aio_survives_a_kernel_that_takes_little();
    kernel_aio_without_contexts_says_so();
    a_forked_child_may_destroy_but_not_use<AioEngine>();
    errors_of_the_kernel_arrive<AioEngine>();
  }
}

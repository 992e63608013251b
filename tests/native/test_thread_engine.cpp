// The thread engine without Python: on real files, and on a kernel that misbehaves on purpose.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "aio_ops/csrc/engines.h"
#include "tests/native/aio_support.h"

namespace {

using namespace tierzero::aio;
using namespace tierzero::aio::testing;

int64_t move_all(const Block& block) {
  return static_cast<int64_t>(block.size_bytes);
}

MoveOnce through(Gate& gate) {
  return [&gate](const Block& block) {
    gate.pass();
    return move_all(block);
  };
}

void real_files_hold_what_was_written() {
  constexpr uint64_t kTransferBytes = 5 * kSector + 123;
  constexpr uint64_t kCount = 24;
  TemporaryFile file(kCount * kTransferBytes);
  ThreadEngine engine({4, kSector, 8});
  std::vector<Bytes> sources;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (unsigned index = 0; index < kCount; ++index) {
    sources.push_back(pattern(kTransferBytes, index));
  }
  for (unsigned index = 0; index < kCount; ++index) {
    Block block = block_of(sources[index], Operation::kWrite, file.descriptor());
    block.offset_bytes = index * kTransferBytes;
    transfers.push_back(submit(engine, block));
  }
  for (const auto& transfer : transfers) {
    CHECK(engine.wait(*transfer, kForever));
    CHECK(transfer->result().error_number == 0);
    CHECK(transfer->result().moved_bytes == kTransferBytes);
  }
  for (unsigned index = 0; index < kCount; ++index) {
    Bytes direct(kTransferBytes);  // past the engine, so that two wrongs cannot make a right
    const auto offset = static_cast<off_t>(index * kTransferBytes);
    CHECK(pread(file.descriptor(), direct.data(), direct.size(), offset) ==
          static_cast<ssize_t>(kTransferBytes));
    CHECK(direct == sources[index]);
    Bytes target(kTransferBytes);
    Block block = block_of(target, Operation::kRead, file.descriptor());
    block.offset_bytes = index * kTransferBytes;
    CHECK(run(engine, block).moved_bytes == kTransferBytes);
    CHECK(target == sources[index]);
  }
}

void every_byte_is_asked_for_once() {
  Bytes memory(10 * kSector + 1);
  std::vector<std::atomic<int>> touched(memory.size());
  ThreadEngine engine({3, 2 * kSector, 4}, [&](const Block& block) {
    const auto start = static_cast<uint64_t>(block.data - memory.data());
    CHECK(block.offset_bytes == start);
    CHECK(block.size_bytes <= 2 * kSector);
    for (uint64_t index = start; index < start + block.size_bytes; ++index) {
      ++touched[index];
    }
    return move_all(block);
  });
  CHECK(run(engine, block_of(memory)).moved_bytes == memory.size());
  for (const auto& count : touched) {
    CHECK(count == 1);
  }
}

// Moves at most `most_bytes` a call, and before each such call answers with `before` once.
MoveOnce reluctant(uint64_t most_bytes, int before) {
  auto calls = std::make_shared<std::atomic<int>>(0);
  return [=](const Block& block) -> int64_t {
    if (before != 0 && (*calls)++ % 2 == 0) {
      return -before;
    }
    return static_cast<int64_t>(std::min(most_bytes, block.size_bytes));
  };
}

void short_and_interrupted_calls_go_on() {
  for (const int before : {0, EINTR, EAGAIN}) {
    for (const uint64_t most_bytes : {uint64_t{1}, uint64_t{7}, kSector}) {
      Bytes memory(2 * kSector + 5);
      ThreadEngine engine({1, kSector, 1}, reluctant(most_bytes, before));
      const Result result = run(engine, block_of(memory));
      CHECK(result.error_number == 0);
      CHECK(result.moved_bytes == memory.size());
    }
  }
}

void direct_transfers_go_on_from_whole_sectors() {
  Bytes memory(4 * kSector);
  std::vector<uint64_t> offsets;
  ThreadEngine engine({1, 4 * kSector, 1}, [&](const Block& block) {
    offsets.push_back(block.offset_bytes);
    return static_cast<int64_t>(std::min(block.size_bytes, kSector + 1000));
  });
  CHECK(run(engine, direct_block_of(memory)).moved_bytes == memory.size());
  CHECK((offsets == std::vector<uint64_t>{0, kSector, 2 * kSector, 3 * kSector}));
}

void blocks_are_whole_sectors() {
  Bytes memory(4 * kSector);
  std::atomic<int> calls = 0;
  ThreadEngine engine({1, 512, 1}, [&](const Block& block) {
    ++calls;
    CHECK(block.size_bytes == kSector);
    return move_all(block);
  });
  CHECK(run(engine, direct_block_of(memory)).moved_bytes == memory.size());
  CHECK(calls == 4);
}

void a_file_that_ends_early_is_an_error() {
  TemporaryFile file(kSector + 100);
  Bytes memory(2 * kSector);
  ThreadEngine engine({2, kSector, 1});
  const Result result = run(engine, block_of(memory, Operation::kRead, file.descriptor()));
  CHECK(result.error_number == EIO && result.ended_early);
  CHECK(result.moved_bytes == kSector + 100);
}

void calls_that_never_get_on_are_errors() {
  Bytes memory(kSector);
  ThreadEngine again({1, kSector, 1}, [](const Block&) { return int64_t{-EAGAIN}; });
  CHECK(run(again, block_of(memory)).error_number == EAGAIN);
  ThreadEngine crumbs({1, kSector, 1}, [](const Block&) { return int64_t{100}; });
  const Result result = run(crumbs, direct_block_of(memory));  // less than a sector is the end
  CHECK(result.error_number == EIO && result.ended_early);
  CHECK(result.moved_bytes == 100);
}

void the_first_error_is_kept_and_other_blocks_finish() {
  Bytes memory(8 * kSector);
  std::atomic<int> calls = 0;
  ThreadEngine engine({1, kSector, 1}, [&](const Block& block) -> int64_t {
    ++calls;
    const uint64_t index = block.offset_bytes / kSector;
    return index == 2 ? -ENOSPC : index == 5 ? -EIO : move_all(block);
  });
  const Result result = run(engine, block_of(memory));
  CHECK(calls == 8 && result.error_number == ENOSPC);
  CHECK(result.moved_bytes == 6 * kSector);
  CHECK(run(engine, block_of(memory)).error_number == ENOSPC);  // and the engine goes on
}

void what_a_call_throws_becomes_the_error() {
  Bytes memory(kSector);
  ThreadEngine coded({1, kSector, 1}, [](const Block&) -> int64_t {
    throw std::system_error(ENODEV, std::generic_category());
  });
  CHECK(run(coded, block_of(memory)).error_number == ENODEV);
  ThreadEngine other({1, kSector, 1},
                     [](const Block&) -> int64_t { throw std::runtime_error("not an errno"); });
  CHECK(run(other, block_of(memory)).error_number == EIO);
}

void errors_of_the_real_kernel_arrive() {
  Bytes memory(kSector);
  ThreadEngine engine({1, kSector, 1});
  CHECK(run(engine, block_of(memory, Operation::kRead, -1)).error_number == EBADF);
}

void transfers_complete_one_by_one() {
  Gate gate;
  Bytes slow(kSector);
  Bytes fast(3 * kSector);
  ThreadEngine engine({2, kSector, 8}, [&](const Block& block) {
    if (block.data == slow.data()) {
      gate.pass();
    }
    return move_all(block);
  });
  const auto held = submit(engine, block_of(slow));
  gate.wait_for_arrivals(1);
  CHECK(run(engine, block_of(fast)).moved_bytes == fast.size());
  CHECK(!held->done());
  CHECK(!engine.wait(*held, kPoll));
  CHECK(!engine.drain(kPoll));
  CHECK(engine.in_flight() == 1);
  gate.open();
  CHECK(engine.wait(*held, kForever));
  CHECK(engine.drain(kForever) && engine.in_flight() == 0);
}

void a_full_queue_is_an_answer() {
  Gate gate;
  Bytes memory(kSector);
  ThreadEngine engine({1, kSector, 2}, through(gate));
  CHECK(engine.try_submit(block_of(memory)) != nullptr);
  CHECK(engine.try_submit(block_of(memory)) != nullptr);
  CHECK(engine.try_submit(block_of(memory)) == nullptr);
  CHECK(!engine.wait_for_room(kPoll));
  gate.open();
  CHECK(engine.wait_for_room(kForever));
  CHECK(engine.try_submit(block_of(memory)) != nullptr);
}

void closing_finishes_what_nobody_waits_for() {
  TemporaryFile file(64 * kSector);
  Bytes source = pattern(64 * kSector, 9);
  {
    ThreadEngine engine({3, kSector, 64});
    for (uint64_t index = 0; index < 64; ++index) {
      const Block whole = block_of(source, Operation::kWrite, file.descriptor());
      CHECK(engine.try_submit(whole.part(index * kSector, kSector)) != nullptr);  // and dropped
    }
  }
  Bytes target(source.size());
  CHECK(pread(file.descriptor(), target.data(), target.size(), 0) ==
        static_cast<ssize_t>(target.size()));
  CHECK(target == source);
}

void closing_waits_for_a_call_in_the_kernel() {
  Gate gate;
  Bytes memory(kSector);
  std::atomic<bool> opened = false;
  ThreadEngine engine({1, kSector, 4}, through(gate));
  const auto transfer = submit(engine, block_of(memory));
  gate.wait_for_arrivals(1);
  std::array<std::thread, 2> closers;
  for (std::thread& closer : closers) {  // two at once: each returns only when all is over
    closer = std::thread([&] {
      engine.close();
      CHECK(opened);
      CHECK(transfer->done());
    });
  }
  while (error_of([&] { engine.try_submit(block_of(memory)); }) != ESHUTDOWN) {
    std::this_thread::yield();  // until a closer has begun
  }
  CHECK(!transfer->done());
  opened = true;
  gate.open();
  for (std::thread& closer : closers) {
    closer.join();
  }
  CHECK(transfer->result().moved_bytes == kSector);
  CHECK(error_of([&] { engine.try_submit(block_of(memory)); }) == ESHUTDOWN);
  engine.close();
}

void closing_wakes_those_who_wait_for_room() {
  for (int round = 0; round < 20; ++round) {  // in some of them the submitter really waits
    Gate gate;
    Bytes memory(kSector);
    ThreadEngine engine({1, kSector, 1}, through(gate));
    const auto transfer = submit(engine, block_of(memory));
    std::latch started(1);
    std::thread submitter([&] {
      started.count_down();
      CHECK(error_of([&] { submit(engine, block_of(memory)); }) == ESHUTDOWN);
    });
    started.wait();
    engine.refuse_more();  // the gate is closed, so nothing else can wake the submitter
    submitter.join();
    CHECK(!transfer->done());
    gate.open();
  }
}

void a_forked_child_may_destroy_but_not_use() {
  Gate gate;
  Bytes memory(kSector);
  auto engine = std::make_unique<ThreadEngine>(Settings{2, kSector, 4}, through(gate));
  const auto transfer = submit(*engine, block_of(memory));
  gate.wait_for_arrivals(1);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    bool refused = error_of([&] { engine->try_submit(block_of(memory)); }) == EPERM;
    refused = refused && error_of([&] { engine->wait(*transfer, kForever); }) == EPERM;
    refused = refused && error_of([&] { engine->drain(kForever); }) == EPERM;
    refused = refused && error_of([&] { engine->close(); }) == EPERM;
    engine.reset();  // joins no thread and waits for no transfer
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(!transfer->done());
  gate.open();
  CHECK(engine->wait(*transfer, kForever));
}

std::atomic<pthread_t> signal_ran_on;

void signals_stay_with_the_caller() {
  struct sigaction action = {};
  action.sa_handler = [](int) { signal_ran_on = pthread_self(); };
  CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
  std::latch looked(2);
  ThreadEngine engine({2, kSector, 4}, [&](const Block& block) {
    sigset_t blocked;
    CHECK(pthread_sigmask(SIG_BLOCK, nullptr, &blocked) == 0);
    CHECK(sigismember(&blocked, SIGUSR1) == 1);
    CHECK(sigismember(&blocked, SIGSEGV) == 0);
    looked.arrive_and_wait();  // so that each of the two threads looks
    return move_all(block);
  });
  Bytes memory(2 * kSector);
  CHECK(run(engine, block_of(memory)).error_number == 0);
  CHECK(kill(getpid(), SIGUSR1) == 0);
  CHECK(pthread_equal(signal_ran_on, pthread_self()) != 0);
}

void many_threads_share_one_engine() {
  constexpr uint64_t kThreads = 4;
  constexpr uint64_t kExtent = 3 * kSector;
  TemporaryFile file(kThreads * kExtent);
  ThreadEngine engine({3, kSector, 3});
  std::vector<std::thread> threads;
  for (unsigned owner = 0; owner < kThreads; ++owner) {
    threads.emplace_back([&, owner] {
      for (unsigned round = 0; round < 60; ++round) {
        Bytes source = pattern(kExtent, owner * 1000 + round);
        Bytes target(kExtent);
        Block out = block_of(source, Operation::kWrite, file.descriptor());
        Block in = block_of(target, Operation::kRead, file.descriptor());
        out.offset_bytes = in.offset_bytes = owner * kExtent;
        CHECK(run(engine, out).error_number == 0);
        CHECK(run(engine, in).moved_bytes == kExtent);
        CHECK(target == source);
        if (round % 8 == owner) {
          CHECK(engine.drain(kForever));
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(engine.in_flight() == 0);
}

void wrong_settings_are_refused() {
  CHECK(error_of([] { ThreadEngine({0, kSector, 1}); }) == EINVAL);
  CHECK(error_of([] { ThreadEngine({1, 0, 1}); }) == EINVAL);
  CHECK(error_of([] { ThreadEngine({1, kSector, 0}); }) == EINVAL);
  ThreadEngine engine({1, kSector, 1});
  Bytes nothing;
  CHECK(error_of([&] { engine.try_submit(block_of(nothing)); }) == EINVAL);
}

}  // namespace

int main() {
  real_files_hold_what_was_written();
  every_byte_is_asked_for_once();
  short_and_interrupted_calls_go_on();
  direct_transfers_go_on_from_whole_sectors();
  blocks_are_whole_sectors();
  a_file_that_ends_early_is_an_error();
  calls_that_never_get_on_are_errors();
  the_first_error_is_kept_and_other_blocks_finish();
  what_a_call_throws_becomes_the_error();
  errors_of_the_real_kernel_arrive();
  transfers_complete_one_by_one();
  a_full_queue_is_an_answer();
  closing_finishes_what_nobody_waits_for();
  closing_waits_for_a_call_in_the_kernel();
  closing_wakes_those_who_wait_for_room();
  a_forked_child_may_destroy_but_not_use();
  signals_stay_with_the_caller();
  many_threads_share_one_engine();
  wrong_settings_are_refused();
}

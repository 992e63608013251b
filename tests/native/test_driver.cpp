// The driver on a queue that is hostile on purpose: it answers late, out of order, in crumbs, busy,
// or breaks.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "aio_ops/csrc/driver.h"
#include "tests/native/aio_support.h"

namespace {

using namespace tierzero::aio;
using namespace tierzero::aio::testing;

// What the tests of this file steer.
struct Script {
  uint64_t depth = 4;
  std::function<int64_t(const Block&)> answer = [](const Block& block) {
    return static_cast<int64_t>(block.size_bytes);
  };
  unsigned seed = 1;
  uint64_t busy_every = 0;    // each such submit answers busy although there is room
  uint64_t breaks_after = 0;  // reaps, then every one throws
  int break_with = EBADF;
  bool holds = false;  // nothing completes until `release`
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t most_taken = 0;
  uint64_t wakes = 0;

  void release() {
    const std::lock_guard lock(mutex);
    holds = false;
    changed.notify_all();
  }
};

class ScriptedQueue final : public Queue {
 public:
  explicit ScriptedQueue(Script& script) : script_(script), random_(script.seed) {}

  uint64_t depth() const override { return script_.depth; }

  Answer submit(uint64_t token, const Block& block) override {
    const std::lock_guard lock(script_.mutex);
    CHECK(token < script_.depth);
    ++submits_;
    const bool is_busy = script_.busy_every != 0 && submits_ % script_.busy_every == 0;
    if (calls_.size() == script_.depth || (is_busy && !calls_.empty())) {
      return Answer::kBusy;
    }
    for (const Call& call : calls_) {
      CHECK(call.token != token);
    }
    calls_.push_back({token, block});
    script_.most_taken = std::max<uint64_t>(script_.most_taken, calls_.size());
    return Answer::kTaken;
  }

  void reap(std::vector<Completion>& completions) override {
    if (script_.breaks_after != 0 && ++reaps_ >= script_.breaks_after) {
      throw std::system_error(script_.break_with, std::generic_category());
    }
    std::unique_lock lock(script_.mutex);
    script_.changed.wait(lock, [this] { return !script_.holds || woken_; });
    woken_ = false;
    if (script_.holds) {
      return;
    }
    std::shuffle(calls_.begin(), calls_.end(), random_);
    const uint64_t count = calls_.empty() ? 0 : 1 + random_() % calls_.size();
    for (uint64_t index = 0; index < count; ++index) {
      completions.push_back({calls_.back().token, script_.answer(calls_.back().block)});
      calls_.pop_back();
    }
  }

  void wake() override {
    const std::lock_guard lock(script_.mutex);
    ++script_.wakes;
    woken_ = true;
    script_.changed.notify_all();
  }

 private:
  struct Call {
    uint64_t token;
    Block block;
  };

  Script& script_;
  std::mt19937 random_;
  std::deque<Call> calls_;
  uint64_t submits_ = 0;
  uint64_t reaps_ = 0;
  bool woken_ = false;
};

std::unique_ptr<Driver> driver_of(Script& script, const Limits& limits = {kSector, 8}) {
  std::vector<std::unique_ptr<Queue>> queues;
  queues.push_back(std::make_unique<ScriptedQueue>(script));
  return std::make_unique<Driver>(limits, std::move(queues), Lanes::kShared);
}

void blocks_complete_in_any_order_and_in_crumbs() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Script script;
    script.seed = seed;
    script.busy_every = seed % 4;
    int calls = 0;
    std::vector<int> touched(10 * kSector + 7);
    Bytes memory(touched.size());
    script.answer = [&](const Block& block) -> int64_t {
      if (++calls % 3 == 0) {
        return calls % 2 == 0 ? -EINTR : -EAGAIN;
      }
      const uint64_t moved_bytes = std::min<uint64_t>(block.size_bytes, 1500);
      for (uint64_t index = 0; index < moved_bytes; ++index) {
        ++touched[block.offset_bytes + index];
      }
      return static_cast<int64_t>(moved_bytes);
    };
    const auto driver = driver_of(script);
    const Result result = run(*driver, block_of(memory));
    CHECK(result.error_number == 0 && result.moved_bytes == memory.size());
    CHECK(std::all_of(touched.begin(), touched.end(), [](int count) { return count == 1; }));
    CHECK(script.most_taken <= script.depth);
  }
}

void a_queue_is_kept_full_and_never_overfilled() {
  Script script;
  script.holds = true;
  Bytes memory(9 * kSector);
  const auto driver = driver_of(script);
  const auto first = submit(*driver, block_of(memory).part(0, kSector));
  std::vector<std::shared_ptr<Transfer>> others;
  for (int index = 0; index < 7; ++index) {  // each wakes the driver while there is room
    others.push_back(submit(*driver, block_of(memory)));
  }
  CHECK(driver->try_submit(block_of(memory)) == nullptr);
  CHECK(!driver->drain(kPoll) && driver->in_flight() == 8);
  for (;;) {
    const std::lock_guard lock(script.mutex);
    if (script.most_taken == script.depth) {
      break;
    }
  }
  script.release();
  CHECK(driver->drain(kForever));
  CHECK(first->done() && script.most_taken == script.depth);
}

void further_pieces_take_no_place() {
  Script script;
  script.holds = true;
  Bytes memory(kSector);
  const auto driver = driver_of(script, {kSector, 2});
  Block further = block_of(memory);
  further.further = true;
  std::vector<std::shared_ptr<Transfer>> taken;
  for (int place = 0; place < 2; ++place) {
    taken.push_back(submit(*driver, block_of(memory)));
    for (int index = 0; index < 20; ++index) {
      taken.push_back(submit(*driver, further));
    }
  }
  CHECK(driver->try_submit(block_of(memory)) == nullptr && !driver->wait_for_room(kPoll));
  CHECK(driver->try_submit(further) != nullptr);
  CHECK(driver->in_flight() == 43);
  script.release();
  CHECK(driver->drain(kForever) && driver->wait_for_room(kForever));
  CHECK(std::all_of(taken.begin(), taken.end(), [](const auto& each) { return each->done(); }));
  CHECK(run(*driver, block_of(memory)).moved_bytes == memory.size());
}

void errors_stay_with_their_transfer() {
  Script script;
  Bytes memory(6 * kSector);
  script.answer = [](const Block& block) -> int64_t {
    return block.offset_bytes == 2 * kSector ? -ENOSPC : static_cast<int64_t>(block.size_bytes);
  };
  const auto driver = driver_of(script);
  const Result failed = run(*driver, block_of(memory));
  CHECK(failed.error_number == ENOSPC && failed.moved_bytes == 5 * kSector);
  CHECK(run(*driver, block_of(memory).part(0, 2 * kSector)).error_number == 0);
  script.answer = [](const Block&) -> int64_t { return -EAGAIN; };
  CHECK(run(*driver, block_of(memory)).error_number == EAGAIN);
}

void a_broken_queue_fails_what_it_has_and_hangs_nobody() {
  for (const int broken_with : {EBADF, EINTR, EAGAIN}) {
    Script script;
    script.breaks_after = 3;
    script.break_with = broken_with;
    Bytes memory(40 * kSector);
    const auto driver = driver_of(script);
    const auto transfer = submit(*driver, block_of(memory));
    CHECK(driver->wait(*transfer, kForever));
    CHECK(transfer->result().error_number == (broken_with == EBADF ? EBADF : EIO));
    CHECK(run(*driver, block_of(memory)).error_number == transfer->result().error_number);
    driver->close();
  }
}

void reads_and_writes_have_lanes_of_their_own() {
  Script reads;
  Script writes;
  writes.holds = true;
  std::vector<std::unique_ptr<Queue>> queues;
  queues.push_back(std::make_unique<ScriptedQueue>(reads));
  queues.push_back(std::make_unique<ScriptedQueue>(writes));
  Driver driver({kSector, 8}, std::move(queues), Lanes::kByOperation);
  Bytes memory(3 * kSector);
  const auto held = submit(driver, block_of(memory, Operation::kWrite));
  CHECK(run(driver, block_of(memory, Operation::kRead)).moved_bytes == memory.size());
  CHECK(!held->done());
  writes.release();
  CHECK(driver.wait(*held, kForever));
}

void ragged_transfers_are_direct_only_in_the_middle() {
  alignas(4096) static std::byte memory[8 * kSector];
  struct Case {
    uint64_t offset, address, size;
    std::vector<std::pair<int, uint64_t>> blocks;  // descriptor and bytes, by offset
  };
  const std::vector<Case> cases = {
      {0, 0, kSector, {{3, kSector}}},
      {100, 100, 50, {{4, 50}}},
      {100, 100, kSector, {{4, kSector}}},
      {100, 100, 2 * kSector, {{4, kSector - 100}, {3, kSector}, {4, 100}}},
      {100, 100, 2 * kSector - 100, {{4, kSector - 100}, {3, kSector}}},
      {0, 0, kSector + 1, {{3, kSector}, {4, 1}}},
      {0, 64, 2 * kSector, {{4, kSector}, {4, kSector}}},  // memory and file out of step
  };
  for (const Case& one : cases) {
    Script script;
    std::vector<std::tuple<uint64_t, int, uint64_t>> seen;
    script.answer = [&](const Block& block) {
      seen.emplace_back(block.offset_bytes, block.descriptor, block.size_bytes);
      CHECK(block.data - memory ==
            static_cast<ptrdiff_t>(one.address + block.offset_bytes - one.offset));
      return static_cast<int64_t>(block.size_bytes);
    };
    const auto driver = driver_of(script);
    Block whole{Operation::kWrite, 3, one.offset, memory + one.address, one.size, kSector, -1, 4};
    CHECK(run(*driver, whole).moved_bytes == one.size);
    std::sort(seen.begin(), seen.end());
    std::vector<std::pair<int, uint64_t>> blocks;
    for (const auto& [offset, descriptor, size_bytes] : seen) {
      blocks.emplace_back(descriptor, size_bytes);
    }
    CHECK(blocks == one.blocks);
  }
}

}  // namespace

int main() {
  blocks_complete_in_any_order_and_in_crumbs();
  a_queue_is_kept_full_and_never_overfilled();
  further_pieces_take_no_place();
  errors_stay_with_their_transfer();
  a_broken_queue_fails_what_it_has_and_hangs_nobody();
  reads_and_writes_have_lanes_of_their_own();
  ragged_transfers_are_direct_only_in_the_middle();
}

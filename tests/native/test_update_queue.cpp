// The queue that runs kernels beside the thread that submits them, without Python.

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "offload/csrc/kernel_queue.h"
#include "offload/csrc/update.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

namespace {

using namespace tierzero::kernels;

constexpr double kLongSeconds = 60.0;

// Returns what a call throws, or "" if it throws nothing.
template <typename Work>
std::string thrown(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void calls_run_in_order_and_tickets_count_them() {
  KernelQueue queue;
  CHECK(queue.done(0));
  std::vector<int> order;  // only the queue's thread writes it, until the last ticket is done
  for (int number = 0; number < 1000; ++number) {
    const uint64_t ticket = queue.submit([&order, number] { order.push_back(number); });
    CHECK(ticket == static_cast<uint64_t>(number) + 1);
  }
  CHECK(queue.wait(1000, kLongSeconds));
  CHECK(order.size() == 1000);
  for (int number = 0; number < 1000; ++number) {
    CHECK(order[static_cast<size_t>(number)] == number);
    CHECK(queue.done(static_cast<uint64_t>(number) + 1));
  }
  CHECK(queue.times(1).end_seconds <= queue.times(1000).begin_seconds);
  CHECK(queue.times(7).begin_seconds <= queue.times(7).end_seconds);
}

void nothing_is_done_before_it_is() {
  KernelQueue queue;
  std::latch may_end(1);
  const uint64_t first = queue.submit([&] { may_end.wait(); });
  const uint64_t second = queue.submit([] {});
  CHECK(!queue.done(first));
  CHECK(!queue.wait(second, 0.001));
  CHECK(thrown([&] { queue.times(first); }) == "call 1 is not over");
  may_end.count_down();
  CHECK(queue.wait(second, kLongSeconds));
  CHECK(queue.done(first));
}

void what_a_call_throws_reaches_all_who_ask() {
  KernelQueue queue;
  std::atomic<int> ran = 0;
  std::latch may_throw(1);
  const uint64_t good = queue.submit([&] { ++ran; });
  const uint64_t bad = queue.submit([&] {
    may_throw.wait();
    throw std::runtime_error("no memory for this kernel");
  });
  const uint64_t behind = queue.submit([&] { ++ran; });
  may_throw.count_down();
  CHECK(thrown([&] { queue.wait(bad, kLongSeconds); }) == "no memory for this kernel");
  CHECK(thrown([&] { queue.done(behind); }) == "no memory for this kernel");
  CHECK(thrown([&] { queue.submit([] {}); }) == "no memory for this kernel");
  CHECK(queue.done(good));
  CHECK(ran == 1);
}

void tickets_that_were_not_given_are_refused() {
  KernelQueue queue;
  queue.submit([] {});
  CHECK(thrown([&] { queue.done(2); }) == "ticket 2 was not given: 1 calls were submitted");
}

void closing_drops_what_has_not_begun_and_waits_for_what_runs() {
  std::atomic<bool> has_ended = false;
  std::atomic<bool> ran_later = false;
  const auto captured = std::make_shared<int>(1);
  std::latch has_begun(1);
  std::latch may_end(1);
  KernelQueue queue;
  queue.submit([&] {
    has_begun.count_down();
    may_end.wait();
    has_ended = true;
  });
  queue.submit([&, captured] { ran_later = true; });
  has_begun.wait();
  std::jthread ender([&] { may_end.count_down(); });
  queue.close();
  CHECK(has_ended);
  CHECK(!ran_later);
  CHECK(captured.use_count() == 1);  // what a dropped call held is given up
  queue.close();
  CHECK(thrown([&] { queue.submit([] {}); }) == "a kernel was submitted to a queue that is closed");
}

void a_queue_may_go_while_calls_wait() {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ran = 0;
    {
      KernelQueue queue;
      for (int number = 0; number < round % 7; ++number) {
        queue.submit([&ran] { ++ran; });
      }
    }
    CHECK(ran <= round % 7);
  }
}

// Kernels on threads of their own, asked for by one thread and waited for by several.
void kernels_in_a_queue_have_the_bits_of_a_call() {
  constexpr size_t kNumel = 300'001;
  const Scalars scalars{.beta1 = 0.9F,
                        .one_minus_beta1 = 0.1F,
                        .beta2 = 0.999F,
                        .one_minus_beta2 = 0.001F,
                        .step_size = 0.003F,
                        .eps = 1e-8F};
  std::array<std::vector<float>, 2> params;
  std::vector<float> grad(kNumel);
  for (size_t i = 0; i < kNumel; ++i) {
    grad[i] = static_cast<float>(i % 97) - 48.0F;
  }
  KernelQueue queue;
  for (size_t which = 0; which < 2; ++which) {
    params[which].assign(kNumel, 1.0F);
    std::vector<float> first(kNumel);
    std::vector<float> second(kNumel);
    const Moments<float> moments{first, second};
    const auto update = [&] { update_own(params[which], grad, moments, scalars, 3); };
    for (int step = 0; step < 3; ++step) {
      which == 0 ? update() : static_cast<void>(queue.submit(update));
    }
    if (which == 1) {
      std::jthread other([&] { CHECK(queue.wait(3, kLongSeconds)); });
      CHECK(queue.wait(3, kLongSeconds));
    }
  }
  CHECK(params[0] == params[1]);
  CHECK(params[0][0] != 1.0F);
}

}  // namespace

int main() {
  calls_run_in_order_and_tickets_count_them();
  nothing_is_done_before_it_is();
  what_a_call_throws_reaches_all_who_ask();
  tickets_that_were_not_given_are_refused();
  closing_drops_what_has_not_begun_and_waits_for_what_runs();
  a_queue_may_go_while_calls_wait();
  kernels_in_a_queue_have_the_bits_of_a_call();
  return 0;
}

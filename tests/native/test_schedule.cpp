// The chooser on random arrivals: windows hold, bursts alternate, nothing waits for ever.
#include <deque>
#include <random>

#include "aio_ops/csrc/schedule.h"
#include "tests/native/aio_support.h"

namespace {

using namespace tierzero::aio;
using namespace tierzero::aio::testing;

struct Taken {
  Operation operation;
  uint64_t size_bytes;
};

class Device {
 public:
  explicit Device(const Schedule& schedule) : schedule_(schedule) { chooser_.set(schedule); }

  void arrive(Operation operation, uint64_t size_bytes) {
    queue(operation).push_back(size_bytes);
    take_all();
  }

  void end(uint64_t index) {
    if (with_kernel_.empty()) {
      return;
    }
    const auto place =
        with_kernel_.begin() + static_cast<std::ptrdiff_t>(index % with_kernel_.size());
    chooser_.over(place->operation, place->size_bytes);
    with_kernel_.erase(place);
    take_all();
  }

  bool idle() const { return with_kernel_.empty() && reads_.empty() && writes_.empty(); }

 private:
  std::deque<uint64_t>& queue(Operation operation) {
    return operation == Operation::kRead ? reads_ : writes_;
  }
  uint64_t used(Operation operation) const {
    uint64_t bytes = 0;
    for (const Taken& taken : with_kernel_) {
      bytes += taken.operation == operation ? taken.size_bytes : 0;
    }
    return bytes;
  }

  void take_all() {
    for (;;) {
      const std::optional<Operation> chosen = chooser_.choose(
          reads_.empty() ? 0 : reads_.front(), writes_.empty() ? 0 : writes_.front());
      if (!chosen.has_value()) {
        CHECK(!with_kernel_.empty() || (reads_.empty() && writes_.empty()));
        return;
      }
      const uint64_t size_bytes = queue(*chosen).front();
      const bool reads = *chosen == Operation::kRead;
      const uint64_t window_bytes =
          reads ? schedule_.read_window_bytes : schedule_.write_window_bytes;
      const uint64_t used_bytes = used(*chosen);
      const uint64_t others_bytes = used(reads ? Operation::kWrite : Operation::kRead);
      CHECK(used_bytes == 0 || used_bytes + size_bytes <= window_bytes);
      CHECK(schedule_.burst_bytes == 0 || others_bytes == 0);
      queue(*chosen).pop_front();
      with_kernel_.push_back({*chosen, size_bytes});
      chooser_.taken(*chosen, size_bytes);
    }
  }

  const Schedule schedule_;
  Chooser chooser_;
  std::deque<uint64_t> reads_;
  std::deque<uint64_t> writes_;
  std::vector<Taken> with_kernel_;
};

void every_choice_keeps_the_rules() {
  for (unsigned seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    Schedule schedule;
    schedule.read_window_bytes = random() % 2 == 0 ? UINT64_MAX : 1 + random() % 40;
    schedule.write_window_bytes = random() % 2 == 0 ? UINT64_MAX : 1 + random() % 40;
    schedule.burst_bytes = random() % 2 == 0 ? 0 : 1 + random() % 40;
    Device device(schedule);
    for (int step = 0; step < 200; ++step) {
      if (random() % 3 == 0) {
        device.end(random());
      } else {
        device.arrive(random() % 2 == 0 ? Operation::kRead : Operation::kWrite, 1 + random() % 16);
      }
    }
    for (int step = 0; step < 400; ++step) {
      device.end(random());
    }
    CHECK(device.idle());
  }
}

void bursts_alternate() {
  Chooser chooser;
  chooser.set({UINT64_MAX, UINT64_MAX, 3});
  std::string order;
  uint64_t reads = 7;
  uint64_t writes = 5;
  while (reads > 0 || writes > 0) {
    const std::optional<Operation> chosen = chooser.choose(reads > 0 ? 1 : 0, writes > 0 ? 1 : 0);
    CHECK(chosen.has_value());
    chooser.taken(*chosen, 1);
    chooser.over(*chosen, 1);
    const bool is_read = *chosen == Operation::kRead;
    (is_read ? reads : writes) -= 1;
    order += is_read ? 'r' : 'w';
  }
  CHECK(order == "rrrwwwrrrwwr");
}

}  // namespace

int main() {
  every_choice_keeps_the_rules();
  bursts_alternate();
  return 0;
}

// The kernels' own tests, without Python. With the argument "full", the split and the rounding to
// fp16 are also checked on all 2^32 patterns.

#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "offload/csrc/halves.h"
#include "offload/csrc/norm.h"
#include "offload/csrc/parallel.h"
#include "offload/csrc/split.h"
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

constexpr Scalars kScalars{.beta1 = 0.9F,
                           .one_minus_beta1 = 0.1F,
                           .beta2 = 0.999F,
                           .one_minus_beta2 = 0.001F,
                           .decay_factor = 0.9997F,
                           .step_size = 0.003F,
                           .bias_correction2_sqrt = 0.0316F,
                           .eps = 1e-8F,
                           .grad_scale = 0.7F};

// A small generator of patterns (xorshift), the same on every machine.
class Patterns {
 public:
  explicit Patterns(uint32_t seed) : state_(seed) {}

  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }

  // Any pattern but NaN and infinity.
  float number() {
    uint32_t candidate = bits();
    while ((candidate & 0x7F80'0000) == 0x7F80'0000) {
      candidate = bits();
    }
    return std::bit_cast<float>(candidate);
  }

 private:
  uint32_t state_;
};

std::vector<float> numbers(size_t numel, uint32_t seed) {
  Patterns patterns(seed);
  std::vector<float> values(numel);
  for (float& value : values) {
    value = patterns.number();
  }
  return values;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) {
    bits.push_back(std::bit_cast<uint32_t>(value));
  }
  return bits;
}

// The value of a finite fp16, by its definition; what has the bits of infinity counts as 2^16.
double slow_value(Fp16 half) {
  const int exponent = (half.bits >> 10) & 0x1F;
  const int fraction = half.bits & 0x3FF;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half.bits >> 15 != 0 ? -magnitude : magnitude;
}

// The fp16 nearest to an fp32, by counting the units of its exponent in fp64.
Fp16 slow_fp16(uint32_t bits) {
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const auto signed_half = [&](int half) { return Fp16{static_cast<uint16_t>(sign | half)}; };
  const double magnitude = std::fabs(std::bit_cast<float>(bits));
  if (std::isnan(magnitude)) {
    return signed_half(0x7E00);
  }
  if (magnitude >= 65520.0) {
    return signed_half(0x7C00);
  }
  const int exponent = magnitude < std::ldexp(1.0, -14) ? -14 : std::ilogb(magnitude);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return signed_half(((exponent + 14) << 10) + units);
}

// One set of masters in the three formats, with the same bf16-valued gradients; and gradients and
// parameters of fp16.
struct State {
  explicit State(size_t numel)
      : master(numbers(numel, 1)),
        exp_avg(numbers(numel, 2)),
        exp_avg_sq(numbers(numel, 3)),
        wide_grad(numbers(numel, 4)),
        param(numel),
        residual(numel),
        grad(numel),
        fp16_param(numel),
        fp16_grad(numel),
        wide_fp16_grad(numel) {
    for (size_t i = 0; i < numel; ++i) {
      exp_avg_sq[i] = std::fabs(exp_avg_sq[i]);
      grad[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(wide_grad[i]) >> 16);
      wide_grad[i] = std::bit_cast<float>(uint32_t{grad[i]} << 16);
      fp16_grad[i] = {static_cast<uint16_t>(grad[i] & ~0x4000)};  // below 2: no infinity, no NaN
      wide_fp16_grad[i] = static_cast<float>(slow_value(fp16_grad[i]));
    }
    split_master(master, param, residual, 1);
  }

  Moments<float> moments() { return {exp_avg, exp_avg_sq}; }

  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<float> wide_grad;
  std::vector<uint16_t> param;
  std::vector<int16_t> residual;
  std::vector<uint16_t> grad;
  std::vector<Fp16> fp16_param;
  std::vector<Fp16> fp16_grad;
  std::vector<float> wide_fp16_grad;
};

void test_every_chunk_runs_once_on_all_threads() {
  // The barrier opens only if three threads work at the same time.
  std::barrier together(3);
  std::vector<std::thread::id> ids(3);
  for_each_chunk(3, 3, [&](uint64_t chunk) {
    ids[chunk] = std::this_thread::get_id();
    together.arrive_and_wait();
  });
  CHECK(std::set(ids.begin(), ids.end()).size() == 3);

  for (const uint64_t thread_count : {0U, 1U, 2U, 7U}) {
    std::vector<std::atomic<int>> visits(100);
    for_each_chunk(visits.size(), thread_count, [&](uint64_t chunk) { ++visits[chunk]; });
    for (const auto& visit : visits) {
      CHECK(visit == 1);
    }
  }
  for_each_chunk(0, 3, [](uint64_t) { CHECK(false); });
}

void test_update_is_the_written_formula() {
  float param = 1.5F;
  float exp_avg = 0.25F;
  float exp_avg_sq = 0.5F;
  const float grad = 2.0F;
  // volatile: each operation is rounded to fp32 on its own, whatever this file is compiled with.
  volatile float g = grad * kScalars.grad_scale;
  volatile float decayed = param * kScalars.decay_factor;
  volatile float old_part = exp_avg * kScalars.beta1;
  volatile float new_part = g * kScalars.one_minus_beta1;
  volatile float m = old_part + new_part;
  volatile float square = g * g;
  volatile float old_square = exp_avg_sq * kScalars.beta2;
  volatile float new_square = square * kScalars.one_minus_beta2;
  volatile float v = old_square + new_square;
  volatile float root = std::sqrt(v);
  volatile float quotient = root / kScalars.bias_correction2_sqrt;
  volatile float denominator = quotient + kScalars.eps;
  volatile float ratio = m / denominator;
  volatile float change = kScalars.step_size * ratio;
  const float expected = decayed - change;
  update_own({&param, 1}, {&grad, 1}, {{&exp_avg, 1}, {&exp_avg_sq, 1}}, kScalars, 1);
  CHECK(exp_avg == m);
  CHECK(exp_avg_sq == v);
  CHECK(param == expected);
}

void check_same_masters(const State& state, const State& expected) {
  CHECK(bits_of(state.master) == bits_of(expected.master));
  CHECK(bits_of(state.exp_avg) == bits_of(expected.exp_avg));
  CHECK(bits_of(state.exp_avg_sq) == bits_of(expected.exp_avg_sq));
}

template <typename Grad>
void check_bf16_formats(const State& expected, std::vector<Grad> State::* grad, uint64_t threads) {
  const size_t numel = expected.master.size();
  State master(numel);
  update_master<uint16_t, Grad>(
      master.param, master.master, master.*grad, master.moments(), kScalars, threads);
  check_same_masters(master, expected);
  State exact(numel);
  update_exact<Grad>(exact.param, exact.residual, exact.*grad, exact.moments(), kScalars, threads);
  CHECK(exact.param == master.param);
  join_master(exact.param, exact.residual, exact.master, threads);
  check_same_masters(exact, expected);
}

template <typename Grad>
void check_fp16_format(const State& expected, std::vector<Grad> State::* grad, uint64_t threads) {
  State state(expected.master.size());
  update_master<Fp16, Grad>(
      state.fp16_param, state.master, state.*grad, state.moments(), kScalars, threads);
  check_same_masters(state, expected);
  for (size_t i = 0; i < state.master.size(); ++i) {
    CHECK(state.fp16_param[i] == slow_fp16(std::bit_cast<uint32_t>(state.master[i])));
  }
}

void test_formats_and_thread_counts_agree() {
  for (const size_t numel : {size_t{0}, size_t{1}, size_t{4097}, size_t{200'001}}) {
    State bf16(numel);
    update_own(bf16.master, bf16.wide_grad, bf16.moments(), kScalars, 1);
    State fp16(numel);
    update_own(fp16.master, fp16.wide_fp16_grad, fp16.moments(), kScalars, 1);
    for (const uint64_t thread_count : {1U, 2U, 3U}) {
      check_bf16_formats(bf16, &State::grad, thread_count);
      check_bf16_formats(bf16, &State::wide_grad, thread_count);
      check_fp16_format(fp16, &State::fp16_grad, thread_count);
      check_fp16_format(fp16, &State::wide_fp16_grad, thread_count);
    }
  }
}

constexpr RoundingKey kKey{0x1234'5678U, 0x9ABC'DEF0U, 0};

struct Lossy {
  explicit Lossy(size_t numel)
      : param(numel, 0x3F80),
        residual(numel),
        short_residual(numel),
        grad(numbers(numel, 7)),
        halves(2, std::vector<uint16_t>(numel)),
        codes(2, std::vector<uint8_t>(numel)),
        bases(2, std::vector<uint16_t>((numel + kCodeBlock - 1) / kCodeBlock)) {}

  void step_bf16(const Scalars& scalars, uint64_t threads) {
    update_bf16<float>(param, residual, grad, {halves[0], halves[1]}, scalars, kKey, threads);
  }

  void step_compact(const Scalars& scalars, uint64_t threads) {
    const CodedMoments moments{{codes[0], codes[1]}, {bases[0], bases[1]}};
    update_compact<float>(param, short_residual, grad, moments, scalars, kKey, threads);
  }

  std::vector<uint16_t> param;
  std::vector<int16_t> residual;
  std::vector<int8_t> short_residual;
  std::vector<float> grad;
  std::vector<std::vector<uint16_t>> halves;
  std::vector<std::vector<uint8_t>> codes;
  std::vector<std::vector<uint16_t>> bases;
};

// A moment that a rule lacks is empty: nothing must touch it, which the sanitizers see.
void test_lossy_formats_and_thread_counts_agree() {
  for (const auto rule : {Rule::kAdamW, Rule::kAdam, Rule::kLion, Rule::kAdagrad, Rule::kSgd}) {
    Scalars scalars = kScalars;
    scalars.rule = rule;
    for (const size_t numel : {size_t{0}, size_t{1}, size_t{33}, size_t{200'001}}) {
      std::vector<Lossy> states(4, Lossy(numel));
      for (Lossy& state : states) {
        const bool has_exp_avg = rule != Rule::kAdagrad;
        const bool has_exp_avg_sq = rule != Rule::kLion && rule != Rule::kSgd;
        for (size_t i = 0; i < 2; ++i) {
          if (!(i == 0 ? has_exp_avg : has_exp_avg_sq)) {
            state.halves[i].clear();
            state.codes[i].clear();
            state.bases[i].clear();
          }
        }
      }
      for (const uint64_t threads : {1U, 3U}) {
        Lossy& bf16 = states[threads == 1 ? 0 : 1];
        bf16.step_bf16(scalars, threads);
        Lossy& compact = states[threads == 1 ? 2 : 3];
        compact.step_compact(scalars, threads);
      }
      CHECK(states[0].param == states[1].param && states[0].residual == states[1].residual);
      CHECK(states[0].halves == states[1].halves);
      CHECK(states[2].param == states[3].param && states[2].codes == states[3].codes);
      CHECK(states[2].bases == states[3].bases);
      CHECK(states[2].short_residual == states[3].short_residual);
      CHECK(numel < 100 || states[0].residual != Lossy(numel).residual);
      CHECK(numel < 100 || states[2].short_residual != Lossy(numel).short_residual);
    }
  }
}

void test_computed_nans_have_one_pattern() {
  const auto negative_nan = std::bit_cast<float>(0xFFC0'1234U);
  std::vector<float> param{negative_nan, 1.0F, std::numeric_limits<float>::infinity()};
  std::vector<float> exp_avg{0.0F, negative_nan, 0.0F};
  std::vector<float> exp_avg_sq{1.0F, -1.0F, negative_nan};
  const std::vector<float> grad{0.0F, 0.0F, 0.0F};
  update_own(param, grad, {exp_avg, exp_avg_sq}, kScalars, 1);
  for (const float value : {param[0], param[1], param[2], exp_avg[1], exp_avg_sq[2]}) {
    CHECK(std::bit_cast<uint32_t>(value) == 0x7FC0'0000U);
  }
}

uint32_t quieted(uint32_t bits) {
  return (bits & 0x7FFF'FFFF) > 0x7F80'0000 ? (bits & 0x8000'0000) | 0x7FC0'0000 : bits;
}

// Checks join(split(x)) == x, NaNs made quiet, for every `stride`-th pattern.
void check_split_is_a_bijection(uint64_t stride, uint64_t thread_count) {
  constexpr size_t kNumel = 1 << 20;
  std::vector<float> master(kNumel);
  std::vector<float> joined(kNumel);
  std::vector<uint16_t> param(kNumel);
  std::vector<int16_t> residual(kNumel);
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += kNumel * stride) {
    for (size_t i = 0; i < kNumel; ++i) {
      master[i] = std::bit_cast<float>(static_cast<uint32_t>(first + i * stride));
    }
    split_master(master, param, residual, thread_count);
    join_master(param, residual, joined, thread_count);
    bool equal = true;
    for (size_t i = 0; i < kNumel; ++i) {
      const uint32_t bits = quieted(static_cast<uint32_t>(first + i * stride));
      equal &= std::bit_cast<uint32_t>(joined[i]) == bits;
      equal &= param[i] == static_cast<uint16_t>((uint64_t{bits} + 0x8000) >> 16);
    }
    CHECK(equal);
  }
}

void test_fp16_widening_is_the_definition() {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const Fp16 half{static_cast<uint16_t>(bits)};
    const float wide = widen(half);
    CHECK(std::signbit(wide) == (bits >> 15 != 0));
    switch (const uint32_t magnitude = bits & 0x7FFF; magnitude) {
      case 0x7C00:
        CHECK(std::isinf(wide));
        break;
      default:
        CHECK(magnitude > 0x7C00 ? std::isnan(wide) : double{wide} == slow_value(half));
    }
  }
}

void check_fp16_rounding(const std::vector<float>& master, uint64_t thread_count) {
  std::vector<Fp16> halves(master.size());
  round_to_fp16(master, halves, thread_count);
  bool equal = true;
  for (size_t i = 0; i < master.size(); ++i) {
    equal &= halves[i] == slow_fp16(std::bit_cast<uint32_t>(master[i]));
  }
  CHECK(equal);
}

void test_fp16_is_rounded_to_even_between_any_two() {
  std::vector<float> around_ties;
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const double below = slow_value({static_cast<uint16_t>(bits)});
    const double above = slow_value({static_cast<uint16_t>(bits + 1)});
    const auto tie = static_cast<float>((below + above) / 2);
    for (const float value :
         {std::nextafter(tie, 0.0F), tie, std::nextafter(tie, std::numeric_limits<float>::max())}) {
      around_ties.push_back(value);
      around_ties.push_back(-value);
    }
  }
  for (const uint64_t thread_count : {1U, 2U, 3U}) {
    check_fp16_rounding(around_ties, thread_count);
  }
}

// Checks the rounding to fp16 of every `stride`-th pattern.
void check_fp16_rounding_of_patterns(uint64_t stride, uint64_t thread_count) {
  std::vector<float> master(1 << 20);
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += master.size() * stride) {
    for (size_t i = 0; i < master.size(); ++i) {
      master[i] = std::bit_cast<float>(static_cast<uint32_t>(first + i * stride));
    }
    check_fp16_rounding(master, thread_count);
  }
}

// The rule of the norm, one element at a time.
double slow_sum_squares(std::span<const float> values, uint64_t first_index) {
  double total = 0.0;
  size_t done = 0;
  while (done < values.size()) {
    const uint64_t block = (first_index + done) / 4096;
    double lanes[64] = {};
    for (; done < values.size() && (first_index + done) / 4096 == block; ++done) {
      const double value = values[done];
      lanes[(first_index + done) % 64] += value * value;
    }
    for (size_t half = 32; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) {
        lanes[lane] += lanes[lane + half];
      }
    }
    total += lanes[0];
  }
  return total;
}

void test_sum_squares_is_the_slow_sum() {
  State state(262'145);
  const std::span<const float> wide(state.wide_grad);
  const std::span<const uint16_t> narrow(state.grad);
  const std::span<const float> wide_fp16(state.wide_fp16_grad);
  const std::span<const Fp16> fp16(state.fp16_grad);
  for (const size_t numel : {0U, 1U, 63U, 64U, 65U, 4095U, 4096U, 4097U, 262'145U}) {
    for (const uint64_t first_index :
         {uint64_t{0}, uint64_t{1}, uint64_t{63}, uint64_t{4095}, uint64_t{1'000'000'000'037}}) {
      const double expected = slow_sum_squares(wide.first(numel), first_index);
      const double fp16_expected = slow_sum_squares(wide_fp16.first(numel), first_index);
      for (const uint64_t thread_count : {1U, 2U, 3U}) {
        CHECK(sum_squares(wide.first(numel), first_index, thread_count) == expected);
        CHECK(sum_squares(narrow.first(numel), first_index, thread_count) == expected);
        CHECK(sum_squares(fp16.first(numel), first_index, thread_count) == fp16_expected);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  test_every_chunk_runs_once_on_all_threads();
  test_update_is_the_written_formula();
  test_formats_and_thread_counts_agree();
  test_lossy_formats_and_thread_counts_agree();
  test_computed_nans_have_one_pattern();
  test_fp16_widening_is_the_definition();
  test_fp16_is_rounded_to_even_between_any_two();
  test_sum_squares_is_the_slow_sum();
  const bool full = argc > 1 && std::string_view(argv[1]) == "full";
  check_split_is_a_bijection(full ? 1 : 251, 2);
  check_fp16_rounding_of_patterns(full ? 1 : 251, 2);
  std::printf("test_kernels: all passed%s\n", full ? ", all 2^32 patterns" : "");
  return 0;
}

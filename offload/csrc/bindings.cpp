#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "halves.h"
#include "kernel_queue.h"
#include "norm.h"
#include "split.h"
#include "update.h"

namespace nb = nanobind;
using namespace nb::literals;

// numpy's float16.
template <>
struct nanobind::detail::dtype_traits<tierzero::kernels::Fp16> {
  static constexpr dlpack::dtype value{static_cast<uint8_t>(dlpack::dtype_code::Float), 16, 1};
  static constexpr auto name = const_name("float16");
};

namespace tierzero::kernels {
namespace {

// Arrays are taken as they are (never converted, so never silently copied): another type, a
// stride or a read-only array where one is written raises TypeError.
template <typename Value>
using Array = nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Value>
std::span<Value> span_of(const Array<Value>& array, size_t numel, const char* name) {
  if (array.size() != numel) {
    const std::string message = std::string(name) + " has " + std::to_string(array.size()) +
                                " elements, the first array " + std::to_string(numel);
    throw nb::value_error(message.c_str());
  }
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(Value) != 0) {
    throw nb::value_error((std::string(name) + " is not aligned to its elements").c_str());
  }
  return {array.data(), numel};
}

// An absent array is an empty span.
template <typename Value>
std::span<Value> span_of(const std::optional<Array<Value>>& array, size_t numel, const char* name) {
  return array ? span_of(*array, numel, name) : std::span<Value>{};
}

Scalars scalars_of(const nb::object& scalars) {
  const auto value = [&](const char* name) { return nb::cast<float>(scalars.attr(name)); };
  return {.rule = static_cast<Rule>(nb::cast<uint32_t>(scalars.attr("rule_number"))),
          .beta1 = value("beta1"),
          .one_minus_beta1 = value("one_minus_beta1"),
          .beta2 = value("beta2"),
          .one_minus_beta2 = value("one_minus_beta2"),
          .decay_factor = value("decay_factor"),
          .step_size = value("step_size"),
          .bias_correction2_sqrt = value("bias_correction2_sqrt"),
          .eps = value("eps"),
          .grad_scale = value("grad_scale"),
          .l2 = value("l2"),
          .initial = value("initial"),
          .nesterov = nb::cast<bool>(scalars.attr("nesterov"))};
}

RoundingKey key_of(const nb::object& key) {
  const auto word = [&](const char* name) { return nb::cast<uint32_t>(key.attr(name)); };
  return {word("low"), word("high"), word("first")};
}

template <typename Value>
using Moment = std::optional<Array<Value>>;

template <typename Value>
Moments<Value> moments_of(const Moment<Value>& exp_avg,
                          const Moment<Value>& exp_avg_sq,
                          size_t numel) {
  return {span_of(exp_avg, numel, "exp_avg"), span_of(exp_avg_sq, numel, "exp_avg_sq")};
}

// Refuses to update without a moment that the rule reads.
template <typename Value>
void check_moments(const Scalars& scalars, const Moments<Value>& moments, size_t numel) {
  const bool reads_exp_avg = scalars.rule != Rule::kAdagrad;
  const bool reads_exp_avg_sq = scalars.rule != Rule::kLion && scalars.rule != Rule::kSgd;
  if ((reads_exp_avg && moments.exp_avg.size() != numel) ||
      (reads_exp_avg_sq && moments.exp_avg_sq.size() != numel)) {
    throw nb::value_error("a moment that this rule keeps is missing");
  }
}

// Runs a kernel now, or later on the thread of a queue; returns its ticket there, or 0.
template <typename Work>
uint64_t run(KernelQueue* queue, Work work) {
  const nb::gil_scoped_release released;
  if (queue != nullptr) {
    return queue->submit(std::move(work));
  }
  work();
  return 0;
}

uint64_t bind_update_own(const Array<float>& param,
                         const Array<const float>& grad,
                         const Moment<float>& exp_avg,
                         const Moment<float>& exp_avg_sq,
                         const nb::object& scalars,
                         uint64_t thread_count,
                         KernelQueue* queue) {
  const size_t numel = param.size();
  const auto params = span_of(param, numel, "param");
  const auto grads = span_of(grad, numel, "grad");
  const auto moments = moments_of(exp_avg, exp_avg_sq, numel);
  const Scalars rounded = scalars_of(scalars);
  check_moments(rounded, moments, numel);
  return run(queue, [=] { update_own(params, grads, moments, rounded, thread_count); });
}

template <typename Grad>
uint64_t bind_update_exact(const Array<uint16_t>& param,
                           const Array<int16_t>& residual,
                           const Array<const Grad>& grad,
                           const Moment<float>& exp_avg,
                           const Moment<float>& exp_avg_sq,
                           const nb::object& scalars,
                           uint64_t thread_count,
                           KernelQueue* queue) {
  const size_t numel = param.size();
  const auto params = span_of(param, numel, "param");
  const auto residuals = span_of(residual, numel, "residual");
  const auto grads = span_of(grad, numel, "grad");
  const auto moments = moments_of(exp_avg, exp_avg_sq, numel);
  const Scalars rounded = scalars_of(scalars);
  check_moments(rounded, moments, numel);
  return run(queue,
             [=] { update_exact<Grad>(params, residuals, grads, moments, rounded, thread_count); });
}

template <typename Half, typename Grad>
uint64_t bind_update_master(const Array<Half>& param,
                            const Array<float>& master,
                            const Array<const Grad>& grad,
                            const Moment<float>& exp_avg,
                            const Moment<float>& exp_avg_sq,
                            const nb::object& scalars,
                            uint64_t thread_count,
                            KernelQueue* queue) {
  const size_t numel = param.size();
  const auto params = span_of(param, numel, "param");
  const auto masters = span_of(master, numel, "master");
  const auto grads = span_of(grad, numel, "grad");
  const auto moments = moments_of(exp_avg, exp_avg_sq, numel);
  const Scalars rounded = scalars_of(scalars);
  check_moments(rounded, moments, numel);
  return run(queue, [=] {
    update_master<Half, Grad>(params, masters, grads, moments, rounded, thread_count);
  });
}

template <typename Grad>
uint64_t bind_update_bf16(const Array<uint16_t>& param,
                          const Array<int16_t>& residual,
                          const Array<const Grad>& grad,
                          const Moment<uint16_t>& exp_avg,
                          const Moment<uint16_t>& exp_avg_sq,
                          const nb::object& scalars,
                          const nb::object& key,
                          uint64_t thread_count,
                          KernelQueue* queue) {
  const size_t numel = param.size();
  const auto params = span_of(param, numel, "param");
  const auto residuals = span_of(residual, numel, "residual");
  const auto grads = span_of(grad, numel, "grad");
  const auto moments = moments_of(exp_avg, exp_avg_sq, numel);
  const Scalars rounded = scalars_of(scalars);
  const RoundingKey words = key_of(key);
  check_moments(rounded, moments, numel);
  return run(queue, [=] {
    update_bf16<Grad>(params, residuals, grads, moments, rounded, words, thread_count);
  });
}

template <typename Grad>
uint64_t bind_update_compact(const Array<uint16_t>& param,
                             const Array<int8_t>& residual,
                             const Array<const Grad>& grad,
                             const Moment<uint8_t>& exp_avg,
                             const Moment<uint8_t>& exp_avg_sq,
                             const Moment<uint16_t>& exp_avg_base,
                             const Moment<uint16_t>& exp_avg_sq_base,
                             const nb::object& scalars,
                             const nb::object& key,
                             uint64_t thread_count,
                             KernelQueue* queue) {
  const size_t numel = param.size();
  const size_t block_count = (numel + kCodeBlock - 1) / kCodeBlock;
  const auto params = span_of(param, numel, "param");
  const auto residuals = span_of(residual, numel, "residual");
  const auto grads = span_of(grad, numel, "grad");
  const CodedMoments moments{moments_of(exp_avg, exp_avg_sq, numel),
                             moments_of(exp_avg_base, exp_avg_sq_base, block_count)};
  const Scalars rounded = scalars_of(scalars);
  const RoundingKey words = key_of(key);
  check_moments(rounded, moments.codes, numel);
  check_moments(rounded, moments.bases, block_count);
  return run(queue, [=] {
    update_compact<Grad>(params, residuals, grads, moments, rounded, words, thread_count);
  });
}

void bind_split_master(const Array<const float>& master,
                       const Array<uint16_t>& param,
                       const Array<int16_t>& residual,
                       uint64_t thread_count) {
  const size_t numel = master.size();
  const auto masters = span_of(master, numel, "master");
  const auto params = span_of(param, numel, "param");
  const auto residuals = span_of(residual, numel, "residual");
  const nb::gil_scoped_release released;
  split_master(masters, params, residuals, thread_count);
}

void bind_join_master(const Array<const uint16_t>& param,
                      const Array<const int16_t>& residual,
                      const Array<float>& master,
                      uint64_t thread_count) {
  const size_t numel = master.size();
  const auto params = span_of(param, numel, "param");
  const auto residuals = span_of(residual, numel, "residual");
  const auto masters = span_of(master, numel, "master");
  const nb::gil_scoped_release released;
  join_master(params, residuals, masters, thread_count);
}

void bind_round_to_fp16(const Array<const float>& master,
                        const Array<Fp16>& out,
                        uint64_t thread_count) {
  const size_t numel = master.size();
  const auto masters = span_of(master, numel, "master");
  const auto halves = span_of(out, numel, "out");
  const nb::gil_scoped_release released;
  round_to_fp16(masters, halves, thread_count);
}

template <typename Value>
double bind_sum_squares(const Array<const Value>& values,
                        uint64_t first_index,
                        uint64_t thread_count) {
  const auto elements = span_of(values, values.size(), "values");
  const nb::gil_scoped_release released;
  return sum_squares(elements, first_index, thread_count);
}

// Each of the following adds one overload; nanobind takes the one whose types the arrays have.

template <typename Grad>
void define_updates(nb::module_& module) {
  module.def("update_exact",
             &bind_update_exact<Grad>,
             "param"_a.noconvert(),
             "residual"_a.noconvert(),
             "grad"_a.noconvert(),
             "exp_avg"_a.noconvert().none(),
             "exp_avg_sq"_a.noconvert().none(),
             "scalars"_a,
             "thread_count"_a,
             "queue"_a.none() = nb::none());
  module.def("update_bf16",
             &bind_update_bf16<Grad>,
             "param"_a.noconvert(),
             "residual"_a.noconvert(),
             "grad"_a.noconvert(),
             "exp_avg"_a.noconvert().none(),
             "exp_avg_sq"_a.noconvert().none(),
             "scalars"_a,
             "key"_a,
             "thread_count"_a,
             "queue"_a.none() = nb::none());
  module.def("update_compact",
             &bind_update_compact<Grad>,
             "param"_a.noconvert(),
             "residual"_a.noconvert(),
             "grad"_a.noconvert(),
             "exp_avg"_a.noconvert().none(),
             "exp_avg_sq"_a.noconvert().none(),
             "exp_avg_base"_a.noconvert().none(),
             "exp_avg_sq_base"_a.noconvert().none(),
             "scalars"_a,
             "key"_a,
             "thread_count"_a,
             "queue"_a.none() = nb::none());
}

template <typename Half, typename Grad>
void define_update_master(nb::module_& module) {
  module.def("update_master",
             &bind_update_master<Half, Grad>,
             "param"_a.noconvert(),
             "master"_a.noconvert(),
             "grad"_a.noconvert(),
             "exp_avg"_a.noconvert().none(),
             "exp_avg_sq"_a.noconvert().none(),
             "scalars"_a,
             "thread_count"_a,
             "queue"_a.none() = nb::none());
}

void define_queue(nb::module_& module) {
  nb::class_<KernelQueue>(module, "KernelQueue")
      .def(nb::init<>())
      .def("done", &KernelQueue::done, "ticket"_a)
      .def("wait",
           &KernelQueue::wait,
           "ticket"_a,
           "most_seconds"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "times",
          [](KernelQueue& queue, uint64_t ticket) {
            const CallTimes times = queue.times(ticket);
            return std::pair(times.begin_seconds, times.end_seconds);
          },
          "ticket"_a)
      .def("close", &KernelQueue::close, nb::call_guard<nb::gil_scoped_release>());
}

template <typename Value>
void define_sum_squares(nb::module_& module) {
  module.def("sum_squares",
             &bind_sum_squares<Value>,
             "values"_a.noconvert(),
             "first_index"_a,
             "thread_count"_a);
}

}  // namespace
}  // namespace tierzero::kernels

NB_MODULE(_kernels, module) {
  using namespace tierzero::kernels;
  module.doc() = "Optimizer kernels on host memory; called through offload.kernels, which checks.";
  module.def("update_own",
             &bind_update_own,
             "param"_a.noconvert(),
             "grad"_a.noconvert(),
             "exp_avg"_a.noconvert().none(),
             "exp_avg_sq"_a.noconvert().none(),
             "scalars"_a,
             "thread_count"_a,
             "queue"_a.none() = nb::none());
  define_queue(module);
  module.def("split_master",
             &bind_split_master,
             "master"_a.noconvert(),
             "param"_a.noconvert(),
             "residual"_a.noconvert(),
             "thread_count"_a);
  module.def("join_master",
             &bind_join_master,
             "param"_a.noconvert(),
             "residual"_a.noconvert(),
             "master"_a.noconvert(),
             "thread_count"_a);
  module.def("round_to_fp16",
             &bind_round_to_fp16,
             "master"_a.noconvert(),
             "out"_a.noconvert(),
             "thread_count"_a);
  define_updates<uint16_t>(module);
  define_updates<float>(module);
  define_update_master<uint16_t, uint16_t>(module);
  define_update_master<uint16_t, float>(module);
  define_update_master<Fp16, Fp16>(module);
  define_update_master<Fp16, float>(module);
  define_sum_squares<float>(module);
  define_sum_squares<uint16_t>(module);
  define_sum_squares<Fp16>(module);
}

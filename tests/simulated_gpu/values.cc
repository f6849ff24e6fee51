// Computes on the CPU what the kernels of the simulated GPU do not compute.
//
// Every operator of CUDA is wrapped. The wrapped operator runs as it is, and allocates what it always allocates; the
// same operator for the CPU gets the same memory as CPU tensors, and its results are written where they belong.
// Without values (see Settings), only operators on small tensors are computed: what controls a program is then right.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using torch::jit::Stack;

constexpr int64_t kSmall = 8192;  // elements
thread_local int depth = 0;       // of wrapped operators in this thread: what one calls needs no values of its own

struct Depth {
  Depth() { ++depth; }
  ~Depth() { --depth; }
};

bool has_values() {
  static const bool has = [] {
    const char* text = std::getenv("SIMULATED_VALUES");
    return text != nullptr && std::atoi(text) != 0;
  }();
  return has;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto keep = tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep](void*) {})
      .options(tensor.options().device(at::kCPU))
      .target_device(at::kCPU)
      .make_tensor();
}

at::Tensor copy_of(const at::Tensor& cpu) {
  auto copy = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options());
  return copy.copy_(cpu);
}

// The same value for the CPU. `copies`: its tensors are written, so they are copied.
at::IValue for_cpu(const at::IValue& value, bool copies) {
  if (value.isTensor()) {
    auto cpu = as_cpu(value.toTensor());
    return copies && cpu.defined() && value.toTensor().is_cuda() ? copy_of(cpu) : cpu;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(for_cpu(tensor, copies).toTensor());
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(for_cpu(*tensor, copies).toTensor()) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return at::Device(at::kCPU);
  if (value.isGenerator()) return at::IValue();
  return value;
}

template <typename Use>
void each_tensor(const at::IValue& value, const Use& use) {
  if (value.isTensor()) use(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) use(tensor);
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) use(*tensor);
    }
  }
}

void write(const at::Tensor& to, const at::Tensor& from) {
  if (to.defined() && to.is_cuda() && to.numel() > 0) as_cpu(to).copy_(from);
}

void write(const at::IValue& to, const at::IValue& from) {
  std::vector<at::Tensor> targets, sources;
  each_tensor(to, [&](const at::Tensor& tensor) { targets.push_back(tensor); });
  each_tensor(from, [&](const at::Tensor& tensor) { sources.push_back(tensor); });
  for (size_t i = 0; i < targets.size(); ++i) write(targets[i], sources[i]);
}

at::IValue on_gpu(const at::IValue& cpu) {
  if (!cpu.isTensor() || !cpu.toTensor().defined()) return cpu;
  auto from = cpu.toTensor();
  auto to = at::empty(from.sizes(), from.options().device(at::kCUDA));
  write(to, from);
  return to;
}

// What an operator returned on the GPU, with the CPU's values; with the CPU's shape where the data decide the shape.
at::IValue with_values(const at::IValue& gpu, const at::IValue& cpu) {
  if (gpu.isTensor()) {
    auto to = gpu.toTensor();
    auto from = cpu.toTensor();
    if (!to.defined() || !from.defined()) return gpu;
    if (to.sizes() != from.sizes()) return on_gpu(cpu);
    write(to, from);
    return to;
  }
  if (!gpu.isTensorList()) return cpu;  // a number
  write(gpu, cpu);
  return gpu;
}

// While it lives, the CPU's default generator yields values that depend only on the GPU's generator.
struct RandomAsOnGpu {
  explicit RandomAsOnGpu(const at::IValue* generator)
      : cpu(at::globalContext().defaultGenerator(at::kCPU)), before(cpu.get_state()) {
    auto gpu = generator != nullptr && generator->isGenerator()
        ? generator->toGenerator()
        : at::globalContext().defaultGenerator(at::Device(at::kCUDA, at::detail::getCUDAHooks().getCurrentDevice()));
    auto* impl = at::check_generator<at::CUDAGeneratorImpl>(gpu);
    cpu.set_current_seed(impl->current_seed() * 1000003 + impl->get_offset());
  }
  ~RandomAsOnGpu() { cpu.set_state(before); }
  at::Generator cpu;
  at::Tensor before;
};

bool is_small(const at::ArrayRef<at::IValue>& arguments) {
  bool small = true;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      small &= !tensor.defined() || tensor.numel() <= kSmall;
    });
  }
  return small;
}

// ---- operators that do not exist on the CPU

// The weights of attention in float32: [batch, heads, queries, keys].
at::Tensor attention_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& bias, bool is_causal, double scale) {
  auto scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(-2, -1)) * scale;
  if (bias.defined()) scores = scores + bias.to(at::kFloat);
  if (is_causal) {
    auto seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
    scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  return at::softmax(scores, -1);
}

struct Attention {
  at::Tensor query, key, value, bias;
  bool is_causal;
  double dropout, scale;
};

Attention attention(const Stack& in, size_t first, size_t bias, size_t is_causal, size_t dropout) {
  auto query = in[first].toTensor();
  double scale = in.back().isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : in.back().toDouble();
  at::Tensor no_bias;
  return {query, in[first + 1].toTensor(), in[first + 2].toTensor(),
          bias == 0 || in[bias].isNone() ? no_bias : in[bias].toTensor(), in[is_causal].toBool(),
          in[dropout].toDouble(), scale};
}

// What weights are multiplied by. The same in forward and backward, which have the same seed.
at::Tensor dropout_factors(const Attention& a, uint64_t seed) {
  std::vector<int64_t> sizes{a.query.size(0), a.query.size(1), a.query.size(2), a.key.size(2)};
  auto kept = at::full(sizes, 1 - a.dropout, at::kFloat);
  return a.dropout == 0 ? kept : at::bernoulli(kept, at::detail::createCPUGenerator(seed)) / (1 - a.dropout);
}

// The seed of a forward pass, by the address of its log-sum-exp on the GPU, which its backward pass gets too.
std::map<const void*, uint64_t> seeds;
std::mutex seeds_lock;

at::Tensor forward(const Attention& a) {
  uint64_t seed = at::globalContext().defaultGenerator(at::kCPU).current_seed();
  auto weights = attention_weights(a.query, a.key, a.bias, a.is_causal, a.scale) * dropout_factors(a, seed);
  return at::matmul(weights, a.value.to(at::kFloat)).to(a.query.scalar_type());
}

Stack backward(const Attention& a, const at::Tensor& gradient, const at::Tensor& log_sum_exp) {
  uint64_t seed = 0;
  {
    std::lock_guard<std::mutex> guard(seeds_lock);
    seed = seeds[log_sum_exp.data_ptr()];
  }
  auto factors = dropout_factors(a, seed);
  auto undropped = attention_weights(a.query, a.key, a.bias, a.is_causal, a.scale), weights = undropped * factors;
  auto of_output = gradient.to(at::kFloat);
  auto of_weights = at::matmul(of_output, a.value.to(at::kFloat).transpose(-2, -1)) * factors;
  auto of_scores = undropped * (of_weights - (of_weights * undropped).sum(-1, true));
  auto type = a.query.scalar_type();
  return {(at::matmul(of_scores, a.key.to(at::kFloat)) * a.scale).to(type),
          (at::matmul(of_scores.transpose(-2, -1), a.query.to(at::kFloat)) * a.scale).to(type),
          at::matmul(weights.transpose(-2, -1), of_output).to(type)};
}

Stack rms_norm_backward(const Stack& in) {
  auto gradient = in[0].toTensor().to(at::kFloat), input = in[1].toTensor().to(at::kFloat);
  int64_t width = 1, batch_dims = input.dim() - static_cast<int64_t>(in[2].toIntVector().size());
  for (int64_t size : in[2].toIntVector()) width *= size;
  auto normed = (input * in[3].toTensor().to(at::kFloat));
  auto scaled = in[4].isNone() ? gradient : gradient * in[4].toTensor().to(at::kFloat);
  std::vector<int64_t> inner, outer;
  for (int64_t dim = 0; dim < input.dim(); ++dim) (dim < batch_dims ? outer : inner).push_back(dim);
  auto mean = (scaled * normed).sum(inner, true) / static_cast<double>(width);
  auto of_input = (scaled - normed * mean) * in[3].toTensor().to(at::kFloat);
  auto of_weight = (gradient * normed).sum(outer);
  auto type = in[1].toTensor().scalar_type();
  return {of_input.to(type), of_weight.to(type)};
}

// What the CPU computes for an operator, in the order of its results; fewer than it has, if the rest is never read.
void compute(const c10::OperatorHandle& op, Stack& cpu) {
  const auto& name = op.operator_name().name;
  if (name == "aten::_scaled_dot_product_flash_attention") {
    cpu = {forward(attention(cpu, 0, 0, 4, 3))};
  } else if (name == "aten::_scaled_dot_product_efficient_attention") {
    cpu = {forward(attention(cpu, 0, 3, 6, 5))};
  } else if (name == "aten::_scaled_dot_product_flash_attention_backward") {
    cpu = backward(attention(cpu, 1, 0, 11, 10), cpu[0].toTensor(), cpu[5].toTensor());
  } else if (name == "aten::_scaled_dot_product_efficient_attention_backward") {
    cpu = backward(attention(cpu, 1, 4, 11, 9), cpu[0].toTensor(), cpu[6].toTensor());
  } else if (name == "aten::_fused_rms_norm_backward") {
    cpu = rms_norm_backward(cpu);
  } else if (name == "aten::cudnn_convolution") {
    cpu = {at::convolution(cpu[0].toTensor(), cpu[1].toTensor(), {}, cpu[3].toIntVector(), cpu[2].toIntVector(),
                           cpu[4].toIntVector(), false, std::vector<int64_t>(cpu[2].toIntVector().size()),
                           cpu[5].toInt())};
  } else {
    op.callBoxed(&cpu);
  }
}

// ---- every operator

// Whether the data decide how much memory the operator takes: it would read a size that no kernel has written.
bool is_decided_by_data(const c10::OperatorHandle& op, const at::ArrayRef<at::IValue>& arguments) {
  static const std::set<std::string> always = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::repeat_interleave"};
  const auto& name = op.operator_name().name;
  if (always.count(name) != 0) return true;
  if (name.find("index") == std::string::npos) return false;
  bool has_mask = false;
  for (const auto& argument : arguments) {
    if (!argument.isList() && !argument.isOptionalTensorList()) continue;
    each_tensor(argument, [&](const at::Tensor& tensor) {
      has_mask |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    });
  }
  return has_mask;
}

using Kernel = decltype(std::declval<c10::OperatorHandle>().getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));

class Wrapped : public c10::OperatorKernel {
 public:
  explicit Wrapped(Kernel original) : original_(std::move(original)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const auto& schema = op.schema();
    size_t count = schema.arguments().size();
    auto given = torch::jit::last(*stack, count);
    bool skips = is_decided_by_data(op, given);
    if (!skips && (depth > 0 || (!has_values() && !is_small(given)))) {
      original_.callBoxed(op, keys, stack);
      return;
    }
    Depth guard;
    std::vector<at::IValue> arguments(given.begin(), given.end());
    Stack cpu;
    const at::IValue* generator = nullptr;
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      cpu.push_back(for_cpu(arguments[i], alias != nullptr && alias->isWrite()));
      if (arguments[i].isGenerator()) generator = &arguments[i];
    }
    Stack written = cpu;
    std::optional<uint64_t> seed;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::unique_ptr<RandomAsOnGpu> random;
      if (op.hasTag(at::Tag::nondeterministic_seeded)) {
        random = std::make_unique<RandomAsOnGpu>(generator);
        seed = random->cpu.current_seed();
      }
      compute(op, cpu);
    }
    if (skips) {
      torch::jit::drop(*stack, count);
      for (size_t i = 0; i < cpu.size(); ++i) {
        const auto* alias = schema.returns()[i].alias_info();
        stack->push_back(alias == nullptr ? on_gpu(cpu[i]) : arguments[0]);  // in place, of "self"
      }
    } else {
      original_.callBoxed(op, keys, stack);
    }
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) write(arguments[i], written[i]);
    }
    size_t first = stack->size() - schema.returns().size();
    if (seed && schema.returns().size() > 1 && (*stack)[first + 1].isTensor()) {
      std::lock_guard<std::mutex> lock(seeds_lock);
      seeds[(*stack)[first + 1].toTensor().data_ptr()] = *seed;
    }
    for (size_t i = 0; !skips && i < cpu.size(); ++i) {
      auto& result = (*stack)[first + i];
      if (schema.returns()[i].alias_info() == nullptr) result = with_values(result, cpu[i]);
    }
  }

 private:
  Kernel original_;
};

// Operators that only allocate, look, or copy what the runtime copies.
bool stays_as_it_is(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {
      "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::as_strided", "aten::view",
      "aten::_reshape_alias", "aten::unfold", "aten::_local_scalar_dense", "aten::record_stream", "aten::is_pinned",
      "aten::_pin_memory", "aten::is_set_to", "aten::view_as_real", "aten::view_as_complex",
      "aten::_has_same_storage_numel",
      "aten::_efficientzerotensor", "aten::item", "aten::_copy_from", "aten::_copy_from_and_resize"};
  const auto& name = op.operator_name();
  if (name.name.rfind("aten::", 0) != 0 || names.count(name.name) != 0) return true;
  bool has_tensors = false;
  for (const auto& argument : op.schema().arguments()) {
    has_tensors |= argument.type()->str().find("Tensor") != std::string::npos;
  }
  return !has_tensors && !op.hasTag(at::Tag::nondeterministic_seeded);
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::unique_ptr<torch::Library> wrap_all() {
  Silent silent;  // torch warns that an operator is overridden
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.emplace_back("aten::copy_", "");  // it is registered for all devices, and calls a kernel by itself
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    if (!op || stays_as_it_is(*op)) continue;
    auto original = op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(
        full.c_str(),
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Wrapped>(original)),
        torch::_RegisterOrVerify::REGISTER);
  }
  return library;
}

const auto library = wrap_all();

}  // namespace

#include "kernel_set.h"

#include <algorithm>
#include <numeric>

#include "octet/base/rng.h"

namespace octet {

namespace {

std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t below, std::uint64_t key) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::int32_t>(mix(key, i) % static_cast<std::uint64_t>(below));
  return ids;
}

class KernelMaker {
 public:
  KernelMaker(Ops& ops, Operands& memory, const LocalSizes& sizes, const KernelCounts& counts, DType compute)
      : ops_(ops),
        memory_(memory),
        stream_(memory.stream()),
        sizes_(sizes),
        shape_(sizes.shape),
        counts_(counts),
        compute_(compute),
        width_(static_cast<double>(size_of(compute))) {}

  std::vector<Kernel> all() {
    norms();
    heads();
    activations();
    embeddings();
    cross_entropy();
    optimizer();
    if (sizes_.fp8) float8();
    if (sizes_.fp8 && !sizes_.fp8_by_block) coded_outputs();
    return std::move(kernels_);
  }

 private:
  void add(const char* name, double bytes, std::function<void()> run, const std::vector<Tensor>& results,
           const StepScalars* scalars = nullptr) {
    kernels_.push_back({name, bytes, std::move(run), {}, scalars});
    for (const Tensor& result : results) kernels_.back().results.push_back({result, result.dtype});
  }
  Tensor random(std::int64_t rows, std::int64_t cols, double deviation = 1.0) {
    return memory_.random(compute_, rows, cols, deviation);
  }
  Tensor zeros(std::int64_t rows, std::int64_t cols) { return memory_.zeros(compute_, rows, cols); }
  Tensor floats(std::int64_t rows, std::int64_t cols) { return memory_.zeros(DType::kF32, rows, cols); }
  StepScalars* scalars(const StepScalars& values) {
    const Tensor place = memory_.zeros(DType::kI32, 1, sizeof(StepScalars) / 4);
    memory_.device().copy(stream_, place.data, &values, sizeof values);
    stream_.synchronize();
    return static_cast<StepScalars*>(place.data);
  }

  void norms() {
    const std::int64_t t = counts_.norm_tokens, h = shape_.hidden;
    const bool layer = shape_.norm() == NormKind::kLayer;
    const double matrix = static_cast<double>(t * h) * width_;
    const Tensor weight = memory_.random(compute_, 1, h, 0.1, 1.0);
    NormForward forward{shape_.norm(), shape_.norm_epsilon,
                        random(t, h),  random(t, h),
                        weight,        layer ? random(1, h) : Tensor{},
                        zeros(t, h),   zeros(t, h),
                        floats(1, t),  layer ? floats(1, t) : Tensor{}};
    std::vector<Tensor> results{forward.sum, forward.y, forward.rstd};
    if (layer) results.push_back(forward.mean);
    add(
        "norm forward", 4 * matrix, [this, forward] { ops_.norm_forward(stream_, forward); }, results);
    for (KernelResult& result : kernels_.back().results) result.accuracy = compute_;

    NormBackward backward;
    backward.kind = shape_.norm();
    backward.x = random(t, h);
    backward.weight = weight;
    backward.bias = forward.bias;
    backward.rstd = memory_.put(std::vector<float>(static_cast<std::size_t>(t), 1.0f), 1, t);
    if (layer) backward.mean = floats(1, t);
    backward.dy = random(t, h);
    backward.dx = random(t, h);
    backward.y = zeros(t, h);
    backward.dweight = floats(1, h);
    if (layer) backward.dbias = floats(1, h);
    results = {backward.dx, backward.y, backward.dweight};
    if (layer) results.push_back(backward.dbias);
    add(
        "norm backward", 5 * matrix, [this, backward] { ops_.norm_backward(stream_, backward); }, results);
    if (!shape_.biases()) return;
    NormBackward summed = backward;
    summed.dx = random(t, h);
    summed.dx_sums = floats(1, h);
    results.front() = summed.dx;
    results.push_back(summed.dx_sums);
    add(
        "norm backward, bias gradient", 5 * matrix, [this, summed] { ops_.norm_backward(stream_, summed); },
        results);
  }

  void heads() {
    const HeadLayout layout = sizes_.heads;
    const std::int64_t t = counts_.tokens, d = layout.head_size;
    const double turned = static_cast<double>(t * (layout.heads + layout.kv_heads) * d) * width_;
    const double packed = static_cast<double>(t * layout.packed()) * width_;
    if (shape_.rotary()) {
      std::vector<std::int32_t> positions(static_cast<std::size_t>(t));
      for (std::size_t i = 0; i < positions.size(); ++i)
        positions[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(sizes_.sequence));
      const Tensor where = memory_.put(positions);
      const Tensor angles = memory_.put(rope_table(shape_, sizes_.sequence), sizes_.sequence, d);
      const Tensor qkv = random(t, layout.packed());
      add("rope", 2 * turned,
          [this, layout, qkv, where, angles] { ops_.rope(stream_, layout, qkv, where, angles, false); },
          {qkv});
    }
    if (!shape_.qk_norm) return;
    const Tensor in = random(t, layout.packed()), out = zeros(t, layout.packed());
    const Tensor q_weight = memory_.random(compute_, 1, d, 0.1, 1.0),
                 k_weight = memory_.random(compute_, 1, d, 0.1, 1.0);
    const Tensor rstd = floats(t, layout.heads + layout.kv_heads);
    const float epsilon = shape_.norm_epsilon;
    const auto forward = [=, this] {
      ops_.head_norm_forward(stream_, layout, epsilon, in, q_weight, k_weight, out, rstd);
    };
    add("head norm forward", 2 * packed, forward, {out, rstd});
    forward();  // the backward pass takes its rstd
    const Tensor dqkv = random(t, layout.packed()), dq = floats(1, d), dk = floats(1, d);
    add("head norm backward", 3 * turned,
        [=, this] {
          ops_.head_norm_backward(stream_, layout, in, rstd, q_weight, k_weight, dqkv, dq, dk, false);
        },
        {dqkv, dq, dk});
  }

  void activations() {
    const std::int64_t t = counts_.tokens, f = sizes_.mlp;
    const double column = static_cast<double>(t * f) * width_;
    const Tensor in = random(t, sizes_.inner), out = zeros(t, f);
    const Tensor gradient = random(t, sizes_.inner), dout = random(t, f);
    if (shape_.gated()) {
      add("swiglu forward", 3 * column, [=, this] { ops_.swiglu_forward(stream_, in, out, {}); }, {out});
      add("swiglu backward", 6 * column, [=, this] { ops_.swiglu_backward(stream_, gradient, dout, {}); },
          {gradient, dout});
      return;
    }
    add("gelu forward", 2 * column, [=, this] { ops_.gelu_forward(stream_, in, out, {}); }, {out});
    add("gelu backward", 4 * column, [=, this] { ops_.gelu_backward(stream_, gradient, dout, {}); },
        {gradient, dout});
    const Tensor dbias = floats(1, sizes_.inner);
    const Tensor dy = random(t, sizes_.inner);
    add("bias backward", column, [=, this] { ops_.bias_backward(stream_, dy, dbias, false); }, {dbias});
  }

  void embeddings() {
    const std::int64_t t = counts_.tokens, h = shape_.hidden, rows = counts_.table_rows;
    const double matrix = static_cast<double>(t * h) * width_;
    const std::vector<std::int32_t> ids = random_ids(t, rows, 3);
    std::vector<std::int32_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
    });
    std::vector<std::int32_t> distinct = ids;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const Tensor where = memory_.put(ids), sorted = memory_.put(order), table = random(rows, h),
                 out = zeros(t, h);
    add("embedding forward", 2 * matrix,
        [=, this] { ops_.embedding_forward(stream_, where, table, 0, {}, {}, out); }, {out});
    const Tensor dout = random(t, h), dtable = floats(rows, h);
    const double touched = static_cast<double>(distinct.size()) * static_cast<double>(h) * 4;
    add("embedding backward", matrix + 2 * touched,
        [=, this] { ops_.embedding_backward(stream_, where, sorted, dout, 0, dtable); }, {dtable});
  }

  void cross_entropy() {
    const std::int64_t t = counts_.logits_rows, valid = sizes_.valid_rows;
    const double matrix = static_cast<double>(t * sizes_.vocabulary_rows) * width_;
    const Tensor targets = memory_.put(random_ids(t, valid, 4));
    const Tensor logits = random(t, sizes_.vocabulary_rows, 2.0), partial = floats(t, 3);
    const auto first = [=, this](Tensor of, Tensor to) {
      ops_.cross_entropy_partial(stream_, of, 0, valid, targets, to);
    };
    add("cross-entropy, first half", matrix, [=] { first(logits, partial); }, {partial});
    const Tensor changed = random(t, sizes_.vocabulary_rows, 2.0), partials = floats(t, 3);
    first(changed, partials);
    StepScalars* const sums = scalars({});
    add(
        "cross-entropy, second half", 2 * matrix,
        [=, this] {
          ops_.cross_entropy_finish(stream_, changed, 0, valid, targets, partials, 1.0, true, sums);
        },
        {changed}, sums);
    const Tensor replaced = random(t, sizes_.vocabulary_rows, 2.0), parts = floats(t, 3);
    StepScalars* const losses = scalars({});
    add(
        "cross-entropy, one pass", 2 * matrix,
        [=, this] { ops_.cross_entropy(stream_, replaced, valid, targets, parts, true, losses); }, {replaced},
        losses);
  }

  void optimizer() {
    const std::int64_t n = counts_.elements;
    const auto count = static_cast<double>(n);
    const auto random_floats = [&](double deviation) { return memory_.random(DType::kF32, 1, n, deviation); };
    const Tensor gradient = random_floats(1.0);
    StepScalars* const squares = scalars({});
    add(
        "add square", 4 * count, [=, this] { ops_.add_square(stream_, gradient, squares); }, {}, squares);

    Adamw args;
    args.master = random_floats(0.02);
    args.first_moment = random_floats(0.1);
    args.second_moment = memory_.random(DType::kF32, 1, n, 0.01, 0.1);
    args.gradient = gradient;
    args.parameter = zeros(1, n);
    args.weight_decay = 0.1f;
    StepScalars settings;
    settings.gradient_scale = 0.5f;
    settings.learning_rate = 1e-2f;
    settings.bias_correction1 = 0.5f;
    settings.bias_correction2 = 0.5f;
    settings.updates = 7;
    const StepScalars* const state = scalars(settings);
    add("adamw", (28 + width_) * count, [=, this] { ops_.adamw(stream_, args, state); },
        {args.master, args.first_moment, args.second_moment, args.parameter});

    // Beside the reference, which has all of it in float32.
    const bool narrow = compute_ == DType::kBF16;
    Adamw small = args;
    const Tensor parameter = random(1, n, 0.02);
    small.master = narrow ? memory_.zeros(DType::kI16, 1, n) : parameter;
    small.parameter = narrow ? parameter : Tensor{};
    small.first_moment = random(1, n, 0.1);
    small.second_moment = memory_.random(compute_, 1, n, 0.01, 0.1);
    small.run.cols = small.run.stride = n;
    add("adamw, 8 bytes of state", (narrow ? 20 : 28) * count,
        [=, this] { ops_.adamw(stream_, small, state); },
        {small.first_moment, small.second_moment, parameter});

    const Tensor from = random_floats(1.0), to = zeros(1, n);
    add("cast", (4 + width_) * count, [=, this] { ops_.cast(stream_, from, to); }, {to});
  }

  /// The 8-bit copies of the MLP's gradient: as it lies, for the input gradient, and transposed.
  void float8() {
    const std::int64_t t = counts_.tokens, n = sizes_.inner;
    const auto elements = static_cast<double>(t * n);
    const DType type = sizes_.fp8_by_block ? DType::kE4M3 : DType::kE5M2;
    const ScaleCut cut = sizes_.fp8_by_block ? ScaleCut::kRow128 : ScaleCut::kTensor;
    const auto room = [&](std::int64_t rows, std::int64_t cols) {
      const Tensor shape = scale_shape(cut, rows, cols);
      return Scales{floats(shape.rows, shape.cols), cut};
    };
    Quantize args;
    args.from = memory_.random(DType::kBF16, t, n);
    args.codes = memory_.zeros(type, t, n);
    args.transposed = memory_.zeros(type, n, t);
    args.scales = room(t, n);
    args.transposed_scales = room(n, t);
    std::vector<Tensor> results{args.codes, args.transposed, args.scales.values};
    if (cut == ScaleCut::kTensor) {
      const Tensor largest = floats(1, 1);
      args.largest = largest;
      add("largest magnitude", 2 * elements,
          [=, this] { ops_.largest_magnitude(stream_, args.from, largest); }, {largest});
      ops_.largest_magnitude(stream_, args.from, largest);
    }
    add(
        "8-bit copy and transpose", 4 * elements, [=, this] { ops_.quantize(stream_, args); }, results);
    // Both copies are exact for their scales.
    for (KernelResult& result : kernels_.back().results) result.accuracy = DType::kF32;
    if (cut != ScaleCut::kTensor) return;
    // What weights that were gathered as codes need.
    ops_.quantize(stream_, args);
    const Tensor turned = memory_.zeros(type, n, t);
    add("8-bit transpose", 2 * elements, [=, this] { ops_.transpose_codes(stream_, args.codes, turned); },
        {turned});
  }

  /// Room for 8-bit copies of an output [rows, cols].
  OutputCodes room(std::int64_t rows, std::int64_t cols, DType type, bool straight, bool transposed) {
    OutputCodes output;
    output.largest = memory_.put(std::vector<float>{4.0f}, 1, 1);
    output.seen = floats(1, 1);
    output.scale = floats(1, 1);
    if (straight) output.codes = memory_.zeros(type, rows, cols);
    if (transposed) output.transposed = memory_.zeros(type, cols, rows);
    return output;
  }
  /// The operators that write 8-bit operands themselves. Judged by scales and sums: what rounds otherwise in
  /// bfloat16 may get the next code, which lies far off.
  void coded_outputs() {
    const std::int64_t t = counts_.tokens, n = sizes_.inner, f = sizes_.mlp, h = shape_.hidden;
    const auto inner = static_cast<double>(t * n), column = static_cast<double>(t * f);
    const CodedActivation forward{shape_.gated(), memory_.random(DType::kBF16, t, n),
                                  room(t, f, DType::kE4M3, true, false)};
    add("activation, 8 bits", 2 * inner + column, [=, this] { ops_.coded_activation(stream_, forward); },
        {forward.out.scale});
    CodedActivationBackward backward;
    backward.gated = forward.gated;
    backward.in = forward.in;
    backward.dout = memory_.random(DType::kBF16, t, f);
    backward.din = room(t, n, DType::kE5M2, true, true);
    backward.out = room(t, f, DType::kE4M3, false, true);
    std::vector<Tensor> results{backward.din.scale, backward.out.scale};
    if (!backward.gated) {
      backward.dbias = floats(1, n);
      results.push_back(backward.dbias);
    }
    add(
        "activation gradient, 8 bits", 4 * inner + 3 * column,
        [=, this] { ops_.coded_activation_backward(stream_, backward); }, results);
    for (KernelResult& result : kernels_.back().results) result.accuracy = DType::kBF16;

    NormBackward norm;
    norm.kind = shape_.norm();
    norm.x = memory_.random(DType::kBF16, t, h);
    norm.weight = memory_.random(DType::kBF16, 1, h, 0.1, 1.0);
    if (norm.kind == NormKind::kLayer) {
      norm.bias = memory_.random(DType::kBF16, 1, h);
      norm.mean = floats(1, t);
      norm.dbias = floats(1, h);
    }
    norm.rstd = memory_.put(std::vector<float>(static_cast<std::size_t>(t), 1.0f), 1, t);
    norm.dy = memory_.random(DType::kBF16, t, h);
    norm.dx = memory_.random(DType::kBF16, t, h);
    norm.dweight = floats(1, h);
    norm.y_codes = room(t, h, DType::kE4M3, false, true);
    norm.dx_codes = room(t, h, DType::kE5M2, true, true);
    add("norm backward, 8 bits", 11.0 * static_cast<double>(t * h),
        [=, this] { ops_.norm_backward(stream_, norm); }, {norm.dx, norm.dweight});
    for (KernelResult& result : kernels_.back().results) result.accuracy = DType::kBF16;
  }

  Ops& ops_;
  Operands& memory_;
  Stream& stream_;
  const LocalSizes& sizes_;
  const ModelShape& shape_;
  KernelCounts counts_;
  DType compute_;
  double width_;
  std::vector<Kernel> kernels_;
};

}  // namespace

std::vector<Kernel> make_kernels(Ops& ops, Operands& memory, const LocalSizes& sizes,
                                 const KernelCounts& counts, DType compute) {
  // The maker's references all outlive the kernels, but the maker itself must too.
  const auto maker = std::make_shared<KernelMaker>(ops, memory, sizes, counts, compute);
  std::vector<Kernel> kernels = maker->all();
  for (Kernel& kernel : kernels) kernel.run = [maker, run = std::move(kernel.run)] { run(); };
  return kernels;
}

std::vector<std::vector<float>> results_of(Operands& memory, const Kernel& kernel) {
  std::vector<std::vector<float>> all;
  for (const KernelResult& result : kernel.results)
    all.push_back(to_host(memory.device(), memory.stream(), result.tensor));
  if (kernel.scalars == nullptr) return all;
  StepScalars sums;
  memory.device().copy(memory.stream(), &sums, kernel.scalars, sizeof sums);
  memory.stream().synchronize();
  all.push_back({static_cast<float>(sums.loss), static_cast<float>(sums.tokens),
                 static_cast<float>(sums.gradient_square)});
  return all;
}

}  // namespace octet

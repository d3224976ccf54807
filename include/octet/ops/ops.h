#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

class PlanCache;

/// How the scales of an 8-bit matrix are cut. Their layout is the one that matrix units take.
enum class ScaleCut {
  kTensor,    ///< one for all: [1, 1]
  kRow128,    ///< one for 128 elements of a row: [ceil(cols / 128), rows rounded up to 4]
  kSquare128  ///< one for a square of 128 x 128: [ceil(rows / 128), ceil(cols / 128) rounded up to 4]
};

/// What the elements of an 8-bit matrix are to be multiplied by: float32, powers of two. Those of operands of
/// products begin at multiples of 16 bytes.
struct Scales {
  Tensor values;
  ScaleCut cut = ScaleCut::kTensor;
};

/// Elements from one scale to another where several matrices' follow one another.
inline constexpr std::int64_t kScaleSpacing = 4;

/// Shape of the scales of a [rows, cols] matrix; data is null.
Tensor scale_shape(ScaleCut cut, std::int64_t rows, std::int64_t cols);

/// What becomes of a product p = a·b (+ bias) before it is written.
enum class Epilogue {
  kNone,            ///< y = p
  kGelu,            ///< inner = p, y = gelu(inner)
  kGeluGradient,    ///< y = p · gelu'(inner), elementwise
  kSwiglu,          ///< inner = p = [gate, up], y = silu(gate)·up; p is twice as wide as y
  kSwigluGradient,  ///< with p the gradient of silu(gate)·up: inner becomes its gradient, y = silu(gate)·up
  kSwigluGradientAlone  ///< the same, y being scratch
};

/// Whether `inner` holds gates and ups.
constexpr bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::kSwiglu || epilogue == Epilogue::kSwigluGradient ||
         epilogue == Epilogue::kSwigluGradientAlone;
}

/// y = a·b (+ bias) (+ y). With transpose_a, a is stored [k, m]; with transpose_b, b is stored [n, k].
/// The three products of a linear layer y[t,o] = x[t,i]·w[o,i]ᵀ are
///   forward         {x, w, transpose_b}            -> y
///   input gradient  {dy, w}                        -> dx
///   weight gradient {dy, x, transpose_a}           -> dw (float32, accumulate)
/// Of 8-bit operands there is the form with transpose_b alone, which matrix units have: operands of gradients
/// are stored transposed. Not both are E5M2, all sizes are multiples of 16, and at most one is cut in
/// squares.
/// Of others the forward product can end in an activation and the input gradient in that of an activation
/// (`epilogue`; then nothing is accumulated). Each is the same as an operator of its own after the product,
/// but for rounding: an activation's input is not rounded, and neither is the gradient that comes to it.
struct Matmul {
  Tensor a;  ///< compute dtype or 8-bit, [m, k]
  Tensor b;  ///< compute dtype or 8-bit, [k, n]
  bool transpose_a = false;
  bool transpose_b = false;
  Tensor y;                             ///< [m, n], compute dtype or float32
  bool accumulate = false;              ///< add to what y holds
  Tensor bias = {};                     ///< optional [1, n], compute dtype, added to every row
  Tensor addend = {};                   ///< optional [m, n] of y's dtype, added before y is rounded
  Scales a_scales = {}, b_scales = {};  ///< of 8-bit operands; both by tensor or both by 128
  Epilogue epilogue = Epilogue::kNone;
  Tensor inner = {};  ///< of an epilogue: [m, n], with SwiGLU [m, 2·columns of y]; all of the compute dtype
  /// With kGeluGradient, optional out float32 [1, n]: what bias_backward makes of y, which is the gradient of
  /// the bias that was added before the GELU.
  Tensor bias_gradient = {};
  bool accumulate_bias_gradient = false;  ///< add to what bias_gradient holds
};

/// An 8-bit copy of a bfloat16 matrix, as it lies or transposed or both: codes = from / scale, rounded to
/// nearest even. A scale is the smallest power of two with which the largest magnitude that it serves fits
/// the type. So a code does not depend on which of several such scales serves its element, unless the code is
/// subnormal: ranks that hold parts of a matrix need not agree on one.
///
/// By tensor a part can be copied too, such as a rank has of a weight: a straight copy, in E4M3, of a run
/// [1, n] of a matrix, n a multiple of 16. Its elements may be float32, and are rounded to bfloat16 first. Of
/// an empty run the scale is written all the same.
struct Quantize {
  Tensor from;  ///< bfloat16 [r, c], multiples of 16; or a run
  /// By tensor: float32 [1, 1], the largest magnitude that the scale is made for. Larger elements become the
  /// largest value of the type.
  Tensor largest = {};
  Tensor seen = {};               ///< by tensor: optional float32 [1, 1], raised to the largest magnitude
  Tensor codes = {};              ///< optional out E4M3 or E5M2 [r, c]
  Tensor transposed = {};         ///< optional out, the same type [c, r]
  Scales scales = {};             ///< out, of codes
  Scales transposed_scales = {};  ///< out, of transposed; by tensor it may be the same memory
};

/// 8-bit copies of a bfloat16 output that its operator writes itself: those that Quantize would make of it by
/// tensor, bit for bit, without the way through memory. Outputs have multiples of 16 rows and columns.
struct OutputCodes {
  Tensor largest = {};                 ///< float32 [1, 1], as in Quantize
  Tensor seen = {};                    ///< optional float32 [1, 1], as in Quantize
  Tensor codes = {}, transposed = {};  ///< optional out: of an output [r, c], and [c, r]
  Tensor scale = {};                   ///< out float32 [1, 1], of both

  explicit operator bool() const { return codes || transposed; }
};

enum class NormKind { kRms, kLayer };

/// x = residual + delta, then y = (x - mean) · rstd · weight + bias. RMSNorm (Zhang & Sennrich 2019) has
/// neither mean nor bias: rstd = 1/sqrt(mean(x²) + epsilon); LayerNorm: rstd = 1/sqrt(var(x) + epsilon).
struct NormForward {
  NormKind kind = NormKind::kRms;
  float epsilon = 1e-5f;
  Tensor residual;         ///< [t, h]
  Tensor delta;            ///< optional [t, h]; without it x is `residual` and `sum` is not written
  Tensor weight, bias;     ///< [1, h]; bias only for LayerNorm
  Tensor sum;              ///< out [t, h]: x, rounded to the compute dtype before it is normalised
  Tensor y;                ///< out [t, h]
  Tensor rstd, mean;       ///< out float32 [1, t]; mean only for LayerNorm
  Tensor largest = {};     ///< optional, of y: as in Ops
  OutputCodes codes = {};  ///< optional, of y, E4M3, not transposed; y itself is then not written
};

/// Gradients of y = norm(x), and y once more, since the backward pass has all that it takes to rebuild it.
struct NormBackward {
  NormKind kind = NormKind::kRms;
  Tensor x, weight, bias, rstd, mean;  ///< as the forward pass left them
  Tensor dy;                           ///< [t, h]
  Tensor dx;              ///< in/out [t, h]: the gradient through the norm is added to what it holds
  Tensor y;               ///< optional out [t, h]: the norm's output, rebuilt; may be dy itself
  Tensor dweight, dbias;  ///< out float32 [1, h]
  /// Optional out float32 [1, h]: what bias_backward makes of dx as it comes in. Where x is the residual
  /// stream, that is the gradient of the bias of the layer whose output the stream took up last.
  Tensor dx_sums = {};
  bool accumulate = false;    ///< add to dweight, dbias and dx_sums instead of overwriting them
  Tensor largest = {};        ///< optional, of dx: as in Ops
  OutputCodes y_codes = {};   ///< optional, of y, E4M3, transposed alone; without y, and dy is overwritten
  OutputCodes dx_codes = {};  ///< optional, with y_codes: of dx, E5M2, both copies
};

/// swiglu_forward or gelu_forward in bfloat16 whose output is written in 8 bits alone.
struct CodedActivation {
  bool gated = false;  ///< SwiGLU, else GELU
  Tensor in;           ///< [t, 2f] gates and ups, or [t, f]
  OutputCodes out;     ///< E4M3 [t, f], not transposed
};

/// swiglu_backward or gelu_backward in bfloat16, with results in 8 bits alone; nothing is in place.
struct CodedActivationBackward {
  bool gated = false;
  Tensor in;                ///< as the forward pass had it
  Tensor dout;              ///< [t, f]
  OutputCodes din;          ///< E5M2, the gradient of `in`, both copies
  OutputCodes out;          ///< E4M3, the forward output, transposed alone
  Tensor dbias = {};        ///< optional out, GELU alone: float32 [1, f], sums over rows of the rounded din
  bool accumulate = false;  ///< add to dbias
};

/// How queries, keys and values lie in a packed projection: a row holds `heads` query heads, then `kv_heads`
/// key heads, then `kv_heads` value heads, of `head_size` each. Query head j attends with key head (j +
/// head_offset) / group. head_offset is not 0 only where key heads are replicated over tensor ranks.
struct HeadLayout {
  int heads = 0, kv_heads = 0, head_size = 0;
  int group = 1;
  int head_offset = 0;

  std::int64_t packed() const { return std::int64_t{heads + 2 * kv_heads} * head_size; }
  std::int64_t query() const { return std::int64_t{heads} * head_size; }
};

/// Causal softmax(scale·q·kᵀ)·v over `batch` samples, softmax in float32. A sample has `sequence` query rows,
/// which are the last of its `keys` key rows: with context parallelism a rank has some queries and all keys
/// before them. Query row i sees the key rows up to keys - sequence + i, and, where documents are kept apart,
/// none before the first of its own document.
struct AttentionShape {
  HeadLayout layout;
  std::int64_t batch = 0, sequence = 0;
  float scale = 1.0f;
  std::int64_t keys = 0;  ///< at least `sequence`; 0: the same

  std::int64_t key_rows() const { return keys > 0 ? keys : sequence; }
};

/// Rows of samples inside a larger array: column c of row r of sample s is element s·sample_stride +
/// r·row_stride + c. With a batch of 1, sample_stride does not matter.
struct SampleRows {
  void* data = nullptr;
  std::int64_t row_stride = 0, sample_stride = 0;
};

/// The inputs of attention, in the compute dtype `dtype`.
struct AttentionOperands {
  DType dtype = DType::kF32;
  SampleRows query;       ///< [sequence, heads·head_size] a sample
  SampleRows key, value;  ///< [keys, kv_heads·head_size] a sample
  /// Optional int32 [batch, sequence]: the first key row that a query row sees. Never falls along a sample,
  /// nor lies behind the last key row seen.
  Tensor document_starts = {};
};

/// Columns from `column` on of a matrix whose rows are those of samples end to end, `rows_per_sample` each.
SampleRows sample_rows(const Tensor& matrix, std::int64_t rows_per_sample, std::int64_t column = 0);
/// Queries, keys and values as they lie in a packed projection [batch·sequence, layout.packed()].
AttentionOperands packed_operands(const AttentionShape& shape, const Tensor& qkv);

/// Elements of optimizer state by their place in a parameter: element i is element begin + i of this rank's
/// part of it, a matrix of `cols` columns whose element [r, c] is global element origin + r·stride + c.
struct ParameterRun {
  std::uint64_t key = 0;  ///< of the parameter's random numbers
  std::int64_t origin = 0, cols = 1, stride = 1;
  std::int64_t begin = 0;

  std::int64_t global(std::int64_t i) const {
    return origin + (begin + i) / cols * stride + (begin + i) % cols;
  }
  /// Of the blocks of 8-bit moments, the one that holds element i, counted from that of element 0.
  std::int64_t block(std::int64_t i) const;
};

/// Elements of a ParameterRun from a multiple of this on share the scale of 8-bit moments (Dettmers et al.
/// 2021, block-wise quantization).
inline constexpr std::int64_t kMomentBlock = 256;

inline std::int64_t ParameterRun::block(std::int64_t i) const {
  return (begin + i) / kMomentBlock - begin / kMomentBlock;
}

/// Moments are float32; or both bfloat16; or int8 and uint8 codes with a scale a block, its largest
/// magnitude: first = sign · scale·(|code|/127)², second = scale·(code/255)⁴, so that both have the same
/// relative resolution; a second moment above zero never gets code 0. Scales below 2^-90 become 0. Narrow
/// moments are rounded up or down by chance, so that the expected value is exact, with the random number of
/// (run.key, global element, updates): the same in every layout, but for blocks of codes that a slice cuts.
///
/// A split master is the bfloat16 parameter and an int16 remainder: master bits = parameter bits · 2^16 +
/// remainder. Of the 65537 float32 numbers that round to an even bfloat16 one, the remainder +32768 (half
/// way, above in magnitude) has no place: such a master becomes the float32 number next to it towards zero.
struct Adamw {
  Tensor master;                       ///< in/out [1, n]: float32, or int16 where it is split
  Tensor first_moment, second_moment;  ///< in/out [1, n]
  Tensor gradient;                     ///< float32 [1, n]: summed over tokens, not yet scaled
  Tensor parameter;  ///< optional out [1, n], compute dtype: the rounded master; in/out where that is split
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0.0f;  ///< decoupled: master -= lr·weight_decay·master
  Tensor first_scale = {},
         second_scale = {};  ///< of codes: in/out float32 [1, block of the last element + 1]
  ParameterRun run = {};     ///< needed where moments are narrow
};

/// Optimizer state that is narrower than float32, as in Adamw.
struct NarrowState {
  Tensor stored;           ///< [1, n]: int8 or uint8 codes, or the int16 remainder of a split master
  Tensor companion;        ///< the codes' scales, or the bfloat16 parameter
  std::int64_t begin = 0;  ///< of the ParameterRun; codes only
};

/// What a step adds up and what the optimizer goes by; lives in device memory, so that the host never waits
/// for it inside a step. Read back one step late.
struct StepScalars {
  // Summed over the global batch (all three reduced over ranks as float64).
  double loss = 0.0;             ///< sum of token losses, nats
  double tokens = 0.0;           ///< target tokens
  double gradient_square = 0.0;  ///< sum of squared elements of the unscaled gradient, each parameter once
  // Set by finish_step.
  float gradient_scale = 0.0f;  ///< 1/tokens times the clip coefficient
  float gradient_norm = 0.0f;   ///< of the mean gradient, before clipping
  float learning_rate = 0.0f;
  float bias_correction1 = 1.0f, bias_correction2 = 1.0f;  ///< 1 - beta^updates
  std::int32_t skip = 0;  ///< 1: no target token, or a gradient that is not finite; nothing is updated
  // Kept from step to step.
  std::int64_t updates = 0;  ///< optimizer updates done, the Adam step count
};

/// Sizes that an Ops may need scratch memory and plans for. Given once, before the first step.
struct Workload {
  DType compute = DType::kF32;
  std::int64_t tokens = 0;       ///< rows of a micro-batch on this rank
  std::int64_t widest = 0;       ///< widest activation row
  AttentionShape attention;      ///< with the most keys that there will be
  bool documents_apart = false;  ///< attention will be given document_starts
};

/// The operators that training is made of. One implementation a backend; all arguments are views. "compute
/// dtype" is float32 or bfloat16; sums and softmax are float32 inside. Outputs are overwritten unless said
/// otherwise. Sizes that disagree are an internal error.
///
/// Operators with an argument `largest` measure an output while they write it, so that Quantize needs no pass
/// of its own for that: largest (float32 [1, 1]; empty: not wanted) is raised to the largest magnitude of
/// that output, which is bfloat16, as it was rounded. NaNs are passed over.
class Ops {
 public:
  virtual ~Ops() = default;

  /// Builds plans and allocates all scratch memory. After this, no method allocates.
  virtual void prepare(const Workload& workload) = 0;
  /// Scratch bytes that `prepare` took.
  virtual std::int64_t workspace_bytes() const = 0;

  virtual void matmul(Stream& stream, const Matmul& args) = 0;
  /// Where the operators have a PlanCache: times several ways to compute every product asked for so far that
  /// it does not know, on the operands of its first use, and adds the fastest. Later products take what the
  /// cache then says. Waits for the device; what they write is overwritten, so all of it must still be there
  /// and none of it needed.
  virtual void time_products(Stream&) {}

  /// largest[0] = the largest magnitude in x, NaNs passed over; float32 [1, 1]. x: bfloat16, or float32,
  /// which is rounded to bfloat16 first.
  virtual void largest_magnitude(Stream& stream, Tensor x, Tensor largest) = 0;
  virtual void quantize(Stream& stream, const Quantize& args) = 0;
  /// to [c, r] = from [r, c] transposed, of one 8-bit float type; multiples of 16.
  virtual void transpose_codes(Stream& stream, Tensor from, Tensor to) = 0;
  /// After finish_step: where `seen` is given and the step was not skipped, history[i, (updates - 1) mod
  /// steps] = seen[i], or 0 where that is not finite. Then largest[i] = the largest of row i, unless all of
  /// it is 0. history: float32 [n, steps]; seen, largest: [n, 1].
  virtual void remember_largest(Stream& stream, Tensor seen, Tensor history, Tensor largest,
                                const StepScalars* scalars) = 0;

  virtual void norm_forward(Stream& stream, const NormForward& args) = 0;
  virtual void norm_backward(Stream& stream, const NormBackward& args) = 0;

  /// Rotary position embedding (Su et al. 2021), rotate-half layout, in place on the query and key heads of
  /// qkv [t, layout.packed()]: with c, s = row positions[t] of cos_sin, (a, b) -> (a·c - b·s, b·c + a·s) for
  /// the two halves of a head. `inverse` rotates back: the backward pass. positions: int32 [1, t]; cos_sin:
  /// float32 [positions, head_size], head_size/2 cosines then head_size/2 sines.
  virtual void rope(Stream& stream, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
                    bool inverse) = 0;

  /// RMSNorm of every query and key head (QK norm) from `in` to `out`, both [t, layout.packed()]; value heads
  /// are copied. q_weight, k_weight: [1, head_size]; rstd: out float32 [t, heads + kv_heads].
  virtual void head_norm_forward(Stream& stream, const HeadLayout& layout, float epsilon, Tensor in,
                                 Tensor q_weight, Tensor k_weight, Tensor out, Tensor rstd) = 0;
  /// dqkv, in place: gradient of `out` -> gradient of `in`. dq_weight, dk_weight: float32 [1, head_size].
  virtual void head_norm_backward(Stream& stream, const HeadLayout& layout, Tensor in, Tensor rstd,
                                  Tensor q_weight, Tensor k_weight, Tensor dqkv, Tensor dq_weight,
                                  Tensor dk_weight, bool accumulate) = 0;

  /// out: [sequence, heads·head_size] a sample; statistics: float32 [batch·heads, sequence], the log-sum-exp
  /// of each query row.
  virtual void attention_forward(Stream& stream, const AttentionShape& shape,
                                 const AttentionOperands& operands, SampleRows out, Tensor statistics) = 0;
  /// The gradients of query, key and value rows are wholly overwritten; key heads that no query head uses and
  /// key rows that no query row sees get zero.
  virtual void attention_backward(Stream& stream, const AttentionShape& shape,
                                  const AttentionOperands& operands, SampleRows out, Tensor statistics,
                                  SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue) = 0;
  /// The same where every query row has its key row, packed: qkv and dqkv [t, layout.packed()], out and dout
  /// [t, layout.query()].
  void attention_forward(Stream& stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                         Tensor statistics);
  void attention_backward(Stream& stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                          Tensor statistics, Tensor dout, Tensor dqkv);

  /// out [t, f] = silu(gate)·up, with gate_up [t, 2f] holding f gates, then f ups (Shazeer 2020). `largest`:
  /// of out.
  virtual void swiglu_forward(Stream& stream, Tensor gate_up, Tensor out, Tensor largest) = 0;
  /// In place: gate_up becomes its gradient, and dout becomes the forward output (needed for the weight
  /// gradient). `largest`: of the gradient.
  virtual void swiglu_backward(Stream& stream, Tensor gate_up, Tensor dout, Tensor largest) = 0;
  /// out = gelu(in), the tanh form (Hendrycks & Gimpel 2016). `largest`: of out.
  virtual void gelu_forward(Stream& stream, Tensor in, Tensor out, Tensor largest) = 0;
  /// In place: `in` becomes its gradient, and dout becomes the forward output. `largest`: of the gradient.
  virtual void gelu_backward(Stream& stream, Tensor in, Tensor dout, Tensor largest) = 0;

  /// The same with 8-bit outputs.
  virtual void coded_activation(Stream& stream, const CodedActivation& args) = 0;
  virtual void coded_activation_backward(Stream& stream, const CodedActivationBackward& args) = 0;

  /// out[t] = table[ids[t] - first_id] where the table holds that row, else 0; plus
  /// position_table[positions[t]] where that is given. ids, positions: int32 [1, t]; table: [rows, h].
  virtual void embedding_forward(Stream& stream, Tensor ids, Tensor table, std::int64_t first_id,
                                 Tensor positions, Tensor position_table, Tensor out) = 0;
  /// dtable[ids[t] - first_id] += dout[t], in a fixed order. dtable: float32 [rows, h]. `order`: int32 [1,
  /// t], the token numbers sorted by id, equal ids in rising order.
  virtual void embedding_backward(Stream& stream, Tensor ids, Tensor order, Tensor dout,
                                  std::int64_t first_id, Tensor dtable) = 0;

  /// dbias[j] (+)= sum over rows of dy[t, j]. dbias: float32 [1, n].
  virtual void bias_backward(Stream& stream, Tensor dy, Tensor dbias, bool accumulate) = 0;

  /// First half of the cross-entropy over a vocabulary split over ranks. logits [t, v] hold the ids first_id
  /// … first_id + valid - 1 in their first `valid` columns. partial: out float32 [t, 3]: the largest logit
  /// (-inf when valid is 0), the sum of exp(logit - largest), and the logit of the target where this rank
  /// holds it, else 0. targets: int32 [1, t], -1 where there is none.
  virtual void cross_entropy_partial(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                     Tensor targets, Tensor partial) = 0;
  /// Second half. partials: float32 [ranks·t, 3], every rank's. Adds token losses to scalars->loss and, with
  /// count, the number of targets to scalars->tokens (float64, in a fixed order); `weight` (0 or 1)
  /// multiplies both, so that replicated work is counted once. With `gradient`, logits become softmax -
  /// onehot (0 for rows without a target and for padding columns).
  virtual void cross_entropy_finish(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                    Tensor targets, Tensor partials, double weight, bool gradient,
                                    StepScalars* scalars) = 0;
  /// Both halves at once where this rank holds the whole vocabulary, from id 0 on: with `gradient` logits are
  /// read once. partial: float32 [t, 3], work space. Scalars and gradient come out as from the two halves.
  virtual void cross_entropy(Stream& stream, Tensor logits, std::int64_t valid, Tensor targets,
                             Tensor partial, bool gradient, StepScalars* scalars) = 0;

  /// scalars->gradient_square += sum of x², x float32; a fixed order.
  virtual void add_square(Stream& stream, Tensor x, StepScalars* scalars) = 0;
  /// scalars: from the global sums, the gradient scale with clipping at `clip` (0: none), the skip verdict,
  /// and, unless skipped, updates + 1, learning_rate = rates[updates] (float32 [1, n], indexed by updates
  /// done before this one, the last one standing for all later) and the bias corrections.
  virtual void finish_step(Stream& stream, StepScalars* scalars, Tensor rates, float clip, float beta1,
                           float beta2) = 0;
  /// AdamW (Loshchilov & Hutter 2019) with g = scalars->gradient_scale · gradient; nothing is written when
  /// skip is set.
  virtual void adamw(Stream& stream, const Adamw& args, const StepScalars* scalars) = 0;
  /// values (float32 [1, n]) = what the state stands for.
  virtual void widen_state(Stream& stream, const NarrowState& state, Tensor values) = 0;
  /// The state, companion included, that is nearest to values. What widen_state gave comes back bit for bit,
  /// if the run is whole blocks or ends where their elements do.
  virtual void narrow_state(Stream& stream, Tensor values, const NarrowState& state) = 0;

  /// to = from, rounded to the dtype of `to` where that is narrower. Float types only.
  virtual void cast(Stream& stream, Tensor from, Tensor to) = 0;
  /// Rows of samples from one array to another: `rows` rows of `columns` elements of each of `batch` samples.
  /// With `add` they are added (float32 sums).
  virtual void copy_rows(Stream& stream, DType dtype, std::int64_t batch, std::int64_t rows,
                         std::int64_t columns, const SampleRows& from, const SampleRows& to, bool add) = 0;
  /// to += from, float32 sums; either may be bfloat16.
  virtual void add(Stream& stream, Tensor from, Tensor to) = 0;
  /// values[i] = deviation · normal_at(key, first_index + (i / cols) · stride + i % cols), float32 [rows,
  /// cols].
  virtual void fill_normal(Stream& stream, Tensor values, float deviation, std::uint64_t key,
                           std::int64_t first_index, std::int64_t stride) = 0;
  virtual void fill(Stream& stream, Tensor values, float value) = 0;
};

/// Plain operators on host memory; matrix products by OpenBLAS with `threads` threads.
std::unique_ptr<Ops> make_cpu_ops(int threads);
/// Where own kernels for Hopper stand in for a library's: wherever there is one (kAlways), for tests.
enum class OwnKernels { kNever, kWhereFaster, kAlways };

struct CudaOpsOptions {
  /// The attention gradient in bfloat16 adds query gradients in the same order every time, which costs
  /// cuDNN 2·batch·heads·sequence² bytes. All else gives the same bits every time anyway.
  bool deterministic_attention = false;
  /// How cuBLASLt is to compute products, by earlier timing; outlives the operators. Null, or where it says
  /// nothing: by the library's first proposal.
  PlanCache* matmul_plans = nullptr;
  OwnKernels own_products = OwnKernels::kWhereFaster;
  OwnKernels own_attention = OwnKernels::kWhereFaster;
};

/// What run.matmul and run.attention mean: auto (kWhereFaster), own (kAlways), or a library's name.
OwnKernels own_kernels_of(const std::string& word);

/// cuBLASLt, cuDNN and own kernels. Throws Error(kDevice) in a build without CUDA.
std::unique_ptr<Ops> make_cuda_ops(Device& device, const CudaOpsOptions& options = {});

}  // namespace octet

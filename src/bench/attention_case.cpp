#include "attention_case.h"

#include <algorithm>
#include <cmath>

#include "octet/base/rng.h"

namespace octet {

namespace {

/// Rows of samples in host memory.
struct HostPart {
  HostPart(Device& device, Stream& stream, const AttentionCase::Part& part)
      : values(to_host(device, stream, part.matrix)), part(part) {}
  const float* row(std::int64_t sample, std::int64_t row, std::int64_t column) const {
    return values.data() + (sample * part.rows_per_sample + row) * part.matrix.cols + part.column + column;
  }
  std::vector<float> values;
  AttentionCase::Part part;
};

/// Sums in float64 of what single rows should be.
class RowReference {
 public:
  RowReference(const AttentionCase& which, Device& device, Stream& stream, bool backward)
      : case_(which),
        layout_(which.shape.layout),
        query_(device, stream, which.query),
        key_(device, stream, which.key),
        value_(device, stream, which.value) {
    if (backward) dout_ = std::make_unique<HostPart>(device, stream, which.dout);
  }

  /// What one query row of a head sees, and makes of it.
  struct Row {
    std::int64_t first = 0, last = 0;  ///< key rows seen
    std::vector<double> p, ds;         ///< probability and its logit's gradient, by key row from `first` on
    std::vector<double> gross;         ///< size of the two terms that ds is the difference of
    std::vector<double> out, dquery;
    double dquery_gross = 0.0;  ///< ‖dquery‖ if these terms did not cancel, as all do for a single key
  };
  Row row(std::int64_t sample, int head, std::int64_t index) const {
    const std::int64_t d = layout_.head_size, key_column = key_head(head) * d;
    Row row;
    row.first = case_.starts[static_cast<std::size_t>(sample * case_.shape.sequence + index)];
    row.last = case_.shape.key_rows() - case_.shape.sequence + index;
    const float* const q = query_.row(sample, index, head * d);
    double largest = -INFINITY, total = 0.0;
    for (std::int64_t j = row.first; j <= row.last; ++j) {
      row.p.push_back(double{case_.shape.scale} * dot(q, key_.row(sample, j, key_column), d));
      largest = std::max(largest, row.p.back());
    }
    for (double& p : row.p) total += p = std::exp(p - largest);
    row.out.assign(static_cast<std::size_t>(d), 0.0);
    for (std::int64_t j = row.first; j <= row.last; ++j) {
      double& p = row.p[static_cast<std::size_t>(j - row.first)];
      p /= total;
      add(row.out, p, value_.row(sample, j, key_column));
    }
    if (dout_ == nullptr) return row;
    const float* const dout = dout_->row(sample, index, head * d);
    double mean = 0.0, mean_square = 0.0;
    for (std::int64_t c = 0; c < d; ++c) {
      const double term = double{dout[c]} * row.out[static_cast<std::size_t>(c)];
      mean += term;
      mean_square += term * term;
    }
    row.dquery.assign(static_cast<std::size_t>(d), 0.0);
    for (std::int64_t j = row.first; j <= row.last; ++j) {
      const double p = row.p[static_cast<std::size_t>(j - row.first)];
      const double dp = dot(dout, value_.row(sample, j, key_column), d);
      const float* const key = key_.row(sample, j, key_column);
      row.ds.push_back(p * (dp - mean));
      row.gross.push_back(p * (std::abs(dp) + std::sqrt(mean_square)));
      add(row.dquery, case_.shape.scale * row.ds.back(), key);
      row.dquery_gross += std::pow(case_.shape.scale * row.gross.back(), 2) * dot(key, key, d);
    }
    row.dquery_gross = std::sqrt(row.dquery_gross);
    return row;
  }

  /// Gradients of one key row and its value row.
  struct KeyRow {
    std::vector<double> dkey, dvalue;
    double dkey_gross = 0.0;
  };
  KeyRow key_row(std::int64_t sample, int kv_head, std::int64_t j) const {
    const std::int64_t d = layout_.head_size, sequence = case_.shape.sequence;
    KeyRow result;
    result.dkey.assign(static_cast<std::size_t>(d), 0.0);
    result.dvalue = result.dkey;
    for (int head = 0; head < layout_.heads; ++head) {
      if (key_head(head) != kv_head) continue;
      for (std::int64_t i = j - (case_.shape.key_rows() - sequence); i < sequence; ++i) {
        const Row row = this->row(sample, head, i);
        if (j < row.first) continue;
        const auto at = static_cast<std::size_t>(j - row.first);
        const float* const query = query_.row(sample, i, head * d);
        add(result.dvalue, row.p[at], dout_->row(sample, i, head * d));
        add(result.dkey, case_.shape.scale * row.ds[at], query);
        result.dkey_gross += std::pow(case_.shape.scale * row.gross[at], 2) * dot(query, query, d);
      }
    }
    result.dkey_gross = std::sqrt(result.dkey_gross);
    return result;
  }

 private:
  int key_head(int head) const { return (head + layout_.head_offset) / layout_.group; }
  static double dot(const float* a, const float* b, std::int64_t count) {
    double total = 0.0;
    for (std::int64_t c = 0; c < count; ++c) total += double{a[c]} * double{b[c]};
    return total;
  }
  static void add(std::vector<double>& to, double factor, const float* from) {
    for (std::size_t c = 0; c < to.size(); ++c) to[c] += factor * double{from[c]};
  }

  const AttentionCase& case_;
  HeadLayout layout_;
  HostPart query_, key_, value_;
  std::unique_ptr<HostPart> dout_;
};

/// Whether ‖found - expected‖ is within `tolerance` of ‖expected‖ or of `gross`.
bool near(const float* found, const std::vector<double>& expected, double tolerance, double gross = 0.0) {
  double error = 0.0, square = 0.0;
  for (std::size_t c = 0; c < expected.size(); ++c) {
    error += std::pow(double{found[c]} - expected[c], 2);
    square += expected[c] * expected[c];
  }
  return std::sqrt(error) <=
         tolerance * std::sqrt(square + gross * gross);  // false where anything is not finite
}

double row_tolerance(const AttentionCase& which) {
  return which.query.matrix.dtype == DType::kBF16 ? 4e-2 : 2e-4;
}

/// Samples, heads and query rows that are looked at.
struct Probe {
  std::int64_t sample;
  int head;
  std::int64_t row;
};
std::vector<Probe> probes(const AttentionShape& shape) {
  std::vector<Probe> all;
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto below = [&](std::int64_t count, std::uint64_t key) {
      return static_cast<std::int64_t>(mix(key, i) % static_cast<std::uint64_t>(count));
    };
    const std::int64_t row = i == 0 ? 0 : i < 3 ? shape.sequence - 1 : below(shape.sequence, 3);
    all.push_back({below(shape.batch, 1), static_cast<int>(below(shape.layout.heads, 2)), row});
  }
  return all;
}

/// Documents of 1 to `sequence`/4 tokens: the first key row that each key row's own query would see.
std::vector<std::int32_t> random_documents(std::int64_t rows, std::uint64_t key) {
  std::vector<std::int32_t> starts;
  const auto longest = static_cast<std::uint64_t>(std::max<std::int64_t>(1, rows / 4));
  while (static_cast<std::int64_t>(starts.size()) < rows) {
    const auto start = static_cast<std::int32_t>(starts.size());
    const std::size_t end = starts.size() + 1 + mix(key, starts.size()) % longest;
    starts.resize(std::min(end, static_cast<std::size_t>(rows)), start);
  }
  return starts;
}

}  // namespace

AttentionCase::AttentionCase(Operands& memory, const AttentionShape& shape, DType compute, bool documents)
    : shape(shape) {
  const HeadLayout& layout = shape.layout;
  const std::int64_t queries = shape.batch * shape.sequence, keys = shape.batch * shape.key_rows();
  const std::int64_t key_dim = std::int64_t{layout.kv_heads} * layout.head_size;
  if (shape.keys == 0) {  // packed, as a projection leaves them
    const Tensor qkv = memory.random(compute, queries, layout.packed());
    const Tensor dqkv = memory.zeros(compute, queries, layout.packed());
    query = {qkv, 0, shape.sequence};
    key = {qkv, layout.query(), shape.sequence};
    value = {qkv, layout.query() + key_dim, shape.sequence};
    dquery = {dqkv, 0, shape.sequence};
    dkey = {dqkv, layout.query(), shape.sequence};
    dvalue = {dqkv, layout.query() + key_dim, shape.sequence};
  } else {
    const Tensor kv = memory.random(compute, keys, 2 * key_dim),
                 dkv = memory.zeros(compute, keys, 2 * key_dim);
    query = {memory.random(compute, queries, layout.query()), 0, shape.sequence};
    key = {kv, 0, shape.keys};
    value = {kv, key_dim, shape.keys};
    dquery = {memory.zeros(compute, queries, layout.query()), 0, shape.sequence};
    dkey = {dkv, 0, shape.keys};
    dvalue = {dkv, key_dim, shape.keys};
  }
  out = {memory.zeros(compute, queries, layout.query()), 0, shape.sequence};
  dout = {memory.random(compute, queries, layout.query()), 0, shape.sequence};
  statistics = memory.zeros(DType::kF32, shape.batch * layout.heads, shape.sequence);
  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(shape.key_rows()), 0);
    if (documents) all = random_documents(shape.key_rows(), static_cast<std::uint64_t>(sample));
    starts.insert(starts.end(), all.end() - shape.sequence, all.end());
  }
  if (documents) document_starts = memory.put(starts).reshape(shape.batch, shape.sequence);
}

AttentionOperands AttentionCase::operands() const {
  return {query.matrix.dtype, query.rows(), key.rows(), value.rows(), document_starts};
}

void AttentionCase::forward(Ops& ops, Stream& stream) const {
  ops.attention_forward(stream, shape, operands(), out.rows(), statistics);
}

void AttentionCase::backward(Ops& ops, Stream& stream) const {
  ops.attention_backward(stream, shape, operands(), out.rows(), statistics, dout.rows(), dquery.rows(),
                         dkey.rows(), dvalue.rows());
}

double AttentionCase::pairs() const {
  double total = 0.0;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::int64_t last =
        shape.key_rows() - shape.sequence + static_cast<std::int64_t>(i) % shape.sequence;
    total += static_cast<double>(last - starts[i] + 1);
  }
  return total;
}

bool AttentionCase::forward_right(Device& device, Stream& stream) const {
  const RowReference reference(*this, device, stream, false);
  const HostPart found(device, stream, out);
  for (const Probe& at : probes(shape)) {
    const auto row = reference.row(at.sample, at.head, at.row);
    const float* const own = found.row(at.sample, at.row, at.head * std::int64_t{shape.layout.head_size});
    if (!near(own, row.out, row_tolerance(*this))) return false;
  }
  return true;
}

bool AttentionCase::backward_right(Device& device, Stream& stream) const {
  const RowReference reference(*this, device, stream, true);
  const HostPart found_query(device, stream, dquery), found_key(device, stream, dkey),
      found_value(device, stream, dvalue);
  const HeadLayout& layout = shape.layout;
  const std::int64_t d = layout.head_size;
  for (const Probe& at : probes(shape)) {
    const auto row = reference.row(at.sample, at.head, at.row);
    const float* const own = found_query.row(at.sample, at.row, at.head * d);
    if (!near(own, row.dquery, row_tolerance(*this), row.dquery_gross)) return false;
  }
  // Late key rows, which few query rows see.
  for (const std::int64_t back : {std::int64_t{1}, std::int64_t{6}, std::int64_t{17}}) {
    if (back > shape.sequence) continue;
    const Probe at = probes(shape)[static_cast<std::size_t>(back % 8)];
    const int kv_head = (at.head + layout.head_offset) / layout.group;
    const std::int64_t j = shape.key_rows() - back;
    const auto expected = reference.key_row(at.sample, kv_head, j);
    const float* const own_key = found_key.row(at.sample, j, kv_head * d);
    const float* const own_value = found_value.row(at.sample, j, kv_head * d);
    if (!near(own_key, expected.dkey, row_tolerance(*this), expected.dkey_gross)) return false;
    if (!near(own_value, expected.dvalue, row_tolerance(*this))) return false;
  }
  return true;
}

}  // namespace octet

#include "octet/model/parameter_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "octet/base/error.h"

namespace octet {

namespace {

/// Adds the rows of a model in bucket order.
class TableWriter {
 public:
  TableWriter(const ModelShape& shape, std::vector<ParameterRow>& rows) : shape_(shape), rows_(rows) {}

  void bucket(int number) { bucket_ = number; }

  void matrix(std::string name, std::int64_t rows, std::int64_t cols, Split split, float deviation,
              bool follows = false) {
    const GradientPart part = split == Split::kKeyHeads ? GradientPart::kHeads : GradientPart::kComplete;
    rows_.push_back({std::move(name), rows, cols, split, part, bucket_, true, follows, deviation, 0.0f});
  }
  void vector(std::string name, std::int64_t size, Split split, GradientPart part, float constant,
              bool follows = false) {
    rows_.push_back({std::move(name), 1, size, split, part, bucket_, false, follows, 0.0f, constant});
  }
  void norm(const std::string& name) {
    vector(name + ".weight", shape_.hidden, Split::kNone, GradientPart::kSequence, 1.0f);
    if (shape_.biases()) vector(name + ".bias", shape_.hidden, Split::kNone, GradientPart::kSequence, 0.0f);
  }

  void block(std::int64_t layer);

 private:
  const ModelShape& shape_;
  std::vector<ParameterRow>& rows_;
  int bucket_ = 0;
};

void TableWriter::block(std::int64_t layer) {
  const std::string at = fmt::format("layers.{}.", layer);
  const std::int64_t h = shape_.hidden, q = shape_.query_dim(), k = shape_.key_dim(), f = shape_.mlp;
  const float wide = shape_.init_deviation;
  // Projections into the residual stream start smaller by the square root of their number (GPT-2).
  const float into_residual = wide / std::sqrt(2.0f * static_cast<float>(shape_.layers));
  matrix(at + "attention.q.weight", q, h, Split::kRows, wide);
  matrix(at + "attention.k.weight", k, h, Split::kKeyHeads, wide, true);
  matrix(at + "attention.v.weight", k, h, Split::kKeyHeads, wide, true);
  matrix(at + "attention.o.weight", h, q, Split::kCols, into_residual);
  if (shape_.gated()) matrix(at + "mlp.gate.weight", f, h, Split::kRows, wide);
  matrix(at + "mlp.up.weight", f, h, Split::kRows, wide, shape_.gated());
  matrix(at + "mlp.down.weight", h, f, Split::kCols, into_residual);
  if (shape_.biases() || shape_.qkv_bias) {
    vector(at + "attention.q.bias", q, Split::kRows, GradientPart::kComplete, 0.0f);
    vector(at + "attention.k.bias", k, Split::kKeyHeads, GradientPart::kHeads, 0.0f, true);
    vector(at + "attention.v.bias", k, Split::kKeyHeads, GradientPart::kHeads, 0.0f, true);
  }
  if (shape_.biases()) {
    vector(at + "mlp.up.bias", f, Split::kRows, GradientPart::kComplete, 0.0f);
    vector(at + "attention.o.bias", h, Split::kNone, GradientPart::kComplete, 0.0f);
    vector(at + "mlp.down.bias", h, Split::kNone, GradientPart::kComplete, 0.0f);
  }
  norm(at + "attention_norm");
  norm(at + "mlp_norm");
  if (shape_.qk_norm) {
    vector(at + "attention.q_norm.weight", shape_.head_size, Split::kNone, GradientPart::kHeads, 1.0f);
    vector(at + "attention.k_norm.weight", shape_.head_size, Split::kNone, GradientPart::kHeads, 1.0f);
  }
}

}  // namespace

ParameterTable::ParameterTable(const ModelShape& shape) {
  TableWriter writer(shape, rows_);
  const float head_deviation = shape.zero_head ? 0.0f : shape.init_deviation;
  writer.bucket(0);
  writer.matrix("embedding.weight", shape.vocabulary, shape.hidden, Split::kVocabulary,
                shape.tied ? head_deviation : shape.init_deviation);
  if (!shape.rotary()) {
    writer.matrix("positions.weight", shape.positions, shape.hidden, Split::kNone, shape.init_deviation);
  }
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    writer.bucket(static_cast<int>(layer) + 1);
    writer.block(layer);
  }
  buckets_ = static_cast<int>(shape.layers) + 2;
  writer.bucket(buckets_ - 1);
  if (!shape.tied)
    writer.matrix("head.weight", shape.vocabulary, shape.hidden, Split::kVocabulary, head_deviation);
  writer.norm("norm");
}

int ParameterTable::find(const std::string& name) const {
  const auto at =
      std::find_if(rows_.begin(), rows_.end(), [&](const ParameterRow& row) { return row.name == name; });
  OCTET_ASSERT(at != rows_.end());
  return static_cast<int>(at - rows_.begin());
}

std::int64_t ParameterTable::parameters() const {
  std::int64_t total = 0;
  for (const ParameterRow& row : rows_) total += row.rows * row.cols;
  return total;
}

std::int64_t vocabulary_rows(std::int64_t vocabulary, int tensor_size) {
  const std::int64_t share = (vocabulary + tensor_size - 1) / tensor_size;
  return (share + 63) / 64 * 64;
}

LocalParameter local_part(const ParameterRow& row, const ModelShape& shape, int tensor_rank, int tensor_size,
                          bool sequence_parallel) {
  LocalParameter local{row.rows, row.cols, {0, 0, row.rows, row.cols}, false, false};
  const auto replicate = [&] {
    local.replicated = tensor_size > 1;
    local.partial = local.replicated && (row.part == GradientPart::kHeads ||
                                         (row.part == GradientPart::kSequence && sequence_parallel));
  };
  const auto cut = [&](std::int64_t& extent, std::int64_t& offset, std::int64_t& box_extent) {
    OCTET_ASSERT(extent % tensor_size == 0);
    extent /= tensor_size;
    offset = extent * tensor_rank;
    box_extent = extent;
  };
  // A vector's only extent is its columns.
  const bool by_cols = row.split == Split::kCols || row.rows == 1;
  switch (row.split) {
    case Split::kNone:
      replicate();
      break;
    case Split::kKeyHeads:
      if (shape.kv_heads % tensor_size != 0) {
        replicate();
        break;
      }
      [[fallthrough]];
    case Split::kRows:
    case Split::kCols:
      if (by_cols) {
        cut(local.cols, local.box.col, local.box.cols);
      } else {
        cut(local.rows, local.box.row, local.box.rows);
      }
      break;
    case Split::kVocabulary:
      local.rows = vocabulary_rows(row.rows, tensor_size);
      local.box.row = std::min(local.rows * tensor_rank, row.rows);
      local.box.rows = std::min(local.rows, row.rows - local.box.row);
      break;
  }
  return local;
}

HeadLayout local_heads(const ModelShape& shape, int tensor_rank, int tensor_size) {
  OCTET_ASSERT(shape.heads % tensor_size == 0);
  HeadLayout layout;
  layout.heads = shape.heads / tensor_size;
  layout.head_size = shape.head_size;
  layout.group = shape.heads / shape.kv_heads;
  if (shape.kv_heads % tensor_size == 0) {
    layout.kv_heads = shape.kv_heads / tensor_size;
  } else {
    layout.kv_heads = shape.kv_heads;
    layout.head_offset = layout.heads * tensor_rank;
  }
  return layout;
}

}  // namespace octet

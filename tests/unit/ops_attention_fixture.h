#pragma once

#include "ops_fixture.h"

/// Attention on rows anywhere in memory, with the gradient of its inputs, and what it has to give.
namespace octet::test {

/// The inputs of an attention and the gradient of its output, samples end to end.
struct AttentionInputs {
  AttentionShape shape;
  Matrix query, key, value, dout;
  std::vector<std::int32_t> starts = {};  ///< of documents, or none

  std::int64_t first_key(std::int64_t sample, std::int64_t query_row) const {
    return starts.empty() ? 0 : starts[static_cast<std::size_t>(sample * shape.sequence + query_row)];
  }
  std::int64_t end_key(std::int64_t query_row) const {
    return shape.key_rows() - shape.sequence + query_row + 1;
  }
};

std::string describe(const AttentionInputs& in);

inline AttentionShape shape_of(HeadLayout layout, std::int64_t batch, std::int64_t sequence,
                               std::int64_t keys) {
  return {layout, batch, sequence, 1.0f / std::sqrt(static_cast<float>(layout.head_size)), keys};
}

/// "out", "statistics", "dquery", "dkey" and "dvalue" by the definition, row by row in float64.
Results attention_reference(const AttentionInputs& in);
/// The same by operators, on rows in the midst of larger arrays, around which nothing may be written.
Results run_attention(Workbench& bench, const AttentionInputs& in);

class AttentionFixture : public OpsTest {
 protected:
  AttentionInputs inputs(const AttentionShape& shape) {
    const std::int64_t queries = shape.batch * shape.sequence, keys = shape.batch * shape.key_rows();
    const std::int64_t key_cols = std::int64_t{shape.layout.kv_heads} * shape.layout.head_size;
    return {shape, random(queries, shape.layout.query()), random(keys, key_cols), random(keys, key_cols),
            random(queries, shape.layout.query())};
  }

  /// Starts of random documents: about one key row in `length` begins one, and so may the first query's.
  std::vector<std::int32_t> random_starts(const AttentionShape& shape, int length) {
    std::vector<std::int32_t> starts;
    const std::int64_t before = shape.key_rows() - shape.sequence;
    for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
      std::int32_t start = 0;
      for (std::int64_t key = 0; key < shape.key_rows(); ++key) {
        if (random_() % static_cast<unsigned>(length) == 0) start = static_cast<std::int32_t>(key);
        if (key >= before) starts.push_back(start);
      }
    }
    return starts;
  }

  Workbench bench(const AttentionShape& shape, bool documents_apart,
                  const CudaOpsOptions& options = {}) const {
    Workload own = workload();
    own.tokens = own.widest = 1;  // memory is for attention alone
    own.attention = shape;
    own.documents_apart = documents_apart;
    return {GetParam(), own, options};
  }

  void expect_close(const Results& actual, const Results& expected, const std::string& label) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Matrix& result = actual[i].second;
      EXPECT_TRUE(close(result, expected[i].second, tolerance_of(result.dtype)))
          << label << ": " << expected[i].first;
    }
  }
};

}  // namespace octet::test

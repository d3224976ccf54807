#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <regex>

#include "octet/base/error.h"
#include "octet/config/resolve.h"
#include "octet/model/parameter_table.h"
#include "octet/parallel/bucket.h"

namespace octet {
namespace {

ModelShape llama_8b() {
  ModelShape shape;
  shape.layers = 32;
  shape.hidden = 4096;
  shape.heads = 32;
  shape.kv_heads = 8;
  shape.head_size = 128;
  shape.mlp = 14336;
  shape.vocabulary = 128256;
  return shape;
}

ModelShape odd_shape() {
  ModelShape shape;
  shape.layers = 3;
  shape.hidden = 48;
  shape.heads = 4;
  shape.kv_heads = 1;
  shape.head_size = 12;
  shape.mlp = 20;
  shape.vocabulary = 101;
  shape.qk_norm = true;
  shape.qkv_bias = true;
  return shape;
}

TEST(ParameterTable, KnownModelsHaveTheirKnownSizes) {
  EXPECT_EQ(ParameterTable(llama_8b()).parameters(), 8030261248);
  ModelShape gpt2;
  gpt2.family = Family::kGpt2;
  gpt2.layers = 12;
  gpt2.hidden = 768;
  gpt2.heads = gpt2.kv_heads = 12;
  gpt2.head_size = 64;
  gpt2.mlp = 3072;
  gpt2.vocabulary = 50257;
  gpt2.positions = 1024;
  gpt2.tied = true;
  EXPECT_EQ(ParameterTable(gpt2).parameters(), 124439808);
}

/// The size that a shape's first line states, such as "8.03B parameters": its number and its unit.
std::pair<double, double> stated_size(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const std::regex pattern(R"(([0-9.]+)([MB]) parameters)");
  std::smatch match;
  if (!std::regex_search(line, match, pattern)) return {0.0, 1.0};
  return {std::stod(match[1]), match[2] == "M" ? 1e6 : 1e9};
}

TEST(ParameterTable, ShapesInInputsHaveTheSizesTheyState) {
  int shapes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(OCTET_SOURCE_DIR "/inputs/shapes")) {
    Deck deck = read_deck({entry.path().string()}, {"batch.sequence=1024", "data.train=none"});
    resolve_deck(deck, 1);
    const auto [size, unit] = stated_size(entry.path());
    const double found = static_cast<double>(ParameterTable(shape_of(deck.model)).parameters()) / unit;
    EXPECT_NEAR(found, size, size * 6e-3) << entry.path();
    ++shapes;
  }
  EXPECT_GE(shapes, 9);
}

TEST(ParameterTable, FlopsOfLlama8bAt8192) {
  EXPECT_NEAR(flops_per_token(llama_8b(), 8192), 51.47e9, 0.005e9);
}

TEST(ParameterTable, DecayIsForMatricesOnly) {
  const ParameterTable table(odd_shape());
  for (const ParameterRow& row : table.rows()) EXPECT_EQ(row.decay, row.rows > 1) << row.name;
}

/// Every element of every parameter is owned exactly once by the tensor × data ranks, replicas left out; N04:
/// exactly 101 rows of a vocabulary.
TEST(BucketLayout, SlicesCoverEveryParameterOnce) {
  const ModelShape shape = odd_shape();
  const ParameterTable table(shape);
  for (const int tensor : {1, 2, 4}) {
    for (const int slices : {1, 2, 8}) {
      std::vector<std::vector<int>> owners;
      for (const ParameterRow& row : table.rows())
        owners.emplace_back(static_cast<std::size_t>(row.rows * row.cols), 0);
      for (int rank = 0; rank < tensor; ++rank) {
        const BucketLayout layout(table, shape, rank, tensor, true,
                                  std::vector<int>(table.buckets(), slices));
        for (int bucket = 0; bucket < table.buckets(); ++bucket) {
          const std::int64_t slice = layout.bucket(bucket).size / slices;
          for (int data = 0; data < slices; ++data) {
            for (const PlacedBox& placed : layout.boxes(bucket, slice * data, slice * (data + 1))) {
              if (placed.replicated && rank > 0) continue;
              const ParameterRow& row = table.rows()[static_cast<std::size_t>(placed.row)];
              for (std::int64_t i = 0; i < placed.box.size(); ++i) {
                const std::int64_t at =
                    (placed.box.row + i / placed.box.cols) * row.cols + placed.box.col + i % placed.box.cols;
                ++owners[static_cast<std::size_t>(placed.row)][static_cast<std::size_t>(at)];
              }
            }
          }
        }
      }
      for (std::size_t row = 0; row < owners.size(); ++row) {
        for (const int count : owners[row])
          ASSERT_EQ(count, 1) << table.rows()[row].name << " tensor " << tensor << " slices " << slices;
      }
    }
  }
}

TEST(BucketLayout, RegionsCoverARangeInOrder) {
  const ModelShape shape = odd_shape();
  const ParameterTable table(shape);
  const BucketLayout layout(table, shape, 1, 4, true, std::vector<int>(table.buckets(), 2));
  for (int bucket = 0; bucket < table.buckets(); ++bucket) {
    const std::int64_t size = layout.bucket(bucket).size, begin = size / 2;
    std::int64_t at = begin;
    for (const Region& region : layout.regions(bucket, begin, size)) {
      EXPECT_EQ(region.begin, at);
      EXPECT_GT(region.size(), 0);
      at = region.end;
    }
    EXPECT_EQ(at, size);
  }
}

/// Query, key and value weights are one matrix, so are gate and up: nothing lies between them.
TEST(BucketLayout, FusedMatricesAreContiguous) {
  const ModelShape shape = odd_shape();
  const ParameterTable table(shape);
  for (const int tensor : {1, 2, 4}) {
    const BucketLayout layout(table, shape, tensor - 1, tensor, false, std::vector<int>(table.buckets(), 8));
    for (std::size_t row = 1; row < table.rows().size(); ++row) {
      if (!table.rows()[row].follows) continue;
      const BucketEntry &before = layout.entry(static_cast<int>(row) - 1),
                        &own = layout.entry(static_cast<int>(row));
      EXPECT_EQ(own.offset, before.offset + before.local.rows * before.local.cols) << table.rows()[row].name;
    }
  }
}

TEST(RopeTable, Llama3ScalingStretchesLongWavesOnly) {
  ModelShape shape = llama_8b();
  shape.rope_theta = 500000.0;
  shape.rope_llama3 = true;
  const std::vector<float> table = rope_table(shape, 2);
  const auto angle = [&](std::size_t i) { return std::atan2(table[128 + 64 + i], table[128 + i]); };
  EXPECT_NEAR(angle(0), 1.0, 1e-6);                                        // fastest: unchanged
  EXPECT_NEAR(angle(63), std::pow(500000.0, -126.0 / 128.0) / 8.0, 1e-9);  // slowest: eight times slower
}

}  // namespace
}  // namespace octet

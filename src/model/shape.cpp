#include "octet/model/shape.h"

#include <cmath>
#include <numbers>

namespace octet {

ModelShape shape_of(const Deck::Model& model) {
  ModelShape shape;
  shape.family = model.family == "gpt2" ? Family::kGpt2 : Family::kLlama;
  shape.layers = model.layers;
  shape.hidden = model.hidden;
  shape.mlp = model.mlp;
  shape.vocabulary = model.vocabulary;
  shape.positions = model.positions;
  shape.heads = static_cast<int>(model.heads);
  shape.kv_heads = static_cast<int>(model.kv_heads);
  shape.head_size = static_cast<int>(model.head_size);
  shape.tied = model.tied;
  shape.qkv_bias = model.qkv_bias;
  shape.qk_norm = model.qk_norm;
  shape.zero_head = model.zero_head;
  shape.norm_epsilon = static_cast<float>(model.norm_epsilon);
  shape.init_deviation = static_cast<float>(model.init_deviation);
  shape.rope_theta = model.rope_theta;
  shape.rope_llama3 = model.rope_scaling == "llama3";
  shape.rope_factor = model.rope_factor;
  shape.rope_low_frequency = model.rope_low_frequency;
  shape.rope_high_frequency = model.rope_high_frequency;
  shape.rope_original = model.rope_original;
  return shape;
}

double flops_per_token(const ModelShape& shape, std::int64_t sequence) {
  const double h = static_cast<double>(shape.hidden), q = static_cast<double>(shape.query_dim());
  const double attention = h * (2 * q + 2 * static_cast<double>(shape.key_dim()));
  const double mlp = h * static_cast<double>(shape.mlp) * (shape.gated() ? 3 : 2);
  const double layers = static_cast<double>(shape.layers);
  const double matrices = layers * (attention + mlp) + h * static_cast<double>(shape.vocabulary);
  return 6 * matrices + 6 * layers * q * static_cast<double>(sequence);
}

namespace {

double scaled_frequency(const ModelShape& shape, double frequency) {
  if (!shape.rope_llama3) return frequency;
  const double original = static_cast<double>(shape.rope_original);
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < original / shape.rope_high_frequency) return frequency;
  if (wavelength > original / shape.rope_low_frequency) return frequency / shape.rope_factor;
  const double smooth = (original / wavelength - shape.rope_low_frequency) /
                        (shape.rope_high_frequency - shape.rope_low_frequency);
  return (1 - smooth) * frequency / shape.rope_factor + smooth * frequency;
}

}  // namespace

std::vector<float> rope_table(const ModelShape& shape, std::int64_t positions) {
  const std::int64_t half = shape.head_size / 2;
  std::vector<float> table(static_cast<std::size_t>(positions * shape.head_size));
  for (std::int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / shape.head_size;
    const double frequency = scaled_frequency(shape, std::pow(shape.rope_theta, exponent));
    for (std::int64_t p = 0; p < positions; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      const auto row = static_cast<std::size_t>(p * shape.head_size + i);
      table[row] = static_cast<float>(std::cos(angle));
      table[row + static_cast<std::size_t>(half)] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

}  // namespace octet

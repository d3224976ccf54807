#pragma once

#include <cstdint>
#include <vector>

#include "octet/config/deck.h"
#include "octet/ops/ops.h"

namespace octet {

enum class Family { kLlama, kGpt2 };

/// The sizes that define a model, as the deck's model section gives them once resolved.
struct ModelShape {
  Family family = Family::kLlama;
  std::int64_t layers = 0, hidden = 0, mlp = 0, vocabulary = 0, positions = 0;
  int heads = 0, kv_heads = 0, head_size = 0;
  bool tied = false, qkv_bias = false, qk_norm = false, zero_head = false;
  float norm_epsilon = 1e-5f, init_deviation = 0.02f;
  double rope_theta = 10000.0;
  bool rope_llama3 = false;
  double rope_factor = 8.0, rope_low_frequency = 1.0, rope_high_frequency = 4.0;
  std::int64_t rope_original = 8192;

  std::int64_t query_dim() const { return std::int64_t{heads} * head_size; }
  std::int64_t key_dim() const { return std::int64_t{kv_heads} * head_size; }
  bool gated() const { return family == Family::kLlama; }
  bool rotary() const { return family == Family::kLlama; }
  bool biases() const { return family == Family::kGpt2; }
  NormKind norm() const { return family == Family::kLlama ? NormKind::kRms : NormKind::kLayer; }
};

ModelShape shape_of(const Deck::Model& model);

/// Multiply-add FLOPs of a training step per token: 6 · (parameters of matrix products, the head once) + 6 ·
/// layers · query_dim · sequence (causal attention counted once; recomputation never). Llama-3 8B at
/// 8192: 51.47e9.
double flops_per_token(const ModelShape& shape, std::int64_t sequence);

/// cos and sin of every position's angles, [positions, head_size]: head_size/2 cosines, then head_size/2
/// sines. Angle i of position p is p·theta^(-2i/head_size), its frequency scaled as in Llama 3.1 where
/// rope_llama3 is set.
std::vector<float> rope_table(const ModelShape& shape, std::int64_t positions);

}  // namespace octet

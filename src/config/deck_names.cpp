#include <algorithm>
#include <cctype>
#include <utility>

#include "deck_keys.h"
#include "octet/config/nearest_name.h"

namespace octet {
namespace {

/// Names that other trainers use for our keys.
constexpr std::pair<std::string_view, std::string_view> kForeignNames[] = {
    {"architecture", "model.family"},
    {"model_type", "model.family"},
    {"num_layers", "model.layers"},
    {"n_layer", "model.layers"},
    {"n_layers", "model.layers"},
    {"num_hidden_layers", "model.layers"},
    {"hidden_size", "model.hidden"},
    {"n_embd", "model.hidden"},
    {"d_model", "model.hidden"},
    {"dim", "model.hidden"},
    {"num_heads", "model.heads"},
    {"n_head", "model.heads"},
    {"n_heads", "model.heads"},
    {"num_attention_heads", "model.heads"},
    {"num_key_value_heads", "model.kv_heads"},
    {"num_query_groups", "model.kv_heads"},
    {"n_kv_heads", "model.kv_heads"},
    {"head_dim", "model.head_size"},
    {"kv_channels", "model.head_size"},
    {"intermediate_size", "model.mlp"},
    {"ffn_hidden_size", "model.mlp"},
    {"ffn_dim", "model.mlp"},
    {"vocab_size", "model.vocabulary"},
    {"vocab", "model.vocabulary"},
    {"max_position_embeddings", "model.positions"},
    {"n_positions", "model.positions"},
    {"tie_word_embeddings", "model.tied"},
    {"tie_embeddings", "model.tied"},
    {"add_qkv_bias", "model.qkv_bias"},
    {"qk_layernorm", "model.qk_norm"},
    {"rms_norm_eps", "model.norm_epsilon"},
    {"layer_norm_eps", "model.norm_epsilon"},
    {"norm_epsilon", "model.norm_epsilon"},
    {"norm_eps", "model.norm_epsilon"},
    {"initializer_range", "model.init_deviation"},
    {"init_std", "model.init_deviation"},
    {"rotary_base", "model.rope_theta"},
    {"rope_base", "model.rope_theta"},
    {"dp", "parallel.data"},
    {"data_parallel_size", "parallel.data"},
    {"tp", "parallel.tensor"},
    {"tensor_parallel_size", "parallel.tensor"},
    {"tensor_model_parallel_size", "parallel.tensor"},
    {"cp", "parallel.context"},
    {"context_parallel_size", "parallel.context"},
    {"pp", "parallel.pipeline"},
    {"pipeline_parallel_size", "parallel.pipeline"},
    {"pipeline_model_parallel_size", "parallel.pipeline"},
    {"sequence_parallel", "parallel.sequence"},
    {"zero_stage", "parallel.zero"},
    {"seq_len", "batch.sequence"},
    {"seq_length", "batch.sequence"},
    {"sequence_length", "batch.sequence"},
    {"max_seq_len", "batch.sequence"},
    {"block_size", "batch.sequence"},
    {"context_length", "batch.sequence"},
    {"micro_batch_size", "batch.micro"},
    {"per_device_train_batch_size", "batch.micro"},
    {"batch_size", "batch.global"},
    {"global_batch_size", "batch.global"},
    {"train_batch_size", "batch.global"},
    {"learning_rate", "optimizer.lr"},
    {"max_lr", "optimizer.lr"},
    {"wd", "optimizer.weight_decay"},
    {"adam_beta1", "optimizer.beta1"},
    {"adam_beta2", "optimizer.beta2"},
    {"adam_eps", "optimizer.epsilon"},
    {"adam_epsilon", "optimizer.epsilon"},
    {"eps", "optimizer.epsilon"},
    {"grad_clip", "optimizer.clip"},
    {"clip_grad", "optimizer.clip"},
    {"gradient_clipping", "optimizer.clip"},
    {"max_grad_norm", "optimizer.clip"},
    {"lr_scheduler_type", "schedule.kind"},
    {"lr_decay_style", "schedule.kind"},
    {"warmup_steps", "schedule.warmup"},
    {"warmup_iters", "schedule.warmup"},
    {"lr_warmup_iters", "schedule.warmup"},
    {"decay_steps", "schedule.decay"},
    {"lr_decay_iters", "schedule.decay"},
    {"min_lr", "schedule.floor"},
    {"dtype", "precision.compute"},
    {"bf16", "precision.compute"},
    {"activation_checkpointing", "memory.recompute"},
    {"gradient_checkpointing", "memory.recompute"},
    {"train_data", "data.train"},
    {"train_data_path", "data.train"},
    {"data_path", "data.train"},
    {"val_data", "data.validation"},
    {"valid_data_path", "data.validation"},
    {"save_every", "checkpoint.every"},
    {"save_interval", "checkpoint.every"},
    {"save_steps", "checkpoint.every"},
    {"save_total_limit", "checkpoint.keep"},
    {"load", "checkpoint.resume"},
    {"resume_from_checkpoint", "checkpoint.resume"},
    {"log_interval", "log.every"},
    {"logging_steps", "log.every"},
    {"out_dir", "run.directory"},
    {"output_dir", "run.directory"},
    {"max_steps", "run.steps"},
    {"max_iters", "run.steps"},
    {"train_iters", "run.steps"},
    {"num_steps", "run.steps"},
    {"total_steps", "run.steps"},
    {"eval_interval", "run.evaluate_every"},
    {"eval_steps", "run.evaluate_every"},
    {"eval_iters", "run.evaluate_samples"},
};

/// Lower case, with underscores for hyphens.
std::string normalised(std::string_view name) {
  std::string result(name);
  for (char& c : result) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::string_view after_section(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

std::string nearest_deck_key(std::string_view name) {
  const std::string wanted = normalised(name);
  const std::string_view wanted_short = after_section(wanted);
  if (find_deck_key(wanted)) return wanted;
  for (const auto& [foreign, ours] : kForeignNames) {
    if (wanted_short == foreign) return std::string(ours);
  }
  // Whole names are compared first, so that a slip in a section's own keys wins over the same key elsewhere.
  std::vector<std::string> names, short_names;
  for (const DeckKey& key : deck_keys()) {
    names.push_back(key.name);
    short_names.push_back(key.short_name());
  }
  const std::string whole = nearest_name(wanted, names);
  if (!whole.empty() && edit_distance(wanted, whole) <= 1) return whole;
  const std::string short_name = nearest_name(std::string(wanted_short), short_names);
  const auto at = std::find(short_names.begin(), short_names.end(), short_name);
  if (at == short_names.end()) return whole;
  if (!whole.empty() && edit_distance(wanted, whole) <= edit_distance(wanted_short, short_name)) return whole;
  return names[static_cast<std::size_t>(at - short_names.begin())];
}

}  // namespace octet

#include "deck_keys.h"

#include <algorithm>

namespace octet {
namespace {

DeckRange at_least(double low) {
  return {.low = low};
}
DeckRange above(double low) {
  return {.low = low, .open_low = true};
}
DeckRange between(double low, double high) {
  return {.low = low, .high = high};
}
DeckRange above_up_to(double low, double high) {
  return {.low = low, .high = high, .open_low = true};
}
DeckRange from_below(double low, double high) {
  return {.low = low, .high = high, .open_high = true};
}

DeckKey flag(const char* name, bool& (*member)(Deck&), const char* help) {
  return {name, member, {}, {}, help};
}
DeckKey count(const char* name, std::int64_t& (*member)(Deck&), DeckRange range, const char* help) {
  return {name, member, range, {}, help};
}
DeckKey number(const char* name, double& (*member)(Deck&), DeckRange range, const char* help) {
  return {name, member, range, {}, help};
}
DeckKey text(const char* name, std::string& (*member)(Deck&), const char* help) {
  return {name, member, {}, {}, help};
}
DeckKey choice(const char* name, std::string& (*member)(Deck&), std::vector<std::string> choices,
               const char* help) {
  return {name, member, {}, std::move(choices), help};
}

// A key's name is its path in Deck.
#define OCTET_KEY(path)             \
#path, [](Deck & deck) -> auto& { \
    return deck.path;               \
  }

std::vector<DeckKey> model_keys() {
  return {
      choice(OCTET_KEY(model.family), {"llama", "gpt2"},
             "llama: RMSNorm, rotary positions, SwiGLU; gpt2: LayerNorm, learned positions, GELU, biases"),
      count(OCTET_KEY(model.layers), at_least(0), "transformer layers; required"),
      count(OCTET_KEY(model.hidden), at_least(0), "width of the residual stream; required"),
      count(OCTET_KEY(model.heads), at_least(0), "query heads; required"),
      count(OCTET_KEY(model.kv_heads), at_least(0), "key and value heads; 0: as many as heads"),
      count(OCTET_KEY(model.head_size), at_least(0), "width of one head; 0: hidden / heads"),
      count(OCTET_KEY(model.mlp), at_least(0), "inner width of the MLP; 0: 4 x hidden (gpt2 only)"),
      count(OCTET_KEY(model.vocabulary), at_least(0), "token ids; required"),
      count(OCTET_KEY(model.positions), at_least(0),
            "gpt2: rows of the learned position table; 0: batch.sequence"),
      flag(OCTET_KEY(model.tied), "the head is the transposed embedding"),
      flag(OCTET_KEY(model.qkv_bias), "biases on the query, key and value projections"),
      flag(OCTET_KEY(model.qk_norm), "RMSNorm on each query and key head"),
      number(OCTET_KEY(model.norm_epsilon), above(0), "added to the variance in norms"),
      number(OCTET_KEY(model.init_deviation), at_least(0), "standard deviation of initial weights"),
      flag(OCTET_KEY(model.zero_head), "start with a head of zeros: the first loss is ln(vocabulary)"),
      number(OCTET_KEY(model.rope_theta), above(0), "base of the rotary frequencies"),
      choice(OCTET_KEY(model.rope_scaling), {"none", "llama3"}, "how rotary frequencies are stretched"),
      number(OCTET_KEY(model.rope_factor), at_least(1), "llama3: factor of low frequencies"),
      number(OCTET_KEY(model.rope_low_frequency), above(0), "llama3: turns below which all is stretched"),
      number(OCTET_KEY(model.rope_high_frequency), above(0), "llama3: turns above which nothing is"),
      count(OCTET_KEY(model.rope_original), at_least(1), "llama3: sequence length before stretching"),
  };
}

std::vector<DeckKey> layout_keys() {
  return {
      count(OCTET_KEY(parallel.data), at_least(0), "data-parallel ranks; 0: ranks / (the other axes)"),
      count(OCTET_KEY(parallel.tensor), at_least(1), "ranks that share each matrix"),
      count(OCTET_KEY(parallel.context), at_least(1),
            "ranks that share each sequence, as two runs of its tokens each"),
      count(OCTET_KEY(parallel.pipeline), at_least(1), "ranks that share the layers, as stages"),
      count(OCTET_KEY(parallel.zero), between(0, 3),
            "sharded over data ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too"),
      flag(OCTET_KEY(parallel.sequence), "tensor ranks split the sequence between their matrices"),
      count(OCTET_KEY(parallel.tensor_chunks), between(1, 8),
            "pieces of a micro-batch's tokens, 1, 2, 4 or 8: tensor ranks exchange one while they multiply "
            "another; 1: all at once"),
      choice(OCTET_KEY(parallel.schedule), {"1f1b", "interleaved", "zero_bubble"},
             "order of micro-batches in a pipeline"),
      count(OCTET_KEY(parallel.shard_size), at_least(0),
            "replicas that share one set of ZeRO slices, such as those of a node; other sets hold copies; 0: "
            "all"),
      flag(OCTET_KEY(parallel.overlap_optimizer),
           "AdamW runs beside the next step's forward pass, which waits for each layer's new weights"),
      count(OCTET_KEY(parallel.chunks), at_least(1),
            "interleaved: virtual stages on each rank of the pipeline"),
      count(OCTET_KEY(parallel.nccl_max_ctas), between(0, 64),
            "thread blocks that NCCL takes for gradients and parameters over data ranks, at most; 0: its "
            "choice"),
      choice(
          OCTET_KEY(parallel.nccl_cta_policy), {"default", "efficiency", "zero"},
          "the same collectives: NCCL's default, fewer thread blocks where that costs little, or none where "
          "copy engines can do the work"),
      count(OCTET_KEY(parallel.nccl_traffic_class), between(-1, 255),
            "the same collectives: traffic class of their InfiniBand or RoCE packets; -1: NCCL's choice"),
      count(OCTET_KEY(batch.sequence), at_least(0), "tokens a sample; required"),
      count(OCTET_KEY(batch.micro), at_least(1), "samples a rank works on at once"),
      count(OCTET_KEY(batch.global), at_least(0), "samples a step; 0: micro x data"),
  };
}

std::vector<DeckKey> optimizer_keys() {
  return {
      number(OCTET_KEY(optimizer.lr), above_up_to(0, 1), "highest learning rate of AdamW"),
      number(OCTET_KEY(optimizer.weight_decay), between(0, 1), "decoupled weight decay of matrices"),
      number(OCTET_KEY(optimizer.beta1), from_below(0, 1), "decay of the first moment"),
      number(OCTET_KEY(optimizer.beta2), from_below(0, 1), "decay of the second moment"),
      number(OCTET_KEY(optimizer.epsilon), above(0), "added to the root of the second moment"),
      number(OCTET_KEY(optimizer.clip), at_least(0), "largest gradient norm; 0: no clipping"),
      choice(OCTET_KEY(optimizer.moments), {"fp32", "bf16", "8bit"},
             "how moments are kept: 8, 4 or 2 + 1/32 bytes a parameter; bf16 and 8bit round stochastically"),
      choice(OCTET_KEY(optimizer.master), {"fp32", "split"},
             "split: masters are the bf16 parameters and 16 bits each, which saves 2 bytes a parameter up to "
             "ZeRO 2"),
      choice(OCTET_KEY(schedule.kind), {"constant", "linear", "cosine", "wsd"},
             "learning rate after warmup; wsd: constant, then a linear decay"),
      choice(OCTET_KEY(schedule.unit), {"steps", "tokens"}, "unit of warmup and decay"),
      count(OCTET_KEY(schedule.warmup), at_least(0), "length of the linear rise from 0"),
      count(OCTET_KEY(schedule.decay), at_least(0),
            "linear, cosine: where the decay ends, 0: run.steps; wsd: length of the decay at the run's end"),
      number(OCTET_KEY(schedule.floor), between(0, 1), "last learning rate as a fraction of optimizer.lr"),
      choice(OCTET_KEY(precision.compute), {"fp32", "bf16"}, "matrices and activations; masters are fp32"),
      choice(
          OCTET_KEY(precision.fp8), {"none", "current", "delayed", "block"},
          "8-bit products of the blocks' linear layers, scaled by matrix (from its largest magnitude now, or "
          "in earlier steps) or by blocks of 128; all else as precision.compute = bf16"),
      count(OCTET_KEY(precision.fp8_history), between(1, 1024),
            "delayed: steps whose largest magnitudes make a scale"),
      choice(OCTET_KEY(precision.fp8_keep_weights), {"auto", "true", "false"},
             "8-bit copies of the blocks' weights are made once a step and kept, 2 bytes a parameter, 1 with "
             "fp8_gather; auto: where a step has several micro-batches, up to ZeRO 2"),
      flag(OCTET_KEY(precision.fp8_gather),
           "current or delayed, ZeRO 1 to 3: the blocks' weights are gathered and resident in 8 bits, half "
           "the bytes of bf16, with the same results"),
      choice(
          OCTET_KEY(memory.recompute), {"none", "selective", "block"},
          "none: all is kept that the backward pass needs, but what 8-bit products and norms with sequence "
          "parallelism rebuild in any case; selective: backward kernels rebuild norm outputs and MLP "
          "activations from their inputs, at about a hundredth of a step's time; block: keep a layer's input "
          "only and run it again in the backward pass"),
      count(OCTET_KEY(memory.recompute_every), at_least(1), "block: recompute one layer of every so many"),
      count(OCTET_KEY(memory.logits_mib), at_least(1), "largest piece of the logits held at once, MiB"),
  };
}

std::vector<DeckKey> run_keys() {
  return {
      text(OCTET_KEY(data.train), "token file to train on; required"),
      text(OCTET_KEY(data.validation), "token file to evaluate on"),
      flag(OCTET_KEY(data.mask_documents),
           "tokens attend within their document only; positions begin anew; no target across a boundary"),
      count(OCTET_KEY(data.prefetch), at_least(2), "steps read ahead"),
      count(OCTET_KEY(checkpoint.every), at_least(0), "steps between checkpoints; 0: none on the way"),
      flag(OCTET_KEY(checkpoint.at_end), "also write a checkpoint at the last step"),
      count(OCTET_KEY(checkpoint.keep), at_least(0), "newest checkpoints kept; 0: all"),
      text(OCTET_KEY(checkpoint.resume), "auto (the newest in the run folder), none, or a step directory"),
      flag(OCTET_KEY(checkpoint.allow_changes), "resume although the deck alters the run"),
      count(OCTET_KEY(log.every), at_least(1), "steps between log lines"),
      text(OCTET_KEY(run.directory), "run folder: deck, metrics, checkpoints"),
      count(OCTET_KEY(run.steps), at_least(1), "optimizer steps in all"),
      count(OCTET_KEY(run.stop_after), at_least(0),
            "stop with a checkpoint after this step (exit 85); the same command goes on; 0: never"),
      count(OCTET_KEY(run.seed), at_least(0), "seed of initial weights and sample order"),
      choice(OCTET_KEY(run.device), {"auto", "cpu", "cuda"}, "auto: CUDA where there is a GPU"),
      flag(OCTET_KEY(run.share_gpus), "several ranks on one GPU: slow, for tests"),
      choice(OCTET_KEY(run.pin), {"auto", "none"},
             "auto: a rank that no launcher bound runs on the cores near its GPU, or on its share of them"),
      flag(OCTET_KEY(run.deterministic),
           "bitwise equal runs on GPUs too; where cuDNN computes attention, for more memory"),
      choice(
          OCTET_KEY(run.matmul), {"auto", "cublas", "own"},
          "GPU: matrix products on Hopper by own kernels where they are faster than cuBLAS (auto), never, or "
          "wherever there is one"),
      choice(OCTET_KEY(run.attention), {"auto", "cudnn", "own"},
             "GPU: attention on Hopper by own kernels where they are faster than cuDNN (auto), never, or "
             "wherever there is one"),
      flag(OCTET_KEY(run.fuse_matmul),
           "matrix products that are not 8-bit end in the MLP's activation, GELU or SwiGLU, or in its "
           "gradient; false: separate passes"),
      flag(OCTET_KEY(run.tune_matmul),
           "GPU: before the first step, time several ways to compute each matrix product and take the "
           "fastest"),
      text(
          OCTET_KEY(run.tune_cache),
          "folder that remembers those choices; empty: $XDG_CACHE_HOME/octet or ~/.cache/octet, else the run "
          "folder; none: nowhere"),
      count(OCTET_KEY(run.evaluate_every), at_least(0), "steps between evaluations; 0: at the end only"),
      count(OCTET_KEY(run.evaluate_samples), at_least(0), "samples an evaluation; 0: the whole file"),
      count(OCTET_KEY(run.check_replicas), at_least(0),
            "steps between comparisons of all that ranks hold copies of; the first difference ends the run; "
            "0: never"),
      count(OCTET_KEY(run.max_skipped), at_least(1), "skipped steps in a row that end the run (exit 6)"),
  };
}

#undef OCTET_KEY

std::vector<DeckKey> all_keys() {
  std::vector<DeckKey> keys;
  for (auto part : {model_keys(), layout_keys(), optimizer_keys(), run_keys()}) {
    std::move(part.begin(), part.end(), std::back_inserter(keys));
  }
  return keys;
}

}  // namespace

const std::vector<DeckKey>& deck_keys() {
  static const std::vector<DeckKey> keys = all_keys();
  return keys;
}

const DeckKey* find_deck_key(std::string_view name) {
  const auto& keys = deck_keys();
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const DeckKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

}  // namespace octet

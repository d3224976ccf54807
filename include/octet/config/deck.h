#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace octet {

/// The run's settings, one member a key of the deck: `section.key = value`. The table of keys (deck.cpp)
/// gives each its name, type, default, range and help, and is all that `octet help deck`, the parser and the
/// resolved deck are made of. A size of 0 means "follows from the rest" where the help says so.
struct Deck {
  struct Model {
    std::string family = "llama";  ///< llama | gpt2
    std::int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_size = 0, mlp = 0, vocabulary = 0;
    std::int64_t positions = 0;  ///< gpt2: rows of the learned position table
    bool tied = false, qkv_bias = false, qk_norm = false;
    double norm_epsilon = 1e-5, init_deviation = 0.02;
    bool zero_head = false;  ///< start with a head of zeros: the first loss is ln(vocabulary) exactly
    double rope_theta = 10000.0;
    std::string rope_scaling = "none";  ///< none | llama3
    double rope_factor = 8.0, rope_low_frequency = 1.0, rope_high_frequency = 4.0;
    std::int64_t rope_original = 8192;
  } model;
  struct Parallel {
    std::int64_t data = 0, tensor = 1, context = 1, pipeline = 1, zero = 1;
    bool sequence = false;
    std::int64_t tensor_chunks = 1;           ///< 1 | 2 | 4 | 8: pieces of a micro-batch's tokens
    std::string schedule = "1f1b";            ///< 1f1b | interleaved | zero_bubble
    std::int64_t chunks = 1;                  ///< interleaved: virtual stages a rank
    std::int64_t shard_size = 0;              ///< ranks that share one set of slices; 0: all
    std::int64_t nccl_max_ctas = 0;           ///< of gradient and parameter collectives; 0: NCCL's choice
    std::string nccl_cta_policy = "default";  ///< default | efficiency | zero
    std::int64_t nccl_traffic_class = -1;     ///< -1: NCCL's choice
    bool overlap_optimizer = false;           ///< AdamW of later layers beside the next step's first ones
  } parallel;
  struct Batch {
    std::int64_t sequence = 0, micro = 1, global = 0;
  } batch;
  struct Optimizer {
    double lr = 3e-4, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, clip = 1.0;
    std::string moments = "fp32";  ///< fp32 | bf16 | 8bit
    std::string master = "fp32";   ///< fp32 | split
  } optimizer;
  struct Schedule {
    std::string kind = "cosine";  ///< constant | linear | cosine | wsd
    std::string unit = "steps";   ///< steps | tokens, the unit of warmup and decay
    std::int64_t warmup = 0, decay = 0;
    double floor = 0.1;  ///< last learning rate as a fraction of lr
  } schedule;
  struct Precision {
    std::string compute = "bf16";           ///< fp32 | bf16
    std::string fp8 = "none";               ///< none | current | delayed | block: linear layers of blocks
    std::int64_t fp8_history = 16;          ///< delayed: steps whose largest magnitudes make a scale
    std::string fp8_keep_weights = "auto";  ///< auto | true | false: 8-bit weights, over a step
    bool fp8_gather = false;                ///< blocks' weights travel and lie in 8 bits
  } precision;
  struct Memory {
    std::string recompute = "none";    ///< none | selective | block
    std::int64_t recompute_every = 1;  ///< with block: of every so many layers one is recomputed
    std::int64_t logits_mib = 512;     ///< largest piece of the logits held at once
  } memory;
  struct Data {
    std::string train, validation;
    std::int64_t prefetch = 2;  ///< steps read ahead
    bool mask_documents = false;
  } data;
  struct Checkpoint {
    std::int64_t every = 0, keep = 2;
    bool at_end = true;           ///< also at the last step
    std::string resume = "auto";  ///< auto | none | path of a step directory
    bool allow_changes = false;   ///< accept a deck that alters the run (batch, seed, data, schedule, …)
  } checkpoint;
  struct Log {
    std::int64_t every = 10;
  } log;
  struct Run {
    std::string directory = "runs/octet";
    std::int64_t steps = 100,
                 stop_after = 0;  ///< stop_after: stop with a checkpoint after this step (0: never)
    std::int64_t seed = 1234;
    std::string device = "auto";  ///< auto | cpu | cuda
    bool share_gpus = false, deterministic = false;
    std::string pin = "auto";        ///< auto | none
    std::string matmul = "auto";     ///< auto | cublas | own
    std::string attention = "auto";  ///< auto | cudnn | own
    bool fuse_matmul = true;         ///< products end in the MLP's activation or its gradient
    bool tune_matmul = false;        ///< GPU: products by the fastest of several ways, found by timing
    std::string tune_cache;  ///< folder where they are remembered; empty: the user's cache; none: nowhere
    std::int64_t evaluate_every = 0, evaluate_samples = 0;
    std::int64_t check_replicas = 0;
    std::int64_t max_skipped = 10;  ///< skipped steps in a row before the run ends with exit code 6
  } run;

  /// Where each value came from: "default", "FILE:LINE", "--set" or "derived"; by key name.
  std::map<std::string, std::string> origin;
};

/// Reads deck files in order, then --set assignments; later wins. Throws Error(kUsage) with every problem
/// found, one a line: unknown key (nearest name and section), value of the wrong type or out of range, a key
/// given twice in one file, unreadable file. Counts take suffixes k, m, g (powers of 1000) as in `10k`.
Deck read_deck(const std::vector<std::string>& files, const std::vector<std::string>& assignments);

/// The whole deck in the deck's own syntax, each line ending in a comment with the value's origin.
std::string write_deck(const Deck& deck);

/// key -> value as text, for manifests and comparisons.
std::vector<std::pair<std::string, std::string>> deck_values(const Deck& deck);

/// The deck that `deck_values` of some other deck came from. Unknown keys are ignored, missing ones take
/// defaults.
Deck deck_from_values(const std::vector<std::pair<std::string, std::string>>& values);

/// The page of all keys that `octet help deck` prints.
std::string describe_deck();

}  // namespace octet

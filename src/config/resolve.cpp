#include "octet/config/resolve.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "octet/base/error.h"

namespace octet {

namespace {

std::string join(const std::vector<std::int64_t>& values) {
  return fmt::format("{}", fmt::join(values, ", "));
}

std::vector<std::int64_t> divisors(std::int64_t value, std::int64_t largest) {
  std::vector<std::int64_t> result;
  for (std::int64_t d = 1; d <= std::min(value, largest); ++d) {
    if (value % d == 0) result.push_back(d);
  }
  return result;
}

/// The multiples of `unit` on both sides of `value`.
std::string nearest_multiples(std::int64_t value, std::int64_t unit) {
  const std::int64_t below = value / unit * unit;
  return below > 0 ? fmt::format("{} or {}", below, below + unit) : fmt::format("{}", below + unit);
}

class Resolver {
 public:
  Resolver(Deck& deck, int ranks) : deck_(deck), ranks_(ranks) {}

  void run() {
    require();
    finish();
    model();
    layout();
    batch();
    tensor_chunks();
    fp8();
    rest();
    finish();
  }

 private:
  template <typename... Args>
  void problem(fmt::format_string<Args...> text, Args&&... args) {
    problems_.push_back(fmt::format(text, std::forward<Args>(args)...));
  }
  void finish() const {
    if (!problems_.empty()) fail(ErrorKind::kUsage, "{}", fmt::join(problems_, "\n"));
  }
  void derive(const char* key, std::int64_t& value, std::int64_t from) {
    if (value != 0) return;
    value = from;
    deck_.origin[key] = "derived";
  }
  void require() {
    const auto need = [this](const char* key, bool present) {
      if (!present) problem("{} is required: no deck file and no --set gives it", key);
    };
    need("model.layers", deck_.model.layers > 0);
    need("model.hidden", deck_.model.hidden > 0);
    need("model.heads", deck_.model.heads > 0);
    need("model.vocabulary", deck_.model.vocabulary > 0);
    need("model.mlp", deck_.model.mlp > 0 || deck_.model.family == "gpt2");
    need("batch.sequence", deck_.batch.sequence > 0);
    need("data.train", !deck_.data.train.empty());
  }
  void model();
  void layout();
  void batch();
  void tensor_chunks();
  void fp8();
  void fp8_gather();
  void rest();

  Deck& deck_;
  int ranks_;
  std::vector<std::string> problems_;
};

void Resolver::model() {
  Deck::Model& m = deck_.model;
  if (m.head_size == 0 && m.hidden % m.heads != 0) {
    problem("model.hidden = {} does not divide by model.heads = {}: give model.head_size, or heads from {}",
            m.hidden, m.heads, join(divisors(m.hidden, 256)));
    m.head_size = 1;
  }
  derive("model.head_size", m.head_size, m.hidden / m.heads);
  derive("model.kv_heads", m.kv_heads, m.heads);
  derive("model.mlp", m.mlp, 4 * m.hidden);
  if (m.heads % m.kv_heads != 0) {
    problem("model.heads = {} does not divide by model.kv_heads = {}; allowed: {}", m.heads, m.kv_heads,
            join(divisors(m.heads, m.heads)));
  }
  if (m.family == "gpt2") {
    derive("model.positions", m.positions, deck_.batch.sequence);
    if (m.positions < deck_.batch.sequence) {
      problem("batch.sequence = {} is longer than the position table, model.positions = {}",
              deck_.batch.sequence, m.positions);
    }
    if (m.kv_heads != m.heads)
      problem("model.kv_heads = {}: gpt2 has as many key heads as heads ({})", m.kv_heads, m.heads);
    if (m.qkv_bias || m.qk_norm)
      problem("model.qkv_bias and model.qk_norm are for family llama; gpt2 has its own biases");
  } else {
    if (m.head_size % 2 != 0)
      problem("model.head_size = {} is odd: rotary positions turn pairs", m.head_size);
    if (m.positions != 0) problem("model.positions = {}: family llama has no position table", m.positions);
  }
}

void Resolver::layout() {
  Deck::Parallel& p = deck_.parallel;
  const Deck::Model& m = deck_.model;
  const std::int64_t runs = 2 * p.context;
  if (p.context > 1 && deck_.batch.sequence % runs != 0) {
    problem(
        "parallel.context = {} cuts batch.sequence = {} into {} equal runs, which does not divide; nearest "
        "batch.sequence: {}",
        p.context, deck_.batch.sequence, runs, nearest_multiples(deck_.batch.sequence, runs));
  }
  if (p.schedule == "interleaved" && p.chunks < 2) {
    problem("parallel.schedule = interleaved needs parallel.chunks of 2 or more; it is {}", p.chunks);
  }
  if (p.schedule != "interleaved" && p.chunks != 1) {
    problem("parallel.chunks = {} is for parallel.schedule = interleaved", p.chunks);
  }
  if (p.pipeline * p.chunks > m.layers) {
    problem(
        "pipeline {} × chunks {} = {} stages are more than model.layers = {}; allowed parallel.pipeline: up "
        "to {}",
        p.pipeline, p.chunks, p.pipeline * p.chunks, m.layers, m.layers / p.chunks);
  }
  const auto allowed = divisors(std::gcd(m.heads, m.mlp), ranks_);
  if (m.heads % p.tensor != 0 || m.mlp % p.tensor != 0) {
    problem("parallel.tensor = {} must divide model.heads = {} and model.mlp = {}; allowed with {} ranks: {}",
            p.tensor, m.heads, m.mlp, ranks_, join(allowed));
  }
  const std::int64_t others = p.tensor * p.context * p.pipeline;
  if (ranks_ % others != 0) {
    problem(
        "{} ranks do not divide by tensor {} × context {} × pipeline {} = {}; start {} ranks, or "
        "parallel.tensor from {}",
        ranks_, p.tensor, p.context, p.pipeline, others, nearest_multiples(ranks_, others),
        join(divisors(ranks_, ranks_)));
    return;
  }
  derive("parallel.data", p.data, ranks_ / others);
  if (p.data * others != ranks_) {
    problem(
        "data {} × tensor {} × context {} × pipeline {} = {} ranks, but {} were started; leave parallel.data "
        "out, or set it to {}",
        p.data, p.tensor, p.context, p.pipeline, p.data * others, ranks_, ranks_ / others);
  }
  const std::int64_t replicas = p.data * p.context;
  if (p.shard_size > 0 && p.zero == 0) {
    problem("parallel.shard_size = {} has no effect with parallel.zero = 0, which cuts nothing",
            p.shard_size);
  } else if (p.shard_size > 0 && replicas % p.shard_size != 0) {
    problem("parallel.shard_size = {} must divide data {} × context {} = {} replicas; allowed: {}",
            p.shard_size, p.data, p.context, replicas, join(divisors(replicas, replicas)));
  }
}

void Resolver::batch() {
  Deck::Batch& b = deck_.batch;
  const Deck::Parallel& p = deck_.parallel;
  const std::int64_t data = std::max<std::int64_t>(p.data, 1), unit = b.micro * data;
  derive("batch.global", b.global, unit);
  if (b.global % unit != 0) {
    problem("batch.global = {} does not divide by micro {} × data {} = {}; nearest: {}", b.global, b.micro,
            data, unit, nearest_multiples(b.global, unit));
  }
  const std::int64_t micro_batches = b.global / unit;
  if (p.schedule == "interleaved" && p.pipeline > 1 && micro_batches % p.pipeline != 0) {
    problem(
        "parallel.schedule = interleaved takes batch.global / (micro × data) = {} micro-batches in rounds of "
        "pipeline {}; nearest "
        "batch.global: {}",
        micro_batches, p.pipeline, nearest_multiples(b.global, unit * p.pipeline));
  }
  const std::int64_t local = b.sequence / p.context;
  if (p.sequence && p.tensor > 1 && b.micro * local % p.tensor != 0) {
    problem(
        "sequence parallelism splits micro {} × sequence {} / context {} = {} tokens over tensor {}, which "
        "does not "
        "divide; nearest batch.sequence: {}",
        b.micro, b.sequence, p.context, b.micro * local, p.tensor,
        nearest_multiples(b.sequence, p.tensor * p.context));
  }
}

void Resolver::tensor_chunks() {
  const Deck::Parallel& p = deck_.parallel;
  const std::int64_t n = p.tensor_chunks;
  if (n == 1) return;
  if (n != 2 && n != 4 && n != 8) {
    problem("parallel.tensor_chunks = {} is not allowed; allowed: 1, 2, 4, 8", n);
    return;
  }
  if (p.tensor == 1) return;
  // A piece has an equal run for every rank that holds a share of it; 8-bit products take 16 rows.
  const bool narrow = deck_.precision.fp8 != "none";
  const std::int64_t shares = p.sequence ? p.tensor : 1;
  const std::int64_t unit = narrow ? std::lcm(shares, std::int64_t{16}) : shares;
  const std::int64_t micro = deck_.batch.micro, tokens = micro * deck_.batch.sequence / p.context;
  if (tokens % (n * unit) == 0) return;
  std::vector<std::int64_t> chunks;
  for (const std::int64_t other : {1, 2, 4, 8}) {
    if (tokens % (other * unit) == 0 || other == 1) chunks.push_back(other);
  }
  // Of a whole sample: so many tokens that a micro-batch of them divides.
  const std::int64_t step =
      std::lcm(n * unit / std::gcd(n * unit, micro) * p.context, p.context > 1 ? 2 * p.context : 1);
  problem(
      "parallel.tensor_chunks = {} cuts micro {} x sequence {} / context {} = {} tokens into pieces that "
      "must "
      "be multiples of {}{}; nearest batch.sequence: {}; or parallel.tensor_chunks from {}",
      n, micro, deck_.batch.sequence, p.context, tokens, unit,
      narrow ? fmt::format(" (precision.fp8 = {})", deck_.precision.fp8) : "",
      nearest_multiples(deck_.batch.sequence, step), join(chunks));
}

void Resolver::fp8() {
  const std::string& recipe = deck_.precision.fp8;
  fp8_gather();
  if (recipe == "none") return;
  if (deck_.precision.compute != "bf16") {
    problem("precision.fp8 = {} needs precision.compute = bf16; it is {}", recipe, deck_.precision.compute);
  }
  const Deck::Model& m = deck_.model;
  const Deck::Parallel& p = deck_.parallel;
  // Matrix units take rows of whole 16 bytes; a scale by block serves 128 elements.
  const std::int64_t unit = recipe == "block" ? 128 : 16;
  const auto divides = [&](const char* keys, std::int64_t value) {
    if (value % unit == 0) return;
    problem("precision.fp8 = {}: {} = {} must be a multiple of {}; nearest: {}", recipe, keys, value, unit,
            nearest_multiples(value, unit));
  };
  divides("model.hidden", m.hidden);
  if (m.mlp % p.tensor == 0) divides("model.mlp / tensor", m.mlp / p.tensor);
  if (m.heads % p.tensor == 0) divides("model.heads / tensor x head_size", m.heads / p.tensor * m.head_size);
  const std::int64_t kv_heads = m.kv_heads % p.tensor == 0 ? m.kv_heads / p.tensor : m.kv_heads;
  divides("2 x key heads of a rank x model.head_size", 2 * kv_heads * m.head_size);
  divides("batch.micro x sequence / context", deck_.batch.micro * deck_.batch.sequence / p.context);
}

void Resolver::fp8_gather() {
  const Deck::Precision& p = deck_.precision;
  if (!p.fp8_gather) return;
  if (p.fp8 == "none") problem("precision.fp8_gather needs precision.fp8 = current or delayed; it is none");
  if (p.fp8 == "block") {
    problem(
        "precision.fp8_gather does not go with precision.fp8 = block, whose squares of 128 x 128 the ranks' "
        "slices cut; allowed: precision.fp8 = current or delayed, or precision.fp8_gather = false");
  }
  if (deck_.parallel.zero == 0)
    problem("precision.fp8_gather has no effect with parallel.zero = 0, which gathers nothing");
}

void Resolver::rest() {
  const std::int64_t per_step =
      deck_.schedule.unit == "tokens" ? deck_.batch.global * deck_.batch.sequence : 1;
  const std::int64_t total = deck_.run.steps * per_step;
  if (deck_.schedule.warmup > total) {
    problem("schedule.warmup = {} {} is longer than the run, run.steps = {}", deck_.schedule.warmup,
            deck_.schedule.unit, deck_.run.steps);
  }
  if (deck_.schedule.warmup + deck_.schedule.decay > total && deck_.schedule.kind == "wsd") {
    problem("schedule.warmup + schedule.decay = {} {} is longer than the run of {}",
            deck_.schedule.warmup + deck_.schedule.decay, deck_.schedule.unit, total);
  }
  if (deck_.optimizer.master == "split" && deck_.precision.compute == "fp32") {
    problem(
        "optimizer.master = split keeps masters as bf16 parameters and a remainder, but precision.compute = "
        "fp32; allowed: optimizer.master = fp32, or precision.compute = bf16");
  }
  if (deck_.run.evaluate_every > 0 && deck_.data.validation.empty()) {
    problem("run.evaluate_every = {} needs data.validation", deck_.run.evaluate_every);
  }
}

}  // namespace

void resolve_deck(Deck& deck, int ranks) {
  Resolver(deck, ranks).run();
}

}  // namespace octet

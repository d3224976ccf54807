#include <algorithm>
#include <array>
#include <cmath>

#include "octet/base/rng.h"
#include "octet/bench/session.h"
#include "octet/train/engine.h"

namespace octet {

namespace {

constexpr int kWarmUpSteps = 2;

struct PhaseName {
  StepPhase phase;
  const char* name;
};
constexpr PhaseName kPhaseNames[] = {
    {StepPhase::kUpload, "upload"},           {StepPhase::kForward, "forward"},
    {StepPhase::kHead, "head and loss"},      {StepPhase::kBackward, "backward"},
    {StepPhase::kMessages, "stage messages"}, {StepPhase::kReduction, "gradient reduction left over"},
    {StepPhase::kOptimizer, "optimizer"}};
static_assert(std::size(kPhaseNames) == kStepPhases);

/// A step of random tokens, in page-locked memory: the same in every layout.
class RandomStep {
 public:
  RandomStep(Device& device, const BatchCut& cut, std::int64_t vocabulary) {
    const std::int64_t each = MicroBatch::kArrays * cut.tokens();
    memory_ = device.allocate_host(each * cut.micro_batches() * 4, "random tokens");
    auto* const packed = static_cast<std::int32_t*>(memory_->data());
    for (std::int64_t index = 0; index < cut.micro_batches(); ++index) {
      std::vector<SampleArrays> samples;
      for (std::int64_t j = 0; j < cut.micro; ++j)
        samples.push_back(sample(cut, cut.position(index, j), vocabulary));
      pack_micro_batch(cut, samples, packed + index * each);
      batches_.push_back({packed + index * each, cut.tokens()});
    }
  }
  const std::vector<MicroBatch>& batches() const { return batches_; }

 private:
  static SampleArrays sample(const BatchCut& cut, std::int64_t number, std::int64_t vocabulary) {
    const auto id = [&](std::int64_t i) {
      const std::uint64_t word = mix(static_cast<std::uint64_t>(number), static_cast<std::uint64_t>(i));
      return static_cast<std::int32_t>(word % static_cast<std::uint64_t>(vocabulary));
    };
    SampleArrays arrays;
    for (std::int64_t i = 0; i < cut.sequence; ++i) {
      arrays.ids.push_back(id(i));
      arrays.targets.push_back(id(i + 1));
      arrays.positions.push_back(static_cast<std::int32_t>(i));
      arrays.starts.push_back(0);
    }
    return arrays;
  }

  std::unique_ptr<Buffer> memory_;
  std::vector<MicroBatch> batches_;
};

/// A step's time and its parts on this rank, in milliseconds; the last part is what no phase has.
struct StepTimes {
  double step_ms = 0.0, comm_ms = 0.0;
  std::array<double, kStepPhases + 1> parts{};
};

struct Steps {
  std::vector<StepTimes> times;
  std::vector<StepResult> results;  ///< of all steps, warm-up too
};

/// Trains on one batch again and again; the host stays a step ahead, as in a run.
Steps run_steps(Engine& engine, const RandomStep& tokens, Device& device, int measured) {
  PhaseTimer phases(device);
  engine.initialise();
  engine.time_phases(&phases);
  Steps steps;
  const auto take = [&] {
    const StepResult result = engine.result();
    const int number = static_cast<int>(steps.results.size()) + 1;
    steps.results.push_back(result);
    if (number <= kWarmUpSteps) return;
    StepTimes times;
    times.step_ms = result.step_ms;
    times.comm_ms = result.comm_ms;
    const auto parts = phases.milliseconds(number);
    std::copy(parts.begin(), parts.end(), times.parts.begin());
    double sum = 0.0;
    for (const double part : parts) sum += part;
    times.parts.back() = std::max(0.0, result.step_ms - sum);
    steps.times.push_back(times);
  };
  for (int step = 0; step < kWarmUpSteps + measured; ++step) {
    engine.step(tokens.batches(), true);
    if (engine.pending() > 1) take();
  }
  take();
  engine.time_phases(nullptr);
  return steps;
}

/// A head of zeros gives every token the loss ln(vocabulary), exactly; a tied one begins near it. Trained on
/// the same tokens again and again, the loss must fall.
bool right(const Steps& steps, const Deck::Model& model) {
  const double uniform = std::log(static_cast<double>(model.vocabulary));
  const double first = steps.results.front().loss, last = steps.results.back().loss;
  const bool skipped = std::any_of(steps.results.begin(), steps.results.end(),
                                   [](const StepResult& result) { return result.skipped; });
  return !skipped && std::abs(first - uniform) <= (model.tied ? 0.1 : 1e-3) * uniform && last < first;
}

double over_ranks(const World& world, double value, MPI_Op op) {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, op, world.ranks());
  return value;
}

}  // namespace

PartResult bench_step(BenchSession& session) {
  PartResult result{"",
                    ResultTable({{"phase", "phase"},
                                 {"ms", "ms", 3},
                                 {"slowest_rank_ms", "slowest rank ms", 3},
                                 {"percent", "%"},
                                 {"tokens_s", "tokens/s", 0},
                                 {"tflops", "TFLOP/s a rank", 3},
                                 {"mfu_percent", "MFU %"},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  Deck deck = session.deck;
  deck.model.zero_head = !deck.model.tied;
  deck.schedule.kind = "constant";
  deck.schedule.warmup = 0;
  deck.optimizer.lr = 3e-4;  // small enough for any model to learn from its first step on
  deck.run.steps = kWarmUpSteps + session.limits.steps;
  Engine engine(session.world, deck, session.device, session.shared_device);
  const RandomStep tokens(session.device, engine.cut(), deck.model.vocabulary);
  const Steps steps = run_steps(engine, tokens, session.device, session.limits.steps);
  result.title = fmt::format("one training step, {}, {} micro-batch{}", engine.layout(),
                             engine.cut().micro_batches(), engine.cut().micro_batches() == 1 ? "" : "es");

  // The median step, by the slowest rank's time, so that its parts add up.
  std::vector<double> slowest;
  for (const StepTimes& times : steps.times)
    slowest.push_back(over_ranks(session.world, times.step_ms, MPI_MAX));
  std::vector<double> sorted = slowest;
  std::sort(sorted.begin(), sorted.end());
  const auto middle = std::find(slowest.begin(), slowest.end(), sorted[sorted.size() / 2]) - slowest.begin();
  const StepTimes& median = steps.times[static_cast<std::size_t>(middle)];

  const double ranks = session.world.size();
  const auto mean = [&](double value) { return over_ranks(session.world, value, MPI_SUM) / ranks; };
  const double step_ms = mean(median.step_ms);
  const auto row = [&](const std::string& name, double ms) {
    const double average = mean(ms);
    return nlohmann::json{{"phase", name},
                          {"ms", average},
                          {"slowest_rank_ms", over_ranks(session.world, ms, MPI_MAX)},
                          {"percent", 100 * average / step_ms}};
  };
  for (std::size_t i = 0; i < std::size(kPhaseNames); ++i) {
    const auto phase = static_cast<std::size_t>(kPhaseNames[i].phase);
    if (kPhaseNames[i].phase == StepPhase::kMessages && deck.parallel.pipeline == 1) continue;
    result.table.add(row(kPhaseNames[i].name, median.parts[phase]));
  }
  result.table.add(row("rest", median.parts.back()));
  nlohmann::json whole = row("step", median.step_ms);
  const double seconds = slowest[static_cast<std::size_t>(middle)] / 1e3;
  const double tokens_s = static_cast<double>(deck.batch.global * deck.batch.sequence) / seconds;
  const double flops = tokens_s * flops_per_token(engine.shape(), deck.batch.sequence) / ranks;
  whole["tokens_s"] = tokens_s;
  whole["tflops"] = flops / 1e12;
  if (session.device.peak_flops() > 0) whole["mfu_percent"] = 100 * flops / session.device.peak_flops();
  whole["correct"] = session.everywhere(right(steps, deck.model));
  result.table.add(std::move(whole));
  const double comm = mean(median.comm_ms);
  result.notes.push_back(fmt::format(
      "collectives, and waits for them, that the compute stream stood still for: {:.3f} ms of the step, in "
      "whichever phase they came; loss {:.4f} -> {:.4f} on the same tokens over {} steps",
      comm, steps.results.front().loss, steps.results.back().loss, steps.results.size()));
  result.notes.push_back(
      "the median step of the measured ones; ms: mean over ranks; head and loss have the head's gradients "
      "too; "
      "rest: between steps; correct: the first loss is ln(vocabulary), and it falls");
  return result;
}

}  // namespace octet

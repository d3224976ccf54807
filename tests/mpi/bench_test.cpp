// `octet bench` part by part: its numbers are sane, and a wrong result does not go unnoticed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "../src/ops/cpu/cpu_ops.h"
#include "octet/bench/bench.h"
#include "octet/bench/operands.h"
#include "octet/config/resolve.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

using Names = std::set<std::string>;

/// What a fault changes: the first element of a result.
void damage(const Tensor& values) {
  if (values.dtype == DType::kBF16) {
    *values.as<BF16>() = BF16(static_cast<float>(*values.as<BF16>()) + 9.0f);
  } else {
    *values.as<float>() += 9.0f;
  }
}

/// The CPU operators, some of which are wrong.
class FaultyOps final : public CpuOps {
 public:
  explicit FaultyOps(Names faults) : CpuOps(1), faults_(std::move(faults)) {}

  void matmul(Stream& stream, const Matmul& args) override {
    CpuOps::matmul(stream, args);
    if (faulty("weight gradient") && args.accumulate) damage(args.y);
    if (faulty("bias gradient") && args.bias_gradient) damage(args.bias_gradient);
  }
  void swiglu_backward(Stream& stream, Tensor gate_up, Tensor dout, Tensor largest) override {
    CpuOps::swiglu_backward(stream, gate_up, dout, largest);
    if (faulty("swiglu backward")) damage(gate_up);
  }
  void cross_entropy_finish(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                            Tensor targets, Tensor partials, double weight, bool gradient,
                            StepScalars* scalars) override {
    CpuOps::cross_entropy_finish(stream, logits, first_id, valid, targets, partials, weight, gradient,
                                 scalars);
    if (faulty("cross-entropy, second half")) scalars->loss *= 1.01;
  }
  void attention_forward(Stream& stream, const AttentionShape& shape, const AttentionOperands& operands,
                         SampleRows out, Tensor statistics) override {
    AttentionShape wrong = shape;
    if (faulty("attention")) wrong.scale *= 1.5f;
    CpuOps::attention_forward(stream, wrong, operands, out, statistics);
  }

 private:
  bool faulty(const char* what) const { return faults_.count(what) > 0; }
  Names faults_;
};

/// Passes everything on, but for some operations.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> ranks, Names faults)
      : ranks_(std::move(ranks)), faults_(std::move(faults)) {}

  int rank() const override { return ranks_->rank(); }
  int size() const override { return ranks_->size(); }
  const std::string& name() const override { return ranks_->name(); }
  void all_reduce(Stream& stream, Tensor values, ReduceOp op) override {
    ranks_->all_reduce(stream, values, op);
    spoil("all_reduce", values);
  }
  void reduce_scatter(Stream& stream, Tensor in, Tensor out) override {
    ranks_->reduce_scatter(stream, in, out);
    spoil("reduce_scatter", out);
  }
  void all_gather(Stream& stream, Tensor in, Tensor out) override {
    ranks_->all_gather(stream, in, out);
    spoil("all_gather", out);
  }
  void all_to_all(Stream& stream, Tensor in, Tensor out) override {
    ranks_->all_to_all(stream, in, out);
    spoil("all_to_all", out);
  }
  void send(Stream& stream, Tensor values, int to) override { ranks_->send(stream, values, to); }
  void receive(Stream& stream, Tensor values, int from) override {
    ranks_->receive(stream, values, from);
    spoil("send_receive", values);
  }

 private:
  /// The last rank alone gets it wrong, in the last element.
  void spoil(const char* operation, const Tensor& values) {
    if (faults_.count(operation) > 0 && rank() == size() - 1) damage(values.range(values.size() - 1, 1));
  }
  std::unique_ptr<Communicator> ranks_;
  Names faults_;
};

class Bench : public testing::Test {
 protected:
  void SetUp() override {
    deck_ = tiny_deck();
    deck_.model.layers = 2;
    deck_.batch.sequence = 32;
    deck_.parallel.tensor = std::min(world_.size(), 2);
    std::vector<char> name(64);
    std::snprintf(name.data(), name.size(), "/tmp/octet-bench-%d", world_.rank() == 0 ? getpid() : 0);
    MPI_Bcast(name.data(), 64, MPI_CHAR, 0, MPI_COMM_WORLD);
    folder_ = name.data();
    deck_.run.directory = folder_.string();
    if (world_.rank() == 0) std::filesystem::create_directories(folder_);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_.rank() == 0) std::filesystem::remove_all(folder_);
  }

  struct Outcome {
    int code = -1;
    nlohmann::json json;
  };
  /// Parts on CPU ranks, some of whose operations are wrong.
  Outcome run(const std::vector<std::string>& parts, const Names& faults = {}) {
    const std::unique_ptr<Device> device = make_cpu_device();
    return run_on(*device, false, parts,
                  {[&] { return std::make_unique<FaultyOps>(faults); },
                   [&](MPI_Comm ranks, const std::string& name) {
                     return std::make_unique<FaultyCommunicator>(make_mpi_communicator(ranks, name), faults);
                   }});
  }
  Outcome run_on(Device& device, bool shared, const std::vector<std::string>& parts,
                 const BenchBackend& backend) {
    Deck deck = deck_;
    resolve_deck(deck, world_.size());
    const std::unique_ptr<Stream> stream = device.make_stream();
    BenchLimits limits = default_limits(DeviceKind::kCpu);
    limits.max_bytes = 32 << 10;
    limits.io_bytes = 1 << 20;
    limits.seconds = 1e-4;
    limits.flops = 4e6;
    limits.copy_bytes = 1 << 18;
    BenchSession session{world_, deck, device, shared, backend, limits, *stream};
    const std::string json = (folder_ / "bench.json").string();
    testing::internal::CaptureStdout();
    Outcome outcome{run_parts(session, parts, json), {}};
    printed_ = testing::internal::GetCapturedStdout();
    MPI_Barrier(MPI_COMM_WORLD);
    std::ifstream file(json);
    outcome.json = nlohmann::json::parse(file);
    MPI_Barrier(MPI_COMM_WORLD);
    return outcome;
  }
  /// A part's rows whose results are wrong, by the value of `key`.
  static std::set<std::string> wrong(const Outcome& outcome, const std::string& part,
                                     const std::string& key) {
    std::set<std::string> found;
    for (const auto& row : outcome.json["parts"][part]["rows"]) {
      if (row["correct"].is_boolean() && !row["correct"].get<bool>())
        found.insert(row[key].get<std::string>());
    }
    return found;
  }
  static const nlohmann::json& rows(const Outcome& outcome, const std::string& part) {
    return outcome.json["parts"][part]["rows"];
  }

  World world_{MPI_COMM_WORLD};
  Deck deck_;
  std::filesystem::path folder_;
  std::string printed_;
};

TEST_F(Bench, CommMeasuresEveryAxisOfTheLayoutAndTheWorld) {
  deck_.precision.compute = "bf16";
  const Outcome outcome = run({"comm"});
  EXPECT_EQ(outcome.code, 0) << printed_;
  Names axes, operations, types;
  for (const auto& row : rows(outcome, "comm")) {
    axes.insert(row["axis"].get<std::string>());
    operations.insert(row["operation"].get<std::string>());
    types.insert(row["type"].get<std::string>());
    EXPECT_TRUE(row["correct"].get<bool>()) << row;
    EXPECT_GT(row["time_us"].get<double>(), 0.0) << row;
    const double n = row["ranks"].get<double>();
    const double factor = row["operation"] == "send_receive" ? 1.0
                          : row["operation"] == "all_reduce" ? 2 * (n - 1) / n
                                                             : (n - 1) / n;
    EXPECT_NEAR(row["bus_gb_s"].get<double>(), factor * row["algorithm_gb_s"].get<double>(), 1e-9) << row;
    EXPECT_NEAR(row["algorithm_gb_s"].get<double>(),
                row["bytes"].get<double>() / row["time_us"].get<double>() / 1e3, 1e-9)
        << row;
    EXPECT_TRUE(row["expected_gb_s"].is_null()) << "nothing is expected of CPU ranks: " << row;
  }
  const int ranks = world_.size();
  EXPECT_EQ(axes, ranks == 1 ? Names{} : ranks == 2 ? Names{"tensor"} : (Names{"tensor", "data", "world"}));
  if (ranks == 1) return;
  EXPECT_EQ(operations, (Names{"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"}));
  EXPECT_EQ(types, (Names{"bfloat16", "float32"}));
}

TEST_F(Bench, CommFindsTheOneWrongElementOfOneRank) {
  if (world_.size() == 1) return;  // nothing is exchanged
  for (const Names& faults :
       {Names{"all_reduce", "all_to_all", "send_receive"}, Names{"all_gather", "reduce_scatter"}}) {
    const Outcome outcome = run({"comm"}, faults);
    EXPECT_EQ(outcome.code, 5);
    EXPECT_EQ(wrong(outcome, "comm", "operation"), faults);
    EXPECT_EQ(printed_.find("WRONG") != std::string::npos, world_.rank() == 0) << printed_;
  }
}

TEST_F(Bench, OperatorsAreMeasuredAndRight) {
  for (const bool gpt2 : {false, true}) {
    deck_.model.family = gpt2 ? "gpt2" : "llama";
    deck_.model.kv_heads = gpt2 ? 4 : 2;
    deck_.model.qk_norm = !gpt2;
    deck_.model.mlp = 256;
    deck_.precision.compute = gpt2 ? "bf16" : "fp32";
    deck_.data.mask_documents = gpt2;
    const Outcome outcome = run({"matmul", "attention", "kernels"});
    EXPECT_EQ(outcome.code, 0) << printed_;
    EXPECT_EQ(rows(outcome, "matmul").size(), gpt2 ? 18u : 15u)
        << "three of each linear layer and of the head; of GPT-2 three with a GELU";
    for (const auto& row : rows(outcome, "matmul")) {
      const double flops = 2.0 * row["m"].get<double>() * row["n"].get<double>() * row["k"].get<double>();
      EXPECT_NEAR(row["tflops"].get<double>(), flops / row["time_us"].get<double>() / 1e6, 1e-9) << row;
      EXPECT_LE(row["percent_of_best"].get<double>(), 100.0 + 1e-9) << row;
    }
    EXPECT_EQ(rows(outcome, "attention").size(), 2u);
    Names kernels;
    for (const auto& row : rows(outcome, "kernels")) {
      kernels.insert(row["kernel"].get<std::string>());
      EXPECT_NEAR(row["gb_s"].get<double>(), 1e3 * row["mb"].get<double>() / row["time_us"].get<double>(),
                  1e-9);
    }
    EXPECT_EQ(kernels.count(gpt2 ? "gelu backward" : "swiglu backward"), 1u);
    EXPECT_EQ(kernels.count("head norm backward"), gpt2 ? 0u : 1u);
    EXPECT_EQ(kernels.count("norm backward, bias gradient"), gpt2 ? 1u : 0u);
    for (const char* part : {"matmul", "attention", "kernels"})
      EXPECT_TRUE(outcome.json["parts"][part]["correct"].get<bool>()) << part;
  }
}

TEST_F(Bench, FaultsOfOperatorsShowInTheirRows) {
  const Outcome outcome =
      run({"matmul", "attention", "kernels"},
          {"weight gradient", "attention", "swiglu backward", "cross-entropy, second half"});
  EXPECT_EQ(outcome.code, 5);
  EXPECT_FALSE(outcome.json["correct"].get<bool>());
  EXPECT_EQ(wrong(outcome, "matmul", "pass"), Names{"weight gradient"});
  EXPECT_EQ(wrong(outcome, "attention", "pass").count("forward"), 1u);
  // The CPU's one pass is made of the two halves.
  EXPECT_EQ(wrong(outcome, "kernels", "kernel"),
            (Names{"swiglu backward", "cross-entropy, second half", "cross-entropy, one pass"}));
}

TEST_F(Bench, AWrongBiasGradientShowsInTheRowOfItsProduct) {
  deck_.model.family = "gpt2";
  deck_.model.kv_heads = 4;
  deck_.model.qk_norm = false;
  const Outcome outcome = run({"matmul"}, {"bias gradient"});
  EXPECT_EQ(outcome.code, 5);
  EXPECT_EQ(wrong(outcome, "matmul", "pass"), Names{"input gradient with gelu, bias gradient"});
}

TEST_F(Bench, EightBitProductsAndCopiesAreMeasuredWhereTheDeckHasThem) {
  if (world_.size() > 1) return;  // they know nothing of other ranks
  deck_.model.hidden = 128;
  deck_.model.mlp = 128;
  deck_.batch.sequence = 128;
  deck_.precision.compute = "bf16";
  for (const char* recipe : {"current", "block"}) {
    deck_.precision.fp8 = recipe;
    const Outcome outcome = run({"matmul", "kernels"});
    EXPECT_EQ(outcome.code, 0) << printed_;
    EXPECT_EQ(rows(outcome, "matmul").size(), 27u) << "three of each linear layer and of the head, three "
                                                      "more of each linear layer";
    EXPECT_NE(printed_.find("8-bit copy and transpose"), std::string::npos);
    const bool by_tensor = deck_.precision.fp8 == "current";
    EXPECT_EQ(printed_.find("norm backward, 8 bits") != std::string::npos, by_tensor);
    EXPECT_EQ(run({"matmul"}, {"weight gradient"}).code, 5);
  }
}

TEST_F(Bench, AttentionOfContextRanksIsMeasuredOnTheirLastRun) {
  if (world_.size() == 1) return;  // one rank has whole samples
  deck_.parallel.tensor = 1;
  deck_.parallel.context = 2;
  const Outcome outcome = run({"attention"});
  EXPECT_EQ(outcome.code, 0) << printed_;
  for (const auto& row : rows(outcome, "attention")) {
    EXPECT_EQ(row["queries"], 8);
    EXPECT_EQ(row["keys"], 32);
  }
}

TEST_F(Bench, IoReadsBackWhatItWroteAndLeavesNothing) {
  const Outcome outcome = run({"io"});
  EXPECT_EQ(outcome.code, 0) << printed_;
  Names checked;
  for (const auto& row : rows(outcome, "io")) {
    EXPECT_GT(row["gb_s"].get<double>(), 0.0) << row;
    if (row["correct"].is_boolean()) checked.insert(row["what"].get<std::string>());
  }
  EXPECT_EQ(checked, (Names{"checkpoint write", "raw read", "checkpoint read", "tokens, batch loader"}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "bench-io"));
}

TEST_F(Bench, PhasesOfAStepAddUpToIt) {
  if (world_.size() >= 4) {
    deck_.parallel.pipeline = 2;
    deck_.parallel.zero = 2;
  }
  const Outcome outcome = run({"step"});
  EXPECT_EQ(outcome.code, 0) << printed_;
  double sum = 0.0, step = 0.0;
  Names phases;
  for (const auto& row : rows(outcome, "step")) {
    const double ms = row["ms"].get<double>();
    EXPECT_GE(ms, 0.0) << row;
    EXPECT_GE(row["slowest_rank_ms"].get<double>(), ms * (1 - 1e-9)) << row;
    phases.insert(row["phase"].get<std::string>());
    (row["phase"] == "step" ? step : sum) += ms;
  }
  EXPECT_NEAR(sum, step, 1e-6 * step);
  EXPECT_EQ(phases.count("stage messages"), world_.size() >= 4 ? 1u : 0u);
  EXPECT_EQ(phases.count("head and loss"), 1u);
  const nlohmann::json& whole = rows(outcome, "step").back();
  EXPECT_TRUE(whole["correct"].get<bool>());
  EXPECT_GT(whole["tokens_s"].get<double>(), 0.0);
}

TEST_F(Bench, CudaPartsAreRight) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  deck_.run.device = "cuda";
  deck_.run.share_gpus = true;
  for (const char* compute : {"bf16", "fp32"}) {
    deck_.precision.compute = compute;
    const DeviceChoice choice = open_device(world_, deck_.run);
    const Outcome outcome = run_on(*choice.device, choice.shared, {},
                                   {[&] { return make_cuda_ops(*choice.device); },
                                    [&](MPI_Comm ranks, const std::string& name) {
                                      return make_communicator(ranks, *choice.device, choice.shared, name);
                                    }});
    EXPECT_EQ(outcome.code, 0) << printed_;
  }
}

TEST(BenchAgreement, OneElementFarOffOrNotANumberIsNoAgreement) {
  std::vector<float> expected(10000);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = std::sin(static_cast<float>(i));
  std::vector<float> found = expected;
  found[77] += 1e-3f;
  EXPECT_TRUE(agree(found, expected, 1e-2));
  found[77] += 1.0f;
  EXPECT_FALSE(agree(found, expected, 1e-2));
  found[77] = std::nanf("");
  EXPECT_FALSE(agree(found, expected, 1e-2));
}

}  // namespace
}  // namespace octet::test

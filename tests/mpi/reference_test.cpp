// Whole models against PyTorch: the loss, every gradient and three AdamW steps of tiny models, in every
// layout of the ranks at hand. The recorded values are true to float32
// (tests/reference/make_model_reference.py).
#include "reference/reference_file.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

Deck deck_of(const ReferenceFile& file, const std::string& family) {
  const auto value = [&](const std::string& name) { return file["config/" + name].values[0]; };
  const auto count = [&](const std::string& name) { return static_cast<std::int64_t>(value(name)); };
  Deck deck = tiny_deck();
  deck.model.family = family;
  deck.model.layers = count("layers");
  deck.model.hidden = count("hidden");
  deck.model.heads = count("heads");
  deck.model.kv_heads = count("kv_heads");
  deck.model.head_size = count("head_size");
  deck.model.mlp = count("mlp");
  deck.model.vocabulary = count("vocabulary");
  deck.model.tied = count("tied") != 0;
  deck.model.norm_epsilon = value("norm_epsilon");
  if (family == "gpt2") {
    deck.model.positions = count("positions");
  } else {
    deck.model.qkv_bias = count("qkv_bias") != 0;
    deck.model.qk_norm = count("qk_norm") != 0;
    deck.model.rope_theta = value("rope_theta");
    if (file.contains("config/rope_factor")) {
      deck.model.rope_scaling = "llama3";
      deck.model.rope_factor = value("rope_factor");
      deck.model.rope_low_frequency = value("rope_low_frequency");
      deck.model.rope_high_frequency = value("rope_high_frequency");
      deck.model.rope_original = count("rope_original_positions");
    }
  }
  deck.batch.sequence = count("sequence");
  deck.batch.global = count("batch");
  deck.batch.micro = deck.batch.global;
  deck.optimizer.lr = value("lr");
  deck.optimizer.beta1 = value("beta1");
  deck.optimizer.beta2 = value("beta2");
  deck.optimizer.epsilon = value("epsilon");
  deck.optimizer.weight_decay = value("weight_decay");
  deck.optimizer.clip = value("clip");
  return deck;
}

struct Case {
  std::string name, family;
};
void PrintTo(const Case& value, std::ostream* out) {
  *out << value.name;
}

class ModelReference : public testing::TestWithParam<Case> {
 protected:
  /// The batch of the file on `ranks` ranks: tensor parallel as far as the heads go, the rest of the ranks
  /// idle.
  void compare(const std::string& device, double tolerance) {
    const auto& [name, family] = GetParam();
    const ReferenceFile file("model_" + name + ".ref");
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int tensor = std::min(size, 4);
    MPI_Comm group = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank / tensor, rank, &group);
    for (const bool sequence : {false, true}) {
      if (sequence && tensor == 1) continue;
      Deck deck = deck_of(file, family);
      deck.run.device = device;
      deck.parallel.tensor = tensor;
      deck.parallel.sequence = sequence;
      SCOPED_TRACE(fmt::format("{}, tensor {}{}", name, tensor, sequence ? " with sequence" : ""));
      Session session(group, deck);
      check(session, file, tolerance);
    }
    MPI_Comm_free(&group);
  }

  void check(Session& session, const ReferenceFile& file, double tolerance) {
    Tensors initial;
    for (const std::string& entry : file.names("initial/")) initial[entry.substr(8)] = file[entry].floats();
    session.set_parameters(initial);
    const ReferenceMatrix& tokens = file["tokens"];
    Samples samples;
    for (std::int64_t row = 0; row < tokens.rows; ++row) {
      const auto begin = tokens.values.begin() + row * tokens.cols;
      samples.tokens.emplace_back(begin, begin + tokens.cols);
    }
    // AdamW at this learning rate magnifies rounding; sums split over ranks round differently.
    const double later = (session.world().size() == 1 ? 10 : 100) * tolerance;
    for (std::size_t step = 0; step < 3; ++step) {
      const StepResult result = session.step(samples);
      EXPECT_NEAR(result.loss, file["loss"].values[step], tolerance * file["loss"].values[step])
          << "step " << step + 1;
      const double norm = file["gradient_norm"].values[step];
      EXPECT_NEAR(result.gradient_norm, norm, (step == 0 ? 10 * tolerance : later) * norm)
          << "step " << step + 1;
      if (step > 0) continue;
      Tensors gradients = session.gather(session.engine().store().gradient_boxes());
      for (auto& [name, values] : gradients) {
        for (float& value : values) value /= static_cast<float>(result.tokens);
        if (name.ends_with("attention.k.bias") && GetParam().family == "gpt2")
          continue;  // its true gradient is 0
        EXPECT_LT(relative_difference(values, file["gradient/" + name.substr(10)].floats()), 10 * tolerance)
            << name;
      }
      EXPECT_EQ(gradients.size(), file.names("gradient/").size());
    }
    const Tensors updated = session.gather(session.engine().store().saved_boxes());
    for (const std::string& entry : file.names("updated/")) {
      const std::string name = entry.substr(8);
      if (name.ends_with("attention.k.bias") && GetParam().family == "gpt2") continue;
      EXPECT_LT(relative_difference(updated.at("parameters/" + name), file[entry].floats()), later) << name;
    }
  }
};

TEST_P(ModelReference, LossGradientsAndThreeUpdatesMatchPyTorch) {
  compare("cpu", 1e-6);
}

TEST_P(ModelReference, CudaLossGradientsAndThreeUpdatesMatchPyTorch) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  compare("cuda", 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Models, ModelReference,
                         testing::Values(Case{"llama", "llama"}, Case{"llama_variant", "llama"},
                                         Case{"gpt2", "gpt2"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace octet::test

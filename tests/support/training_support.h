#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "octet/config/resolve.h"
#include "octet/runtime/device_choice.h"
#include "octet/train/engine.h"
#include "support/threaded_streams.h"

namespace octet::test {

/// The samples of one step: sequence + 1 tokens each, a mask of their targets (empty: all count), and the
/// first token that each token attends to (empty: the sample's first).
struct Samples {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<std::vector<std::uint8_t>> masks;
  std::vector<std::vector<std::int32_t>> starts;
};

inline Samples random_samples(std::int64_t count, std::int64_t sequence, std::int64_t vocabulary,
                              std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<std::int32_t> id(0, static_cast<std::int32_t>(vocabulary - 1));
  Samples samples;
  for (std::int64_t i = 0; i < count; ++i) {
    samples.tokens.emplace_back(static_cast<std::size_t>(sequence + 1));
    for (auto& token : samples.tokens.back()) token = id(random);
  }
  return samples;
}

/// Masks that keep between 1 and `sequence` targets a sample, very unequal.
inline void mask_unevenly(Samples& samples, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const auto& tokens : samples.tokens) {
    std::uniform_int_distribution<std::size_t> kept(1, tokens.size() - 1);
    std::vector<std::uint8_t> mask(tokens.size() - 1, 0);
    for (std::size_t i = 0, n = kept(random); i < n; ++i) mask[i] = 1;
    samples.masks.push_back(mask);
  }
}

/// Cuts every sample into documents of 1 to 30 tokens.
inline void cut_documents(Samples& samples, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<std::size_t> length(1, 30);
  for (const auto& tokens : samples.tokens) {
    std::vector<std::int32_t> starts;
    while (starts.size() + 1 < tokens.size()) {
      const auto start = static_cast<std::int32_t>(starts.size());
      const std::size_t end = std::min(starts.size() + length(random), tokens.size() - 1);
      starts.resize(end, start);
    }
    samples.starts.push_back(std::move(starts));
  }
}

/// A rank's micro-batches of one step, and the memory behind them.
struct PackedStep {
  std::vector<std::vector<std::int32_t>> memory;
  std::vector<MicroBatch> batches;
};

inline PackedStep pack(const Samples& samples, const BatchCut& cut) {
  PackedStep step;
  for (std::int64_t index = 0; index < cut.micro_batches(); ++index) {
    std::vector<SampleArrays> arrays;
    for (std::int64_t j = 0; j < cut.micro; ++j) {
      const auto number = static_cast<std::size_t>(cut.position(index, j));
      const std::vector<std::int32_t>& tokens = samples.tokens[number];
      SampleArrays sample;
      for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
        const bool counts = samples.masks.empty() || samples.masks[number][i] != 0;
        const std::int32_t start = samples.starts.empty() ? 0 : samples.starts[number][i];
        sample.ids.push_back(tokens[i]);
        sample.targets.push_back(counts ? tokens[i + 1] : -1);
        sample.positions.push_back(static_cast<std::int32_t>(i) - start);
        sample.starts.push_back(start);
      }
      arrays.push_back(std::move(sample));
    }
    step.memory.emplace_back(static_cast<std::size_t>(MicroBatch::kArrays * cut.tokens()));
    pack_micro_batch(cut, arrays, step.memory.back().data());
    step.batches.push_back({step.memory.back().data(), cut.tokens()});
  }
  return step;
}

/// Whole tensors by name.
using Tensors = std::map<std::string, std::vector<float>>;

/// An engine on some ranks, with what tests ask of it.
class Session {
 public:
  /// `streams`: with a seed, streams run behind the host and beside one another (support/threaded_streams.h),
  /// which takes the place of other `wrappers`.
  Session(MPI_Comm ranks, Deck deck, std::optional<std::uint64_t> streams = {}, EngineWrappers wrappers = {})
      : world_(ranks) {
    deck.run.share_gpus = true;  // tests may have fewer GPUs than ranks
    resolve_deck(deck, world_.size());
    choice_ = open_device(world_, deck.run);
    if (streams) {
      choice_.device = make_threaded_device(std::move(choice_.device), *streams);
      wrappers = {make_threaded_ops, make_threaded_communicator};
    }
    engine_ = std::make_unique<Engine>(world_, deck, *choice_.device, choice_.shared, wrappers);
    engine_->initialise();
  }
  Engine& engine() { return *engine_; }
  const World& world() const { return world_; }

  StepResult step(const Samples& samples) {
    const PackedStep packed = pack(samples, engine_->cut());
    engine_->step(packed.batches, true);
    return engine_->result();
  }

  /// Puts boxes of all ranks together; every element must be held once.
  Tensors gather(const std::vector<ParameterStore::StateBox>& boxes) {
    Tensors whole;
    for (const ParameterRow& row : engine_->table().rows()) {
      for (const char* kind : {"parameters/", "first_moment/", "second_moment/", "gradients/"}) {
        const bool wanted = !boxes_named(boxes, kind).empty();
        int anywhere = wanted ? 1 : 0;
        MPI_Allreduce(MPI_IN_PLACE, &anywhere, 1, MPI_INT, MPI_MAX, world_.ranks());
        if (anywhere == 0) continue;
        std::vector<float> values(static_cast<std::size_t>(row.rows * row.cols)), holders(values.size());
        for (const auto& box : boxes) {
          if (box.name != kind + row.name) continue;
          std::vector<float> part(static_cast<std::size_t>(box.box.size()));
          engine_->store().read(engine_->stream(), box, part.data());
          engine_->stream().synchronize();
          for (std::int64_t i = 0; i < box.box.size(); ++i) {
            const std::int64_t at =
                (box.box.row + i / box.box.cols) * row.cols + box.box.col + i % box.box.cols;
            values[static_cast<std::size_t>(at)] = part[static_cast<std::size_t>(i)];
            holders[static_cast<std::size_t>(at)] += 1.0f;
          }
        }
        MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                      world_.ranks());
        MPI_Allreduce(MPI_IN_PLACE, holders.data(), static_cast<int>(holders.size()), MPI_FLOAT, MPI_SUM,
                      world_.ranks());
        for (const float count : holders)
          EXPECT_EQ(count, 1.0f) << kind << row.name << " is not held exactly once";
        whole[kind + row.name] = std::move(values);
      }
    }
    return whole;
  }

  /// Overwrites masters by parameter name, then publishes them.
  void set_parameters(const Tensors& values) {
    std::vector<ParameterStore::StateBox> boxes;
    std::vector<std::vector<float>> parts;
    for (const auto& box : engine_->store().held_boxes()) {
      if (!box.name.starts_with("parameters/")) continue;
      const std::vector<float>& whole = values.at(box.name.substr(11));
      boxes.push_back(box);
      std::vector<float>& part = parts.emplace_back(static_cast<std::size_t>(box.box.size()));
      for (std::int64_t i = 0; i < box.box.size(); ++i) {
        const std::int64_t at = (box.box.row + i / box.box.cols) * box.cols + box.box.col + i % box.box.cols;
        part[static_cast<std::size_t>(i)] = whole[static_cast<std::size_t>(at)];
      }
    }
    std::vector<const float*> host;
    for (const auto& part : parts) host.push_back(part.data());
    engine_->store().write(engine_->stream(), boxes, host);
    engine_->restored(0);
  }

 private:
  static std::vector<const ParameterStore::StateBox*> boxes_named(
      const std::vector<ParameterStore::StateBox>& boxes, const std::string& prefix) {
    std::vector<const ParameterStore::StateBox*> found;
    for (const auto& box : boxes) {
      if (box.name.starts_with(prefix)) found.push_back(&box);
    }
    return found;
  }

  World world_;
  DeviceChoice choice_;
  std::unique_ptr<Engine> engine_;
};

/// ‖a - b‖ / ‖b‖, or ‖a - b‖ where b is zero.
inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

/// F-TINY of the case list: 4 layers of 64, 4 heads, 2 key heads, vocabulary 256, sequence 64, global batch
/// 8, float32.
inline Deck tiny_deck() {
  Deck deck;
  deck.model.layers = 4;
  deck.model.hidden = 64;
  deck.model.heads = 4;
  deck.model.kv_heads = 2;
  deck.model.mlp = 172;
  deck.model.vocabulary = 256;
  deck.batch.sequence = 64;
  deck.batch.global = 8;
  deck.precision.compute = "fp32";
  deck.schedule.kind = "constant";
  deck.optimizer.lr = 1e-3;
  deck.run.device = "cpu";
  deck.data.train = "given by the test";
  return deck;
}

/// Whether a test of the GPU can run here; a reason to skip otherwise. OCTET_REQUIRE_GPU=1 turns the skip
/// into a failure.
inline bool gpu_missing() {
  if (cuda_device_count() > 0) return false;
  if (const char* required = std::getenv("OCTET_REQUIRE_GPU");
      required != nullptr && std::string(required) == "1") {
    ADD_FAILURE() << "OCTET_REQUIRE_GPU=1, but there is no CUDA device";
  }
  return true;
}

}  // namespace octet::test

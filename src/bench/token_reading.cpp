#include "token_reading.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "octet/base/rng.h"
#include "octet/data/batch_loader.h"
#include "octet/runtime/grid.h"

namespace octet {

namespace {

constexpr std::int64_t kFewestSteps = 12, kMostSteps = 10000;  ///< taken against the clock
constexpr std::uint64_t kSeed = 19;

/// Tokens that are worth measuring.
std::int64_t token_count(const BenchSession& session) {
  return std::min<std::int64_t>(session.limits.io_bytes / 16, 1 << 26);
}

BatchCut cut_of(const BenchSession& session) {
  const Deck& deck = session.deck;
  const GridPoint sizes{static_cast<int>(deck.parallel.tensor), static_cast<int>(deck.parallel.context),
                        static_cast<int>(deck.parallel.data), static_cast<int>(deck.parallel.pipeline)};
  const GridPoint place = place_of(session.world.rank(), sizes);
  return {deck.batch.sequence, deck.batch.micro, deck.batch.global, place.data,
          sizes.data,          place.context,    sizes.context,     deck.data.mask_documents};
}

/// Whether a step's ids are those of the samples that stand at its positions.
bool right(const std::vector<MicroBatch>& step, std::int64_t consumed, const BatchCut& cut,
           const SampleOrder& order, const TokenSource& source) {
  const std::int64_t parts = cut.context_size > 1 ? 2 : 1, run = cut.local_sequence() / parts;
  const std::int64_t begins[] = {cut.context_rank * run, (2 * cut.context_size - 1 - cut.context_rank) * run};
  for (std::size_t micro_batch = 0; micro_batch < step.size(); ++micro_batch) {
    const std::int32_t* ids = step[micro_batch].ids();
    for (std::int64_t j = 0; j < cut.micro; ++j) {
      const std::int64_t position = consumed + cut.position(static_cast<std::int64_t>(micro_batch), j);
      const std::int64_t begin = order.sample(position) * cut.sequence;
      for (std::int64_t part = 0; part < parts; ++part, ids += run) {
        const std::vector<std::int32_t> expected = source(begin + begins[part], run);
        if (!std::equal(expected.begin(), expected.end(), ids)) return false;
      }
    }
  }
  return true;
}

}  // namespace

void write_known_tokens(const BenchSession& session, const std::string& path) {
  const Deck& deck = session.deck;
  TokenFileInfo info;
  info.vocabulary = deck.model.vocabulary;
  info.token_bytes = 0;
  TokenFileWriter writer(path, info);
  const TokenSource ids = known_tokens(session);
  const std::int64_t step = deck.batch.global * deck.batch.sequence;
  const std::int64_t count = std::max(step, token_count(session)) + 1;
  constexpr std::int64_t kPiece = 1 << 20;
  for (std::int64_t at = 0; at < count; at += kPiece) writer.append(ids(at, std::min(kPiece, count - at)));
  writer.end_document();
  writer.finish();
}

TokenSource known_tokens(const BenchSession& session) {
  return [vocabulary = static_cast<std::uint64_t>(session.deck.model.vocabulary)](std::int64_t begin,
                                                                                  std::int64_t count) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>(mix(kSeed, static_cast<std::uint64_t>(begin) + i) % vocabulary);
    return ids;
  };
}

TokenSource tokens_of_file(const std::string& path) {
  return [file = std::make_shared<const TokenFile>(path)](std::int64_t begin, std::int64_t count) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    file->read(begin, ids);
    return ids;
  };
}

TokenReading read_tokens(BenchSession& session, const TokenFile& file, const TokenSource& source) {
  const BatchCut cut = cut_of(session);
  const SampleOrder order(samples_in(file, cut.sequence), static_cast<std::uint64_t>(session.deck.run.seed));
  const std::int64_t steps =
      std::clamp(token_count(session) / (cut.global * cut.sequence), kFewestSteps, kMostSteps);
  const auto begin = std::chrono::steady_clock::now();
  BatchLoader loader(file, order, cut, 0, static_cast<int>(session.deck.data.prefetch) + 2, session.device);
  for (std::int64_t i = 1; i < steps; ++i) loader.next();
  const std::vector<MicroBatch>& last = loader.next();
  TokenReading reading;
  reading.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  reading.tokens = steps * cut.micro_batches() * cut.tokens();
  reading.correct = right(last, (steps - 1) * cut.global, cut, order, source);
  return reading;
}

}  // namespace octet

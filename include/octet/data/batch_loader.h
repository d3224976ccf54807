#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "octet/data/sample_order.h"
#include "octet/data/token_file.h"
#include "octet/runtime/device.h"

namespace octet {

/// How a global batch is cut over data ranks and micro-batches.
struct BatchCut {
  std::int64_t sequence = 0, micro = 0,
               global = 0;  ///< tokens a sample, samples a micro-batch and rank, samples a step
  int data_rank = 0, data_size = 1;

  std::int64_t micro_batches() const { return global / (micro * data_size); }
  std::int64_t tokens() const { return micro * sequence; }
  /// Stream position, within the step, of sample j of micro-batch i on this rank.
  std::int64_t position(std::int64_t micro_batch, std::int64_t sample) const {
    return (micro_batch * data_size + data_rank) * micro + sample;
  }
};

/// One micro-batch of this rank, packed int32 in page-locked memory: four arrays of cut.tokens() each.
struct MicroBatch {
  const std::int32_t* packed = nullptr;
  std::int64_t tokens = 0;
  const std::int32_t* ids() const { return packed; }
  const std::int32_t* targets() const { return packed + tokens; }  ///< -1: no target
  const std::int32_t* positions() const { return packed + 2 * tokens; }
  const std::int32_t* order() const { return packed + 3 * tokens; }  ///< token numbers sorted by id, stable
  std::int64_t bytes() const { return 4 * tokens * 4; }
};

/// A sample is `sequence` + 1 tokens beginning at sample·sequence; targets are the tokens shifted by one, -1
/// where the mask says so. samples_in(file, sequence) = (tokens - 1) / sequence.
std::int64_t samples_in(const TokenFile& file, std::int64_t sequence);

/// Fills one micro-batch (4·tokens int32 at `packed`) from the given sample numbers; a sample of -1 is all id
/// 0 without targets. Throws Error(kData) for an id outside the file's vocabulary, as TokenFile::check_range
/// does.
void fill_micro_batch(const TokenFile& file, std::int64_t sequence, const std::vector<std::int64_t>& samples,
                      std::int32_t* packed);

/// Reads whole steps ahead in a thread of its own.
class BatchLoader {
 public:
  /// `consumed`: samples of the stream before the first step. `ahead`: steps read ahead of the two that the
  /// caller may hold (at least 2); a step handed out stays valid until the second call of next() after it.
  /// `file` outlives the loader. Throws Error(kData) when the file has fewer samples than one global batch.
  BatchLoader(const TokenFile& file, const SampleOrder& order, const BatchCut& cut, std::int64_t consumed,
              int ahead, Device& device);
  ~BatchLoader();
  /// The next step's micro-batches. Waits if they are not ready; rethrows what stopped the thread once the
  /// steps read before that are used up.
  const std::vector<MicroBatch>& next();
  /// Milliseconds that the last next() waited.
  double waited_ms() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace octet

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "octet/data/sample_order.h"
#include "octet/data/token_file.h"
#include "octet/runtime/device.h"

namespace octet {

/// How a global batch is cut over data ranks, context ranks and micro-batches. With context parallelism a
/// sample is cut into 2·context_size runs of equal length, and context rank r has run r and run
/// 2·context_size - 1 - r: as much causal attention as every other.
struct BatchCut {
  std::int64_t sequence = 0, micro = 0,
               global = 0;  ///< tokens a sample, samples a micro-batch and data rank, samples a step
  int data_rank = 0, data_size = 1;
  int context_rank = 0, context_size = 1;
  bool mask_documents =
      false;  ///< tokens attend within their document only, and positions begin anew in each

  std::int64_t micro_batches() const { return global / (micro * data_size); }
  /// Tokens of a sample, and of a micro-batch, on this rank.
  std::int64_t local_sequence() const { return sequence / context_size; }
  std::int64_t tokens() const { return micro * local_sequence(); }
  /// Stream position, within the step, of sample j of micro-batch i on this rank.
  std::int64_t position(std::int64_t micro_batch, std::int64_t sample) const {
    return (micro_batch * data_size + data_rank) * micro + sample;
  }
};

/// One micro-batch of this rank, packed int32 in page-locked memory: six arrays of cut.tokens() each.
struct MicroBatch {
  static constexpr std::int64_t kArrays = 6;
  const std::int32_t* packed = nullptr;
  std::int64_t tokens = 0;
  const std::int32_t* array(int number) const { return packed + number * tokens; }
  const std::int32_t* ids() const { return array(0); }
  const std::int32_t* targets() const { return array(1); }    ///< -1: no target
  const std::int32_t* positions() const { return array(2); }  ///< in the sample, or in the document
  const std::int32_t* order() const { return array(3); }      ///< token numbers sorted by id, stable
  const std::int32_t* position_order() const {
    return array(4);
  }  ///< token numbers sorted by position, stable
  /// First token of the sample that each token attends to. Tokens in the order of the others without context
  /// parallelism; with it all samples' first runs, then all their second runs.
  const std::int32_t* starts() const { return array(5); }
  std::int64_t bytes() const { return kArrays * tokens * 4; }
};

/// A sample is `sequence` + 1 tokens beginning at sample·sequence; targets are the tokens shifted by one, -1
/// where the mask says so. samples_in(file, sequence) = (tokens - 1) / sequence.
std::int64_t samples_in(const TokenFile& file, std::int64_t sequence);

/// The whole of a sample, `sequence` elements each, as MicroBatch describes them.
struct SampleArrays {
  std::vector<std::int32_t> ids, targets, positions, starts;
};

/// Packs this rank's part of cut.micro samples: kArrays·cut.tokens() int32 at `packed`.
void pack_micro_batch(const BatchCut& cut, const std::vector<SampleArrays>& samples, std::int32_t* packed);

/// Packs samples of a file by number; -1 is a sample of id 0 without targets. With cut.mask_documents the
/// last token of a document has no target. Throws Error(kData) for an id outside the file's vocabulary, as
/// TokenFile::check_range does.
void fill_micro_batch(const TokenFile& file, const BatchCut& cut, const std::vector<std::int64_t>& samples,
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

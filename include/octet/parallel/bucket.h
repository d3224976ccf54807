#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "octet/model/parameter_table.h"

namespace octet {

/// One parameter inside a bucket of one tensor rank.
struct BucketEntry {
  int row = 0;  ///< of the parameter table
  LocalParameter local;
  std::int64_t offset = 0;  ///< first element in the bucket
};

/// All parameters of a layer in one flat buffer, padded so that data ranks own equal contiguous slices.
struct Bucket {
  std::vector<BucketEntry> entries;
  std::int64_t size = 0;  ///< elements, padding included; 0 where this rank does not hold the bucket
  int slices = 1;         ///< into which the bucket is cut
  std::int64_t slice() const { return size / slices; }
};

/// A run of elements of a bucket that the optimizer treats alike.
struct Region {
  std::int64_t begin = 0, end = 0;
  bool decay = false, replicated = false, partial = false;
  std::int64_t size() const { return end - begin; }
};

/// A contiguous part of a bucket that is one box of one global parameter.
struct PlacedBox {
  int row = 0;              ///< of the parameter table
  Box box;                  ///< global
  std::int64_t offset = 0;  ///< first element in the bucket
  bool replicated = false;
};

/// A contiguous part of a bucket that lies in one parameter: elements [begin, begin + size) of what this rank
/// holds of it.
struct PlacedRun {
  int row = 0;  ///< of the parameter table
  LocalParameter local;
  std::int64_t offset = 0;  ///< first element in the bucket
  std::int64_t begin = 0, size = 0;
};

/// A matrix in a bucket: of one parameter, or of several that follow one another.
struct PlacedMatrix {
  int row = 0;                        ///< of the parameter table: the first
  std::int64_t offset = 0, size = 0;  ///< elements of the bucket
};

/// Where every parameter that a rank holds lies. The same for all tensor ranks but for the boxes.
class BucketLayout {
 public:
  /// `slices`: of each bucket, the number of ranks that share it; 0 for a bucket that this rank does not
  /// hold.
  BucketLayout(const ParameterTable& table, const ModelShape& shape, int tensor_rank, int tensor_size,
               bool sequence_parallel, const std::vector<int>& slices);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  const Bucket& bucket(int number) const { return buckets_.at(static_cast<std::size_t>(number)); }
  const BucketEntry& entry(int row) const;
  int bucket_of(int row) const { return table_.rows()[static_cast<std::size_t>(row)].bucket; }
  const ParameterTable& table() const { return table_; }

  /// Elements [begin, end) of a bucket as runs of equal treatment, in order, covering all of it.
  std::vector<Region> regions(int bucket, std::int64_t begin, std::int64_t end) const;
  /// The matrices of a bucket, in order.
  std::vector<PlacedMatrix> matrices(int bucket) const;
  /// The elements [begin, end) of a bucket that belong to no parameter: alignment, and padding at its end.
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps(int bucket) const;
  /// Elements [begin, end) of a bucket as boxes, at most three a parameter; padding has none.
  std::vector<PlacedBox> boxes(int bucket, std::int64_t begin, std::int64_t end) const;
  /// The same, one run a parameter.
  std::vector<PlacedRun> runs(int bucket, std::int64_t begin, std::int64_t end) const;

 private:
  const ParameterTable& table_;
  std::vector<Bucket> buckets_;
  std::vector<std::pair<int, int>> place_;  ///< of a row: bucket and entry
};

}  // namespace octet

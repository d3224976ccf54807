#pragma once

#include <cstdint>
#include <vector>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

/// The matrix of a linear layer, [out, in].
struct LinearWeight {
  Tensor values;        ///< compute dtype, or E4M3 codes as Quantize makes them by tensor
  Tensor scale = {};    ///< of codes: float32 [1, 1]
  Tensor largest = {};  ///< with codes: float32 [1, 1], the largest magnitude that the matrix has now
};

/// How layers reach weights and deliver gradients, whatever the ZeRO stage. Row numbers are those of the
/// ParameterTable; a range of rows that follow one another is one matrix (or one vector, for biases).
class ParameterAccess {
 public:
  virtual ~ParameterAccess() = default;
  /// Rows first … last in the compute dtype, as this tensor rank holds them. Valid between begin_forward /
  /// begin_backward of the bucket and the next bucket's.
  virtual Tensor parameter(int first, int last) = 0;
  Tensor parameter(int row) { return parameter(row, row); }
  /// The same of a matrix of a block, which may be there in 8 bits alone.
  virtual LinearWeight weight(int first, int last) = 0;
  /// What is gathered from now on in 8 bits is scaled for these largest magnitudes (float32 [1, 1] each, of
  /// layer after layer, in the table's order), not for those that matrices have.
  virtual void scale_weights_for(std::vector<Tensor> largest) = 0;
  /// Changes whenever parameters may have.
  virtual std::int64_t version() const = 0;
  /// Where to write the gradient, float32. Valid from begin_backward to finish_backward.
  virtual Tensor gradient(int first, int last) = 0;
  Tensor gradient(int row) { return gradient(row, row); }
  /// Whether gradients of this bucket add to what an earlier micro-batch left.
  virtual bool accumulates(int bucket) const = 0;

  /// Makes a bucket's parameters ready for what is queued on the stream next, and starts to fetch the next
  /// bucket's. Buckets come in rising order in the forward pass and in falling order in the backward pass;
  /// bucket 0 stays readable from embedding to head where the head is tied to it.
  virtual void begin_forward(Stream& stream, int bucket) = 0;
  /// Also makes room for the bucket's gradients. `reads` is false where this part of the backward
  /// pass does not need the parameters, `writes` where it leaves no gradients.
  virtual void begin_backward(Stream& stream, int bucket, bool reads = true, bool writes = true) = 0;
  /// All gradients of the bucket are queued: reduce them where it is time to.
  virtual void finish_backward(Stream& stream, int bucket) = 0;
};

}  // namespace octet

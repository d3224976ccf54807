#pragma once

#include "octet/comm/communicator.h"
#include "octet/model/parameter_access.h"
#include "octet/model/parameter_table.h"
#include "octet/model/tensor_axis.h"
#include "octet/ops/ops.h"
#include "octet/runtime/stream_timer.h"

namespace octet {

/// How the linear layers of blocks are multiplied in 8 bits (Micikevicius et al. 2022): not at all; with one
/// scale a matrix, from the largest magnitude it has now; or from those of earlier steps; or with a scale for
/// every 128 elements of a row of activations and gradients and every 128 x 128 of a weight (DeepSeek-V3
/// 2024). Activations and weights are E4M3; gradients E5M2, with scales by block E4M3.
enum class Fp8Recipe { kNone, kCurrent, kDelayed, kBlock };

/// What every layer of a network works with.
struct LayerContext {
  const ModelShape& shape;
  const ParameterTable& table;
  ParameterAccess& parameters;
  TensorAxis& tensor;
  Communicator& context;
  StreamTimer& timer;
  Ops& ops;
  DType compute = DType::kF32;
  std::int64_t batch = 0, sequence = 0;  ///< a micro-batch on this rank: samples, and tokens of each
  std::int64_t positions = 0;            ///< tokens of a whole sample
  bool documents_apart = false;          ///< documents of a sample do not see one another
  Fp8Recipe fp8 = Fp8Recipe::kNone;
  std::int64_t fp8_history = 1;   ///< kDelayed: steps that are remembered
  bool fuse_activation = true;    ///< products end in the MLP's activation or its gradient
  bool keep_activations = true;   ///< of norms and MLPs, where that saves work, rather than rebuild them
  bool fp8_keep_weights = false;  ///< 8-bit copies of weights stay until parameters change
  bool fp8_gather = false;        ///< weights come as 8-bit codes (LinearWeight), which need no copy
  bool fp8_direct = true;         ///< kDelayed: operators write 8-bit operands themselves where they can

  std::int64_t tokens() const { return batch * sequence; }
};

}  // namespace octet

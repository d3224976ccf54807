#pragma once

#include <vector>

namespace octet {

/// A run of consecutive layers that one rank works on: a stage of a pipeline, or one of several virtual
/// stages of a rank. Without pipeline parallelism the one chunk is the whole model.
struct Chunk {
  int first_layer = 0, layers = 0;
  bool embeds = true;  ///< begins with the embedding
  bool head = true;    ///< ends with the head and the loss
  int in_flight = 1;   ///< micro-batches whose activations are held at once
};

/// Which of the buffers of a rank a micro-batch of a chunk uses: the slot of its activations, the buffer of
/// the stream that it passes on (-1: none), and that of the gradient which comes back.
struct Place {
  int slot = 0, output = -1, gradient = 0;
};

/// How many stream buffers a rank needs beside activations.
struct StreamBuffers {
  int outputs = 0, gradients = 1;
};

}  // namespace octet

#pragma once

#include "octet/config/deck.h"

namespace octet {

/// Fills in what follows from the rest (head size, data ranks, global batch, …) and checks that sizes fit one
/// another and the number of ranks. Throws Error(kUsage) with every problem, one a line: the formula with its
/// numbers, and the nearest values that are allowed.
void resolve_deck(Deck& deck, int ranks);

}  // namespace octet

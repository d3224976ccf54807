#pragma once

#include <cstdint>
#include <vector>

#include "octet/config/deck.h"

namespace octet {

/// The learning rate of update n = 1, 2, …, run.steps, at index n - 1. Warm-up: lr·n/warmup. After it, with
/// floor = schedule.floor·lr:
///   constant  lr
///   linear    straight to the floor at the end
///   cosine    floor + (lr - floor)·(1 + cos(π·(n - warmup)/(end - warmup)))/2
///   wsd       lr until `decay` before the end, then straight to the floor (warm-up, stable, decay)
/// The end is run.steps, or schedule.decay where linear and cosine give one; past it the rate stays at the
/// floor. Token units are rounded up to steps.
std::vector<float> learning_rates(const Deck& deck);

}  // namespace octet

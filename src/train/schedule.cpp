#include "octet/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace octet {

namespace {

double rate_after_warmup(const Deck::Schedule& schedule, double lr, double step, double warmup, double decay,
                         double steps) {
  const double floor = schedule.floor * lr;
  if (schedule.kind == "constant") return lr;
  if (schedule.kind == "wsd") {
    const double begin = steps - decay;
    return step <= begin ? lr : lr + (floor - lr) * (step - begin) / decay;
  }
  const double end = decay > 0 ? decay : steps;
  const double done = end > warmup ? std::min(1.0, (step - warmup) / (end - warmup)) : 1.0;
  if (schedule.kind == "linear") return lr + (floor - lr) * done;
  return floor + (lr - floor) * (1 + std::cos(std::numbers::pi * done)) / 2;
}

}  // namespace

std::vector<float> learning_rates(const Deck& deck) {
  const Deck::Schedule& schedule = deck.schedule;
  const std::int64_t unit = schedule.unit == "tokens" ? deck.batch.global * deck.batch.sequence : 1;
  const auto in_steps = [unit](std::int64_t value) {
    const std::int64_t steps = (value + unit - 1) / unit;
    return static_cast<double>(steps);
  };
  const double warmup = in_steps(schedule.warmup), decay = in_steps(schedule.decay), lr = deck.optimizer.lr;
  std::vector<float> rates;
  for (std::int64_t n = 1; n <= std::max<std::int64_t>(deck.run.steps, 1); ++n) {
    const double step = static_cast<double>(n);
    rates.push_back(static_cast<float>(
        step <= warmup
            ? lr * step / warmup
            : rate_after_warmup(schedule, lr, step, warmup, decay, static_cast<double>(deck.run.steps))));
  }
  return rates;
}

}  // namespace octet

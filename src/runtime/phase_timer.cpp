#include "octet/runtime/phase_timer.h"

namespace octet {

int PhaseTimer::begin_step() {
  ++number_;
  present().used = 0;
  present().number = number_;
  return number_;
}

void PhaseTimer::enter(Stream& stream, StepPhase phase) {
  Step& step = present();
  if (step.used == step.marks.size()) step.marks.push_back({device_.make_event(true), phase});
  Mark& mark = step.marks[step.used++];
  mark.phase = phase;
  mark.event->record(stream);
}

void PhaseTimer::finish_step(Stream& stream) {
  enter(stream, StepPhase::kOptimizer);
}

std::array<double, kStepPhases> PhaseTimer::milliseconds(int number) const {
  const Step& step = steps_[static_cast<std::size_t>(number) % steps_.size()];
  OCTET_ASSERT(step.number == number);
  std::array<double, kStepPhases> sums{};
  for (std::size_t i = 0; i + 1 < step.used; ++i) {
    sums[static_cast<std::size_t>(step.marks[i].phase)] +=
        step.marks[i + 1].event->milliseconds_since(*step.marks[i].event);
  }
  return sums;
}

}  // namespace octet

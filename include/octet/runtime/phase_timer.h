#pragma once

#include <array>
#include <memory>
#include <vector>

#include "octet/runtime/device.h"

namespace octet {

/// What a training step spends its time on. The gradients of the head come with the loss.
enum class StepPhase { kUpload, kForward, kHead, kBackward, kMessages, kReduction, kOptimizer };
constexpr int kStepPhases = 7;

/// Splits a stream's time into phases: an event wherever one begins, so the host waits for nothing. The last
/// two steps can be read, since results are read one step late.
class PhaseTimer {
 public:
  explicit PhaseTimer(Device& device) : device_(device) {}

  /// Begins a step and returns its number: 1, 2, …
  int begin_step();
  /// What is queued from here on belongs to `phase`, until the next call.
  void enter(Stream& stream, StepPhase phase);
  /// What is queued from here on belongs to no phase.
  void finish_step(Stream& stream);
  /// Milliseconds of each phase in one of the last two steps. The stream must have passed its last mark.
  std::array<double, kStepPhases> milliseconds(int step) const;

 private:
  struct Mark {
    std::unique_ptr<Event> event;
    StepPhase phase = StepPhase::kUpload;
  };
  struct Step {
    std::vector<Mark> marks;  ///< the last one used ends the phase before it
    std::size_t used = 0;
    int number = 0;
  };
  Step& present() { return steps_[static_cast<std::size_t>(number_) % steps_.size()]; }

  Device& device_;
  int number_ = 0;
  std::array<Step, 2> steps_;
};

}  // namespace octet

#include "octet/runtime/stream_timer.h"

namespace octet {

int StreamTimer::restart(bool on) {
  on_ = on;
  ++number_;
  present().used = 0;
  present().number = number_;
  return number_;
}

void StreamTimer::begin(Stream& stream) {
  if (!on_) return;
  Sum& sum = present();
  if (sum.used == sum.marks.size())
    sum.marks.emplace_back(device_.make_event(true), device_.make_event(true));
  sum.marks[sum.used].first->record(stream);
}

void StreamTimer::end(Stream& stream) {
  if (!on_) return;
  Sum& sum = present();
  sum.marks[sum.used++].second->record(stream);
}

double StreamTimer::milliseconds(int number) const {
  const Sum& sum = sums_[static_cast<std::size_t>(number) % sums_.size()];
  OCTET_ASSERT(sum.number == number);
  double total = 0.0;
  for (std::size_t i = 0; i < sum.used; ++i)
    total += sum.marks[i].second->milliseconds_since(*sum.marks[i].first);
  return total;
}

}  // namespace octet

#include "transport/poller_set.h"

#include <algorithm>
#include <utility>

namespace resilient {

void PollerSet::add(Poller* poller) {
  poller->setAsleep(asleep_);
  pollers_.push_back(poller);
}

void PollerSet::remove(Poller* poller) {
  std::replace(
      pollers_.begin(), pollers_.end(), poller, static_cast<Poller*>(nullptr));
}

size_t PollerSet::writersHere() const {
  return static_cast<size_t>(
      std::count_if(pollers_.begin(), pollers_.end(), [](const Poller* p) {
        return p != nullptr && p->hasWriterHere();
      }));
}

bool PollerSet::hasNews() {
  return std::any_of(pollers_.begin(), pollers_.end(), [](Poller* p) {
    return p != nullptr && p->hasNews();
  });
}

bool PollerSet::inMidst() const {
  return std::any_of(pollers_.begin(), pollers_.end(), [](const Poller* p) {
    return p != nullptr && p->inMidst();
  });
}

bool PollerSet::writerIsOn(int processor) const {
  return std::any_of(pollers_.begin(), pollers_.end(), [&](const Poller* p) {
    return p != nullptr && p->writerIsOn(processor);
  });
}

// By index: onNews() may add pollers.
void PollerSet::runNews() {
  for (size_t i = 0; i < pollers_.size(); ++i) {
    if (pollers_[i] != nullptr && pollers_[i]->hasNews()) {
      pollers_[i]->onNews();
    }
  }
  std::erase(pollers_, nullptr);
}

void PollerSet::wake() {
  if (std::exchange(asleep_, false)) {
    for (Poller* p : pollers_) {
      if (p != nullptr) {
        p->setAsleep(false);
      }
    }
  }
}

void PollerSet::putToSleep() {
  asleep_ = true;
  for (Poller* p : pollers_) {
    if (p != nullptr) {
      p->setAsleep(true);
    }
  }
}

} // namespace resilient

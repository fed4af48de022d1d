#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/time.h"

namespace resilient {

// A burst that was acknowledged whole, and went over paths of one kind.
struct BurstTime {
  uint64_t bytes = 0; // by which its paths were chosen
  Nanos took{}; // until the last acknowledgement
  bool datagrams = false;
};

// One that has not ended yet.
struct OpenBurst {
  TimePoint began{};
  uint64_t bytes = 0;
  bool counts = true;
  std::optional<bool> datagrams; // none yet
};

// How long the bursts of a channel take. A burst begins with a message that is
// posted while none is unacknowledged, and ends when none is left. Those that
// tell nothing of the paths are left out: both kinds carried, the bytes were
// not there yet, or a message was cancelled.
class BurstTimer {
 public:
  // `ready`: all of the message can be sent at once.
  void posted(uint64_t burstBytes, bool ready, TimePoint now) {
    if (!burst_) {
      burst_.emplace();
      burst_->began = now;
    }
    burst_->bytes = std::max(burst_->bytes, burstBytes);
    burst_->counts = burst_->counts && ready;
  }
  void handedOut(bool datagrams) {
    if (burst_) {
      burst_->counts =
          burst_->counts && burst_->datagrams.value_or(datagrams) == datagrams;
      burst_->datagrams = datagrams;
    }
  }
  void spoil() {
    if (burst_) {
      burst_->counts = false;
    }
  }
  void ended(TimePoint now) {
    if (burst_ && burst_->counts && burst_->datagrams &&
        ended_.size() < kMost) {
      ended_.push_back(
          {burst_->bytes, now - burst_->began, *burst_->datagrams});
    }
    burst_.reset();
  }
  // Those that have ended since the last call.
  std::vector<BurstTime> take() {
    return std::exchange(ended_, {});
  }

 private:
  static constexpr size_t kMost = 64; // if nobody takes them

  std::optional<OpenBurst> burst_;
  std::vector<BurstTime> ended_;
};

} // namespace resilient

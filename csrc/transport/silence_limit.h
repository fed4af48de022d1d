#pragma once

#include <algorithm>
#include <cstddef>

#include "base/time.h"

namespace resilient {

// How long an answer of an RDMA device may take before it counts as silent.
// Answers of hardware take microseconds. Devices in software, on a busy host,
// take much longer now and then, and so do networks with long queues.
class SilenceLimit {
 public:
  explicit SilenceLimit(Nanos least) : least_(least) {}

  Nanos limit() const {
    return std::clamp(
        kSlowerThanUsual * slowest_, least_, kSlowerThanUsual * least_);
  }
  // An answer has come after this time. Not of a silence: otherwise one would
  // hide the next.
  void onAnswer(Nanos after) {
    slowest_ = std::max(after, slowest_ - slowest_ / kForget);
  }

 private:
  // An answer that takes so many times longer than the slowest of late is none.
  static constexpr int kSlowerThanUsual = 4;
  // The slowest is forgotten within about so many answers.
  static constexpr int kForget = 64;

  const Nanos least_;
  Nanos slowest_{0};
};

// How much longer than another answer a read may take, for its bytes: as much
// as on a slow network, until it is known that this one is faster.
class ReadTime {
 public:
  Nanos of(size_t bytes) const {
    return fromSeconds(
        static_cast<double>(bytes) *
        std::min(kSlowerThanUsual * slowest_, kSlowest));
  }
  // It took so long after the answer before it.
  void onRead(size_t bytes, Nanos after) {
    slowest_ = std::max(
        toSeconds(after) / static_cast<double>(bytes),
        slowest_ - slowest_ / kForget);
  }

 private:
  static constexpr double kSlowest = 1 / 10e6; // seconds a byte
  static constexpr double kSlowerThanUsual = 2;
  static constexpr double kForget = 16; // reads

  double slowest_ = kSlowest;
};

} // namespace resilient

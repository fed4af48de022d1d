#pragma once

#include <cstddef>
#include <cstdint>

namespace resilient {

// The content of a message, in order of priority: a pipeline stage waits for
// activations now, an optimizer for gradients soon, a checkpoint for bulk any
// time. A lower value goes first.
// Paper: SMART §3.1, the type that each message carries; no depth of layer.
//
// These are wire values, in the header of every frame; sets of classes are bit
// masks of them (Channel::setClasses).
enum class TrafficClass : uint8_t {
  kActivation = 0,
  kActivationGradient = 1,
  kGradient = 2,
  kBulk = 3,
};

inline constexpr size_t kTrafficClassCount = 4;

inline const char* trafficClassName(TrafficClass c) {
  switch (c) {
    case TrafficClass::kActivation:
      return "activation";
    case TrafficClass::kActivationGradient:
      return "activation_gradient";
    case TrafficClass::kGradient:
      return "gradient";
    case TrafficClass::kBulk:
      return "bulk";
  }
  return "unknown";
}

} // namespace resilient

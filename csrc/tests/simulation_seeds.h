#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <optional>
#include <string>

#include "tests/check.h"

namespace resilient::test {

// A sanitizer makes a simulation slow and looks for other mistakes than it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

inline std::optional<uint64_t> numberOf(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::strtoull(value, nullptr, 10);
}

// Prints each event of a simulation if RESILIENT_SIM_TRACE is set.
inline std::function<void(const std::string&)> simulationTrace() {
  const char* value = std::getenv("RESILIENT_SIM_TRACE");
  if (value == nullptr || *value == '\0') {
    return nullptr;
  }
  return [](const std::string& line) { std::cerr << line << "\n"; };
}

// The line to paste after a simulation has failed with a seed.
inline std::string replayLine(uint64_t seed, const std::string& test) {
  return "\n  replay: RESILIENT_SIM_SEED=" + std::to_string(seed) +
      " RESILIENT_SIM_TRACE=1 core_tests " + test;
}

// Runs a simulation with the seeds from 1 to `usual` (a fifth of them under a
// sanitizer), to RESILIENT_SIM_SCHEDULES if that is set, or only with the seed
// of RESILIENT_SIM_SEED or --seed. Returns how many ran; 0 after a single seed,
// whose counts say nothing about the simulation.
inline uint64_t simulateSeeds(
    uint64_t usual,
    const std::function<void(uint64_t)>& one) {
  const std::optional<uint64_t> single = numberOf("RESILIENT_SIM_SEED");
  if (single || runState().forcedSeed) {
    one(single ? *single : *runState().forcedSeed);
    return 0;
  }
  const uint64_t count = numberOf("RESILIENT_SIM_SCHEDULES")
                             .value_or(kSanitized ? usual / 5 : usual);
  CHECK(count > 0);
  for (uint64_t seed = 1; seed <= count; ++seed) {
    noteSeed(seed);
    one(seed);
  }
  return count;
}

} // namespace resilient::test

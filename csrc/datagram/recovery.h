#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/tolerance.h"
#include "base/traffic_class.h"
#include "loss/parity_code.h"

namespace resilient {

// How what is lost comes back. Paper: SMART §4.1, the schemes it compares.
enum class RecoveryKind : uint8_t {
  kSelectiveRepeat, // only by sending again what the receiver misses
  kUniformFec, // so much parity for everything, else by sending again
  kSemantic, // parity by what is lost, and by what the bytes mean
};

struct RecoveryScheme {
  RecoveryKind kind = RecoveryKind::kSemantic;
  ParityKind code = ParityKind::kReedSolomon;
  // Uniform: `parity` parity symbols for `data` data symbols. (100, 10) is
  // LoWAR's.
  int data = 100;
  int parity = 10;
  // Semantic: bounds of the parity per data symbol that follows from what is
  // lost; and what activations get at least, until it is known that nothing is
  // lost, and the few important packets of a gradient, which costs next to
  // nothing.
  double minRatio = 0;
  double maxRatio = 0.5;
  double activationRatio = 0.1;
  double importantRatio = 0.5;
};

// One for each traffic class.
using RecoverySchemes = std::array<RecoveryScheme, kTrafficClassCount>;

// The option wan_recovery: schemes by site and traffic class. Entries are
// separated by commas. An entry is a scheme, or a place, '=' and a scheme. A
// place is a site, a class ("/gradient") or both ("eu-west/gradient"); '*' is
// any site. A scheme is "semantic", "selective_repeat" or
// "uniform_fec:DATA:PARITY". docs/options.md has examples.
class RecoveryTable {
 public:
  // Nothing if the text is malformed or names something twice.
  static std::optional<RecoveryTable> parse(
      std::string_view text,
      ParityKind code);

  // The most exact entry counts: site and class, then site, then class. Places
  // without an entry get the default, semantic recovery.
  RecoverySchemes of(const std::string& site) const;

 private:
  RecoveryScheme base_;
  // By site and class; "" stands for all sites, -1 for all classes.
  std::map<std::pair<std::string, int>, RecoveryScheme> schemes_;
};

} // namespace resilient

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "planning/problem.h"

namespace resilient {

// Scheduling of a cell: pipelines over several sites that share the links
// between them. The twin of torch_resilient/geo/cell_rules.py, which defines
// each value and explains the rules. Times are milliseconds.

// Numbers of the kinds of a cell's operations, as in compact orders; part of
// the interface to Python.
enum CellKind : uint8_t {
  kCellForward,
  kCellRecompute,
  kCellBackward,
  kCellWeight
};
inline constexpr size_t kCellKinds = 4;

// Transfers have a direction: activations go forward, gradients backward.
inline constexpr size_t kDirections = 2;
using ByDirection = std::array<double, kDirections>;

// Sizes are checked by bindings.cpp, values by torch_resilient/geo/cell.py.
// None is negative, and all are finite.
struct CellProblem {
  size_t pipelines = 1;
  size_t microbatches = 1;
  std::array<std::vector<double>, kCellKinds> durations; // by kind and stage
  std::vector<ByDirection> hops; // n stages have n - 1 hops
  std::vector<ByDirection> latencies; // by hop
  std::vector<uint8_t> crosses; // by hop, whether it leads to another site
  size_t relays = 1;
  std::vector<size_t> caps; // by stage
  bool split = false;

  size_t stages() const {
    return durations[kCellForward].size();
  }
};

// Rules in cell_rules.py explains each field.
struct CellRules {
  std::vector<uint8_t> priority; // kinds, the preferred one first
  size_t turn = 1;
  bool reserve = false;
  bool spatial = false;
  bool early = false;
  std::vector<size_t> warmup; // by stage, or empty
  bool alternate = false;
};

// A transfer over a hop between sites.
struct CellTransfer {
  uint32_t pipe = 0;
  uint32_t hop = 0;
  uint32_t direction = 0;
  uint32_t microbatch = 0;
  double start = 0;
  double end = 0;
};

// GPUs are numbered pipeline by pipeline, each from the first stage to the
// last.
struct CellSchedule {
  std::vector<Kinds> kinds; // by GPU
  std::vector<std::vector<double>> starts; // by GPU
  std::vector<CellTransfer> sent;
  double iteration = 0;
};

// The schedule by these rules: the decisions of cell_rules.py, and its times to
// the last bit.
//
// Time: logarithmic in the number of GPUs and links for each operation.
//
// Preconditions: at least one pipeline, stage and microbatch; relays, caps and
// warm-ups are at least 1; with `alternate` there is a warm-up, which never
// grows from a stage to the next and is within the caps.
CellSchedule scheduleCell(const CellProblem& cell, const CellRules& rules);

} // namespace resilient

// The Python module torch_resilient._planning. It knows nothing of torch: plans
// can be made where torch is slow to import or not used.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planning/cell.h"
#include "planning/evaluator.h"
#include "planning/generator.h"
#include "planning/local_search.h"

namespace py = pybind11;

namespace resilient {
namespace {

template <typename T>
std::vector<T>
perPlace(const py::object& owner, const char* name, size_t count) {
  auto values = owner.attr(name).cast<std::vector<T>>();
  if (values.size() != count) {
    throw std::invalid_argument(
        std::string(name) + ": expected " + std::to_string(count) +
        " values, got " + std::to_string(values.size()));
  }
  return values;
}

// Of torch_resilient.planning.costs.PipelineCosts.
PipelineCosts readCosts(const py::object& from) {
  const size_t stages = py::len(from.attr("forward_s"));
  if (stages == 0) {
    throw std::invalid_argument("forward_s: expected at least one stage");
  }
  return {
      .forward = perPlace<double>(from, "forward_s", stages),
      .inputBackward = perPlace<double>(from, "input_backward_s", stages),
      .weightBackward = perPlace<double>(from, "weight_backward_s", stages),
      .delayForward = perPlace<double>(from, "delay_forward_s", stages - 1),
      .delayBackward = perPlace<double>(from, "delay_backward_s", stages - 1)};
}

Limits readLimits(const py::object& from, size_t stages) {
  return {
      .activations = perPlace<size_t>(from, "activations", stages),
      .pending = perPlace<size_t>(from, "pending", stages)};
}

Rules readRules(const py::object& from, size_t stages) {
  return {
      .warmup = perPlace<size_t>(from, "warmup", stages),
      .waitForWarmup = from.attr("wait_for_warmup").cast<bool>(),
      .gate = from.attr("gate").cast<bool>(),
      .forwardFirst = from.attr("forward_first").cast<bool>(),
      .weightShare = from.attr("weight_share").cast<double>(),
      .maxWeights = from.attr("max_weights").cast<std::optional<size_t>>()};
}

// One bytes object per stage. The core trusts its orders, so each must have the
// three kinds equally often. It does not check their sequence. B before its F
// shows as stages that wait for each other; W before its B is not noticed here.
Orders readOrders(const std::vector<py::bytes>& from, size_t stages) {
  if (from.size() != stages) {
    throw std::invalid_argument(
        "kinds: expected " + std::to_string(stages) + " orders, got " +
        std::to_string(from.size()));
  }
  Orders orders;
  for (const py::bytes& each : from) {
    const std::string_view text = each;
    orders.emplace_back(text.begin(), text.end());
    const Kinds& kinds = orders.back();
    const size_t microbatches = orders[0].size() / kKinds;
    size_t counts[kKinds] = {};
    for (const uint8_t kind : kinds) {
      if (kind < kKinds) {
        ++counts[kind];
      }
    }
    if (microbatches == 0 || kinds.size() != kKinds * microbatches ||
        std::any_of(counts, counts + kKinds, [&](size_t count) {
          return count != microbatches;
        })) {
      throw std::invalid_argument(
          "kinds[" + std::to_string(orders.size() - 1) +
          "]: expected 0, 1 and 2, each as often as the others and as on the "
          "first stage");
    }
  }
  return orders;
}

std::vector<py::bytes> writeOrders(const Orders& orders) {
  std::vector<py::bytes> result;
  for (const Kinds& kinds : orders) {
    result.emplace_back(
        reinterpret_cast<const char*>(kinds.data()), kinds.size());
  }
  return result;
}

py::tuple generateOrders(
    const py::object& costs,
    size_t microbatches,
    const py::object& rules,
    const py::object& limits) {
  if (microbatches == 0) {
    throw std::invalid_argument("num_microbatches: expected at least 1, got 0");
  }
  const PipelineCosts given = readCosts(costs);
  const Rules how = readRules(rules, given.stages());
  const Limits within = readLimits(limits, given.stages());
  Generated found;
  {
    py::gil_scoped_release release;
    found = generate(given, microbatches, how, within);
  }
  return py::make_tuple(writeOrders(found.orders), found.iterationS);
}

// (begin, forward wait, backward wait, end) of each stage.
std::vector<std::tuple<double, double, double, double>> evaluate(
    const std::vector<py::bytes>& kinds,
    const py::object& costs) {
  const PipelineCosts given = readCosts(costs);
  const Orders orders = readOrders(kinds, given.stages());
  std::vector<std::tuple<double, double, double, double>> result;
  bool complete = false;
  {
    py::gil_scoped_release release;
    Evaluator evaluator(given, orders[0].size() / kKinds);
    complete = evaluator.run(orders);
    for (size_t i = 0; i < orders.size(); ++i) {
      const StageTimes& times = evaluator.times(i);
      result.emplace_back(
          times.begin, times.forwardWait, times.backwardWait, times.end);
    }
  }
  if (!complete) {
    throw std::invalid_argument("kinds: the stages wait for each other");
  }
  return result;
}

// (activations, pending, units) of each stage.
std::vector<std::tuple<size_t, size_t, double>> peaksOfOrders(
    const std::vector<py::bytes>& kinds,
    const py::object& costs) {
  const size_t stages = kinds.size();
  const auto units = perPlace<double>(costs, "activation_units", stages);
  const auto kept = perPlace<double>(costs, "weight_backward_units", stages);
  const Orders orders = readOrders(kinds, stages);
  std::vector<std::tuple<size_t, size_t, double>> result;
  for (size_t i = 0; i < stages; ++i) {
    const MemoryPeaks held = memoryPeaks(orders[i], units[i], kept[i]);
    result.emplace_back(held.activations, held.pending, held.units);
  }
  return result;
}

Search startSearch(
    const std::vector<py::bytes>& kinds,
    const py::object& costs,
    const py::object& limits,
    double lowerBoundS,
    uint64_t seed) {
  const PipelineCosts given = readCosts(costs);
  Limits within = readLimits(limits, given.stages());
  Orders orders = readOrders(kinds, given.stages());
  if (!Evaluator(given, orders[0].size() / kKinds).run(orders)) {
    throw std::invalid_argument("kinds: the stages wait for each other");
  }
  return Search(std::move(orders), given, std::move(within), lowerBoundS, seed);
}

py::list foundBy(const Search& search) {
  py::list result;
  for (const Search::Found& each : search.found()) {
    result.append(py::make_tuple(each.iterationS, writeOrders(each.orders)));
  }
  return result;
}

// Of torch_resilient.geo.cell_rules.Problem.
CellProblem readCell(const py::object& from) {
  CellProblem cell;
  cell.pipelines = from.attr("pipelines").cast<size_t>();
  cell.microbatches = from.attr("microbatches").cast<size_t>();
  const size_t stages = py::len(from.attr("forward_ms"));
  if (cell.pipelines == 0 || cell.microbatches == 0 || stages == 0) {
    throw std::invalid_argument(
        "cell: expected at least one pipeline, stage and microbatch");
  }
  cell.durations = {
      perPlace<double>(from, "forward_ms", stages),
      perPlace<double>(from, "recompute_ms", stages),
      perPlace<double>(from, "backward_ms", stages),
      perPlace<double>(from, "weight_ms", stages)};
  cell.hops = perPlace<ByDirection>(from, "hop_ms", stages - 1);
  cell.latencies = perPlace<ByDirection>(from, "latency_ms", stages - 1);
  for (const bool crosses : perPlace<bool>(from, "crosses", stages - 1)) {
    cell.crosses.push_back(crosses ? 1 : 0);
  }
  cell.relays = from.attr("relays").cast<size_t>();
  cell.caps = perPlace<size_t>(from, "caps", stages);
  cell.split = from.attr("split").cast<bool>();
  if (cell.relays == 0 ||
      std::count(cell.caps.begin(), cell.caps.end(), size_t{0}) != 0) {
    throw std::invalid_argument("cell: expected relays and caps of at least 1");
  }
  return cell;
}

CellRules readCellRules(const py::object& from, size_t stages) {
  CellRules rules{
      .priority = {},
      .turn = from.attr("turn").cast<size_t>(),
      .reserve = from.attr("reserve").cast<bool>(),
      .spatial = from.attr("spatial").cast<bool>(),
      .early = from.attr("early").cast<bool>(),
      .warmup = from.attr("warmup").cast<std::vector<size_t>>(),
      .alternate = from.attr("alternate").cast<bool>()};
  constexpr std::string_view kinds = "FRBW";
  for (const char kind : from.attr("priority").cast<std::string>()) {
    rules.priority.push_back(static_cast<uint8_t>(kinds.find(kind)));
  }
  std::vector<uint8_t> known = rules.priority;
  std::sort(known.begin(), known.end());
  if (known != std::vector<uint8_t>{0, 1, 2, 3}) {
    throw std::invalid_argument("priority: expected F, R, B and W, each once");
  }
  if (rules.warmup.empty() ? rules.alternate : rules.warmup.size() != stages) {
    throw std::invalid_argument("warmup: expected a count per stage");
  }
  return rules;
}

double timeCell(const py::object& cell, const py::object& rules) {
  const CellProblem given = readCell(cell);
  const CellRules how = readCellRules(rules, given.stages());
  py::gil_scoped_release release;
  return scheduleCell(given, how).iteration;
}

// (kinds and starts of each GPU, transfers, iteration time)
py::tuple scheduleOfCell(const py::object& cell, const py::object& rules) {
  const CellProblem given = readCell(cell);
  const CellRules how = readCellRules(rules, given.stages());
  CellSchedule found;
  {
    py::gil_scoped_release release;
    found = scheduleCell(given, how);
  }
  py::list sent;
  for (const CellTransfer& each : found.sent) {
    sent.append(
        py::make_tuple(
            each.pipe,
            each.hop,
            each.direction,
            each.microbatch,
            each.start,
            each.end));
  }
  return py::make_tuple(
      writeOrders(found.kinds), found.starts, sent, found.iteration);
}

// generate, evaluate, the functions of cells and Search.run release the GIL
// while they compute, after all arguments have been read. One Search must not
// be used by two threads at a time: run() holds no lock.
PYBIND11_MODULE(_planning, m) {
  m.def(
      "generate",
      &generateOrders,
      py::arg("costs"),
      py::arg("num_microbatches"),
      py::arg("rules"),
      py::arg("limits"));
  m.def("evaluate", &evaluate, py::arg("kinds"), py::arg("costs"));
  m.def("memory_peaks", &peaksOfOrders, py::arg("kinds"), py::arg("costs"));
  m.def("schedule_cell", &scheduleOfCell, py::arg("cell"), py::arg("rules"));
  m.def("time_cell", &timeCell, py::arg("cell"), py::arg("rules"));
  py::class_<Search>(m, "Search")
      .def(
          py::init(&startSearch),
          py::arg("kinds"),
          py::arg("costs"),
          py::arg("limits"),
          py::arg("lower_bound_s"),
          py::arg("seed"))
      .def(
          "run",
          &Search::run,
          py::arg("tries"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("found", &foundBy);
}

} // namespace
} // namespace resilient

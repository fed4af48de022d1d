#include "planning/cell.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

namespace resilient {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// A part of the longest time. Times that differ by less are one moment. This
// absorbs rounding errors of sums. A larger value would change decisions.
constexpr double kEqual = 1e-9;
constexpr int kNoKind = -1;

template <typename T>
using MinHeap = std::priority_queue<T, std::vector<T>, std::greater<>>;

struct Gpu {
  size_t pipe = 0;
  size_t stage = 0;
  double free = 0;
  std::array<size_t, kCellKinds> done{};
  // By microbatch, as far as known: arrivals of inputs of F and of gradients,
  // and the expected arrivals of gradients, for which R gets ready.
  std::vector<double> inputs, gradients, expected;
  Kinds kinds;
  std::vector<double> starts;
};

struct Waiting {
  std::array<size_t, 3> key; // smaller goes first; unique
  size_t pipe;
  size_t microbatch;
  double ready;

  auto operator<=>(const Waiting& other) const {
    return key <=> other.key;
  }
};

// One direction of a hop between sites, or of one pipeline's part of it.
struct Link {
  size_t hop = 0;
  size_t direction = 0;
  double transfer = 0;
  double latency = 0;
  std::vector<double> free; // of each transfer that may run at a time
  double reserved = 0; // until when rule 3 has given it away
  MinHeap<Waiting> queue;
};

// Something to look at: a GPU, or a link.
struct Event {
  double time;
  bool isLink;
  size_t number;

  bool operator>(const Event& other) const {
    return time > other.time;
  }
};

// A result that will be ready to be sent.
struct Ready {
  double time;
  size_t pipe, hop, direction, microbatch;

  bool operator>(const Ready& other) const {
    return time > other.time;
  }
};

// Numbers noted at one moment, each once, in ascending order.
class Noted {
 public:
  explicit Noted(size_t count) : is_(count) {}

  void add(size_t number) {
    if (!is_[number]) {
      is_[number] = 1;
      numbers_.push_back(number);
    }
  }
  const std::vector<size_t>& sorted() {
    std::sort(numbers_.begin(), numbers_.end());
    return numbers_;
  }
  void clear() {
    for (const size_t number : numbers_) {
      is_[number] = 0;
    }
    numbers_.clear();
  }

 private:
  std::vector<uint8_t> is_;
  std::vector<size_t> numbers_;
};

class CellSimulation {
 public:
  CellSimulation(const CellProblem& cell, const CellRules& rules)
      : cell_(cell),
        rules_(rules),
        stages_(cell.stages()),
        gpus_(cell.pipelines * stages_),
        gpusNow_(gpus_.size()),
        linksNow_(
            rules.spatial ? (stages_ - 1) * kDirections * cell.pipelines
                          : (stages_ - 1) * kDirections) {
    size_t operations = 0;
    for (const uint8_t kind : rules.priority) {
      operations += kind == kCellWeight && !cell.split ? 0 : 1;
    }
    for (size_t i = 0; i < gpus_.size(); ++i) {
      Gpu& gpu = gpus_[i];
      gpu.pipe = i / stages_;
      gpu.stage = i % stages_;
      gpu.inputs.reserve(cell.microbatches);
      gpu.gradients.reserve(cell.microbatches);
      gpu.expected.reserve(cell.microbatches);
      gpu.kinds.reserve(operations * cell.microbatches);
      gpu.starts.reserve(operations * cell.microbatches);
    }
    makeLinks();
    makeChains();
  }

  CellSchedule run() {
    for (size_t i = 0; i < gpus_.size(); i += stages_) {
      gpus_[i].inputs.assign(cell_.microbatches, 0);
      events_.push({0, false, i});
    }
    double now = 0;
    while (!events_.empty()) {
      // Events in the past are handled now.
      now = std::max(now, events_.top().time);
      const double soon = now + equal_;
      ++moment_;
      gpusNow_.clear();
      linksNow_.clear();
      while (!events_.empty() && events_.top().time <= soon) {
        const Event event = events_.top();
        events_.pop();
        (event.isLink ? linksNow_ : gpusNow_).add(event.number);
      }
      queueReady(soon);
      for (const size_t number : linksNow_.sorted()) {
        send(number, soon);
      }
      for (const size_t number : inSequence(soon)) {
        Gpu& gpu = gpus_[number];
        const int kind = choose(gpu, soon, /*asks=*/true);
        if (kind != kNoKind) {
          start(gpu, static_cast<CellKind>(kind), now);
        }
      }
    }
    CellSchedule result;
    for (Gpu& gpu : gpus_) {
      result.iteration = std::max(result.iteration, gpu.free);
      result.kinds.push_back(std::move(gpu.kinds));
      result.starts.push_back(std::move(gpu.starts));
    }
    result.sent = std::move(sent_);
    return result;
  }

 private:
  void makeLinks() {
    const size_t atATime =
        std::max(cell_.relays, cell_.pipelines) / cell_.relays;
    double longest = 0;
    for (const auto& times : cell_.durations) {
      longest =
          std::max(longest, *std::max_element(times.begin(), times.end()));
    }
    for (size_t hop = 0; hop + 1 < stages_; ++hop) {
      for (size_t direction = 0; direction < kDirections; ++direction) {
        const double alone = cell_.hops[hop][direction];
        if (cell_.crosses[hop]) {
          longest = std::max(longest, alone);
        }
        Link link;
        link.hop = hop;
        link.direction = direction;
        link.latency = cell_.latencies[hop][direction];
        if (rules_.spatial) {
          link.transfer = alone;
          link.free.assign(1, 0);
          links_.insert(links_.end(), cell_.pipelines, link);
        } else {
          link.transfer = alone / static_cast<double>(cell_.relays);
          link.free.assign(atATime, 0);
          links_.push_back(std::move(link));
        }
      }
    }
    equal_ = kEqual * longest;
  }

  // By stage and direction: from the start of its operation to the transfer out
  // of the site that follows; negative if rule 3 does not apply there.
  void makeChains() {
    chains_.assign(stages_, {-1, -1});
    const auto& forward = cell_.durations[kCellForward];
    const auto& backward = cell_.durations[kCellBackward];
    const size_t last = stages_ - 1;
    for (size_t stage = 0; stage < stages_; ++stage) {
      if (stage == 0 || cell_.crosses[stage - 1]) {
        double time = forward[stage];
        size_t k = stage;
        for (; k < last && !cell_.crosses[k]; ++k) {
          time += cell_.hops[k][0] + forward[k + 1];
        }
        if (k < last) {
          chains_[stage][0] = time;
        }
      }
      if (stage == last || cell_.crosses[stage]) {
        double time = backward[stage];
        size_t k = stage;
        for (; k > 0 && !cell_.crosses[k - 1]; --k) {
          time += cell_.hops[k - 1][1] + backward[k - 1];
        }
        if (k > 0) {
          chains_[stage][1] = time;
        }
      }
    }
  }

  size_t numberOf(const Gpu& gpu) const {
    return gpu.pipe * stages_ + gpu.stage;
  }

  // The number of the link that this pipeline uses.
  size_t linkOf(size_t pipe, size_t hop, size_t direction) const {
    const size_t place = kDirections * hop + direction;
    return rules_.spatial ? place * cell_.pipelines + pipe : place;
  }

  // The link out of the GPU's site that its results will take.
  Link& exitOf(const Gpu& gpu, size_t direction) {
    size_t hop = direction == 0 ? gpu.stage : gpu.stage - 1;
    while (!cell_.crosses[hop]) {
      hop += direction == 0 ? 1 : -1;
    }
    return links_[linkOf(gpu.pipe, hop, direction)];
  }

  // Whether rule 3 lets this operation start now; if not, the GPU looks again
  // then.
  bool mayStart(const Gpu& gpu, int kind, double soon) {
    const size_t direction = kind == kCellBackward ? 1 : 0;
    const double chain = chains_[gpu.stage][direction];
    if (!rules_.reserve || kind == kCellRecompute || kind == kCellWeight ||
        chain < 0) {
      return true;
    }
    const double start = exitOf(gpu, direction).reserved - chain;
    if (start <= soon) {
      return true;
    }
    events_.push({start, false, numberOf(gpu)});
    return false;
  }

  // Since when, or from when on, the next operation of this kind could run.
  double available(const Gpu& gpu, int kind) const {
    const auto [forwards, recomputes, backwards, weights] = gpu.done;
    const size_t held = forwards - backwards;
    const bool last = gpu.stage + 1 == stages_;
    if (kind == kCellForward) {
      const size_t kept = cell_.split ? forwards - weights : held;
      const bool gated =
          !rules_.warmup.empty() && held >= rules_.warmup[gpu.stage];
      return gated || kept >= cell_.caps[gpu.stage] ||
              forwards == gpu.inputs.size()
          ? kNever
          : gpu.inputs[forwards];
    }
    if (kind == kCellWeight) {
      return cell_.split && weights < backwards ? gpu.free : kNever;
    }
    // With `alternate`, B and its R follow only after all forwards of the
    // warm-up.
    if (rules_.alternate && held < rules_.warmup[gpu.stage] &&
        forwards < cell_.microbatches) {
      return kNever;
    }
    if (kind == kCellRecompute) {
      if (last || recomputes > backwards || recomputes == gpu.expected.size()) {
        return kNever;
      }
      return rules_.early ? gpu.free
                          : gpu.expected[recomputes] -
              cell_.durations[kCellRecompute][gpu.stage];
    }
    if (last) {
      return backwards < forwards ? gpu.free : kNever;
    }
    return backwards == recomputes || backwards == gpu.gradients.size()
        ? kNever
        : gpu.gradients[backwards];
  }

  // The kind of operation that the GPU starts now, or kNoKind; `asks` for the
  // leave of rule 3.
  int choose(const Gpu& gpu, double soon, bool asks) {
    if (gpu.free <= soon) {
      for (const uint8_t kind : rules_.priority) {
        if (available(gpu, kind) <= soon &&
            (!asks || mayStart(gpu, kind, soon))) {
          return kind;
        }
      }
    }
    return kNoKind;
  }

  // Runs the operation, and notes its consequences.
  void start(Gpu& gpu, CellKind kind, double now) {
    const size_t stage = gpu.stage;
    const size_t microbatch = gpu.done[kind];
    const size_t number = numberOf(gpu);
    const double begin = std::max({now, gpu.free, available(gpu, kind)});
    const double end = begin + cell_.durations[kind][stage];
    const size_t direction = kind == kCellBackward ? 1 : 0;
    if (rules_.reserve && (kind == kCellForward || kind == kCellBackward)) {
      const double chain = chains_[stage][direction];
      if (chain >= 0) {
        Link& link = exitOf(gpu, direction);
        link.reserved = std::max(link.reserved, begin + chain) +
            link.transfer / static_cast<double>(link.free.size());
      }
    }
    gpu.kinds.push_back(kind);
    gpu.starts.push_back(begin);
    ++gpu.done[kind];
    gpu.free = end;
    events_.push({end, false, number});
    if (kind == kCellForward && stage + 1 < stages_) {
      if (cell_.crosses[stage]) {
        ready_.push({end, gpu.pipe, stage, 0, microbatch});
      } else {
        arrive(number + 1, 0, end + cell_.hops[stage][0]);
      }
    } else if (kind == kCellBackward && stage > 0) {
      Gpu& before = gpus_[number - 1];
      if (cell_.crosses[stage - 1]) {
        ready_.push({end, gpu.pipe, stage - 1, 1, microbatch});
        const Link& link = links_[linkOf(gpu.pipe, stage - 1, 1)];
        const double leaves = std::max(
            end, *std::min_element(link.free.begin(), link.free.end()));
        expect(before, microbatch, leaves + link.transfer + link.latency);
      } else {
        const double arrival = end + cell_.hops[stage - 1][1];
        expect(before, microbatch, arrival);
        arrive(number - 1, 1, arrival);
      }
    }
  }

  // Notes when a gradient will come; R ends then, if it can.
  void expect(Gpu& gpu, size_t microbatch, double arrival) {
    if (microbatch < gpu.expected.size()) {
      gpu.expected[microbatch] = arrival;
    } else {
      gpu.expected.push_back(arrival);
    }
    const double begin = arrival - cell_.durations[kCellRecompute][gpu.stage];
    events_.push({begin, false, numberOf(gpu)});
  }

  void arrive(size_t number, size_t direction, double arrival) {
    Gpu& gpu = gpus_[number];
    (direction == 0 ? gpu.inputs : gpu.gradients).push_back(arrival);
    events_.push({arrival, false, number});
  }

  // Starts the waiting transfers that the link has room for.
  void send(size_t linkNumber, double soon) {
    Link& link = links_[linkNumber];
    while (!link.queue.empty()) {
      const auto free = std::min_element(link.free.begin(), link.free.end());
      if (*free > soon) {
        return;
      }
      const Waiting next = link.queue.top();
      link.queue.pop();
      const double begin = std::max(*free, next.ready);
      const double end = begin + link.transfer;
      *free = end;
      sent_.push_back(
          {.pipe = static_cast<uint32_t>(next.pipe),
           .hop = static_cast<uint32_t>(link.hop),
           .direction = static_cast<uint32_t>(link.direction),
           .microbatch = static_cast<uint32_t>(next.microbatch),
           .start = begin,
           .end = end});
      events_.push({end, true, linkNumber});
      const double arrival = end + link.latency;
      const size_t number = next.pipe * stages_ + link.hop;
      if (link.direction == 0) {
        arrive(number + 1, 0, arrival);
      } else {
        expect(gpus_[number], next.microbatch, arrival);
        arrive(number, 1, arrival);
      }
    }
  }

  // Hands the results that are ready by now to their links.
  void queueReady(double soon) {
    while (!ready_.empty() && ready_.top().time <= soon) {
      const Ready next = ready_.top();
      ready_.pop();
      const size_t number = linkOf(next.pipe, next.hop, next.direction);
      Waiting waiting{{}, next.pipe, next.microbatch, next.time};
      if (rules_.turn != 0) {
        waiting.key = {
            next.microbatch / rules_.turn, next.pipe, next.microbatch};
      } else {
        waiting.key = {moment_, next.microbatch, next.pipe};
      }
      links_[number].queue.push(waiting);
      linksNow_.add(number);
    }
  }

  // The sequence in which GPUs choose, which matters where they reserve links.
  const std::vector<size_t>& inSequence(double soon) {
    const std::vector<size_t>& numbers = gpusNow_.sorted();
    if (!rules_.reserve) {
      return numbers;
    }
    const size_t turn = std::max<size_t>(rules_.turn, 1);
    // The last value is the number of stages behind: later stages go first.
    std::vector<std::pair<std::array<size_t, 4>, size_t>> keys;
    for (const size_t number : numbers) {
      const Gpu& gpu = gpus_[number];
      const int kind = choose(gpu, soon, /*asks=*/false);
      if (kind != kNoKind) {
        const size_t microbatch = gpu.done[kind];
        keys.push_back(
            {{microbatch / turn, gpu.pipe, microbatch, stages_ - gpu.stage},
             number});
      }
    }
    std::sort(keys.begin(), keys.end());
    sequence_.clear();
    for (const auto& [key, number] : keys) {
      sequence_.push_back(number);
    }
    return sequence_;
  }

  const CellProblem& cell_;
  const CellRules& rules_;
  const size_t stages_;
  std::vector<Gpu> gpus_;
  std::vector<Link> links_;
  std::vector<ByDirection> chains_;
  double equal_ = 0; // see kEqual
  MinHeap<Event> events_;
  MinHeap<Ready> ready_;
  size_t moment_ = 0;
  std::vector<CellTransfer> sent_;
  Noted gpusNow_, linksNow_;
  std::vector<size_t> sequence_;
};

} // namespace

// Paper: ATLAS §4.4
CellSchedule scheduleCell(const CellProblem& cell, const CellRules& rules) {
  return CellSimulation(cell, rules).run();
}

} // namespace resilient

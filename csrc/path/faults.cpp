#include "path/faults.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "base/status.h"

namespace resilient {

namespace {

using Kind = FaultRule::Kind;

struct KindName {
  Kind kind;
  const char* name;
  const char* ownKeys; // each with a space on both sides
};

constexpr KindName kKinds[] = {
    {Kind::kDelay, "delay", " ms jitter_ms "},
    {Kind::kRate, "rate", " bytes_per_s "},
    {Kind::kStall, "stall", " "},
    {Kind::kCut, "cut", " after_bytes times every_s "},
    {Kind::kDrop, "drop", " "},
};
constexpr const char* kCommonKeys =
    " rank peer path from_s at_s until_s for_s from_step at_step until_step ";

// About 30 years: seconds above it would not fit into Nanos.
constexpr double kSecondsMax = 1e9;
// Whole numbers up to here are exact in a double.
constexpr double kCountMax = 9007199254740992.0;

// One rule on its way in: its words, and errors that quote it.
class RuleText {
 public:
  RuleText(std::string text, size_t number)
      : text_(std::move(text)), number_(number) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "fault rule " + std::to_string(number_) + " \"" + text_ +
            "\": " + why));
  }

  void split() {
    std::istringstream in(text_);
    in >> kind_;
    for (std::string word; in >> word;) {
      size_t equals = word.find('=');
      if (equals == std::string::npos || equals == 0) {
        fail("\"" + word + "\" is not of the form key=value");
      }
      std::string key = word.substr(0, equals);
      if (!values_.emplace(key, word.substr(equals + 1)).second) {
        fail(key + " is given twice");
      }
    }
  }

  const std::string& kind() const {
    return kind_;
  }
  const std::map<std::string, std::string>& values() const {
    return values_;
  }
  bool has(const std::string& key) const {
    return values_.count(key) != 0;
  }
  const std::string& text() const {
    return text_;
  }

  // A number in [min, max]; `want` says so in words.
  double number(
      const std::string& key,
      double min,
      double max,
      const char* want) const {
    const std::string& value = values_.at(key);
    char* end = nullptr;
    double x = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(x >= min && x <= max)) {
      fail(key + "=" + value + ": want " + want);
    }
    return x;
  }
  Nanos seconds(const std::string& key) const {
    return fromSeconds(
        number(key, 0, kSecondsMax, "seconds, 0 or more (to 1e9)"));
  }
  int64_t count(const std::string& key, int64_t min = 0) const {
    std::string want = "a whole number, " + std::to_string(min) + " or more";
    double x = number(key, static_cast<double>(min), kCountMax, want.c_str());
    if (x != std::floor(x)) {
      fail(key + "=" + values_.at(key) + ": want " + want);
    }
    return static_cast<int64_t>(x);
  }
  void notBoth(const char* a, const char* b) const {
    if (has(a) && has(b)) {
      fail(std::string(a) + " and " + b + " exclude each other");
    }
  }
  void require(const char* key, const char* why) const {
    if (!has(key)) {
      fail(std::string(why) + " " + key + "=...");
    }
  }

 private:
  std::string text_;
  size_t number_;
  std::string kind_;
  std::map<std::string, std::string> values_;
};

const KindName& kindOf(const RuleText& in) {
  for (const KindName& k : kKinds) {
    if (in.kind() == k.name) {
      return k;
    }
  }
  in.fail(
      "\"" + in.kind() +
      "\" is no kind of fault; want delay, rate, stall, cut, drop or seed=N");
}

void checkKeys(const RuleText& in, const KindName& kind) {
  for (const auto& [key, value] : in.values()) {
    std::string padded = " " + key + " ";
    if (std::string(kCommonKeys).find(padded) == std::string::npos &&
        std::string(kind.ownKeys).find(padded) == std::string::npos) {
      in.fail(
          "there is no key " + key + " for " + kind.name +
          "; allowed:" + kind.ownKeys + std::string(kCommonKeys).substr(1));
    }
  }
}

void readWindow(const RuleText& in, std::optional<Nanos> now, FaultRule& r) {
  in.notBoth("from_s", "at_s");
  in.notBoth("until_s", "for_s");
  in.notBoth("from_step", "at_step");
  in.notBoth("until_step", "at_step");
  if (in.has("from_s")) {
    r.from = in.seconds("from_s");
  }
  if (in.has("at_s")) {
    r.from = in.seconds("at_s");
  }
  if (in.has("until_s")) {
    r.until = in.seconds("until_s");
  }
  if (in.has("for_s")) {
    if (r.from == Nanos::min()) {
      r.from = now.value_or(Nanos(0));
    }
    r.until = r.from + in.seconds("for_s");
  }
  if (r.until <= r.from) {
    in.fail("it ends before it begins");
  }
  if (in.has("from_step")) {
    r.fromStep = in.count("from_step");
  }
  if (in.has("until_step")) {
    r.untilStep = in.count("until_step");
  }
  if (r.untilStep <= r.fromStep) {
    in.fail("until_step is not after from_step");
  }
}

void readCut(const RuleText& in, std::optional<Nanos> now, FaultRule& r) {
  in.notBoth("after_bytes", "every_s");
  in.notBoth("after_bytes", "at_s");
  in.notBoth("after_bytes", "at_step");
  in.notBoth("at_step", "at_s");
  in.notBoth("at_step", "every_s");
  if (in.has("times")) {
    in.require("after_bytes", "times goes with");
    r.cutTimes = static_cast<uint64_t>(in.count("times", 1));
  }
  if (in.has("after_bytes")) {
    r.cutAfterBytes = static_cast<uint64_t>(in.count("after_bytes", 1));
  } else if (in.has("at_step")) {
    r.cutAtStep = in.count("at_step");
  } else if (in.has("at_s") || in.has("every_s") || now) {
    if (in.has("every_s")) {
      // A cut each microsecond would keep the loop from anything else.
      r.cutEvery = fromSeconds(
          in.number("every_s", 0.001, kSecondsMax, "seconds, 0.001 or more"));
    }
    r.cutAt = r.from != Nanos::min() ? r.from : now.value_or(Nanos(0));
  } else {
    in.fail("when? cut needs one of at_s, every_s, at_step or after_bytes");
  }
}

FaultRule readRule(const RuleText& in, std::optional<Nanos> now) {
  const KindName& kind = kindOf(in);
  checkKeys(in, kind);
  FaultRule r;
  r.kind = kind.kind;
  r.text = in.text();
  auto where = [&](const char* key, std::optional<int64_t>& value) {
    if (in.has(key)) {
      value = in.count(key);
    }
  };
  where("rank", r.rank);
  where("peer", r.peer);
  where("path", r.path);
  readWindow(in, now, r);
  if (r.kind == Kind::kCut) {
    readCut(in, now, r);
    return r;
  }
  if (in.has("at_s")) {
    // A window that has a beginning by at_s needs a length.
    if (!in.has("for_s") && !in.has("until_s")) {
      in.fail("at_s needs for_s=... (use from_s for one without an end)");
    }
  }
  if (in.has("at_step")) {
    r.fromStep = in.count("at_step");
    r.untilStep = r.fromStep + 1;
  }
  if (r.kind == Kind::kDelay) {
    in.require("ms", "delay needs");
    const char* want = "milliseconds, 0 or more";
    r.delay = fromSeconds(in.number("ms", 0, kSecondsMax, want) / 1e3);
    if (in.has("jitter_ms")) {
      r.jitter =
          fromSeconds(in.number("jitter_ms", 0, kSecondsMax, want) / 1e3);
    }
  }
  if (r.kind == Kind::kRate) {
    in.require("bytes_per_s", "rate needs");
    r.bytesPerS = in.number(
        "bytes_per_s", 1, 1e15, "bytes per second, 1 or more (to 1e15)");
  }
  return r;
}

std::string trimmed(const std::string& text) {
  size_t from = text.find_first_not_of(" \t\r");
  size_t to = text.find_last_not_of(" \t\r");
  return from == std::string::npos ? "" : text.substr(from, to - from + 1);
}

} // namespace

FaultPlan FaultPlan::parse(const std::string& text) {
  FaultPlan plan;
  size_t number = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream parts(line.substr(0, line.find('#')));
    for (std::string part; std::getline(parts, part, ';');) {
      if (part = trimmed(part); !part.empty()) {
        plan.addParsed(part, ++number, nullptr);
      }
    }
  }
  return plan;
}

uint64_t FaultPlan::add(const std::string& rule, TimePoint now) {
  addParsed(trimmed(rule), 1, &now);
  return rules_.back().id;
}

void FaultPlan::addParsed(
    const std::string& text,
    size_t number,
    TimePoint* now) {
  RuleText in(text, number);
  std::optional<Nanos> sinceStart;
  if (now != nullptr) {
    sinceStart = *now - start_;
    if (text.find_first_of(";#\n") != std::string::npos) {
      in.fail("add one rule at a time");
    }
  }
  if (text.compare(0, 5, "seed=") == 0) {
    if (now != nullptr) {
      in.fail("the seed can only be given at the start");
    }
    char* end = nullptr;
    errno = 0;
    seed_ = std::strtoull(text.c_str() + 5, &end, 10);
    if (text[5] < '0' || text[5] > '9' || *end != '\0' || errno != 0) {
      in.fail("want seed=N, a whole number below 2^64");
    }
    return;
  }
  in.split();
  FaultRule rule = readRule(in, sinceStart);
  rule.addedLater = now != nullptr;
  rule.id = nextId_++;
  rules_.push_back(std::move(rule));
  ++version_;
}

bool FaultPlan::remove(uint64_t id) {
  ++version_;
  return std::erase_if(
             rules_, [&](const FaultRule& r) { return r.id == id; }) != 0;
}

namespace {

bool fits(const std::optional<int64_t>& wanted, int is) {
  return !wanted || *wanted == is;
}

bool concernsRanks(const FaultRule& rule, int selfRank, int peerRank) {
  return fits(rule.rank, selfRank) && fits(rule.peer, peerRank);
}

} // namespace

bool FaultPlan::concerns(int selfRank, int peerRank) const {
  return std::any_of(rules_.begin(), rules_.end(), [&](const FaultRule& r) {
    return concernsRanks(r, selfRank, peerRank);
  });
}

PathFaults::PathFaults(
    const FaultPlan& plan,
    int selfRank,
    int peerRank,
    int connection)
    : plan_(plan),
      selfRank_(selfRank),
      peerRank_(peerRank),
      connection_(connection),
      // A stream of its own for each path: one path never changes the jitter of
      // another.
      random_(mixBits(
          mixBits(
              mixBits(plan.seed() ^ mixBits(static_cast<uint64_t>(selfRank))) ^
              static_cast<uint64_t>(peerRank)) ^
          static_cast<uint64_t>(connection))) {}

void PathFaults::refresh() {
  if (version_ == plan_.version()) {
    return;
  }
  version_ = plan_.version();
  rules_.clear();
  namesOthers_ = false;
  for (const FaultRule& r : plan_.rules()) {
    if (!concernsRanks(r, selfRank_, peerRank_)) {
      continue;
    }
    if (fits(r.path, connection_)) {
      rules_.push_back(r);
    } else if (connection_ < 0) {
      namesOthers_ = true;
    }
  }
}

bool PathFaults::namesOthers() {
  refresh();
  return namesOthers_;
}

bool PathFaults::any() {
  refresh();
  return !rules_.empty();
}

TimePoint PathFaults::absolute(Nanos sinceStart) const {
  if (sinceStart == Nanos::min()) {
    return TimePoint::min();
  }
  return sinceStart == Nanos::max() ? kNever : plan_.start() + sinceStart;
}

bool PathFaults::active(const FaultRule& r, TimePoint now) const {
  return now >= absolute(r.from) && now < absolute(r.until) &&
      plan_.step() >= r.fromStep && plan_.step() < r.untilStep;
}

void PathFaults::connectionOpened(TimePoint now) {
  refresh();
  sentBefore_.clear();
  for (const FaultRule& r : rules_) {
    if (r.cutAfterBytes) {
      sentBefore_[r.id] = 0; // it is there from this connection's beginning
    }
  }
  cutsDone_ = std::max(cutsDone_, now);
  stepCutsDone_ = plan_.step();
}

TimePoint PathFaults::release(TimePoint now, size_t bytes) {
  refresh();
  double rate = 0;
  Nanos delay{};
  for (const FaultRule& r : rules_) {
    if (!active(r, now)) {
      continue;
    }
    if (r.kind == Kind::kRate) {
      rate = rate == 0 ? r.bytesPerS : std::min(rate, r.bytesPerS);
    } else if (r.kind == Kind::kDelay) {
      delay += r.delay;
      if (r.jitter.count() > 0) {
        delay += fromSeconds(toSeconds(r.jitter) * (2 * random_.uniform() - 1));
      }
    }
  }
  linkFree_ = std::max(linkFree_, now);
  if (rate > 0) {
    // Bounded: a rate of 1 byte a second must not overflow the clock.
    linkFree_ +=
        fromSeconds(std::min(static_cast<double>(bytes) / rate, kSecondsMax));
    linkFree_ = std::min(linkFree_, now + fromSeconds(kSecondsMax));
  }
  TimePoint at = linkFree_ + std::max(delay, Nanos(0));
  // A stream: bytes never overtake earlier ones, also when a delay ends.
  lastRelease_ = std::max(lastRelease_, at);
  return lastRelease_;
}

bool PathFaults::stalled(TimePoint now) {
  refresh();
  return std::any_of(rules_.begin(), rules_.end(), [&](const FaultRule& r) {
    return r.kind == Kind::kStall && active(r, now);
  });
}

TimePoint PathFaults::stalledUntil(TimePoint now) {
  refresh();
  TimePoint until = now;
  for (const FaultRule& r : rules_) {
    if (r.kind == Kind::kStall && active(r, now)) {
      until = std::max(until, absolute(r.until));
    }
  }
  return until;
}

bool PathFaults::dropping(TimePoint now) {
  refresh();
  return std::any_of(rules_.begin(), rules_.end(), [&](const FaultRule& r) {
    return r.kind == Kind::kDrop && active(r, now);
  });
}

// The first instant of a timed cut that is later than `after`, or kNever.
TimePoint PathFaults::nextCut(const FaultRule& r, TimePoint after) const {
  TimePoint first = absolute(*r.cutAt);
  TimePoint at = first;
  if (after >= first) {
    if (r.cutEvery.count() == 0) {
      return kNever;
    }
    at = first + ((after - first) / r.cutEvery + 1) * r.cutEvery;
  }
  return at < absolute(r.until) ? at : kNever;
}

bool PathFaults::cutPending(const FaultRule& r, TimePoint now) const {
  if (r.cutAt) {
    return nextCut(r, cutsDone_) <= now && plan_.step() >= r.fromStep &&
        plan_.step() < r.untilStep;
  }
  if (r.cutAtStep) {
    return stepCutsDone_ < *r.cutAtStep && *r.cutAtStep <= plan_.step() &&
        now >= absolute(r.from) && now < absolute(r.until);
  }
  return false;
}

size_t PathFaults::bytesLeft(const FaultRule& r, uint64_t sent, TimePoint now)
    const {
  auto done = byteCuts_.find(r.id);
  if (!r.cutAfterBytes || !active(r, now) ||
      (done != byteCuts_.end() && done->second >= r.cutTimes)) {
    return SIZE_MAX;
  }
  const auto before = sentBefore_.find(r.id);
  const uint64_t end =
      *r.cutAfterBytes + (before != sentBefore_.end() ? before->second : 0);
  return end > sent ? static_cast<size_t>(end - sent) : 0;
}

size_t PathFaults::bytesUntilCut(uint64_t sent, TimePoint now) {
  refresh();
  size_t left = SIZE_MAX;
  for (const FaultRule& r : rules_) {
    if (r.addedLater && r.cutAfterBytes) {
      sentBefore_.try_emplace(r.id, sent); // if it is new: from now on
    }
    if (r.kind == Kind::kCut) {
      left = std::min(left, cutPending(r, now) ? 0 : bytesLeft(r, sent, now));
    }
  }
  return left;
}

void PathFaults::cutDone(uint64_t sent, TimePoint now) {
  refresh();
  for (const FaultRule& r : rules_) {
    if (r.kind == Kind::kCut && bytesLeft(r, sent, now) == 0) {
      ++byteCuts_[r.id];
    }
  }
  connectionOpened(now); // whatever else was due is done, too
}

TimePoint PathFaults::nextChange(TimePoint now) {
  refresh();
  TimePoint next = kNever;
  auto consider = [&](TimePoint t) {
    if (t > now) {
      next = std::min(next, t);
    }
  };
  for (const FaultRule& r : rules_) {
    consider(absolute(r.from));
    consider(absolute(r.until));
    if (r.cutAt) {
      consider(nextCut(r, std::max(now, cutsDone_)));
    }
  }
  return next;
}

} // namespace resilient

#include "lab/emulator.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace resilient::lab {
namespace {

Nanos timeFor(uint64_t bytes, double rateBytesPerS) {
  return Nanos(std::llround(static_cast<double>(bytes) / rateBytesPerS * 1e9));
}

void add(Amount& amount, const Packet& packet) {
  amount.packets += packet.wirePackets();
  amount.bytes += packet.wireBytes();
}

} // namespace

size_t Emulator::addLimiter() {
  limiters_.emplace_back();
  return limiters_.size() - 1;
}

size_t Emulator::addPipe(uint64_t seed) {
  const size_t own = addLimiter();
  pipes_.push_back(
      Pipe{
          .settings = {},
          .counters = {},
          .prng = Prng(seed),
          .ownLimiter = own,
          .line = {}});
  return pipes_.size() - 1;
}

void Emulator::schedule(
    TimePoint time,
    Nanos slack,
    EventKind kind,
    size_t index,
    uint64_t version) {
  const Event event{time, nextOrder_++, kind, index, version};
  events_.push(event);
  wakes_.push({time + slack, event});
}

// The end of a limiter's work on a packet shows only when that packet arrives.
void Emulator::scheduleDone(size_t limiter) {
  Limiter& l = limiters_[limiter];
  const Nanos delay = pipes_[l.queue.front().pipe].settings.delay;
  schedule(l.firstDone, delay, EventKind::kLimiter, limiter, ++l.version);
}

void Emulator::wakeForLimiter(size_t limiter, Nanos delay) {
  const Limiter& l = limiters_[limiter];
  if (!l.queue.empty()) {
    wakes_.push(
        {l.firstDone + delay,
         {l.firstDone, 0, EventKind::kLimiter, limiter, l.version}});
  }
}

bool Emulator::isVoid(const Event& event) const {
  switch (event.kind) {
    case EventKind::kLimiter:
      return limiters_[event.index].version != event.version;
    case EventKind::kLine:
      return pipes_[event.index].lineVersion != event.version;
    case EventKind::kLate:
      return false;
  }
  return false;
}

TimePoint Emulator::nextEvent() {
  while (!events_.empty() && isVoid(events_.top())) {
    events_.pop();
  }
  return events_.empty() ? kNever : events_.top().time;
}

TimePoint Emulator::wakeBy() {
  while (
      !wakes_.empty() &&
      (wakes_.top().event.time <= advancedTo_ || isVoid(wakes_.top().event))) {
    wakes_.pop();
  }
  return wakes_.empty() ? kNever : wakes_.top().by;
}

// Each event is handled with its own time, not with `now`. A late call changes
// when packets are delivered, but not when later ones are due.
void Emulator::advance(TimePoint now) {
  advancedTo_ = now;
  while (nextEvent() <= now && !events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    switch (event.kind) {
      case EventKind::kLimiter:
        limiterDone(event.time, event.index);
        break;
      case EventKind::kLine:
        lineArrived(event.time, event.index);
        break;
      case EventKind::kLate: {
        Traveller late = std::move(*late_[event.index]);
        late_[event.index].reset();
        lateFree_.push_back(event.index);
        Pipe& pipe = pipes_[late.pipe];
        if (late.epoch != pipe.epoch) {
          drop(pipe, pipe.counters.outage, late.packet);
        } else {
          deliver(late.pipe, std::move(late.packet));
        }
        break;
      }
    }
  }
}

// The queue behind the first packet needs no change: each packet takes its time
// when its turn comes.
void Emulator::setLimiter(
    TimePoint now,
    size_t limiter,
    double rateBytesPerS,
    uint64_t queueBytes) {
  Limiter& l = limiters_[limiter];
  l.queueBytes = queueBytes;
  if (rateBytesPerS == l.rateBytesPerS) {
    return;
  }
  const double oldRate = std::exchange(l.rateBytesPerS, rateBytesPerS);
  if (l.queue.empty()) {
    return;
  }
  // The rest of the packet being sent goes on at the new rate.
  const double left = std::max(0.0, toSeconds(l.firstDone - now)) * oldRate;
  l.firstDone = rateBytesPerS == 0
      ? now
      : now + timeFor(static_cast<uint64_t>(left), rateBytesPerS);
  scheduleDone(limiter);
}

void Emulator::setPipe(
    TimePoint now,
    size_t pipe,
    const PipeSettings& settings) {
  Pipe& p = pipes_[pipe];
  const bool goesDown = settings.down && !p.settings.down;
  const bool delayChanges = settings.delay != p.settings.delay;
  p.settings = settings;
  if (settings.burstPackets == 0) {
    p.inBurst = false;
  }
  if (goesDown) {
    flush(pipe);
  }
  setLimiter(now, p.ownLimiter, settings.rateBytesPerS, settings.queueBytes);
  if (delayChanges && !p.line.empty()) {
    armLine(now, pipe);
  }
  if (delayChanges) { // what limiters are sending may arrive sooner
    wakeForLimiter(p.ownLimiter, settings.delay);
    for (const size_t shared : settings.sharedRates) {
      wakeForLimiter(shared, settings.delay);
    }
  }
}

void Emulator::flush(size_t pipe) {
  Pipe& p = pipes_[pipe];
  ++p.epoch; // what is elsewhere is dropped at its next step
  for (OnLine& each : p.line) {
    drop(p, p.counters.outage, each.packet);
  }
  p.line.clear();
  ++p.lineVersion;
  Limiter& l = limiters_[p.ownLimiter];
  for (Traveller& each : l.queue) {
    drop(p, p.counters.outage, each.packet);
  }
  l.queue.clear();
  l.queuedBytes = 0;
  ++l.version;
}

// The only way out of a pipe except deliver().
void Emulator::drop(Pipe& pipe, Amount& cause, const Packet& packet) {
  pipe.inFlightBytes -= packet.wireBytes();
  add(cause, packet);
}

void Emulator::offer(TimePoint now, size_t pipe, Packet packet) {
  Pipe& p = pipes_[pipe];
  add(p.counters.entered, packet);
  p.inFlightBytes += packet.wireBytes();
  if (p.settings.down) {
    drop(p, p.counters.outage, packet);
  } else if (p.inFlightBytes > kInFlightBytesMax) {
    drop(p, p.counters.overrun, packet);
  } else if (auto passed = police(now, p, std::move(packet))) {
    enqueue(now, p.ownLimiter, Traveller{pipe, p.epoch, 0, std::move(*passed)});
  }
}

// Returns the wire packets at the front for which the policer has credit.
std::optional<Packet>
Emulator::police(TimePoint now, Pipe& pipe, Packet packet) {
  const double rate = pipe.settings.udpRateBytesPerS;
  if (rate == 0 || !packet.isUdp()) {
    return packet;
  }
  pipe.udpCreditBytes = std::min(
      kPolicerBurstBytes,
      pipe.udpCreditBytes + toSeconds(now - pipe.udpCreditAt) * rate);
  pipe.udpCreditAt = now;
  const uint32_t count = packet.wirePackets();
  uint32_t passing = 0;
  while (passing < count &&
         packet.wireBytesOf(passing + 1) <= pipe.udpCreditBytes) {
    ++passing;
  }
  pipe.udpCreditBytes -= packet.wireBytesOf(passing);
  if (passing == count) {
    return packet;
  }
  drop(pipe, pipe.counters.queueFull, packet.slice(passing, count - passing));
  return passing == 0 ? std::nullopt
                      : std::optional<Packet>(packet.slice(0, passing));
}

// After `traveller.stage` limiters.
void Emulator::proceed(TimePoint now, Traveller traveller) {
  Pipe& p = pipes_[traveller.pipe];
  if (traveller.epoch != p.epoch) {
    drop(p, p.counters.outage, traveller.packet);
    return;
  }
  const std::vector<size_t>& shared = p.settings.sharedRates;
  if (traveller.stage <= shared.size()) {
    const size_t next = shared[traveller.stage - 1];
    enqueue(now, next, std::move(traveller));
  } else {
    impair(now, std::move(traveller));
  }
}

// A packet reaches a limiter. Without a rate and a queue it passes at once.
// Else it is cut to pieces of at most kPieceTimeMax, and the pieces that fit
// are queued. When the room ends, the rest of the super-packet is dropped; wire
// packets are never cut. An empty queue takes one wire packet of any size:
// otherwise a queue smaller than a packet would pass nothing.
void Emulator::enqueue(TimePoint now, size_t limiter, Traveller traveller) {
  ++traveller.stage;
  if (limiters_[limiter].rateBytesPerS == 0 &&
      limiters_[limiter].queue.empty()) {
    proceed(now, std::move(traveller));
    return;
  }
  Limiter& l = limiters_[limiter];
  Pipe& p = pipes_[traveller.pipe];
  Packet packet = std::move(traveller.packet);
  const uint32_t count = packet.wirePackets();
  uint32_t pieceMax = count;
  if (l.rateBytesPerS > 0 && count > 1) {
    const double bytes = toSeconds(kPieceTimeMax) * l.rateBytesPerS;
    pieceMax = static_cast<uint32_t>(
        std::clamp<double>(bytes / packet.wireBytesOf(1), 1, count));
  }
  const bool idle = l.queue.empty();
  for (uint32_t first = 0; first < count;) {
    uint32_t part = std::min(pieceMax, count - first);
    // Whole wire packets that fit; one always does when nothing is queued.
    const uint64_t room =
        l.queueBytes > l.queuedBytes ? l.queueBytes - l.queuedBytes : 0;
    // The whole packet is moved only in a first pass that is the last one, too.
    // NOLINTNEXTLINE(bugprone-use-after-move)
    const auto bytesOf = [&](uint32_t n) {
      return packet.wireBytesOf(first + n) - packet.wireBytesOf(first);
    };
    if (bytesOf(part) > room) {
      const uint32_t fits = static_cast<uint32_t>(room / packet.wireBytesOf(1));
      part = std::min(part, fits);
      if (part == 0 && l.queue.empty()) {
        part = 1;
      }
      if (part == 0) {
        const Packet rest = packet.slice(first, count - first);
        drop(p, p.counters.queueFull, rest);
        break;
      }
    }
    Packet piece =
        part == count ? std::move(packet) : packet.slice(first, part);
    first += part;
    l.queuedBytes += piece.wireBytes();
    l.queue.push_back(
        {traveller.pipe, traveller.epoch, traveller.stage, std::move(piece)});
  }
  if (idle && !l.queue.empty()) {
    startFirst(now, limiter);
  }
}

// The first of the queue begins to be sent at `now`.
void Emulator::startFirst(TimePoint now, size_t limiter) {
  Limiter& l = limiters_[limiter];
  l.firstDone = l.rateBytesPerS == 0
      ? now
      : now + timeFor(l.queue.front().packet.wireBytes(), l.rateBytesPerS);
  scheduleDone(limiter);
}

void Emulator::limiterDone(TimePoint now, size_t limiter) {
  Limiter& l = limiters_[limiter];
  Traveller first = std::move(l.queue.front());
  l.queue.pop_front();
  l.queuedBytes -= first.packet.wireBytes();
  if (!l.queue.empty()) {
    startFirst(now, limiter);
  }
  proceed(now, std::move(first));
}

// Gilbert's model: in a burst everything is lost. A burst ends with
// probability 1 / burstPackets after each packet; it begins so often that the
// share of lost packets is `loss`.
bool Emulator::losesNext(Pipe& pipe) {
  const PipeSettings& s = pipe.settings;
  if (s.burstPackets == 0 || s.loss >= 1) {
    return pipe.prng.chance(s.loss);
  }
  const double end = 1 / s.burstPackets;
  if (pipe.inBurst) {
    pipe.inBurst = !pipe.prng.chance(end);
  } else {
    pipe.inBurst = pipe.prng.chance(end * s.loss / (1 - s.loss));
  }
  return pipe.inBurst;
}

// How it works. The wire packets of a super-packet are judged one by one. Those
// without any impairment stay together: `kept` counts them, and a packet that
// is lost, late, damaged or doubled first sends the ones before it. A setting
// of 0 draws no random number. A duplicate enters the line before its original,
// which may be late; a corrupted packet is duplicated with its damage.
void Emulator::impair(TimePoint now, Traveller traveller) {
  Pipe& p = pipes_[traveller.pipe];
  const PipeSettings& s = p.settings;
  const size_t pipe = traveller.pipe;
  if (s.loss == 0 && s.duplicate == 0 && s.corrupt == 0 && s.reorder == 0) {
    enterLine(now, pipe, std::move(traveller.packet));
    return;
  }
  Packet whole = std::move(traveller.packet);
  const uint32_t count = whole.wirePackets();
  uint32_t kept = 0; // packets before `i` that go on together
  const auto sendKept = [&](uint32_t end) {
    if (kept > 0) {
      enterLine(now, pipe, whole.slice(end - kept, kept));
      kept = 0;
    }
  };
  for (uint32_t i = 0; i < count; ++i) {
    const bool lost = s.loss > 0 && losesNext(p);
    const bool corrupted = s.corrupt > 0 && p.prng.chance(s.corrupt);
    const bool duplicated = s.duplicate > 0 && p.prng.chance(s.duplicate);
    const bool late = s.reorder > 0 && p.prng.chance(s.reorder);
    if (!lost && !corrupted && !duplicated && !late) {
      ++kept;
      continue;
    }
    sendKept(i);
    Packet one = whole.slice(i, 1);
    if (lost) {
      drop(p, p.counters.lost, one);
      continue;
    }
    if (corrupted) {
      one.corrupt(p.prng.next());
      add(p.counters.corrupted, one);
    }
    if (duplicated) {
      add(p.counters.duplicated, one);
      p.inFlightBytes += one.wireBytes();
      enterLine(now, pipe, one.copy());
    }
    if (!late) {
      enterLine(now, pipe, std::move(one));
      continue;
    }
    add(p.counters.reordered, one);
    size_t place;
    if (lateFree_.empty()) {
      place = late_.size();
      late_.emplace_back();
    } else {
      place = lateFree_.back();
      lateFree_.pop_back();
    }
    late_[place].emplace(Traveller{pipe, p.epoch, 0, std::move(one)});
    schedule(
        now + s.delay + s.reorderDelay, Nanos(0), EventKind::kLate, place, 0);
  }
  sendKept(count);
}

// Jitter delays the entry into the line, never the order: a packet waits for
// one before it that got more.
void Emulator::enterLine(TimePoint now, size_t pipe, Packet packet) {
  Pipe& p = pipes_[pipe];
  TimePoint entered = now;
  if (p.settings.jitter > Nanos(0)) {
    entered += fromSeconds(p.prng.uniform() * toSeconds(p.settings.jitter));
  }
  if (p.line.empty() && p.settings.delay == Nanos(0) && entered == now) {
    deliver(pipe, std::move(packet));
    return;
  }
  p.line.push_back({entered, std::move(packet)});
  if (p.line.size() == 1) {
    armLine(now, pipe);
  }
}

// The first of the line arrives when it is due, others after it at the
// earliest.
void Emulator::armLine(TimePoint now, size_t pipe) {
  Pipe& p = pipes_[pipe];
  const TimePoint due = p.line.front().entered + p.settings.delay;
  schedule(
      std::max(now, due),
      p.settings.delay / kLatePart,
      EventKind::kLine,
      pipe,
      ++p.lineVersion);
}

void Emulator::lineArrived(TimePoint now, size_t pipe) {
  Pipe& p = pipes_[pipe];
  Packet packet = std::move(p.line.front().packet);
  p.line.pop_front();
  if (!p.line.empty()) {
    armLine(now, pipe);
  }
  deliver(pipe, std::move(packet));
}

void Emulator::deliver(size_t pipe, Packet packet) {
  Pipe& p = pipes_[pipe];
  p.inFlightBytes -= packet.wireBytes();
  add(sink_(pipe, packet) ? p.counters.delivered : p.counters.refused, packet);
}

} // namespace resilient::lab

#include "tests/simulated.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace resilient {

SimulatedNetwork::SimulatedNetwork(uint64_t seed, Listener& listener)
    : listener_(listener), prng_(seed) {}

SimulatedNetwork::~SimulatedNetwork() = default;

void SimulatedNetwork::addProcess(
    const ChannelConfig& config,
    uint64_t stagingBytes) {
  auto p = std::make_unique<Process>(listener_);
  p->config = config;
  p->staging.setLimit(stagingBytes);
  processes_.push_back(std::move(p));
}

// Channel ids: process * processes + peer.
void SimulatedNetwork::join() {
  const size_t n = processes_.size();
  dirty_.resize(n * n);
  timerAt_.resize(n * n, kNever);
  openPaths_.resize(n * n);
  for (size_t a = 0; a < n; ++a) {
    Process& p = *processes_[a];
    p.channels.resize(n);
    for (size_t b = 0; b < n; ++b) {
      if (a == b) {
        continue;
      }
      ChannelConfig config = p.config;
      // As the handshake would tell.
      config.peerEagerBytes = processes_[b]->config.ownEagerBytes;
      p.channels[b] = std::make_unique<Channel>(
          static_cast<uint32_t>(a * n + b),
          config,
          p.mailbox,
          p.completions,
          p.staging,
          static_cast<ChannelHost&>(*this));
    }
  }
}

std::pair<size_t, size_t> SimulatedNetwork::ownerOf(const Channel& c) const {
  return {c.id() / processes_.size(), c.id() % processes_.size()};
}

void SimulatedNetwork::note(
    uint64_t what,
    uint64_t a,
    uint64_t b,
    const char* text) {
  const auto t = static_cast<uint64_t>(now_.time_since_epoch().count());
  for (uint64_t x : {t, what, a, b}) {
    traceHash_ = mixBits(traceHash_ ^ x);
  }
  if (trace_) {
    trace_(
        std::to_string(t / 1000) + " us: " + text + " " + std::to_string(a) +
        " " + std::to_string(b));
  }
}

void SimulatedNetwork::at(TimePoint when, std::function<void()> what) {
  queue_.push(Event{std::max(when, now_), eventNumber_++, std::move(what)});
}

bool SimulatedNetwork::step() {
  if (queue_.empty()) {
    return false;
  }
  // The top is const only to protect the order, which moving leaves alone.
  std::function<void()> what = std::move(const_cast<Event&>(queue_.top()).what);
  now_ = queue_.top().when;
  queue_.pop();
  ++events_;
  what();
  settle();
  listener_.onSettled();
  return true;
}

void SimulatedNetwork::channelReady(Channel& channel) {
  if (!dirty_[channel.id()]) {
    dirty_[channel.id()] = true;
    dirtyList_.push_back(channel.id());
  }
}

void SimulatedNetwork::onControl(
    Channel& channel,
    std::span<const std::byte> payload) {
  const auto [process, peer] = ownerOf(channel);
  listener_.onControl(process, peer, payload);
}

void SimulatedNetwork::onBye(Channel& channel) {
  const auto [process, peer] = ownerOf(channel);
  listener_.onBye(process, peer);
}

// Writes what can be written and tells the owners of what has ended, until
// nothing more follows.
void SimulatedNetwork::settle() {
  for (;;) {
    bool any = false;
    for (auto& p : processes_) {
      if (!p->completions.empty()) {
        any = true;
        p->completions.drain();
      }
    }
    while (!dirtyList_.empty()) {
      any = true;
      const uint32_t id = dirtyList_.back();
      dirtyList_.pop_back();
      dirty_[id] = false;
      const size_t n = processes_.size();
      Channel& channel = *processes_[id / n]->channels[id % n];
      // Which path asks first must not matter.
      const std::vector<PathRef> open = openPaths_[id];
      const size_t first = open.empty() ? 0 : prng_.below(open.size());
      for (size_t i = 0; i < open.size(); ++i) {
        const PathRef ref = open[(first + i) % open.size()];
        write(ref, paths_[ref]->ends[0].process == id / n ? 0 : 1);
      }
      armTimer(channel);
    }
    if (!any) {
      return;
    }
  }
}

void SimulatedNetwork::armTimer(Channel& channel) {
  const TimePoint due = channel.deadline();
  const uint32_t id = channel.id();
  if (due == kNever || due >= timerAt_[id]) {
    return;
  }
  timerAt_[id] = due;
  at(due, [this, &channel, id, due] {
    if (timerAt_[id] != due) {
      return; // an earlier one has taken its place
    }
    timerAt_[id] = kNever;
    if (channel.deadline() <= now_) {
      note(1, id, 0, "timer of channel");
      channel.onTimer(now_);
    }
    armTimer(channel);
  });
}

SimulatedNetwork::PathRef
SimulatedNetwork::connect(size_t a, size_t b, const SimulatedLink& link) {
  const PathRef ref = paths_.size();
  auto path = std::make_unique<Path>();
  path->link = link;
  const std::pair<size_t, size_t> owners[2] = {{a, b}, {b, a}};
  for (int side = 0; side < 2; ++side) {
    End& e = path->ends[side];
    e.process = owners[side].first;
    e.peer = owners[side].second;
    e.id = ++lastPathId_;
    e.open = true;
  }
  paths_.push_back(std::move(path));
  note(2, a, b, "new path between");
  for (int side = 0; side < 2; ++side) {
    End& e = paths_[ref]->ends[side];
    Channel& c = channel(e.process, e.peer);
    openPaths_[c.id()].push_back(ref);
    c.addPath(e.id, now_);
    if (link.selfAcknowledging || link.datagrams) {
      c.setSelfAcknowledging(e.id, /*ordered=*/!link.datagrams);
    }
  }
  return ref;
}

std::vector<SimulatedNetwork::PathRef> SimulatedNetwork::pathsBetween(
    size_t a,
    size_t b) const {
  std::vector<PathRef> found;
  for (PathRef ref = 0; ref < paths_.size(); ++ref) {
    const Path& p = *paths_[ref];
    const auto [x, y] = std::pair(p.ends[0].process, p.ends[1].process);
    if (!p.broken && ((x == a && y == b) || (x == b && y == a))) {
      found.push_back(ref);
    }
  }
  return found;
}

void SimulatedNetwork::stall(PathRef ref, TimePoint until) {
  Path& path = *paths_[ref];
  path.stalledUntil = std::max(path.stalledUntil, until);
  note(3, ref, 0, "stall of path");
}

void SimulatedNetwork::suspect(PathRef ref, int side, bool suspect) {
  End& e = paths_[ref]->ends[side];
  if (e.open) {
    note(8, ref, suspect ? 1 : 0, "path is suspect");
    channel(e.process, e.peer).setSuspect(e.id, suspect);
  }
}

void SimulatedNetwork::setClasses(PathRef ref, int side, uint8_t classes) {
  End& e = paths_[ref]->ends[side];
  if (e.open) {
    note(9, ref, classes, "classes of path");
    channel(e.process, e.peer).setClasses(e.id, classes);
  }
}

void SimulatedNetwork::setBursts(PathRef ref, int side, BurstRange range) {
  End& e = paths_[ref]->ends[side];
  if (e.open) {
    note(15, ref, range.above, "bursts of path");
    channel(e.process, e.peer).setBursts(e.id, range);
  }
}

void SimulatedNetwork::trustAll() {
  for (PathRef ref = 0; ref < paths_.size(); ++ref) {
    for (int side = 0; side < 2; ++side) {
      suspect(ref, side, false);
      setClasses(ref, side, 0xff);
    }
  }
}

void SimulatedNetwork::cut(PathRef ref, Nanos notice) {
  Path& path = *paths_[ref];
  if (path.broken) {
    return;
  }
  path.broken = true;
  note(4, ref, 0, "cut of path");
  for (int side = 0; side < 2; ++side) {
    Stream& s = path.ends[side].stream;
    s.bytesLeft = prng_.below(s.inFlightBytes + 1);
    const auto delay = Nanos(
        static_cast<int64_t>(
            prng_.below(static_cast<uint64_t>(notice.count()) + 1)));
    at(now_ + delay, [this, ref, side] { closeEnd(ref, side); });
  }
}

void SimulatedNetwork::closeEnd(PathRef ref, int side) {
  End& e = paths_[ref]->ends[side];
  if (!e.open) {
    return;
  }
  e.open = false;
  note(5, ref, static_cast<uint64_t>(side), "end closed, path and side");
  Channel& c = channel(e.process, e.peer);
  std::erase(openPaths_[c.id()], ref);
  c.removePath(e.id, now_);
  if (paths_[ref]->link.reads) {
    // Until the device has let go, packets land, and are asked for.
    // Some take so long that the far end has long sent the data another way.
    const uint64_t most = prng_.chance(0.3) ? 500'000'000 : 30'000'000;
    const auto fence = Nanos(static_cast<int64_t>(prng_.below(most)));
    at(now_ + fence, [this, ref, side] {
      End& end = paths_[ref]->ends[side];
      end.fenced = true;
      note(14, ref, static_cast<uint64_t>(side), "fenced, path and side");
      channel(end.process, end.peer).endPins(end.id);
    });
  }
}

// The writing half of a transport. Frames are written in pieces of any size;
// the payload pointer is read again for each piece, as channel.h demands.
void SimulatedNetwork::write(PathRef ref, int side) {
  Path& path = *paths_[ref];
  End& e = path.ends[side];
  if (!e.open) {
    return;
  }
  if (path.link.datagrams) {
    writeDatagrams(ref, side);
    return;
  }
  Channel& c = channel(e.process, e.peer);
  Stream& s = e.stream;
  std::vector<std::byte> piece;
  uint64_t room = path.link.windowBytes > s.inFlightBytes
      ? path.link.windowBytes - s.inFlightBytes
      : 0;
  while (room > 0) {
    if (c.unwritten(e.id).empty() && c.pull(e.id, now_) == nullptr) {
      break;
    }
    // Some transports take several frames before they write the first.
    if (prng_.chance(0.2)) {
      c.pull(e.id, now_);
    }
    if (path.link.reads && s.writtenOfFrame == 0 && refer(ref, side, piece)) {
      room -= std::min<uint64_t>(room, kReferenceBytes);
      continue;
    }
    const OutFrame& f = c.unwritten(e.id).front();
    const size_t whole = kFrameHeaderBytes + f.payloadBytes;
    const bool inHeader = s.writtenOfFrame < kFrameHeaderBytes;
    const size_t end = inHeader ? kFrameHeaderBytes : whole;
    const size_t n = std::min<uint64_t>(room, end - s.writtenOfFrame);
    const std::byte* from = inHeader
        ? f.header.data() + s.writtenOfFrame
        : f.payload + (s.writtenOfFrame - kFrameHeaderBytes);
    piece.insert(piece.end(), from, from + n);
    s.writtenOfFrame += n;
    room -= n;
    if (s.writtenOfFrame == whole) {
      s.writtenOfFrame = 0;
      c.popWritten(e.id);
    }
  }
  if (piece.empty()) {
    return;
  }
  note(6, ref, piece.size(), "written, path and bytes");
  const auto jitter = path.link.jitter.count() == 0
      ? Nanos(0)
      : Nanos(
            static_cast<int64_t>(
                prng_.below(static_cast<uint64_t>(path.link.jitter.count()))));
  s.inFlightBytes += piece.size();
  s.linkFree = std::max(s.linkFree, now_) +
      Nanos(static_cast<int64_t>(
          piece.size() * 1'000'000'000 / path.link.bytesPerS));
  s.lastArrival =
      std::max(s.lastArrival, s.linkFree + path.link.latency + jitter);
  s.pieces.emplace_back(s.lastArrival, std::move(piece));
  planDelivery(ref, side);
}

// Takes frames whole: what is bound to the path is a copy.
void SimulatedNetwork::writeDatagrams(PathRef ref, int side) {
  Path& path = *paths_[ref];
  End& e = path.ends[side];
  Channel& c = channel(e.process, e.peer);
  Stream& s = e.stream;
  while (s.inFlightBytes < path.link.windowBytes) {
    const OutFrame* const f = c.pull(e.id, now_);
    if (f == nullptr) {
      break;
    }
    auto d = std::make_shared<Datagram>();
    d->number = s.sentBegin + s.sent.size();
    d->header = f->header;
    d->payload.assign(f->payload, f->payload + f->payloadBytes);
    if (!f->tolerance.exact() && !d->payload.empty() && prng_.chance(0.5)) {
      const uint64_t max = d->payload.size();
      const uint64_t begin = prng_.below(max);
      d->holes.push_back({begin, 1 + prng_.below(max - begin)});
    }
    s.sent.push_back({f->reliable, false});
    c.popWritten(e.id);
    const uint64_t bytes = kFrameHeaderBytes + d->payload.size();
    s.inFlightBytes += bytes;
    note(11, ref, bytes, "datagram on its way, path and bytes");
    s.linkFree = std::max(s.linkFree, now_) +
        Nanos(static_cast<int64_t>(
            bytes * 1'000'000'000 / path.link.bytesPerS));
    const auto spread = 4 * path.link.latency + path.link.jitter;
    const auto later = Nanos(
        static_cast<int64_t>(
            prng_.below(static_cast<uint64_t>(spread.count()))));
    at(s.linkFree + path.link.latency + later,
       [this, ref, side, d] { arrive(ref, side, d); });
  }
}

void SimulatedNetwork::arrive(
    PathRef ref,
    int side,
    const std::shared_ptr<Datagram>& what) {
  Path& path = *paths_[ref];
  if (path.stalledUntil > now_) {
    at(path.stalledUntil, [this, ref, side, what] { arrive(ref, side, what); });
    return;
  }
  if (path.broken && prng_.chance(0.5)) {
    return;
  }
  Datagram& d = *what;
  End& reader = path.ends[1 - side];
  End& writer = path.ends[side];
  note(12, ref, d.number, "datagram arrived, path and number");
  writer.stream.inFlightBytes -= kFrameHeaderBytes + d.payload.size();
  if (reader.open) {
    Channel& c = channel(reader.process, reader.peer);
    FrameHeader header;
    Status status = decodeFrame(d.header, header);
    if (status.ok()) {
      status = c.onHeader(reader.id, header, now_);
    }
    if (status.ok()) {
      for (const ByteRange& hole : d.holes) {
        std::memset(d.payload.data() + hole.offset, 0, hole.bytes);
      }
      std::byte* const to = c.destination(reader.id);
      if (to != nullptr && !d.payload.empty()) {
        std::memcpy(to, d.payload.data(), d.payload.size());
      }
      status = c.onPayload(reader.id, now_, d.holes);
    }
    if (!status.ok()) {
      listener_.onProtocolError(reader.process, reader.peer, status);
      return;
    }
    const auto delay = Nanos(
        static_cast<int64_t>(
            prng_.below(static_cast<uint64_t>(path.link.latency.count()) + 1)));
    at(now_ + delay, [this, ref, side, number = d.number] {
      acknowledge(ref, side, number);
    });
  }
  if (writer.open) {
    channelReady(channel(writer.process, writer.peer)); // there is room
  }
}

void SimulatedNetwork::acknowledge(PathRef ref, int side, uint64_t number) {
  End& writer = paths_[ref]->ends[side];
  Stream& s = writer.stream;
  s.sent[number - s.sentBegin].done = true;
  while (!s.sent.empty() && s.sent.front().done) {
    s.framesDone += s.sent.front().reliable;
    s.sent.pop_front();
    ++s.sentBegin;
  }
  if (writer.open) {
    note(13, ref, s.framesDone, "acknowledged, path and frames");
    channel(writer.process, writer.peer)
        .delivered(writer.id, s.framesDone, now_);
  }
}

void SimulatedNetwork::planDelivery(PathRef ref, int side) {
  Path& path = *paths_[ref];
  Stream& s = path.ends[side].stream;
  if (s.deliveryPlanned || s.pieces.empty()) {
    return;
  }
  s.deliveryPlanned = true;
  at(std::max(s.pieces.front().first, path.stalledUntil),
     [this, ref, side] { deliver(ref, side); });
}

void SimulatedNetwork::deliver(PathRef ref, int side) {
  Path& path = *paths_[ref];
  Stream& s = path.ends[side].stream;
  s.deliveryPlanned = false;
  if (path.stalledUntil > now_) {
    planDelivery(ref, side);
    return;
  }
  std::vector<std::byte>& piece = s.pieces.front().second;
  // The reader gets the bytes in pieces other than the writer's.
  size_t n = piece.size();
  if (n > 1 && prng_.chance(0.3)) {
    n = 1 + prng_.below(n);
  }
  uint64_t arriving = n;
  if (s.bytesLeft) {
    arriving = std::min(arriving, *s.bytesLeft);
    *s.bytesLeft -= arriving;
  }
  End& reader = path.ends[1 - side];
  note(7, ref, arriving, "arrived, path and bytes");
  std::vector<std::byte> data(
      piece.begin(), piece.begin() + static_cast<ptrdiff_t>(n));
  if (n == piece.size()) {
    s.pieces.pop_front();
  } else {
    piece.erase(piece.begin(), piece.begin() + static_cast<ptrdiff_t>(n));
  }
  if (!s.bytesLeft) {
    s.inFlightBytes -= n; // a broken path acknowledges nothing any more
  }
  const uint64_t framesBefore = s.framesRead;
  bool sound = true;
  if (path.link.reads) {
    s.held.insert(
        s.held.end(),
        data.begin(),
        data.begin() + static_cast<ptrdiff_t>(arriving));
    sound = readHeld(ref, side);
  } else if (reader.open) {
    sound = read(path, reader, s, data.data(), arriving);
  }
  if (!sound) {
    breakNow(ref);
  }
  if (path.link.selfAcknowledging && s.framesRead != framesBefore) {
    planAcknowledgement(ref, side);
  }
  End& writer = path.ends[side];
  if (writer.open) {
    channelReady(channel(writer.process, writer.peer)); // there is room
  }
  planDelivery(ref, side);
}

void SimulatedNetwork::planAcknowledgement(PathRef ref, int side) {
  const auto delay = Nanos(
      static_cast<int64_t>(prng_.below(
          static_cast<uint64_t>(paths_[ref]->link.latency.count()) + 1)));
  const uint64_t frames = paths_[ref]->ends[side].stream.framesRead;
  at(now_ + delay, [this, ref, side, frames] {
    End& writer = paths_[ref]->ends[side];
    if (writer.open) {
      note(10, ref, frames, "acknowledged, path and frames");
      channel(writer.process, writer.peer).delivered(writer.id, frames, now_);
    }
  });
}

// The peer broke the rules, or a device was refused.
void SimulatedNetwork::breakNow(PathRef ref) {
  paths_[ref]->broken = true;
  closeEnd(ref, 0);
  closeEnd(ref, 1);
}

// The reading half of a transport; false on malformed bytes.
bool SimulatedNetwork::read(
    Path&,
    End& reader,
    Stream& s,
    const std::byte* data,
    size_t bytes) {
  Channel& c = channel(reader.process, reader.peer);
  Status status;
  while (reader.open) {
    if (s.headerRead < kFrameHeaderBytes) {
      if (bytes == 0) {
        return true;
      }
      const size_t n = std::min(bytes, kFrameHeaderBytes - s.headerRead);
      std::memcpy(s.header.data() + s.headerRead, data, n);
      s.headerRead += n;
      data += n;
      bytes -= n;
      if (s.headerRead < kFrameHeaderBytes) {
        return true;
      }
      s.payloadRead = 0;
      status = decodeFrame(s.header, s.frame);
      if (status.ok()) {
        status = c.onHeader(reader.id, s.frame, now_);
      }
      if (!status.ok()) {
        break;
      }
    }
    const size_t rest = s.frame.payloadBytes - s.payloadRead;
    size_t n = std::min(bytes, rest);
    if (n > 1 && prng_.chance(0.3)) {
      n = 1 + prng_.below(n);
    }
    if (n > 0) {
      std::byte* to = c.destination(reader.id);
      if (to != nullptr) {
        std::memcpy(to + s.payloadRead, data, n);
      }
      s.payloadRead += n;
      data += n;
      bytes -= n;
    }
    if (s.payloadRead < s.frame.payloadBytes) {
      if (bytes == 0) {
        return true;
      }
      continue;
    }
    s.headerRead = 0;
    s.framesRead += isReliable(s.frame.type);
    status = c.onPayload(reader.id, now_);
    if (!status.ok()) {
      break;
    }
  }
  if (status.ok()) {
    return true;
  }
  listener_.onProtocolError(reader.process, reader.peer, status);
  return false;
}

} // namespace resilient

#include <algorithm>
#include <cstring>

#include "tests/simulated.h"

// Paths that read payloads from the memory of the far end, as RDMA does. The
// memory is real: a packet reads it when it leaves, and writes when it lands,
// also after the path is over for its owners, until its end is fenced.

namespace resilient {

void SimulatedNetwork::registerMemory(const std::byte* data, uint64_t bytes) {
  if (bytes != 0) {
    memory_[data] = {bytes, ++lastKey_};
  }
}

uint64_t SimulatedNetwork::keyOf(const std::byte* data, uint64_t bytes) const {
  auto at = memory_.upper_bound(data);
  if (at == memory_.begin()) {
    return 0;
  }
  const auto& [begin, region] = *--at;
  return data + bytes <= begin + region.bytes ? region.key : 0;
}

void SimulatedNetwork::revoke(
    const std::byte* data,
    std::function<void()> done) {
  const auto delay = Nanos(static_cast<int64_t>(prng_.below(5'000'000)));
  at(now_ + delay, [this, data, done = std::move(done)] {
    memory_.erase(data);
    done();
  });
}

// Writes a reference in place of the payload, if it may. What is written is
// longer than the window by one at most.
bool SimulatedNetwork::refer(
    PathRef ref,
    int side,
    std::vector<std::byte>& piece) {
  End& e = paths_[ref]->ends[side];
  Channel& c = channel(e.process, e.peer);
  const OutFrame& f = c.unwritten(e.id).front();
  if (!f.mayRefer || f.payloadBytes == 0) {
    return false;
  }
  const uint64_t key = keyOf(f.payload, f.payloadBytes);
  if (key == 0 || prng_.chance(0.2)) {
    return false;
  }
  const FrameBytes bytes = asReference(f.header);
  piece.insert(piece.end(), bytes.begin(), bytes.end());
  const std::byte* const from = f.payload;
  const auto* const raw = reinterpret_cast<const std::byte*>(&from);
  piece.insert(piece.end(), raw, raw + sizeof(from));
  const auto* const rawKey = reinterpret_cast<const std::byte*>(&key);
  piece.insert(piece.end(), rawKey, rawKey + sizeof(key));
  c.popReferred(e.id);
  return true;
}

// Frames are taken in their order: behind a payload that is still coming, only
// more of them are begun.
bool SimulatedNetwork::readHeld(PathRef ref, int side) {
  Path& path = *paths_[ref];
  Stream& s = path.ends[side].stream;
  End& reader = path.ends[1 - side];
  while (reader.open) {
    if (s.frameLeft == 0) {
      if (s.held.size() < kFrameHeaderBytes) {
        return true;
      }
      FrameBytes bytes;
      std::memcpy(bytes.data(), s.held.data(), kFrameHeaderBytes);
      FrameHeader header;
      if (const Status status = decodeFrame(bytes, header); !status.ok()) {
        listener_.onProtocolError(reader.process, reader.peer, status);
        return false;
      }
      if ((header.flags & kFlagReference) != 0) {
        if (s.held.size() < kReferenceBytes) {
          return true;
        }
        startRead(ref, side, s.held.data());
        s.held.erase(s.held.begin(), s.held.begin() + kReferenceBytes);
        continue;
      }
      if (!s.reads.empty()) {
        return true;
      }
      s.frameLeft = kFrameHeaderBytes + header.payloadBytes;
    }
    if (s.held.empty()) {
      return true;
    }
    const size_t n = std::min(s.frameLeft, s.held.size());
    const std::vector<std::byte> part(
        s.held.begin(), s.held.begin() + static_cast<ptrdiff_t>(n));
    s.held.erase(s.held.begin(), s.held.begin() + static_cast<ptrdiff_t>(n));
    s.frameLeft -= n;
    if (!read(path, reader, s, part.data(), n)) {
      return false;
    }
  }
  return true;
}

void SimulatedNetwork::startRead(PathRef ref, int side, const std::byte* data) {
  Path& path = *paths_[ref];
  Stream& s = path.ends[side].stream;
  End& reader = path.ends[1 - side];
  auto what = std::make_shared<Read>();
  FrameBytes bytes;
  std::memcpy(bytes.data(), data, kFrameHeaderBytes);
  (void)decodeFrame(bytes, what->header);
  std::memcpy(&what->from, data + kFrameHeaderBytes, sizeof(const std::byte*));
  std::memcpy(
      &what->fromKey,
      data + kFrameHeaderBytes + sizeof(const std::byte*),
      sizeof(uint64_t));
  const uint32_t size = what->header.payloadBytes;
  const auto found =
      channel(reader.process, reader.peer)
          .pin(reader.id, what->header, [this](std::span<std::byte> bytes) {
            return keyOf(bytes.data(), bytes.size()) != 0;
          });
  const Channel::Place place = found.value();
  if (place.pinned != nullptr) {
    what->to = place.pinned;
    what->toKey = keyOf(place.pinned, size);
  } else {
    what->own.resize(size);
    what->to = what->own.data();
  }
  note(15, ref, size, "begins to read, path and bytes");
  s.reads.push_back(what);
  if (!place.wanted) {
    what->landed = size;
    at(now_, [this, ref, side] { finishReads(ref, side); });
    return;
  }
  at(now_ + path.link.latency,
     [this, ref, side, what] { answerRead(ref, side, what); });
}

// The device of the far end answers, packet by packet.
void SimulatedNetwork::answerRead(
    PathRef ref,
    int side,
    const std::shared_ptr<Read>& what) {
  Path& path = *paths_[ref];
  End& writer = path.ends[side];
  Stream& s = writer.stream;
  if (path.stalledUntil > now_) {
    at(path.stalledUntil,
       [this, ref, side, what] { answerRead(ref, side, what); });
    return;
  }
  if (writer.fenced || (path.broken && prng_.chance(0.3))) {
    return;
  }
  const uint64_t size = what->header.payloadBytes;
  const uint64_t n = std::min<uint64_t>(size - what->asked, 100);
  if (keyOf(what->from + what->asked, n) != what->fromKey) {
    breakNow(ref); // the memory has been revoked
    return;
  }
  std::vector<std::byte> packet(
      what->from + what->asked, what->from + what->asked + n);
  const uint64_t offset = what->asked;
  what->asked += n;
  const auto took =
      Nanos(static_cast<int64_t>(n * 1'000'000'000 / path.link.bytesPerS));
  const auto jitter = Nanos(
      static_cast<int64_t>(
          prng_.below(static_cast<uint64_t>(path.link.jitter.count()) + 1)));
  s.lastLanding =
      std::max(s.lastLanding, now_ + path.link.latency + took + jitter);
  at(s.lastLanding,
     [this, ref, side, what, offset, packet = std::move(packet)] {
       land(ref, side, what, offset, packet);
     });
  if (what->asked < size) {
    at(now_ + took, [this, ref, side, what] { answerRead(ref, side, what); });
  }
}

void SimulatedNetwork::land(
    PathRef ref,
    int side,
    const std::shared_ptr<Read>& what,
    uint64_t offset,
    std::vector<std::byte> packet) {
  Path& path = *paths_[ref];
  End& reader = path.ends[1 - side];
  if (path.stalledUntil > now_) {
    at(path.stalledUntil,
       [this, ref, side, what, offset, packet = std::move(packet)] {
         land(ref, side, what, offset, packet);
       });
    return;
  }
  if (reader.fenced) {
    return;
  }
  if (what->toKey != 0 &&
      keyOf(what->to + offset, packet.size()) != what->toKey) {
    breakNow(ref);
    return;
  }
  note(16, ref, packet.size(), "landed, path and bytes");
  std::memcpy(what->to + offset, packet.data(), packet.size());
  what->landed += packet.size();
  if (what->landed == what->header.payloadBytes) {
    finishReads(ref, side);
  }
}

// In the order of the frames.
void SimulatedNetwork::finishReads(PathRef ref, int side) {
  Path& path = *paths_[ref];
  Stream& s = path.ends[side].stream;
  End& reader = path.ends[1 - side];
  Channel& c = channel(reader.process, reader.peer);
  while (reader.open && !s.reads.empty() &&
         s.reads.front()->landed == s.reads.front()->header.payloadBytes) {
    const std::shared_ptr<Read> what = s.reads.front();
    s.reads.pop_front();
    Status status = c.onHeader(reader.id, what->header, now_);
    if (status.ok() && what->toKey == 0) {
      if (std::byte* const to = c.destination(reader.id)) {
        std::memcpy(to, what->own.data(), what->own.size());
      }
    }
    if (status.ok()) {
      status = c.onPayload(reader.id, now_);
    }
    if (!status.ok()) {
      listener_.onProtocolError(reader.process, reader.peer, status);
      breakNow(ref);
      return;
    }
    if (what->toKey != 0) {
      c.unpin(reader.id);
    }
  }
  if (reader.open && !readHeld(ref, side)) {
    breakNow(ref);
  }
}

} // namespace resilient

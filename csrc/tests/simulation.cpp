#include "tests/simulation.h"

#include "tests/simulation_run.h"

namespace resilient::test {

// --- the plan

BurstRange Simulation::randomBursts() {
  if (below(4) == 0) {
    return BurstRange::none();
  }
  const uint64_t bound = uint64_t{1} << below(20);
  return below(2) == 0 ? BurstRange{0, bound} : BurstRange{bound, UINT64_MAX};
}

SimulatedLink Simulation::randomLink() {
  SimulatedLink l;
  l.latency = Nanos(1000) +
      upTo(oneOf<Nanos>(
          {std::chrono::microseconds(50),
           std::chrono::milliseconds(2),
           std::chrono::milliseconds(40)}));
  l.jitter = oneOf<Nanos>(
      {Nanos(0),
       std::chrono::microseconds(100),
       std::chrono::milliseconds(10)});
  l.bytesPerS = oneOf<uint64_t>({20'000, 1'000'000, 100'000'000});
  l.windowBytes = oneOf<uint64_t>({100, 500, 3000, 60'000});
  l.selfAcknowledging = below(4) == 0;
  l.datagrams = below(4) == 0;
  if (below(3) == 0) {
    l.reads = true;
    l.selfAcknowledging = l.datagrams = false;
  }
  return l;
}

void Simulation::plan() {
  processes_ = 2 + below(3);
  groups_ = 1 + below(2);
  chunkBytes_ = oneOf<uint32_t>({64, 100, 256, 1000, 4096});
  duration_ = std::chrono::milliseconds(oneOf<int>({20, 200, 1000}));
  cancelChance_ = oneOf<double>({0, 0, 0.1, 0.4});
  mismatchChance_ = oneOf<double>({0, 0, 0.1});
  ChannelConfig config;
  config.chunkBytes = chunkBytes_;
  config.starvationBytes = 1 + below(20'000);
  for (size_t i = 0; i < processes_; ++i) {
    config.copyBytes = oneOf<uint64_t>({0, 32, 512, 8192});
    config.stageAfter = oneOf<Nanos>(
        {std::chrono::microseconds(100),
         std::chrono::milliseconds(2),
         std::chrono::milliseconds(100)});
    config.copyPieceBytes = oneOf<uint64_t>({50, 1000, 2 << 20});
    config.ownEagerBytes =
        oneOf<uint64_t>({0, chunkBytes_ / 2, chunkBytes_ * 3, 3000, 1 << 20});
    eagerBytes_.push_back(config.ownEagerBytes);
    net_.addProcess(config, oneOf<uint64_t>({0, 1000, 10'000, 1 << 20}));
  }
  net_.join();
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = 0; b < processes_; ++b) {
      if (a < b) {
        planPaths(a, b);
      }
      if (a != b) {
        planMessages(a, b);
      }
    }
  }
  planCollectives();
  if (below(10) == 0) {
    const size_t p = below(processes_);
    const uint64_t g = below(groups_);
    net_.at(net_.now() + upTo(duration_), [this, p, g] { closeGroup(p, g); });
  }
  if (below(10) == 0) {
    const size_t a = below(processes_);
    const size_t b = (a + 1) % processes_;
    net_.at(net_.now() + upTo(duration_), [this, a, b] { failChannel(a, b); });
  }
}

void Simulation::planPaths(size_t a, size_t b) {
  const TimePoint start = net_.now();
  for (uint64_t i = below(4); i > 0; --i) {
    const auto when = below(2) == 0 ? Nanos(0) : upTo(duration_);
    net_.at(start + when, [this, a, b] {
      if (!dead(a, b)) {
        net_.connect(a, b, randomLink());
      }
    });
  }
  for (uint64_t i = below(8); i > 0; --i) {
    const uint64_t kind = below(13);
    net_.at(start + upTo(duration_), [this, a, b, kind] {
      const auto open = net_.pathsBetween(a, b);
      const Nanos notice =
          below(3) == 0 ? Nanos(0) : upTo(std::chrono::milliseconds(60));
      if (kind == 0) { // all at once, for a while
        for (auto p : open) {
          ++result_.cuts;
          net_.cut(p, notice);
        }
        return;
      }
      if (kind <= 3) {
        if (!open.empty()) {
          ++result_.cuts;
          net_.cut(open[below(open.size())], notice);
        }
        return;
      }
      if (kind <= 5) {
        if (!open.empty()) {
          ++result_.stalls;
          net_.stall(
              open[below(open.size())],
              net_.now() + upTo(std::chrono::milliseconds(300)));
        }
        return;
      }
      if (kind <= 7) {
        if (!dead(a, b) && open.size() < 4) {
          net_.connect(a, b, randomLink());
        }
        return;
      }
      if (open.empty()) {
        return;
      }
      const int side = static_cast<int>(below(2));
      if (kind == 12) { // maybe none for large bursts, or none for small ones
        for (const auto p : open) {
          net_.setBursts(p, side, randomBursts());
        }
        return;
      }
      const auto path = open[below(open.size())];
      if (kind <= 10) {
        ++result_.suspicions;
        net_.suspect(path, side, true);
        const Nanos doubt = upTo(std::chrono::milliseconds(300));
        net_.at(net_.now() + doubt, [this, path, side] {
          net_.suspect(path, side, false);
        });
        return;
      }
      ++result_.roles;
      net_.setClasses(path, side, static_cast<uint8_t>(below(16)));
    });
  }
  for (uint64_t i = below(4); i > 0; --i) {
    const bool turn = below(2) == 0;
    const uint64_t number = i;
    net_.at(start + upTo(duration_), [this, a, b, turn, number] {
      const size_t from = turn ? a : b;
      const size_t to = turn ? b : a;
      std::vector<std::byte> payload(8 + below(300));
      std::memcpy(payload.data(), &number, 8);
      if (net_.channel(from, to).failure().ok()) {
        controlSent_.insert({from, to, number});
      }
      net_.channel(from, to).sendControl(std::move(payload));
    });
  }
}

void Simulation::planMessages(size_t src, size_t dst) {
  const TimePoint start = net_.now();
  const uint64_t count = below(oneOf<uint64_t>({2, 8, 20}));
  const uint64_t early = below(4); // 0: receives first; 1: late; else mixed
  for (uint64_t i = 0; i < count; ++i) {
    const StreamId id{src, dst, below(groups_), below(3)};
    net_.at(start + upTo(duration_), [this, id] { sendNext(id); });
    Nanos when = upTo(duration_);
    if (early == 0) {
      when /= 10;
    } else if (early == 1) {
      when = duration_ - when / 10;
    }
    const bool any = id.tag == kAnySourceTag && below(2) == 0;
    if (below(10) != 0) { // else it is received in the end
      net_.at(start + when, [this, id, any] {
        receiveNext(id, any, /*mayMismatch=*/true);
      });
    }
  }
}

void Simulation::planCollectives() {
  const TimePoint start = net_.now();
  for (uint64_t g = 0; g < groups_; ++g) {
    const uint64_t count = below(4);
    std::vector<Nanos> when(processes_);
    for (uint64_t sequence = 0; sequence < count; ++sequence) {
      const size_t c = collectives_.size();
      Collective& x = collectives_.emplace_back();
      x.group = g;
      x.sequence = sequence;
      x.orders = 1 + below(3);
      x.parts.resize(processes_);
      if (prng_.chance(mismatchChance_)) {
        x.strange = static_cast<int>(below(processes_));
        x.broken = true;
      }
      for (size_t p = 0; p < processes_; ++p) {
        when[p] += upTo(duration_ / 5);
        net_.at(start + when[p], [this, c, p] { startPart(c, p); });
        if (prng_.chance(cancelChance_ / 4)) {
          net_.at(start + when[p] + upTo(duration_ / 5), [this, c, p] {
            endPart(c, p, Status(StatusCode::kAborted, "given up"));
          });
        }
      }
    }
  }
}

// --- operations

void Simulation::send(
    size_t src,
    size_t dst,
    uint64_t group,
    uint64_t stream,
    uint64_t order,
    bool collective,
    const OpSignature& signature) {
  const size_t index = messages_.size();
  Message& m = messages_.emplace_back();
  const uint64_t h = collective ? hashOf(src, dst, group, stream, order)
                                : messageHash(src, dst, group, stream, order);
  m.src = src;
  m.dst = dst;
  m.group = group;
  m.stream = stream;
  m.order = order;
  m.bytes = bytesOf(h);
  m.dtype = dtypeOf(h);
  m.collective = collective;
  m.op = std::make_unique<Send>(*this, index);
  m.buffer = newBuffer(m.bytes);
  m.op->awaitReceive = below(4) == 0;
  Send& op = *m.op;
  op.key = MessageKey{group, stream, order};
  op.pointToPoint = !collective;
  op.signature = signature;
  if (!collective) {
    op.signature.dtype = m.dtype;
  }
  op.trafficClass = static_cast<TrafficClass>(below(kTrafficClassCount));
  op.sourceRank = static_cast<int32_t>(src);
  op.data = m.buffer.data.get();
  op.bytes = m.bytes;
  if (below(4) == 0) {
    planSource(index);
  } else {
    fill(m.buffer.data.get(), m.bytes, contentHash(m));
  }
  if (below(3) == 0) {
    m.tolerant = true;
    op.tolerance.maxLost = 0.5f; // the simulated paths do not look at it
  }
  if (!collective) {
    sent_[{src, dst, group, stream}].push_back(index);
  }
  net_.note(10, index, m.bytes, "send of message with bytes");
  net_.note(10, src, dst, "  from and to");
  net_.note(10, group, stream, "  in group and stream");
  net_.channel(src, dst).send(&op, net_.now());
  if (!collective && prng_.chance(cancelChance_)) {
    const Nanos after = upTo(duration_ / oneOf<int>({2, 20, 1000}));
    net_.at(net_.now() + after, [this, index] { cancelSend(index); });
  }
}

// The data comes in pieces, as from a device; until then there is garbage. The
// first piece is there before the send.
void Simulation::planSource(size_t index) {
  Message& m = messages_[index];
  std::memset(m.buffer.data.get(), static_cast<int>(kGarbage), m.bytes);
  std::vector<uint64_t> ends = {m.bytes};
  for (uint64_t i = below(5); i > 0; --i) {
    ends.push_back(below(m.bytes + 1));
  }
  std::ranges::sort(ends);
  growSource(index, ends.front());
  const TimePoint last = net_.now() + upTo(duration_ / 5);
  for (const uint64_t end : ends) {
    const TimePoint at =
        end == m.bytes ? last : net_.now() + upTo(last - net_.now());
    net_.at(at, [this, index, end] { growSource(index, end); });
  }
}

void Simulation::growSource(size_t index, uint64_t end) {
  Message& m = messages_[index];
  if (m.outcome != Outcome::kPending) {
    return;
  }
  const uint64_t there = std::min(m.op->availableBytes, m.bytes);
  const bool first = m.op->availableBytes == UINT64_MAX;
  if (!first && end <= there) {
    return; // a later piece was faster
  }
  std::vector<std::byte> content(m.bytes);
  fill(content.data(), m.bytes, contentHash(m));
  const uint64_t begin = first ? 0 : there;
  std::copy(
      content.begin() + static_cast<int64_t>(begin),
      content.begin() + static_cast<int64_t>(end),
      m.buffer.data.get() + begin);
  if (first) {
    m.op->availableBytes = end;
  } else {
    net_.channel(m.src, m.dst).sourceGrew(m.op.get(), end, net_.now());
  }
}

void Simulation::sendNext(const StreamId& id) {
  send(
      id.src,
      id.dst,
      id.group,
      id.tag,
      sent_[id].size(),
      /*collective=*/false,
      OpSignature());
}

void Simulation::receive(
    size_t dst,
    int src,
    uint64_t group,
    uint64_t stream,
    uint64_t order,
    bool collective,
    uint64_t bytes,
    DType dtype,
    const OpSignature& signature) {
  const size_t index = receives_.size();
  Receive& r = receives_.emplace_back();
  r.dst = dst;
  r.src = src;
  r.group = group;
  r.stream = stream;
  r.order = order;
  r.bytes = bytes;
  r.dtype = dtype;
  r.collective = collective;
  r.op = std::make_unique<Recv>(*this, index);
  r.buffer = newBuffer(bytes);
  Recv& op = *r.op;
  op.key = MessageKey{group, stream, order};
  op.ordered = !collective;
  op.source =
      src == kAny ? nullptr : &net_.channel(dst, static_cast<size_t>(src));
  op.signature = signature;
  if (!collective) {
    op.signature.dtype = dtype;
    posted_[{dst, group, stream}].push_back(index);
  }
  op.data = r.buffer.data.get();
  op.bytes = bytes;
  net_.note(11, index, bytes, "post of receive with bytes");
  net_.note(11, static_cast<uint64_t>(src), dst, "  from and to");
  net_.note(11, group, stream, "  in group and stream");
  if (below(4) == 0) {
    op.settling = true;
    net_.at(net_.now() + upTo(duration_ / 5), [this, index] { settle(index); });
  }
  net_.mailbox(dst).post(&op);
  if (!collective && !healing_ && prng_.chance(cancelChance_)) {
    const Nanos after = upTo(duration_ / oneOf<int>({2, 20, 1000}));
    net_.at(net_.now() + after, [this, index] {
      if (!healing_) { // then there is no other receive for its message
        cancelReceive(index);
      }
    });
  }
}

// Devices know the memory of the receive now.
void Simulation::settle(size_t index) {
  Receive& r = receives_[index];
  if (r.outcome != Outcome::kPending) {
    return;
  }
  if (r.op->matchedSource != nullptr) {
    r.op->matchedSource->receiveReady(r.op.get(), net_.now());
  } else {
    r.op->settling = false;
  }
}

// The receive expects the message that must come to it, unless receives
// before it are cancelled or take from any source.
void Simulation::receiveNext(const StreamId& id, bool any, bool mayMismatch) {
  if (dead(id.src, id.dst) && below(2) == 0) {
    return;
  }
  uint64_t k = 0;
  for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
    const Receive& r = receives_[i];
    const int from = r.op && r.outcome == Outcome::kPending
        ? (r.op->matchedSource != nullptr
               ? static_cast<int>(net_.ownerOf(*r.op->matchedSource).second)
               : r.src)
        : r.matched;
    k += from == static_cast<int>(id.src);
  }
  const uint64_t h = messageHash(id.src, id.dst, id.group, id.tag, k);
  uint64_t bytes = bytesOf(h);
  DType dtype = dtypeOf(h);
  if (mayMismatch && prng_.chance(mismatchChance_)) {
    if (below(2) == 0) {
      bytes += 1;
    } else {
      dtype = DType::kFloat64;
    }
  }
  receive(
      id.dst,
      any ? kAny : static_cast<int>(id.src),
      id.group,
      id.tag,
      0,
      /*collective=*/false,
      bytes,
      dtype,
      OpSignature());
}

// Allocators hand out the same memory again, so what was late for one operation
// must not touch the next one there.
Simulation::Buffer Simulation::newBuffer(uint64_t bytes) {
  Buffer b;
  const auto spare = std::ranges::find_if(
      spare_, [&](const Buffer& s) { return s.bytes >= bytes; });
  if (spare != spare_.end()) {
    b = std::move(*spare);
    spare_.erase(spare);
  } else {
    b.data = std::make_unique<std::byte[]>(bytes);
  }
  b.bytes = bytes;
  if (below(4) != 0) {
    b.registered = true;
    net_.registerMemory(b.data.get(), b.bytes);
  }
  return b;
}

// The memory of an operation that did not end well: devices may still read it,
// or write to it, so it is revoked first. A mistake in this test would be the
// owner's.
void Simulation::takeBack(Buffer& buffer) {
  if (!buffer.registered) {
    giveBack(buffer);
    return;
  }
  const auto kept = std::make_shared<Buffer>(std::move(buffer));
  kept->registered = false;
  net_.revoke(kept->data.get(), [this, kept] { giveBack(*kept); });
}

// The owner does with its memory what it likes: at once, and roughly. Memory of
// devices stays registered for a while, since nothing waits for that.
void Simulation::giveBack(Buffer& buffer) {
  if (buffer.bytes == 0) {
    return;
  }
  std::memset(buffer.data.get(), static_cast<int>(kGarbage), buffer.bytes);
  if (buffer.registered) {
    net_.revoke(buffer.data.get(), [] {});
  }
  const uint64_t next = below(3);
  if (buffer.registered || next == 0) {
    graveyard_.push_back(std::move(buffer)); // checked at the end
  } else if (next == 1) {
    spare_.push_back(std::move(buffer)); // for a later operation
  } else {
    buffer.data.reset(); // address sanitizer watches it
  }
}

void Simulation::cancelSend(size_t index) {
  Message& m = messages_[index];
  if (m.outcome != Outcome::kPending) {
    return;
  }
  net_.note(12, index, 0, "cancel of message");
  net_.channel(m.src, m.dst).cancelSend(m.op.get(), "cancelled", net_.now());
  m.outcome = Outcome::kCancelled;
  ++result_.cancelled;
  m.op.reset();
  takeBack(m.buffer);
}

void Simulation::cancelReceive(size_t index) {
  Receive& r = receives_[index];
  if (r.outcome != Outcome::kPending) {
    return;
  }
  net_.note(13, index, 0, "cancel of receive");
  if (r.op->matchedSource != nullptr) {
    r.matched = static_cast<int>(net_.ownerOf(*r.op->matchedSource).second);
  }
  net_.mailbox(r.dst).cancel(r.op.get(), "cancelled");
  r.outcome = Outcome::kCancelled;
  ++result_.cancelled;
  r.op.reset();
  takeBack(r.buffer);
}

void Simulation::sendFinished(size_t index, const Status& status) {
  Message& m = messages_[index];
  net_.note(14, index, static_cast<uint64_t>(status.code()), "sent");
  if (m.outcome != Outcome::kPending) {
    fail("message " + std::to_string(index) + " ended twice");
    return;
  }
  m.outcome = status.ok() ? Outcome::kOk : Outcome::kError;
  m.status = status;
  m.zeroFilled = std::move(m.op->zeroFilled);
  for (const ByteRange& r : m.zeroFilled) {
    result_.zeroFilled += r.bytes;
  }
  result_.failed += !status.ok();
  std::unique_ptr<Send> gone;
  if (below(2) == 0) {
    gone = std::move(m.op); // its memory is its owner's again
  }
  if (status.ok()) {
    giveBack(m.buffer);
  } else {
    takeBack(m.buffer);
  }
  auto c = collectiveOfSend_.find(index);
  if (c != collectiveOfSend_.end()) {
    partProgress(c->second, m.src, status);
  }
}

void Simulation::chunkArrived(size_t index, uint64_t offset, uint64_t bytes) {
  Receive& r = receives_[index];
  if (r.outcome != Outcome::kPending || offset + bytes > r.bytes) {
    fail(
        "a chunk arrived for receive " + std::to_string(index) + " that ended");
    return;
  }
  if (bytes != 0) { // else there may be no buffer
    r.op->seen.resize(r.bytes);
    std::memcpy(
        r.op->seen.data() + offset, r.buffer.data.get() + offset, bytes);
    r.op->arrivedBytes += bytes;
  }
}

void Simulation::receiveFinished(size_t index, const Status& status) {
  Receive& r = receives_[index];
  net_.note(15, index, static_cast<uint64_t>(status.code()), "received");
  if (r.outcome != Outcome::kPending) {
    fail("receive " + std::to_string(index) + " ended twice");
    return;
  }
  r.outcome = status.ok() ? Outcome::kOk : Outcome::kError;
  r.status = status;
  if (r.op->matchedSource != nullptr) {
    r.matched = static_cast<int>(net_.ownerOf(*r.op->matchedSource).second);
  }
  if (status.ok()) {
    ++result_.delivered;
    r.content.assign(r.buffer.data.get(), r.buffer.data.get() + r.buffer.bytes);
    r.op->seen.resize(r.bytes);
    if (r.op->arrivedBytes != r.bytes || r.op->seen != r.content) {
      fail(
          "receive " + std::to_string(index) +
          " has other bytes than have arrived");
    }
  } else {
    ++result_.failed;
  }
  std::unique_ptr<Recv> gone;
  if (below(2) == 0) {
    gone = std::move(r.op);
  }
  if (status.ok()) {
    giveBack(r.buffer);
  } else {
    takeBack(r.buffer);
  }
  auto c = collectiveOfReceive_.find(index);
  if (c != collectiveOfReceive_.end()) {
    partProgress(c->second, r.dst, status);
  }
}

// --- collectives

void Simulation::startPart(size_t c, size_t process) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  if (part.ended || closed_.contains({process, x.group})) {
    return;
  }
  part.started = true;
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  signature.count = 10 + x.sequence;
  if (x.strange == static_cast<int>(process)) {
    signature.kind = OpKind::kBroadcast;
    signature.root = 0;
  }
  net_.note(16, c, process, "collective begins at process");
  net_.mailbox(process).begin(x.group, x.sequence, signature);
  const uint64_t stream = kCollectiveBit | x.sequence;
  const bool receivesFirst = below(2) == 0;
  for (int step = 0; step < 2; ++step) {
    for (uint64_t order = 0; order < x.orders; ++order) {
      for (size_t peer = 0; peer < processes_; ++peer) {
        if (peer == process) {
          continue;
        }
        ++part.open;
        if ((step == 0) == receivesFirst) {
          const uint64_t h = hashOf(peer, process, x.group, stream, order);
          part.receives.push_back(receives_.size());
          collectiveOfReceive_[receives_.size()] = c;
          receive(
              process,
              static_cast<int>(peer),
              x.group,
              stream,
              order,
              /*collective=*/true,
              bytesOf(h),
              dtypeOf(h),
              signature);
        } else {
          part.sends.push_back(messages_.size());
          collectiveOfSend_[messages_.size()] = c;
          send(
              process,
              peer,
              x.group,
              stream,
              order,
              /*collective=*/true,
              signature);
        }
      }
    }
  }
}

// One operation of it has ended: with the last, or the first error, it ends.
void Simulation::partProgress(size_t c, size_t process, const Status& status) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  --part.open;
  if (part.ended) {
    return;
  }
  if (!status.ok()) {
    bool excused = x.broken;
    for (size_t p = 0; p < processes_; ++p) {
      excused = excused || closed_.contains({p, x.group});
      for (size_t q = 0; q < processes_; ++q) {
        excused = excused || (p != q && dead(p, q));
      }
    }
    if (!excused) {
      fail(
          "collective " + std::to_string(c) + " failed at process " +
          std::to_string(process) + ": " + status.toString());
    }
  }
  if (!status.ok() || part.open == 0) {
    net_.at(net_.now(), [this, c, process, status] {
      endPart(c, process, status);
    });
  }
}

void Simulation::endPart(size_t c, size_t process, const Status& status) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  if (part.ended || closed_.contains({process, x.group})) {
    part.ended = true;
    return;
  }
  if (!part.started && status.ok()) {
    return;
  }
  part.ended = true;
  if (!status.ok()) {
    x.broken = true;
  }
  net_.note(17, c, process, "collective ends at process");
  for (size_t i : part.sends) {
    cancelSend(i);
  }
  if (below(2) == 0) {
    for (size_t i : part.receives) {
      cancelReceive(i);
    }
    net_.mailbox(process).end(x.group, x.sequence, status);
    return;
  }
  // Also in the other order: what is posted and not matched then ends.
  net_.mailbox(process).end(x.group, x.sequence, status);
  net_.at(net_.now(), [this, c, process] {
    for (size_t i : collectives_[c].parts[process].receives) {
      cancelReceive(i);
    }
  });
}

void Simulation::closeGroup(size_t process, uint64_t group) {
  net_.note(18, process, group, "process closes group");
  closed_.insert({process, group});
  ++result_.losses;
  for (Collective& x : collectives_) {
    if (x.group == group) {
      x.broken = true;
      for (size_t i : x.parts[process].sends) {
        cancelSend(i);
      }
    }
  }
  net_.mailbox(process).closeGroup(group);
}

void Simulation::failChannel(size_t a, size_t b) {
  net_.note(19, a, b, "channel fails");
  dead_.insert({std::min(a, b), std::max(a, b)});
  ++result_.losses;
  for (Collective& x : collectives_) {
    x.broken = true; // it may have needed the channel
  }
  net_.channel(a, b).fail(Status(StatusCode::kNetwork, "channel failed"));
  for (auto p : net_.pathsBetween(a, b)) {
    net_.cut(p, std::chrono::milliseconds(50));
  }
  net_.at(net_.now() + upTo(std::chrono::milliseconds(100)), [this, a, b] {
    net_.channel(b, a).fail(Status(StatusCode::kNetwork, "channel failed"));
    for (auto p : net_.pathsBetween(a, b)) {
      net_.cut(p, Nanos(0));
    }
  });
}

SimulationResult simulate(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace) {
  return Simulation(seed, trace).run();
}

} // namespace resilient::test

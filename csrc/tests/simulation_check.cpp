#include "tests/simulation_run.h"

namespace resilient::test {

// --- the end

// From now on the network works, and every message gets its receive: then
// everything must end by itself.
void Simulation::heal() {
  healing_ = true;
  net_.note(20, 0, 0, "healing");
  net_.trustAll();
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = a + 1; b < processes_; ++b) {
      if (!dead(a, b)) {
        const auto path = net_.connect(a, b, SimulatedLink());
        // A burst that suits no path must not wait for one.
        for (int side = 0; side < 2; ++side) {
          net_.setBursts(path, side, randomBursts());
        }
      }
    }
  }
  for (size_t c = 0; c < collectives_.size(); ++c) {
    for (size_t p = 0; p < processes_; ++p) {
      Part& part = collectives_[c].parts[p];
      if (!part.started || collectives_[c].broken) {
        if (!part.started) {
          collectives_[c].broken = true;
        }
        endPart(c, p, Status(StatusCode::kAborted, "given up at the end"));
        for (size_t i : part.receives) {
          cancelReceive(i);
        }
        for (size_t i : part.sends) {
          cancelSend(i);
        }
      }
    }
  }
  // Receives from any source would take what others need.
  for (size_t i = 0; i < receives_.size(); ++i) {
    const Receive& r = receives_[i];
    if (!r.collective && r.src == kAny && r.outcome == Outcome::kPending &&
        r.op->matchedSource == nullptr) {
      cancelReceive(i);
    }
  }
  std::set<StreamId> streams;
  for (const auto& [id, list] : sent_) {
    streams.insert(id);
  }
  for (const Receive& r : receives_) {
    if (!r.collective && r.src != kAny) {
      streams.insert({static_cast<size_t>(r.src), r.dst, r.group, r.stream});
    }
  }
  for (const StreamId& id : streams) {
    if (closed_.contains({id.dst, id.group}) || dead(id.src, id.dst)) {
      continue;
    }
    size_t taken = 0;
    std::vector<size_t> waiting;
    for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
      const Receive& r = receives_[i];
      const bool pending = r.outcome == Outcome::kPending;
      if (pending && r.op->matchedSource == nullptr) {
        if (r.src == static_cast<int>(id.src)) {
          waiting.push_back(i);
        }
        continue;
      }
      const int from = pending
          ? static_cast<int>(net_.ownerOf(*r.op->matchedSource).second)
          : r.matched;
      taken += from == static_cast<int>(id.src);
    }
    const size_t sent = sent_[id].size();
    if (taken > sent) {
      fail("more messages were received than sent");
      return;
    }
    while (waiting.size() > sent - taken) {
      cancelReceive(waiting.back());
      waiting.pop_back();
    }
    for (size_t n = waiting.size(); n < sent - taken; ++n) {
      receiveNext(id, /*any=*/false, /*mayMismatch=*/false);
    }
  }
}

// What was sent, but for what the sender was told is missing. A sender that
// gave up was not told: then anything may be zero.
bool Simulation::arrivedRight(
    const Message& m,
    const std::vector<std::byte>& got) const {
  std::vector<std::byte> expected(m.bytes);
  fill(expected.data(), m.bytes, contentHash(m));
  for (const ByteRange& r : m.zeroFilled) {
    if (!m.tolerant || r.offset + r.bytes > m.bytes) {
      return false;
    }
    std::memset(expected.data() + r.offset, 0, r.bytes);
  }
  if (got.size() != m.bytes) {
    return false;
  }
  if (m.outcome == Outcome::kOk || !m.tolerant) {
    return got == expected;
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != expected[i] && got[i] != std::byte{0}) {
      return false;
    }
  }
  return true;
}

void Simulation::checkEnd() {
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Message& m = messages_[i];
    if (m.outcome == Outcome::kPending) {
      fail(
          "message " + std::to_string(i) + " from " + std::to_string(m.src) +
          " to " + std::to_string(m.dst) + " never ended");
    }
  }
  for (size_t i = 0; i < receives_.size(); ++i) {
    if (receives_[i].outcome == Outcome::kPending) {
      fail(
          "receive " + std::to_string(i) + " of " +
          std::to_string(receives_[i].dst) + " from " +
          std::to_string(receives_[i].src) + " never ended");
    }
  }
  checkStreams();
  std::map<std::pair<StreamId, uint64_t>, const Message*> sends;
  for (const Message& m : messages_) {
    if (m.collective) {
      sends[{{m.src, m.dst, m.group, m.stream}, m.order}] = &m;
    }
  }
  for (const Receive& r : receives_) {
    if (!r.collective || r.outcome != Outcome::kOk) {
      continue;
    }
    const auto found = sends.find(
        {{static_cast<size_t>(r.src), r.dst, r.group, r.stream}, r.order});
    if (found == sends.end() || !arrivedRight(*found->second, r.content)) {
      fail("a collective received wrong bytes");
    }
  }
  for (const Collective& x : collectives_) {
    for (const Part& part : x.parts) {
      if (!x.broken && !part.ended) {
        fail("a collective never ended");
      }
    }
  }
  for (const Buffer& b : graveyard_) {
    if (!std::all_of(b.data.get(), b.data.get() + b.bytes, [](std::byte x) {
          return x == kGarbage;
        })) {
      fail("memory was written after it had been given back");
    }
  }
  for (size_t a = 0; a < processes_; ++a) {
    if (net_.staging(a).used() != 0) {
      fail("staging memory was not given back");
    }
    for (size_t b = 0; b < processes_; ++b) {
      if (a == b) {
        continue;
      }
      const Channel& c = net_.channel(a, b);
      const std::string name =
          "channel " + std::to_string(a) + " to " + std::to_string(b) + ": ";
      if (c.openMessages() != 0 || !c.drained()) {
        fail(name + "messages remain open at the sender");
      }
      if (c.chargedBytes() != 0) {
        fail(name + "credit was not given back");
      }
      if (!dead(a, b) && c.incomingMessages() != 0) {
        fail(name + "messages remain open at the receiver");
      }
      if (c.bufferedBytes() != 0 && !dead(a, b)) {
        fail(name + "bytes remain buffered at the receiver");
      }
      result_.duplicates += c.counters().duplicateChunks;
    }
  }
  for (const auto& [from, to, number] : controlSent_) {
    if (!dead(from, to) && !controlReceived_.contains({from, to, number})) {
      fail("a control message was lost");
    }
  }
}

// The receives that took a message of one source, in the order in which they
// were posted, must have taken its messages in the order of their sends.
void Simulation::checkStreams() {
  for (const auto& [id, list] : sent_) {
    std::vector<const Receive*> took;
    for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
      if (receives_[i].matched == static_cast<int>(id.src)) {
        took.push_back(&receives_[i]);
      }
    }
    const bool excused =
        closed_.contains({id.dst, id.group}) || dead(id.src, id.dst);
    if (took.size() > list.size() || (!excused && took.size() != list.size())) {
      fail(
          std::to_string(list.size()) + " messages were sent from " +
          std::to_string(id.src) + " to " + std::to_string(id.dst) +
          ", group " + std::to_string(id.group) + ", tag " +
          std::to_string(id.tag) + ", and " + std::to_string(took.size()) +
          " received");
      return;
    }
    for (size_t k = 0; k < list.size(); ++k) {
      const Message& m = messages_[list[k]];
      const std::string name = "message " + std::to_string(list[k]) + " (" +
          std::to_string(id.src) + " to " + std::to_string(id.dst) + ", tag " +
          std::to_string(id.tag) + ", #" + std::to_string(k) + "): ";
      const Receive* r = k < took.size() ? took[k] : nullptr;
      const bool fits =
          r == nullptr || (r->bytes == m.bytes && r->dtype == m.dtype);
      if (r != nullptr && r->outcome == Outcome::kOk) {
        if (!fits || !arrivedRight(m, r->content)) {
          fail(name + "received with wrong bytes");
        }
      }
      if (r != nullptr && r->outcome == Outcome::kError && !excused) {
        const bool right = m.outcome == Outcome::kCancelled
            ? true
            : !fits && r->status.code() == StatusCode::kMismatch;
        if (!right) {
          fail(name + "its receive failed: " + r->status.toString());
        }
      }
      if (m.outcome == Outcome::kError && !excused) {
        const bool right =
            (!fits && m.status.code() == StatusCode::kMismatch) ||
            (r->outcome == Outcome::kCancelled &&
             m.status.code() == StatusCode::kAborted);
        if (!right) {
          fail(name + "its send failed: " + m.status.toString());
        }
      }
    }
  }
}

void Simulation::sayBye() {
  if (!result_.error.empty()) {
    return;
  }
  net_.at(net_.now(), [this] {
    for (size_t a = 0; a < processes_; ++a) {
      for (size_t b = 0; b < processes_; ++b) {
        if (a != b && !dead(a, b)) {
          net_.channel(a, b).sendBye();
        }
      }
    }
  });
  runUntil(net_.now() + kHealLimit);
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = 0; b < processes_; ++b) {
      if (a != b && !dead(a, b) && byes_[{a, b}] != 1) {
        fail("a goodbye came " + std::to_string(byes_[{a, b}]) + " times");
      }
    }
  }
}

} // namespace resilient::test

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "base/status.h"
#include "operation/communicator.h"
#include "operation/task.h"
#include "tests/check.h"

namespace resilient::test {

// All ranks of a group in memory, on one thread. What happens next is drawn
// from a seed: which rank starts, which message arrives, which send ends, in
// any order a real network could show. Besides it is a strict landlord:
//   - memory lent for sending must not change until the send has ended;
//   - memory lent for receiving must not overlap any other lent memory of its
//     rank, and is overwritten with rubbish when lent;
//   - a slot is used once per direction, sizes agree at both ends;
//   - a rank that ends well has no transfer left, and no message stays unread;
//   - inputs that come in pieces hold rubbish before, and nothing is written to
//     them before they are there;
//   - results that were said to be final do not change.
class LoopbackNetwork {
  using Bytes = std::vector<unsigned char>;
  static constexpr unsigned char kRubbish = 0xdd; // not the one of receives

 public:
  // Memory of a rank that a device fills, or takes, in pieces.
  struct Staged {
    int rank = 0;
    unsigned char* data = nullptr;
    size_t bytes = 0;
    bool input = false, result = false;
  };

  struct Options {
    int ranks = 1;
    uint64_t seed = 1;
    // The transfer event with this number (counting from 0) fails.
    int64_t failAt = -1;
    // Ranks that never start, as if their process had not come so far.
    std::set<int> absent{};
    // The operation's time runs out when nothing more can happen.
    bool deadline = false;
    // Where the ranks are; each learns it at a time of its own. Null: all at
    // one place.
    const Topology* topology = nullptr;
    std::vector<Staged> staged{};
  };

  struct Outcome {
    std::vector<Status> status; // by rank; kInternal "never ended" if so
    int64_t events = 0;
    int failedRank = -1; // whose transfer failed by failAt
    std::vector<uint64_t> bytesSent, messagesSent; // by rank
    std::vector<std::vector<uint64_t>> bytesTo, messagesTo; // by rank, peer
    int64_t yields = 0;
    // The part of the results in Options::staged that was final before the end.
    uint64_t finalBytes = 0;
  };

  using Body = std::function<Task(Communicator&)>;

  // Runs body(communicator of rank r) for all ranks.
  static Outcome run(const Options& options, const Body& body) {
    LoopbackNetwork network(options);
    network.runAll(body);
    return network.outcome_;
  }

 private:
  struct Record {
    Transfer* transfer = nullptr;
    int rank = 0, peer = 0;
    uint64_t slot = 0;
    enum Kind { kSend, kRecv, kYield, kFetch } kind = kSend;
    const unsigned char* sendFrom = nullptr;
    unsigned char* recvInto = nullptr;
    size_t bytes = 0;
    Bytes snapshot; // of a send
    bool delivered = false;
    bool waits = false; // a send whose data is not there yet
  };

  // A Staged, while it comes and goes.
  struct Region {
    Staged memory;
    Bytes content; // of an input
    size_t there = 0;
    Bytes results; // the final ones
    std::vector<bool> isFinal;
  };

  struct Message {
    Bytes content;
    Record* send = nullptr; // null once the send has ended
    bool buffered = false; // the send may end before the receive
  };

  // source, destination, slot
  using Key = std::tuple<int, int, uint64_t>;

  class Rank : public Communicator {
   public:
    Rank(LoopbackNetwork& network, int rank) : network_(network), rank_(rank) {}
    int rank() const override {
      return rank_;
    }
    int size() const override {
      return network_.options_.ranks;
    }
    void startSend(
        Transfer& t,
        int peer,
        uint64_t slot,
        const void* data,
        size_t bytes) override {
      Record& r = network_.add(*this, t, Record::kSend, peer, slot, bytes);
      r.sendFrom = static_cast<const unsigned char*>(data);
      network_.posted(r);
    }
    void startRecv(
        Transfer& t,
        int peer,
        uint64_t slot,
        void* data,
        size_t bytes) override {
      Record& r = network_.add(*this, t, Record::kRecv, peer, slot, bytes);
      r.recvInto = static_cast<unsigned char*>(data);
      network_.posted(r);
    }
    void cancel(Transfer& t) override {
      network_.cancelled(static_cast<Record*>(t.record()));
    }
    size_t available(const void* data, size_t bytes) const override {
      return network_.available(rank_, data, bytes);
    }
    void startFetch(Transfer& t, const void* data, size_t bytes) override {
      Record& r = network_.add(*this, t, Record::kFetch, -1, 0, bytes);
      r.sendFrom = static_cast<const unsigned char*>(data);
    }
    void resultIsFinal(const void* data, size_t bytes) override {
      network_.isFinal(rank_, data, bytes);
    }
    void startYield(Transfer& t) override {
      network_.add(*this, t, Record::kYield, -1, 0, 0);
      ++network_.outcome_.yields;
    }
    const Topology* topology() const override {
      return knows_ ? network_.topology() : nullptr;
    }
    void startLearning(Transfer& t) override {
      knows_ = true;
      network_.add(*this, t, Record::kYield, -1, 0, 0);
    }

   private:
    LoopbackNetwork& network_;
    int rank_;
    bool knows_ = false;
  };

  const Topology* topology() const {
    return options_.topology != nullptr ? options_.topology : &onePlace_;
  }

  explicit LoopbackNetwork(const Options& options)
      : options_(options), random_(options.seed), onePlace_(options.ranks) {
    const size_t n = static_cast<size_t>(options.ranks);
    outcome_.status.assign(n, Status(StatusCode::kInternal, "never ended"));
    outcome_.bytesSent.assign(n, 0);
    outcome_.messagesSent.assign(n, 0);
    outcome_.bytesTo.assign(n, std::vector<uint64_t>(n, 0));
    outcome_.messagesTo.assign(n, std::vector<uint64_t>(n, 0));
  }

  void fault(const std::string& what) {
    if (fault_.empty()) {
      fault_ = what;
    }
  }

  static bool overlap(
      const unsigned char* a,
      size_t an,
      const unsigned char* b,
      size_t bn) {
    return an > 0 && bn > 0 && a < b + bn && b < a + an;
  }

  Record& add(
      Rank& rank,
      Transfer& t,
      Record::Kind kind,
      int peer,
      uint64_t slot,
      size_t bytes) {
    if (t.pending()) {
      fault("a pending transfer was started again");
    }
    if ((kind == Record::kSend || kind == Record::kRecv) &&
        (peer < 0 || peer >= options_.ranks || peer == rank.rank())) {
      fault("no such peer: " + std::to_string(peer));
    }
    records_.push_back(std::make_unique<Record>());
    Record& r = *records_.back();
    r.transfer = &t;
    r.kind = kind;
    r.rank = rank.rank();
    r.peer = peer;
    r.slot = slot;
    r.bytes = bytes;
    t.begin(&rank, &r);
    return r;
  }

  void posted(Record& r) {
    const unsigned char* memory =
        r.kind == Record::kSend ? r.sendFrom : r.recvInto;
    for (const auto& other : records_) {
      if (other.get() == &r || other->rank != r.rank ||
          other->kind == Record::kYield || other->kind == Record::kFetch ||
          (other->kind == Record::kSend && r.kind == Record::kSend)) {
        continue;
      }
      const unsigned char* theirs =
          other->kind == Record::kSend ? other->sendFrom : other->recvInto;
      if (overlap(memory, r.bytes, theirs, other->bytes)) {
        fault(
            "rank " + std::to_string(r.rank) + " lent memory twice, slot " +
            std::to_string(r.slot) + " and " + std::to_string(other->slot));
      }
    }
    if (r.kind == Record::kSend) {
      const Key key(r.rank, r.peer, r.slot);
      if (!used_.insert(key).second) {
        fault("slot used twice: " + std::to_string(r.slot));
      }
      outcome_.bytesSent[static_cast<size_t>(r.rank)] += r.bytes;
      ++outcome_.messagesSent[static_cast<size_t>(r.rank)];
      const size_t from = static_cast<size_t>(r.rank);
      const size_t to = static_cast<size_t>(r.peer);
      outcome_.bytesTo[from][to] += r.bytes;
      ++outcome_.messagesTo[from][to];
      r.waits = available(r.rank, r.sendFrom, r.bytes) < r.bytes;
      if (!r.waits) {
        publish(r);
      }
    } else {
      checkNotFinal(r);
      if (r.bytes > 0) {
        std::memset(r.recvInto, 0xee, r.bytes);
      }
      if (!usedByReceiver_.insert(Key(r.peer, r.rank, r.slot)).second) {
        fault("slot received twice: " + std::to_string(r.slot));
      }
    }
  }

  // The data of a send is there.
  void publish(Record& r) {
    r.waits = false;
    r.snapshot.assign(r.sendFrom, r.sendFrom + r.bytes);
    Message& m = messages_[Key(r.rank, r.peer, r.slot)];
    m.content = r.snapshot;
    m.send = &r;
    m.buffered = random_.chance(0.3);
  }

  Region* regionOf(int rank, const void* data) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (Region& region : regions_) {
      const Staged& m = region.memory;
      if (m.rank == rank && at >= m.data && at < m.data + m.bytes) {
        return &region;
      }
    }
    return nullptr;
  }

  size_t available(int rank, const void* data, size_t bytes) {
    const Region* region = regionOf(rank, data);
    if (region == nullptr || !region->memory.input) {
      return bytes;
    }
    const size_t offset = static_cast<size_t>(
        static_cast<const unsigned char*>(data) - region->memory.data);
    return region->there <= offset ? 0
                                   : std::min(bytes, region->there - offset);
  }

  void isFinal(int rank, const void* data, size_t bytes) {
    Region* region = regionOf(rank, data);
    if (region == nullptr || !region->memory.result) {
      return;
    }
    const auto* from = static_cast<const unsigned char*>(data);
    const size_t offset = static_cast<size_t>(from - region->memory.data);
    for (size_t i = 0; i < bytes; ++i) {
      if (region->isFinal.at(offset + i)) {
        fault("a result was final twice");
        return;
      }
      region->isFinal[offset + i] = true;
      region->results[offset + i] = from[i];
    }
    outcome_.finalBytes += bytes;
  }

  // A receive would give a final result another value.
  void checkNotFinal(const Record& r) {
    for (const Region& region : regions_) {
      for (size_t i = 0; r.rank == region.memory.rank && i < r.bytes; ++i) {
        const unsigned char* at = r.recvInto + i;
        if (at >= region.memory.data &&
            at < region.memory.data + region.memory.bytes &&
            region.isFinal[static_cast<size_t>(at - region.memory.data)]) {
          fault("a final result is received once more");
          return;
        }
      }
    }
  }

  void grow(Region& region) {
    const size_t end =
        region.there + 1 + random_.below(region.memory.bytes - region.there);
    for (; region.there < end; ++region.there) {
      if (region.memory.data[region.there] != kRubbish) {
        fault("memory of an input was written before the input was there");
      }
      region.memory.data[region.there] = region.content[region.there];
    }
    for (const auto& r : records_) {
      if (r->waits && available(r->rank, r->sendFrom, r->bytes) == r->bytes) {
        publish(*r);
      }
    }
  }

  void prepareStaged() {
    for (const Staged& memory : options_.staged) {
      Region& region = regions_.emplace_back();
      region.memory = memory;
      region.results.resize(memory.bytes);
      region.isFinal.resize(memory.bytes);
      if (memory.input) {
        region.content.assign(memory.data, memory.data + memory.bytes);
        std::fill_n(memory.data, memory.bytes, kRubbish);
      }
    }
  }

  // After the run: the rest of the inputs comes, as a device would bring it.
  void finishStaged() {
    for (Region& region : regions_) {
      while (region.memory.input && region.there < region.memory.bytes) {
        grow(region);
      }
      for (size_t i = 0; i < region.memory.bytes; ++i) {
        if (region.isFinal[i] && region.results[i] != region.memory.data[i]) {
          fault("a final result has changed");
          return;
        }
      }
    }
  }

  void cancelled(Record* r) {
    ++cancelled_;
    if (r->kind == Record::kSend) {
      const auto it = messages_.find(Key(r->rank, r->peer, r->slot));
      if (it != messages_.end()) {
        messages_.erase(it);
      }
    }
    forget(r);
  }

  void forget(Record* r) {
    const auto it =
        std::find_if(records_.begin(), records_.end(), [r](const auto& x) {
          return x.get() == r;
        });
    records_.erase(it);
  }

  bool ready(const Record& r) {
    if (r.kind == Record::kYield) {
      return true;
    }
    if (r.kind == Record::kFetch) {
      return available(r.rank, r.sendFrom, r.bytes) == r.bytes;
    }
    if (r.waits) {
      return false;
    }
    if (r.kind == Record::kSend) {
      if (r.delivered) {
        return true;
      }
      return messages_.at(Key(r.rank, r.peer, r.slot)).buffered;
    }
    return messages_.count(Key(r.peer, r.rank, r.slot)) > 0;
  }

  void checkUnchanged(const Record& send) {
    if (send.bytes > 0 &&
        std::memcmp(send.sendFrom, send.snapshot.data(), send.bytes) != 0) {
      fault(
          "rank " + std::to_string(send.rank) +
          " changed memory lent to a send, slot " + std::to_string(send.slot));
    }
  }

  void finish(Record* r, Status status) {
    Transfer* t = r->transfer;
    forget(r);
    t->complete(std::move(status)); // may start, cancel and end anything
  }

  void step(Record* r) {
    if (r->kind == Record::kYield || r->kind == Record::kFetch) {
      finish(r, Status());
      return;
    }
    if (outcome_.events++ == options_.failAt) {
      outcome_.failedRank = r->rank;
      if (r->kind == Record::kSend && !r->delivered) {
        messages_.erase(Key(r->rank, r->peer, r->slot));
      }
      finish(r, Status(StatusCode::kNetwork, "injected failure"));
      return;
    }
    if (r->kind == Record::kSend) {
      checkUnchanged(*r);
      if (!r->delivered) {
        messages_.at(Key(r->rank, r->peer, r->slot)).send = nullptr;
      }
      finish(r, Status());
      return;
    }
    const auto it = messages_.find(Key(r->peer, r->rank, r->slot));
    Message message = std::move(it->second);
    messages_.erase(it);
    if (message.send != nullptr) {
      checkUnchanged(*message.send);
      message.send->delivered = true;
    }
    if (message.content.size() != r->bytes) {
      fault(
          "sizes differ in slot " + std::to_string(r->slot) + ": sent " +
          std::to_string(message.content.size()) + ", expected " +
          std::to_string(r->bytes));
    } else if (r->bytes > 0) {
      std::memcpy(r->recvInto, message.content.data(), r->bytes);
      isFinal(r->rank, r->recvInto, r->bytes);
    }
    finish(r, Status());
  }

  void ended(size_t rank) {
    ++done_;
    const std::exception_ptr error = tasks_[rank].error();
    if (!error) {
      outcome_.status[rank] = Status();
      for (const auto& r : records_) {
        if (r->rank == static_cast<int>(rank)) {
          fault(
              "rank " + std::to_string(rank) + " ended before slot " +
              std::to_string(r->slot));
        }
      }
      return;
    }
    try {
      std::rethrow_exception(error);
    } catch (const StatusError& e) {
      outcome_.status[rank] = e.status();
    } catch (const std::exception& e) {
      outcome_.status[rank] = Status(StatusCode::kInternal, e.what());
    }
  }

  void runAll(const Body& body) {
    const size_t n = static_cast<size_t>(options_.ranks);
    std::vector<size_t> unstarted;
    for (size_t r = 0; r < n; ++r) {
      ranks_.push_back(std::make_unique<Rank>(*this, static_cast<int>(r)));
      tasks_.emplace_back();
      if (options_.absent.count(static_cast<int>(r)) == 0) {
        unstarted.push_back(r);
      }
    }
    const size_t expected = unstarted.size();
    prepareStaged();
    while (true) {
      std::vector<Record*> choices;
      for (const auto& r : records_) {
        if (ready(*r)) {
          choices.push_back(r.get());
        }
      }
      std::vector<Region*> growing;
      for (Region& region : regions_) {
        if (region.memory.input && region.there < region.memory.bytes) {
          growing.push_back(&region);
        }
      }
      const size_t total = choices.size() + unstarted.size();
      if (total + growing.size() > 0 && done_ < expected) {
        const size_t pick = random_.below(total + growing.size());
        if (pick >= total) {
          grow(*growing[pick - total]);
        } else if (pick < choices.size()) {
          step(choices[pick]);
        } else {
          const size_t at = pick - choices.size();
          const size_t rank = unstarted[at];
          unstarted.erase(unstarted.begin() + static_cast<long>(at));
          tasks_[rank] = body(*ranks_[rank]);
          tasks_[rank].start([this, rank] { ended(rank); });
        }
        continue;
      }
      if (done_ == expected) {
        break;
      }
      const bool excused = outcome_.failedRank >= 0 || options_.deadline;
      if (!excused) {
        fault("deadlock");
        break;
      }
      // Either the deadline passes for one transfer after the other, or the
      // operation is taken down from outside.
      if (options_.deadline || random_.chance(0.5)) {
        while (!records_.empty()) {
          Record* r = records_[random_.below(records_.size())].get();
          if (r->kind == Record::kSend && !r->delivered) {
            messages_.erase(Key(r->rank, r->peer, r->slot));
          }
          finish(r, Status(StatusCode::kTimeout, "deadline"));
        }
        continue;
      }
      break;
    }
    const bool clean = outcome_.failedRank < 0 && options_.absent.empty() &&
        !options_.deadline && fault_.empty();
    if (clean && cancelled_ > 0) {
      fault("transfers were given up although nothing failed");
    }
    if (clean && !messages_.empty()) {
      fault("messages were sent that nobody received");
    }
    tasks_.clear();
    if (clean) {
      finishStaged();
    }
    if (fault_.empty() && !records_.empty()) {
      fault("a transfer outlived its task");
    }
    if (!fault_.empty()) {
      throw Failure(
          fault_ + " (" + std::to_string(options_.ranks) +
          " ranks, network seed " + std::to_string(options_.seed) +
          ", fail at " + std::to_string(options_.failAt) + ")");
    }
  }

  Options options_;
  Prng random_;
  Topology onePlace_;
  Outcome outcome_;
  std::string fault_;
  size_t done_ = 0;
  int cancelled_ = 0;
  std::set<Key> used_, usedByReceiver_;
  std::map<Key, Message> messages_;
  std::vector<Region> regions_;
  // Before the tasks, whose end cancels transfers through them.
  std::vector<std::unique_ptr<Record>> records_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Task> tasks_;
};

inline void expectAllOk(const LoopbackNetwork::Outcome& outcome) {
  for (size_t r = 0; r < outcome.status.size(); ++r) {
    if (!outcome.status[r].ok()) {
      throw Failure(
          "rank " + std::to_string(r) + ": " + outcome.status[r].toString());
    }
  }
}

} // namespace resilient::test

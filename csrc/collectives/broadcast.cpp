#include <algorithm>
#include <memory>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/hierarchical.h"

namespace resilient {
namespace {

struct Segment {
  size_t offset = 0;
  size_t bytes = 0;
};

// Segment s of a range; empty beyond its end, and one empty one if the range
// is empty.
Segment segmentOf(size_t offset, size_t bytes, size_t s, size_t segmentBytes) {
  const size_t start = std::min(s * segmentBytes, bytes);
  return {offset + start, std::min(segmentBytes, bytes - start)};
}

size_t segmentCountOf(size_t bytes, size_t segmentBytes) {
  return std::max<size_t>((bytes + segmentBytes - 1) / segmentBytes, 1);
}

// Rounds 1; bytes (n-1) * size at the root.
Task flat(Communicator& comm, void* data, size_t bytes, int root) {
  const int n = comm.size();
  if (comm.rank() != root) {
    Transfer recv;
    comm.startRecv(recv, root, slotOf(1, 0), data, bytes);
    co_await recv;
    co_return;
  }
  auto sends = std::make_unique<Transfer[]>(static_cast<size_t>(n));
  for (int i = 1; i < n; ++i) {
    comm.startSend(sends[i], (root + i) % n, slotOf(1, 0), data, bytes);
  }
  for (int i = 1; i < n; ++i) {
    co_await finish(sends[i]);
  }
}

// A binomial tree. Rounds ceil(log2 n); bytes ceil(log2 n) * size at the root,
// which starts with the largest subtree.
//
// Ranks are counted from the root. The lowest set bit of a rank's number is its
// distance from its parent and bounds its subtree: its children are at all
// smaller powers of two.
Task tree(Communicator& comm, void* data, size_t bytes, int root) {
  const int n = comm.size();
  const int relative = (comm.rank() - root + n) % n; // the root is 0
  int mask = 1;
  while (mask < n && (relative & mask) == 0) {
    mask <<= 1;
  }
  if (relative != 0) {
    Transfer recv;
    const int parent = (relative - mask + root) % n;
    comm.startRecv(recv, parent, slotOf(1, 0), data, bytes);
    co_await recv;
  }
  auto sends =
      std::make_unique<Transfer[]>(static_cast<size_t>(logRounds(n)) + 1);
  size_t sent = 0;
  for (mask >>= 1; mask > 0; mask >>= 1) {
    if (relative + mask < n) {
      comm.startSend(
          sends[sent], (relative + mask + root) % n, slotOf(1, 0), data, bytes);
      ++sent;
    }
  }
  for (size_t i = 0; i < sent; ++i) {
    co_await finish(sends[i]);
  }
}

// The root deals the data out over the n-1 others; each passes every segment
// of its shard on to the rest as it comes. Needs n >= 3.
// Rounds 2; bytes: size at the root, (n-2)/(n-1) * size elsewhere. The least
// a broadcast can do, whatever n.
//
// All receives are posted at once, without a window, because they go to the
// caller's memory. A rank forwards segment s of its own shard when it arrives
// and then waits for the next; the other shards need no action. No wait is
// circular: the root waits for no receive, and forwarding needs only messages
// of the root.
Task spread(
    Communicator& comm,
    void* data,
    size_t bytes,
    int root,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t dealt = n - 1;
  const size_t shardBytes = (bytes + dealt - 1) / dealt;
  const size_t segments = segmentCountOf(shardBytes, tuning.segmentBytes);
  const auto rankOf = [n, root](size_t shard) {
    return static_cast<int>((static_cast<size_t>(root) + 1 + shard) % n);
  };
  const auto part = [=](size_t shard, size_t s) {
    const size_t start = std::min(shard * shardBytes, bytes);
    return segmentOf(
        start, std::min(shardBytes, bytes - start), s, tuning.segmentBytes);
  };
  auto sends = std::make_unique<Transfer[]>(segments * dealt);
  if (comm.rank() == root) {
    for (size_t s = 0; s < segments; ++s) {
      for (size_t j = 0; j < dealt; ++j) {
        const Segment piece = part(j, s);
        comm.startSend(
            sends[s * dealt + j],
            rankOf(j),
            slotOf(1, s),
            at(data, piece.offset),
            piece.bytes);
      }
    }
    for (size_t i = 0; i < segments * dealt; ++i) {
      co_await finish(sends[i]);
    }
    co_return;
  }
  const size_t mine =
      (static_cast<size_t>(comm.rank()) + n - static_cast<size_t>(root) - 1) %
      n;
  auto recvs = std::make_unique<Transfer[]>(segments * dealt);
  for (size_t s = 0; s < segments; ++s) {
    for (size_t j = 0; j < dealt; ++j) {
      const Segment piece = part(j, s);
      comm.startRecv(
          recvs[s * dealt + j],
          j == mine ? root : rankOf(j),
          slotOf(j == mine ? 1 : 2, s),
          at(data, piece.offset),
          piece.bytes);
    }
  }
  for (size_t s = 0; s < segments; ++s) {
    co_await finish(recvs[s * dealt + mine]);
    const Segment piece = part(mine, s);
    for (size_t i = 1; i < dealt; ++i) {
      const size_t j = (mine + i) % dealt;
      comm.startSend(
          sends[s * dealt + j],
          rankOf(j),
          slotOf(2, s),
          at(data, piece.offset),
          piece.bytes);
    }
  }
  for (size_t i = 0; i < segments * dealt; ++i) {
    co_await finish(recvs[i]);
    co_await finish(sends[i]);
  }
}

// Rank after rank, each segment passed on as it comes.
// Rounds n-1 for the first segment; bytes: size; two neighbours only.
//
// The root receives nothing: its receives are never begun and count as
// complete.
Task chain(
    Communicator& comm,
    void* data,
    size_t bytes,
    int root,
    Tuning tuning) {
  const int n = comm.size();
  const int relative = (comm.rank() - root + n) % n;
  const size_t segments = segmentCountOf(bytes, tuning.segmentBytes);
  auto sends = std::make_unique<Transfer[]>(segments);
  auto recvs = std::make_unique<Transfer[]>(segments);
  for (size_t s = 0; relative != 0 && s < segments; ++s) {
    const Segment piece = segmentOf(0, bytes, s, tuning.segmentBytes);
    comm.startRecv(
        recvs[s],
        (comm.rank() + n - 1) % n,
        slotOf(1, s),
        at(data, piece.offset),
        piece.bytes);
  }
  for (size_t s = 0; s < segments; ++s) {
    const Segment piece = segmentOf(0, bytes, s, tuning.segmentBytes);
    co_await finish(recvs[s]);
    if (relative + 1 < n) {
      comm.startSend(
          sends[s],
          (comm.rank() + 1) % n,
          slotOf(1, s),
          at(data, piece.offset),
          piece.bytes);
    }
  }
  for (size_t s = 0; s < segments; ++s) {
    co_await finish(sends[s]);
  }
}

} // namespace

Task broadcastWith(
    BroadcastAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t bytes,
    int root,
    Tuning tuning) {
  require(root >= 0 && root < comm.size(), "broadcast", "no such root rank");
  if (comm.size() == 1) {
    co_return;
  }
  if (comm.size() == 2) {
    algorithm = BroadcastAlgorithm::kFlat;
  }
  Task chosen;
  switch (algorithm) {
    case BroadcastAlgorithm::kFlat:
      chosen = flat(comm, data, bytes, root);
      break;
    case BroadcastAlgorithm::kTree:
      chosen = tree(comm, data, bytes, root);
      break;
    case BroadcastAlgorithm::kSpread:
      chosen = spread(comm, data, bytes, root, tuning);
      break;
    case BroadcastAlgorithm::kChain:
      chosen = chain(comm, data, bytes, root, tuning);
      break;
  }
  co_await chosen;
}

Task broadcast(Communicator& comm, void* data, size_t bytes, int root) {
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing =
      chooseByTopology(comm, CollectiveKind::kBroadcast, bytes, use);
  co_await choosing;
  Task chosen;
  if (use == TopologyUse::kHierarchy) {
    chosen = hierarchicalBroadcast(
        comm.topology()->root(),
        comm,
        data,
        bytes,
        root,
        hierarchyTuningFor(*comm.topology()));
  } else {
    chosen = broadcastWith(
        use == TopologyUse::kOneRound
            ? BroadcastAlgorithm::kFlat
            : chooseBroadcast(
                  comm.size(), bytes, costModelFor(comm.topology())),
        comm,
        data,
        bytes,
        root,
        Tuning());
  }
  co_await chosen;
}

} // namespace resilient

#include <memory>
#include <string>
#include <vector>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/hierarchical.h"

namespace resilient {
namespace {

// Everyone tells everyone. Rounds 1; messages n-1, empty.
Task flat(Communicator& comm) {
  const int n = comm.size();
  auto sends = std::make_unique<Transfer[]>(static_cast<size_t>(n));
  auto recvs = std::make_unique<Transfer[]>(static_cast<size_t>(n));
  for (int i = 1; i < n; ++i) {
    const int peer = (comm.rank() + i) % n;
    comm.startRecv(recvs[peer], peer, slotOf(1, 0), nullptr, 0);
    comm.startSend(sends[peer], peer, slotOf(1, 0), nullptr, 0);
  }
  for (int r = 0; r < n; ++r) {
    co_await finish(recvs[r]);
    co_await finish(sends[r]);
  }
}

// In round k each rank tells the rank 2^k ahead, and so knows, when the
// message from 2^k behind is there, of the 2^(k+1) ranks up to itself.
// Rounds ceil(log2 n), one empty message each.
Task dissemination(Communicator& comm) {
  const int n = comm.size();
  for (int distance = 1; distance < n; distance *= 2) {
    Transfer recv;
    Transfer send;
    const uint64_t slot = slotOf(1, static_cast<uint64_t>(distance));
    comm.startRecv(recv, (comm.rank() + n - distance) % n, slot, nullptr, 0);
    comm.startSend(send, (comm.rank() + distance) % n, slot, nullptr, 0);
    co_await recv;
    co_await send;
  }
}

// Rank 0's account of the ranks it waits for, in the words of
// ProcessGroupGloo: the tests and users of torch look for them.
//
// Rank 0 waits for the others in rank order. Without waitAllRanks the first one
// that fails is the only one named, and only lower ranks are known to have
// arrived.
class RollCall {
 public:
  RollCall(int ranks, bool waitAllRanks)
      : waitAllRanks_(waitAllRanks), missing_(static_cast<size_t>(ranks)) {}

  // Throws if that settles the outcome.
  void failed(int rank, const Status& cause) {
    if (cause.code() == StatusCode::kAborted) {
      throw StatusError(cause); // our own abort: no rank is to blame
    }
    if (first_.ok()) {
      first_ = cause;
    }
    missing_[static_cast<size_t>(rank)] = true;
    if (!waitAllRanks_) {
      report(rank);
    }
  }

  // Throws if a rank has failed.
  void conclude() {
    if (!first_.ok()) {
      report(-1);
    }
  }

 private:
  [[noreturn]] void report(int only) {
    std::string ranks;
    std::string passed;
    for (size_t r = 1; r < missing_.size(); ++r) {
      const bool named =
          only < 0 ? missing_[r] : r == static_cast<size_t>(only);
      if (named) {
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
      } else if (only < 0 || r < static_cast<size_t>(only)) {
        passed += (passed.empty() ? "" : ", ") + std::to_string(r);
      }
    }
    std::string text = only < 0 ? "[Rank 0]: Ranks " : "[Rank 0]: Rank ";
    text += ranks + " failed to pass monitoredBarrier in time; ";
    if (first_.code() == StatusCode::kTimeout) {
      text += "Rank 0 timed out in monitoredBarrier; ";
    }
    text += "ranks that passed: " + (passed.empty() ? "none" : passed);
    if (only >= 0 && static_cast<size_t>(only) + 1 < missing_.size()) {
      text += ", later ranks not asked (wait_all_ranks names all)";
    }
    text += ". First cause: " + first_.toString();
    throw StatusError(Status(first_.code(), text));
  }

  bool waitAllRanks_;
  std::vector<bool> missing_;
  Status first_;
};

} // namespace

Task barrierWith(BarrierAlgorithm algorithm, Communicator& comm) {
  Task chosen;
  switch (algorithm) {
    case BarrierAlgorithm::kFlat:
      chosen = flat(comm);
      break;
    case BarrierAlgorithm::kDissemination:
      chosen = dissemination(comm);
      break;
  }
  co_await chosen;
}

Task barrier(Communicator& comm) {
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing = chooseByTopology(comm, CollectiveKind::kBarrier, 0, use);
  co_await choosing;
  Task chosen = use == TopologyUse::kHierarchy
      ? hierarchicalBarrier(comm.topology()->root(), comm)
      : barrierWith(
            use == TopologyUse::kOneRound
                ? BarrierAlgorithm::kFlat
                : chooseBarrier(comm.size(), costModelFor(comm.topology())),
            comm);
  co_await chosen;
}

// Rounds 2; rank 0 exchanges an empty message with each.
//
// Rank 0 catches the errors of its transfers and continues with the next rank,
// to learn who is missing. When the deadline has passed, all its pending
// transfers fail; those that arrived before have ended well. The other ranks
// only know that rank 0 did not answer. A local abort is passed on unchanged,
// because no rank is to blame for it.
Task monitoredBarrier(Communicator& comm, bool waitAllRanks) {
  const int n = comm.size();
  if (comm.rank() != 0) {
    Transfer send;
    Transfer recv;
    comm.startSend(send, 0, slotOf(1, 0), nullptr, 0);
    comm.startRecv(recv, 0, slotOf(2, 0), nullptr, 0);
    try {
      co_await send;
      co_await recv;
    } catch (const StatusError& e) {
      if (e.status().code() == StatusCode::kAborted) {
        throw;
      }
      throw StatusError(Status(
          e.status().code(),
          "Rank " + std::to_string(comm.rank()) +
              " successfully reached monitoredBarrier, but received errors "
              "while waiting for send/recv from rank 0. Please check rank 0 "
              "logs for faulty rank. Cause: " +
              e.status().toString()));
    }
    co_return;
  }
  RollCall rollCall(n, waitAllRanks);
  auto recvs = std::make_unique<Transfer[]>(static_cast<size_t>(n));
  auto sends = std::make_unique<Transfer[]>(static_cast<size_t>(n));
  for (int r = 1; r < n; ++r) {
    comm.startRecv(recvs[r], r, slotOf(1, 0), nullptr, 0);
  }
  for (int r = 1; r < n; ++r) {
    try {
      co_await finish(recvs[r]);
    } catch (const StatusError& e) {
      rollCall.failed(r, e.status());
    }
  }
  rollCall.conclude();
  // Only now may anyone go on: all have been heard of.
  for (int r = 1; r < n; ++r) {
    comm.startSend(sends[r], r, slotOf(2, 0), nullptr, 0);
  }
  for (int r = 1; r < n; ++r) {
    try {
      co_await finish(sends[r]);
    } catch (const StatusError& e) {
      rollCall.failed(r, e.status());
    }
  }
  rollCall.conclude();
}

} // namespace resilient

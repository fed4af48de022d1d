#include "delegate/diagnosis.h"

#include <algorithm>
#include <set>

#include "delegate/collective_run.h"
#include "delegate/group_impl.h"
#include "delegate/resolver.h"

// The culprit of a time-out, and the evidence. All from what
// is known here: reports of the others, and when each was last heard of.

namespace resilient {

std::string timedOutText(Nanos timeout) {
  return "Timed out waiting " + std::to_string(timeout.count() / 1000000) +
      "ms: ";
}

std::string lateCopyText(const std::string& what) {
  if (what.empty()) {
    return "";
  }
  return "the inputs have not been copied from the device, because " + what +
      " has not finished what was queued there before the call. Does a kernel "
      "wait for another rank?";
}

Nanos lateCopyAhead(Nanos timeout) {
  return std::min<Nanos>(timeout / 8, std::chrono::milliseconds(500));
}

Nanos askAhead(Nanos timeout) {
  return std::min<Nanos>(timeout / 4, std::chrono::seconds(1));
}

// Five cases, in this order: no address is known; the link is closed; there is
// a fresh report; there are signs of life but no report; there is nothing.
std::string GroupImpl::silence(int rank) const {
  const Member& m = members_[static_cast<size_t>(rank)];
  if (m.link == nullptr) {
    const std::string trouble = engine_->resolver().trouble(store_);
    if (!trouble.empty()) {
      return "the address of " + describe(rank) +
          " is not known, since the store fails (" + trouble +
          "): is the process that serves it still there?";
    }
    return describe(rank) +
        " has not joined the group yet (no address of it in the store): was "
        "it started?";
  }
  if (!m.link->usable()) {
    return closedText(rank);
  }
  const TimePoint now = engine_->loop().now();
  const auto heard = m.link->heardAt();
  if (m.report && now - m.reportAt < kFreshReport) {
    const Report& r = *m.report;
    std::string s = describe(rank) + " is alive";
    if (r.running) {
      s += ", but itself in collective #" + std::to_string(r.runningSequence) +
          ", " + r.signature.toString();
      if (r.waitingFor >= 0 && r.waitingFor < size()) {
        s += ", waiting for rank " + std::to_string(r.waitingFor) +
            (r.silentNanos < 0 ? std::string(", of which it has never heard")
                               : ", of which it heard " +
                     durationText(Nanos(r.silentNanos)) + " before");
      }
    } else if (r.lastSequence != 0) {
      s += ", its last collective was #" + std::to_string(r.lastSequence) +
          ", " + r.signature.toString();
    } else {
      s += " and has called no collective";
    }
    if (!r.pending.empty()) {
      s += ", pending there: " + r.pending;
    }
    return s;
  }
  if (heard && *heard > m.askedAt) { // members answer at once
    return describe(rank) +
        " is alive, but does not answer for this group: has it destroyed it?";
  }
  std::string s = describe(rank) + " does not respond: ";
  s += heard ? "last sign of life " + durationText(now - *heard) + " ago"
             : std::string("never heard of it (") + m.link->pathSummary() + ')';
  const FrameHeader& last = m.link->channel().lastCollective();
  if (last.group == id_ && last.stream != 0) {
    s += ", then in " + last.signature.toString() + " #" +
        std::to_string(last.stream & ~kCollectiveBit);
  }
  return s + ". Is it stopped, swapping, or cut off?";
}

// Not simply whom we wait for: that rank may wait for another one in turn. A
// rank that answers nobody is to blame, else one that has not called the
// collective, else the end of the chain of waiting.
std::pair<int, std::string> GroupImpl::blame(uint64_t sequence, int waitingFor)
    const {
  const TimePoint now = engine_->loop().now();
  std::vector<int> silent;
  std::vector<int> behind;
  for (int r = 0; r < size(); ++r) {
    const Member& m = members_[static_cast<size_t>(r)];
    if (r == rank_) {
      continue;
    }
    if (!m.report || now - m.reportAt >= kFreshReport) {
      silent.push_back(r);
    } else if (m.report->lastSequence < sequence) {
      behind.push_back(r);
    }
  }
  const auto list = [&](const std::vector<int>& ranks) {
    std::string s;
    // All are named, a few are described.
    for (size_t i = 0; i < ranks.size() && i < 3; ++i) {
      s += (i == 0 ? "" : "; ") + silence(ranks[i]);
    }
    if (ranks.size() > 3) {
      s += "; and ranks";
      for (size_t i = 3; i < ranks.size(); ++i) {
        s += ' ' + std::to_string(ranks[i]);
      }
    }
    return s;
  };
  if (!silent.empty()) {
    return {silent.front(), list(silent)};
  }
  if (!behind.empty()) {
    return {
        behind.front(),
        "not called by all: " + list(behind) +
            ". Do all ranks run the same operations?"};
  }
  // Ranks that wait for each other may have called different operations, in
  // which none was to send.
  const auto own = collectives_.find(sequence);
  for (int r = 0; r < size() && own != collectives_.end(); ++r) {
    if (r == rank_) {
      continue;
    }
    const Report& report = *members_[static_cast<size_t>(r)].report;
    const OpSignature& mine = own->second->spec().signature;
    const uint64_t theirs =
        report.running ? report.runningSequence : report.lastSequence;
    if (theirs == sequence && report.signature != mine) {
      return {
          r,
          "rank " + std::to_string(r) + " called " +
              report.signature.toString() + " where rank " +
              std::to_string(rank_) + " called " + mine.toString() +
              ". All ranks must call the same operations in the same order "
              "with the same shapes and types"};
    }
  }
  // Follow the chain of waiting until it ends or bites its tail.
  int at = waitingFor;
  std::set<int> seen;
  while (at >= 0 && at != rank_ && seen.insert(at).second) {
    const Report& r = *members_[static_cast<size_t>(at)].report;
    if (!r.running || r.runningSequence != sequence || r.waitingFor < 0 ||
        r.waitingFor >= size() || r.waitingFor == at) {
      break;
    }
    at = r.waitingFor;
  }
  if (at < 0) {
    return {-1, "no rank is known to be the cause"};
  }
  return {
      at,
      "waiting for " + (at == rank_ ? "each other" : silence(at)) +
          ". Is the network too slow for the time-out?"};
}

} // namespace resilient

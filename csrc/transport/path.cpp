#include "transport/path.h"

namespace resilient {

const char* nameOf(PathKind kind) {
  switch (kind) {
    case PathKind::kTcp:
      return "tcp";
    case PathKind::kShared:
      return "shm";
    case PathKind::kVerbs:
      return "rdma";
    case PathKind::kDatagram:
      return "udp";
    case PathKind::kRelay:
      return "relay";
  }
  return "";
}

void PathStats::add(const PathCounters& counters) {
  bytesSent += counters.bytesSent;
  bytesReceived += counters.bytesReceived;
  chunksSent += counters.chunksSent;
  chunksRetransmitted += counters.chunksRetransmitted;
  timesSuspect += counters.timesSuspect;
}

void Path::fill(PathStats& stats) const {
  stats.kind = kind_;
  stats.add(channel_.pathCounters(id_));
  const LinkStatistics& s = channel_.pathStatistics(id_);
  stats.roundTripS = s.roundTripS();
  stats.minRoundTripS = s.minRoundTripS();
  stats.roundTripsS = s.roundTripsS();
  stats.goodputBytesPerS = s.goodputBytesPerS();
  stats.capacityBytesPerS = s.capacityBytesPerS();
}

} // namespace resilient

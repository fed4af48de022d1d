#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "channel/channel.h"
#include "path/recent_samples.h"

namespace resilient {

enum class PathKind : uint8_t { kTcp, kShared, kDatagram, kVerbs, kRelay };

// "tcp", "shm", "udp", "rdma" or "relay".
const char* nameOf(PathKind kind);

// The packets of a datagram path, since it was made.
struct DatagramStats {
  uint64_t packetBytes = 0; // of payload, in one packet
  // sent
  uint64_t packets = 0, bytes = 0; // with all headers
  uint64_t parity = 0, retransmitted = 0; // of these packets
  uint64_t lost = 0; // as the far end says
  double lossRate = 0, burstPackets = 1; // lately
  double paceBytesPerS = 0;
  uint64_t carriesUpTo = 0; // bytes of a burst; UINT64_MAX: of any
  // received
  uint64_t recovered = 0; // by parity
  uint64_t zeroFilled = 0;
  uint64_t duplicates = 0;
  uint64_t forged = 0; // not sealed by the peer, and dropped
};

// The queue pairs of an RDMA path; sums go on over all of them.
struct VerbsStats {
  // Of the present one, or the last.
  std::string device, remoteDevice;
  int port = 0; // of our device
  uint32_t queuePair = 0; // our number; 0: there is none now
  uint32_t mtuBytes = 0;
  // Completions, by result. The first that is not ok ends the path; what is
  // flushed behind it is not counted: nobody waits for it.
  uint64_t completed = 0, failed = 0;
  // posted
  uint64_t sends = 0, receives = 0, reads = 0;
  uint64_t copiedBytes = 0; // into and out of the memory of the path
  uint64_t readBytes = 0; // from tensors of the far end
  uint64_t placedBytes = 0; // of these, straight to a tensor
};

// A path over another rank.
struct RelayStats {
  int rank = -1; // of the relay, in the default group; -1: unknown
  std::string host; // of the relay
  bool ours = false; // this process has opened it
  uint64_t windowBytes = 0; // may be at the relay
};

// One path to a peer for stats(); docs/operations.md describes the fields.
struct PathStats {
  PathKind kind = PathKind::kTcp;
  // The connection index, the route of a datagram or RDMA path, or the place in
  // the list of those over relays.
  int index = 0;
  // A state of failover/path_state.h, "reserve" (it works, and is not needed),
  // "connecting", or "unused".
  std::string state;
  std::string nic, remoteNic; // empty where the system chooses
  std::string localAddress, remoteAddress;
  // Nothing leaves the host in plaintext. Over a relay: it cannot read it.
  bool encrypted = false;
  // How, such as "TLS_AES_128_GCM_SHA256"; empty if it is not.
  std::string cipher;
  // A recording cannot be decrypted by those who learn the job's secret later.
  bool forwardSecret = false;
  uint64_t bytesSent = 0, bytesReceived = 0;
  uint64_t chunksSent = 0, chunksRetransmitted = 0;
  double roundTripS = 0; // smoothed; 0 while unknown
  double minRoundTripS = 0; // of the last seconds; 0 while unknown
  RecentSamples roundTripsS;
  double goodputBytesPerS = 0; // smoothed, acknowledged bytes only
  double capacityBytesPerS = 0; // that it could carry; 0 while unknown
  uint64_t timesSuspect = 0;
  // Connections of this index after the first one.
  uint64_t reconnects = 0;
  // Kept when the path works again; empty if it has never failed.
  std::string lastError;
  std::optional<DatagramStats> datagrams; // of a datagram path
  std::optional<VerbsStats> verbs; // of an RDMA path
  std::optional<RelayStats> relay; // of a path over a relay

  void add(const PathCounters& counters);
};

} // namespace resilient

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/signature.h"
#include "base/status.h"
#include "wire/relay.h"

namespace resilient {

// Payload of kReject and kCancel: a status code and a sentence for people.
// Longer sentences are cut. All texts for people that are decoded here are free
// of control characters, whatever the peer has sent. The code must not be kOk:
// the far end would take it for unreadable.
std::vector<std::byte> encodeReason(StatusCode code, const std::string& text);
// Never fails: what cannot be read becomes kProtocol.
Status decodeReason(std::span<const std::byte> payload);

// Payload of kResidual: parts of a message, in bytes.
struct ByteRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  auto operator<=>(const ByteRange&) const = default;
};
// A large residual comes in several frames, in any order and perhaps twice
// (docs/wire_format.md, "Tolerant messages").
struct Residual {
  uint64_t parts =
      0; // that the message has in all, in as many frames as needed
  std::vector<ByteRange> ranges;
  static constexpr size_t kMax = 4000; // in one frame
};
std::vector<std::byte> encodeResidual(
    uint64_t parts,
    std::span<const ByteRange> ranges);
// Checks the length only. Whether the ranges lie in the message and are
// disjoint is checked by Channel::onResidual, which knows the message.
Status decodeResidual(std::span<const std::byte> payload, Residual& residual);

// Payload of kBye: the numbers of messages, first and last of each range, that
// have ended at the sender of the goodbye. No acknowledgement of them need
// follow. Ascending, with a gap between one range and the next.
using MessageRanges = std::vector<std::pair<uint64_t, uint64_t>>;
inline constexpr size_t kMaxByeRanges = 4000;
std::vector<std::byte> encodeBye(const MessageRanges& ended);
// Nothing if it is malformed.
std::optional<MessageRanges> decodeBye(std::span<const std::byte> payload);

// Payloads of kControl, from engine to engine. The first byte tells which.
//
// The numbers are wire values: never reuse one, and add new ones at the end. An
// engine logs and ignores a kind that it does not know, so a new kind alone
// does not break older peers. Control messages are delivered once but in no
// order, among each other or with data. Their meaning must not depend on their
// order.
enum class ControlKind : uint8_t {
  kNotice = 1,
  kQuery = 2,
  kReport = 3,
  kPathsLost = 4,
  kSharedOffer = 5,
  kAddresses = 6,
  kDatagramOffer = 7,
  kVerbsOffer = 8,
  kRelayNote = 9,
  kArrivals = 10,
};

// "This collective has failed here". The other ranks then need not wait for
// their own timeout, and name the same culprit.
//
// A receiver must not believe `reporter` by itself: it counts only if the
// connection belongs to that rank's process by the store (GroupImpl::hear).
// Ranks that forward a notice put themselves in and keep the origin.
struct Notice {
  // All pending operations of the group, not one collective.
  static constexpr uint64_t kWholeGroup = UINT64_MAX;

  uint64_t group = 0;
  // The number of the collective in its group, or kWholeGroup.
  uint64_t sequence = 0;
  StatusCode code = StatusCode::kInternal;
  int32_t reporter = -1; // group rank of the sender, where it has failed
  // Group rank where it failed first, from which the others heard it and the
  // text comes.
  int32_t origin = -1;
  int32_t culprit = -1; // group rank that caused it, or -1
  std::string text;
};

// "What are you doing in this group?", asked before a time-out. No number ties
// an answer to its query.
struct Query {
  uint64_t group = 0;
  int32_t asker = -1;
};

// The answer. A process answers from its loop thread, so it does even while
// its own program is stuck.
//
// Ranks in it are group ranks, and -1 stands for none.
struct Report {
  uint64_t group = 0;
  int32_t reporter = -1;
  uint64_t lastSequence = 0; // the last collective that was called here
  bool running = false; // a collective is pending; the next fields are its
  uint64_t runningSequence = 0; // the oldest one
  int32_t waitingFor = -1; // group rank
  int64_t silentNanos = 0; // since that rank was heard of; -1: never
  OpSignature signature; // of lastSequence
  std::string pending; // point-to-point operations, in words
};

// "These paths of ours are down, I can see it", sent over another one: the peer
// would notice by silence only.
struct PathsLost {
  std::string reason; // "its NIC eth0 went down"
  std::vector<uint16_t> connections; // indices, at most kMax
  static constexpr size_t kMax = 4096;
};

// The rendezvous for shared memory: see transport/shared_rendezvous.h. Both
// texts are arbitrary bytes, and are not cleaned like texts for people.
struct SharedOffer {
  std::string socketName; // name of an abstract socket
  std::string token;
};

// "Open a datagram path in addition to the connection of this index; mine is at
// this port", and the answer. See transport/datagram_path.h.
//
// The answer repeats the connection index. Its `key` holds the first 8 bytes of
// the nonce of the offer, by which the other end tells an answer to an older
// offer (DatagramConnector::onAnswer).
struct DatagramOffer {
  uint16_t connection = 0; // index
  bool answer = false;
  uint16_t port = 0; // 0 in an answer: no
  // Which secret of the two processes it is: that of any group they share.
  uint64_t key = 0;
  std::string nonce;
  static constexpr size_t kNonceBytes = 16;
};

// "Connect an RDMA queue pair of yours, in addition to the connection of this
// index, with this one of mine", and the answer. Without a queue pair, an offer
// asks the other end to offer, and an answer says no; it may also come later,
// when its end has closed the queue pair. See delegate/connect_verbs.h.
struct VerbsOffer {
  uint16_t connection = 0; // index
  bool answer = false;
  uint64_t number = 0; // random; the answer repeats it
  std::array<std::byte, 16> gid{}; // the address of the device
  uint32_t queuePair = 0; // 24 bits; 0: none
  uint32_t firstPacket = 0; // 24 bits
  uint32_t mtuBytes = 0;
  uint16_t lid = 0; // InfiniBand's
  uint16_t reads = 0; // of this memory that it answers at a time
  std::string text; // the name of the device, or why not
};

// "How much has arrived on each of your connections from us?", and the answer.
// Acknowledgements do not tell when data arrived: they wait in the queues of
// the way back.
struct Arrivals {
  bool answer = false;
  uint64_t clockNanos = 0; // of the far end, when it has looked
  struct Connection {
    uint16_t index = 0;
    uint64_t bytes = 0; // total of the connection that stands, in order
    bool operator==(const Connection&) const = default;
  };
  std::vector<Connection> connections; // at most kMax
  static constexpr size_t kMax = 4096;
};

// About a flow over a relay (wire/relay.h), which passes it on like a message.
//
// kOpen: "I shall send you frames this way". kAccept: the answer. kDelivered:
// the acknowledgement, where no frame goes that could carry it. kClose: from
// either end, or from the relay: "nothing comes this way any more".
struct RelayNote {
  enum class What : uint8_t {
    kOpen = 1,
    kAccept = 2,
    kDelivered = 3,
    kClose = 4,
    // From the relay itself: what has left it for the far end.
    kPassed = 5,
  };

  What what = What::kOpen;
  RelayHop hop = RelayHop::kToRelay;
  bool fromOpener = true;
  RelayFlow flow;
  uint64_t delivered = 0; // as RelayHeader has it
  // kPassed: of all messages of the flow, and what the NIC of the relay carries
  // to the far end's site; 0 while unknown.
  uint64_t passedBytes = 0;
  uint64_t bytesPerS = 0;
  // It needs its way to the far end's site itself, or is about to leave.
  bool busy = false;
  RelayKey key; // kOpen, kAccept
  std::string text; // why it is closed

  const Uid& source() const {
    return fromOpener ? flow.opener : flow.other;
  }
  const Uid& target() const {
    return fromOpener ? flow.other : flow.opener;
  }
};

// "This is where we are now": a NIC has another address than the store says.
// The receiver parses it like a text from the store, and accepts it only with
// the peer's own uid and the same number of addresses.
struct Addresses {
  std::string text; // of PeerAddress, see transport/address.h
};

// Never longer than kMaxControlBytes: a message has one long text at most, and
// that is cut at 32 KiB.
std::vector<std::byte> encode(const Notice& notice);
std::vector<std::byte> encode(const Query& query);
std::vector<std::byte> encode(const Report& report);
std::vector<std::byte> encode(const PathsLost& lost);
std::vector<std::byte> encode(const SharedOffer& offer);
std::vector<std::byte> encode(const Addresses& addresses);
std::vector<std::byte> encode(const DatagramOffer& offer);
std::vector<std::byte> encode(const VerbsOffer& offer);
std::vector<std::byte> encode(const RelayNote& note);
std::vector<std::byte> encode(const Arrivals& arrivals);

std::optional<ControlKind> controlKind(std::span<const std::byte> payload);
// Nothing if the bytes are not exactly one message of that kind.
//
// Bytes behind the message make it unreadable too, so a field that is added
// later needs a new kind or another kWireVersion.
std::optional<Notice> decodeNotice(std::span<const std::byte> payload);
std::optional<Query> decodeQuery(std::span<const std::byte> payload);
std::optional<Report> decodeReport(std::span<const std::byte> payload);
std::optional<PathsLost> decodePathsLost(std::span<const std::byte> payload);
std::optional<SharedOffer> decodeSharedOffer(
    std::span<const std::byte> payload);
std::optional<Addresses> decodeAddresses(std::span<const std::byte> payload);
std::optional<DatagramOffer> decodeDatagramOffer(
    std::span<const std::byte> payload);
// Only numbers that a queue pair can have.
std::optional<VerbsOffer> decodeVerbsOffer(std::span<const std::byte> payload);
// Not of a flow from a process to itself.
std::optional<RelayNote> decodeRelayNote(std::span<const std::byte> payload);
std::optional<Arrivals> decodeArrivals(std::span<const std::byte> payload);

} // namespace resilient

#include "wire/control.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/text.h"
#include "wire/frame.h"

namespace resilient {
namespace {

// Texts are for people: what is longer than this is cut.
constexpr size_t kMaxTextBytes = 32u << 10;

// Fields one after the other, without padding, in the byte order of the host,
// which frame.cpp asserts to be that of the wire. A text is its length in 4
// bytes and then its bytes.
class Writer {
 public:
  explicit Writer(ControlKind kind) {
    put(static_cast<uint8_t>(kind));
  }
  template <typename T>
  Writer& put(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
    return *this;
  }
  Writer& put(const std::string& text) {
    const size_t n = std::min(text.size(), kMaxTextBytes);
    put(static_cast<uint32_t>(n));
    const size_t at = bytes_.size();
    bytes_.resize(at + n);
    std::memcpy(bytes_.data() + at, text.data(), n);
    return *this;
  }
  Writer& put(const OpSignature& s) {
    put(static_cast<uint8_t>(s.kind)).put(static_cast<uint8_t>(s.dtype));
    put(static_cast<uint8_t>(s.reduceOp)).put(s.tensors);
    return put(s.root).put(s.count);
  }
  std::vector<std::byte> take() {
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

// Reads past the end give zeros and mark the whole as broken.
//
// A decoder therefore reads all fields without a check and asks complete() once
// at the end. The payload must not be empty: isKind() has looked at its first
// byte, which the constructor skips.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes.subspan(1)) {}
  template <typename T>
  void get(T& value) {
    value = T();
    if (rest_.size() < sizeof(T)) {
      broken_ = true;
      return;
    }
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
  }
  void get(std::string& text) {
    uint32_t n = 0;
    get(n);
    if (broken_ || n > rest_.size()) {
      broken_ = true;
      return;
    }
    text.assign(reinterpret_cast<const char*>(rest_.data()), n);
    rest_ = rest_.subspan(n);
  }
  void get(StatusCode& code) {
    uint8_t value = 0;
    get(value);
    if (value == 0 || value > static_cast<uint8_t>(StatusCode::kInternal)) {
      broken_ = true;
      return;
    }
    code = static_cast<StatusCode>(value);
  }
  void get(OpSignature& s) {
    uint8_t kind = 0, dtype = 0, reduce = 0;
    get(kind);
    get(dtype);
    get(reduce);
    get(s.tensors);
    get(s.root);
    get(s.count);
    if (!validSignatureBytes(kind, dtype, reduce)) {
      broken_ = true;
      return;
    }
    s.kind = static_cast<OpKind>(kind);
    s.dtype = static_cast<DType>(dtype);
    s.reduceOp = static_cast<ReduceOp>(reduce);
  }
  // For people.
  void getText(std::string& text) {
    get(text);
    text = withoutControls(text);
  }
  bool complete() const {
    return !broken_ && rest_.empty();
  }

 private:
  std::span<const std::byte> rest_;
  bool broken_ = false;
};

bool isKind(std::span<const std::byte> payload, ControlKind kind) {
  return controlKind(payload) == kind;
}

} // namespace

std::vector<std::byte> encodeReason(StatusCode code, const std::string& text) {
  const size_t n = std::min(text.size(), kMaxTextBytes);
  std::vector<std::byte> payload(n + 1);
  payload[0] = static_cast<std::byte>(code);
  std::memcpy(payload.data() + 1, text.data(), n);
  return payload;
}

Status decodeReason(std::span<const std::byte> payload) {
  if (payload.empty() ||
      payload[0] > static_cast<std::byte>(StatusCode::kInternal) ||
      payload[0] == static_cast<std::byte>(StatusCode::kOk)) {
    return Status(StatusCode::kProtocol, "peer sent an unreadable reason");
  }
  return Status(
      static_cast<StatusCode>(payload[0]),
      withoutControls(
          {reinterpret_cast<const char*>(payload.data()) + 1,
           payload.size() - 1}));
}

std::vector<std::byte> encode(const Notice& n) {
  return Writer(ControlKind::kNotice)
      .put(n.group)
      .put(n.sequence)
      .put(static_cast<uint8_t>(n.code))
      .put(n.reporter)
      .put(n.origin)
      .put(n.culprit)
      .put(n.text)
      .take();
}

std::vector<std::byte> encode(const Query& q) {
  return Writer(ControlKind::kQuery).put(q.group).put(q.asker).take();
}

std::vector<std::byte> encode(const Report& r) {
  return Writer(ControlKind::kReport)
      .put(r.group)
      .put(r.reporter)
      .put(r.lastSequence)
      .put(static_cast<uint8_t>(r.running))
      .put(r.runningSequence)
      .put(r.waitingFor)
      .put(r.silentNanos)
      .put(r.signature)
      .put(r.pending)
      .take();
}

std::vector<std::byte> encode(const PathsLost& lost) {
  Writer out(ControlKind::kPathsLost);
  const size_t n = std::min(lost.connections.size(), PathsLost::kMax);
  out.put(lost.reason).put(static_cast<uint16_t>(n));
  for (size_t i = 0; i < n; ++i) {
    out.put(lost.connections[i]);
  }
  return out.take();
}

std::vector<std::byte> encode(const SharedOffer& offer) {
  return Writer(ControlKind::kSharedOffer)
      .put(offer.socketName)
      .put(offer.token)
      .take();
}

std::vector<std::byte> encode(const Addresses& addresses) {
  return Writer(ControlKind::kAddresses).put(addresses.text).take();
}

std::vector<std::byte> encode(const DatagramOffer& offer) {
  return Writer(ControlKind::kDatagramOffer)
      .put(offer.connection)
      .put(static_cast<uint8_t>(offer.answer))
      .put(offer.port)
      .put(offer.key)
      .put(offer.nonce)
      .take();
}

std::vector<std::byte> encode(const VerbsOffer& offer) {
  uint64_t high = 0;
  uint64_t low = 0;
  std::memcpy(&high, offer.gid.data(), 8);
  std::memcpy(&low, offer.gid.data() + 8, 8);
  return Writer(ControlKind::kVerbsOffer)
      .put(offer.connection)
      .put(static_cast<uint8_t>(offer.answer))
      .put(offer.number)
      .put(high)
      .put(low)
      .put(offer.queuePair)
      .put(offer.firstPacket)
      .put(offer.mtuBytes)
      .put(offer.lid)
      .put(offer.reads)
      .put(offer.text)
      .take();
}

std::vector<std::byte> encode(const RelayNote& note) {
  return Writer(ControlKind::kRelayNote)
      .put(static_cast<uint8_t>(note.what))
      .put(static_cast<uint8_t>(note.hop))
      .put(static_cast<uint8_t>(note.fromOpener))
      .put(note.flow.opener)
      .put(note.flow.other)
      .put(note.flow.number)
      .put(note.delivered)
      .put(note.passedBytes)
      .put(note.bytesPerS)
      .put(static_cast<uint8_t>(note.busy))
      .put(note.key.secret)
      .put(note.key.publicKey)
      .put(note.text)
      .take();
}

std::vector<std::byte> encode(const Arrivals& arrivals) {
  Writer out(ControlKind::kArrivals);
  const size_t n = std::min(arrivals.connections.size(), Arrivals::kMax);
  out.put(static_cast<uint8_t>(arrivals.answer))
      .put(arrivals.clockNanos)
      .put(static_cast<uint16_t>(n));
  for (size_t i = 0; i < n; ++i) {
    out.put(arrivals.connections[i].index).put(arrivals.connections[i].bytes);
  }
  return out.take();
}

// The upper bound is the last kind: move it with a new one.
std::optional<ControlKind> controlKind(std::span<const std::byte> payload) {
  if (payload.empty() || payload[0] < std::byte(1) ||
      payload[0] > static_cast<std::byte>(ControlKind::kArrivals)) {
    return std::nullopt;
  }
  return static_cast<ControlKind>(payload[0]);
}

std::optional<Notice> decodeNotice(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kNotice)) {
    return std::nullopt;
  }
  Notice n;
  Reader in(payload);
  in.get(n.group);
  in.get(n.sequence);
  in.get(n.code);
  in.get(n.reporter);
  in.get(n.origin);
  in.get(n.culprit);
  in.getText(n.text);
  return in.complete() ? std::optional(n) : std::nullopt;
}

std::optional<Query> decodeQuery(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kQuery)) {
    return std::nullopt;
  }
  Query q;
  Reader in(payload);
  in.get(q.group);
  in.get(q.asker);
  return in.complete() ? std::optional(q) : std::nullopt;
}

std::optional<Report> decodeReport(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kReport)) {
    return std::nullopt;
  }
  Report r;
  uint8_t running = 0;
  Reader in(payload);
  in.get(r.group);
  in.get(r.reporter);
  in.get(r.lastSequence);
  in.get(running);
  in.get(r.runningSequence);
  in.get(r.waitingFor);
  in.get(r.silentNanos);
  in.get(r.signature);
  in.getText(r.pending);
  r.running = running != 0;
  return in.complete() ? std::optional(r) : std::nullopt;
}

std::optional<PathsLost> decodePathsLost(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kPathsLost)) {
    return std::nullopt;
  }
  PathsLost lost;
  uint16_t n = 0;
  Reader in(payload);
  in.getText(lost.reason);
  in.get(n);
  for (size_t i = 0; i < n && i < PathsLost::kMax; ++i) {
    in.get(lost.connections.emplace_back());
  }
  return in.complete() ? std::optional(lost) : std::nullopt;
}

std::optional<SharedOffer> decodeSharedOffer(
    std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kSharedOffer)) {
    return std::nullopt;
  }
  SharedOffer offer;
  Reader in(payload);
  in.get(offer.socketName);
  in.get(offer.token);
  return in.complete() ? std::optional(offer) : std::nullopt;
}

std::optional<Addresses> decodeAddresses(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kAddresses)) {
    return std::nullopt;
  }
  Addresses addresses;
  Reader in(payload);
  in.get(addresses.text);
  return in.complete() ? std::optional(addresses) : std::nullopt;
}

std::optional<DatagramOffer> decodeDatagramOffer(
    std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kDatagramOffer)) {
    return std::nullopt;
  }
  DatagramOffer offer;
  uint8_t answer = 0;
  Reader in(payload);
  in.get(offer.connection);
  in.get(answer);
  in.get(offer.port);
  in.get(offer.key);
  in.get(offer.nonce);
  offer.answer = answer != 0;
  const bool sound =
      answer <= 1 && offer.nonce.size() == DatagramOffer::kNonceBytes;
  return in.complete() && sound ? std::optional(offer) : std::nullopt;
}

std::optional<VerbsOffer> decodeVerbsOffer(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kVerbsOffer)) {
    return std::nullopt;
  }
  constexpr uint32_t kNumberMax = 0xffffff;
  VerbsOffer offer;
  uint8_t answer = 0;
  uint64_t high = 0;
  uint64_t low = 0;
  Reader in(payload);
  in.get(offer.connection);
  in.get(answer);
  in.get(offer.number);
  in.get(high);
  in.get(low);
  in.get(offer.queuePair);
  in.get(offer.firstPacket);
  in.get(offer.mtuBytes);
  in.get(offer.lid);
  in.get(offer.reads);
  in.getText(offer.text);
  std::memcpy(offer.gid.data(), &high, 8);
  std::memcpy(offer.gid.data() + 8, &low, 8);
  offer.answer = answer != 0;
  const bool sound = answer <= 1 && offer.queuePair <= kNumberMax &&
      offer.firstPacket <= kNumberMax;
  return in.complete() && sound ? std::optional(offer) : std::nullopt;
}

std::optional<RelayNote> decodeRelayNote(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kRelayNote)) {
    return std::nullopt;
  }
  RelayNote note;
  uint8_t what = 0;
  uint8_t hop = 0;
  uint8_t fromOpener = 0;
  uint8_t busy = 0;
  Reader in(payload);
  in.get(what);
  in.get(hop);
  in.get(fromOpener);
  in.get(note.flow.opener);
  in.get(note.flow.other);
  in.get(note.flow.number);
  in.get(note.delivered);
  in.get(note.passedBytes);
  in.get(note.bytesPerS);
  in.get(busy);
  in.get(note.key.secret);
  in.get(note.key.publicKey);
  in.getText(note.text);
  note.what = static_cast<RelayNote::What>(what);
  note.hop = static_cast<RelayHop>(hop);
  note.fromOpener = fromOpener == 1;
  note.busy = busy == 1;
  const bool sound = what >= 1 &&
      what <= static_cast<uint8_t>(RelayNote::What::kPassed) && hop >= 1 &&
      hop <= 2 && fromOpener <= 1 && busy <= 1 &&
      note.flow.opener != note.flow.other;
  return in.complete() && sound ? std::optional(note) : std::nullopt;
}

std::vector<std::byte> encodeResidual(
    uint64_t parts,
    std::span<const ByteRange> ranges) {
  std::vector<std::byte> out(8 + 16 * ranges.size());
  std::memcpy(out.data(), &parts, 8);
  for (size_t i = 0; i < ranges.size(); ++i) {
    std::memcpy(out.data() + 8 + 16 * i, &ranges[i].offset, 8);
    std::memcpy(out.data() + 16 + 16 * i, &ranges[i].bytes, 8);
  }
  return out;
}

Status decodeResidual(std::span<const std::byte> payload, Residual& r) {
  if (payload.size() < 8 || payload.size() % 16 != 8) {
    return Status(
        StatusCode::kProtocol,
        "residual of " + std::to_string(payload.size()) + " bytes");
  }
  std::memcpy(&r.parts, payload.data(), 8);
  r.ranges.resize(payload.size() / 16);
  for (size_t i = 0; i < r.ranges.size(); ++i) {
    std::memcpy(&r.ranges[i].offset, payload.data() + 8 + 16 * i, 8);
    std::memcpy(&r.ranges[i].bytes, payload.data() + 16 + 16 * i, 8);
  }
  return Status();
}

std::vector<std::byte> encodeBye(const MessageRanges& ended) {
  std::vector<std::byte> out(16 * ended.size());
  for (size_t i = 0; i < ended.size(); ++i) {
    std::memcpy(out.data() + 16 * i, &ended[i].first, 8);
    std::memcpy(out.data() + 16 * i + 8, &ended[i].second, 8);
  }
  return out;
}

std::optional<MessageRanges> decodeBye(std::span<const std::byte> payload) {
  if (payload.size() % 16 != 0 || payload.size() / 16 > kMaxByeRanges) {
    return std::nullopt;
  }
  MessageRanges ended(payload.size() / 16);
  uint64_t lowest = 1; // that may come next
  for (size_t i = 0; i < ended.size(); ++i) {
    auto& [first, last] = ended[i];
    std::memcpy(&first, payload.data() + 16 * i, 8);
    std::memcpy(&last, payload.data() + 16 * i + 8, 8);
    if (first < lowest || last < first || last > UINT64_MAX - 2) {
      return std::nullopt;
    }
    lowest = last + 2;
  }
  return ended;
}

std::optional<Arrivals> decodeArrivals(std::span<const std::byte> payload) {
  if (!isKind(payload, ControlKind::kArrivals)) {
    return std::nullopt;
  }
  Arrivals arrivals;
  uint8_t answer = 0;
  uint16_t n = 0;
  Reader in(payload);
  in.get(answer);
  in.get(arrivals.clockNanos);
  in.get(n);
  for (size_t i = 0; i < n && i < Arrivals::kMax; ++i) {
    auto& connection = arrivals.connections.emplace_back();
    in.get(connection.index);
    in.get(connection.bytes);
  }
  arrivals.answer = answer != 0;
  return in.complete() && answer <= 1 ? std::optional(arrivals) : std::nullopt;
}

} // namespace resilient

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/signature.h"
#include "base/status.h"

namespace resilient {

// Payload of kReject and kCancel: a status code and a sentence for people.
// Longer sentences are cut.
std::vector<std::byte> encodeReason(StatusCode code, const std::string& text);
// Never fails: what cannot be read becomes kProtocol.
Status decodeReason(std::span<const std::byte> payload);

// Payloads of kControl, from engine to engine. The first byte tells which.
enum class ControlKind : uint8_t {
  kNotice = 1,
  kQuery = 2,
  kReport = 3,
  kPathsLost = 4,
};

// "This collective has failed here": so that the others need not wait for
// their own time-out, and name the same culprit.
struct Notice {
  // All pending operations of the group, not one collective.
  static constexpr uint64_t kWholeGroup = UINT64_MAX;

  uint64_t group = 0;
  uint64_t sequence = 0;
  StatusCode code = StatusCode::kInternal;
  int32_t reporter = -1; // group rank that tells
  int32_t culprit = -1; // group rank that caused it, or -1
  std::string text;
};

// "What are you doing in this group?", asked before a time-out.
struct Query {
  uint64_t group = 0;
  int32_t asker = -1;
};

// The answer. A process answers from its loop thread, so it does even while
// its own program is stuck.
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

// "These paths of ours are down, I can see it", told over another one: the
// peer would find out by silence only.
struct PathsLost {
  std::string reason; // "its NIC eth0 went down"
  std::vector<uint16_t> slots; // at most kMost
  static constexpr size_t kMost = 4096;
};

std::vector<std::byte> encode(const Notice& notice);
std::vector<std::byte> encode(const Query& query);
std::vector<std::byte> encode(const Report& report);
std::vector<std::byte> encode(const PathsLost& lost);

std::optional<ControlKind> controlKind(std::span<const std::byte> payload);
// Nothing if the bytes are not exactly one message of that kind.
std::optional<Notice> decodeNotice(std::span<const std::byte> payload);
std::optional<Query> decodeQuery(std::span<const std::byte> payload);
std::optional<Report> decodeReport(std::span<const std::byte> payload);
std::optional<PathsLost> decodePathsLost(std::span<const std::byte> payload);

} // namespace resilient

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace resilient {

// Why two processes have not become sure of each other. A caller that hangs up,
// or that is only told to come another time, is no fault.
#define RESILIENT_TRUST_FAULTS(X)                                            \
  X(kWrongSecret, "wrong_secret") /* another secret, or a proof with none */ \
  X(kPlaintext, "plaintext") /* where encryption is required */              \
  X(kTls, "tls") /* an alert, or bytes that are no TLS */                    \
  X(kCertificate,                                                            \
    "certificate") /* of the other end, refused by one of both */            \
  X(kVersion, "version") /* of the protocol */                               \
  X(kMalformed, "malformed") /* no message of a handshake */                 \
  X(kTimeout, "timed_out") /* connected, and no end of the handshake */      \
  X(kRecord, "record") /* after the handshake: changed, repeated, cut off */

enum class TrustFault : uint8_t {
#define X(name, text) name,
  RESILIENT_TRUST_FAULTS(X)
#undef X
};

inline constexpr const char* kTrustFaultNames[] = {
#define X(name, text) text,
    RESILIENT_TRUST_FAULTS(X)
#undef X
};
inline constexpr size_t kTrustFaults = std::size(kTrustFaultNames);

// Handshakes of a process, of both directions.
struct HandshakeCounters {
  uint64_t encrypted = 0, plaintext = 0; // that have ended well
  std::array<uint64_t, kTrustFaults> faults{};

  void count(TrustFault fault) {
    ++faults[static_cast<size_t>(fault)];
  }
  void countDone(bool isEncrypted) {
    ++(isEncrypted ? encrypted : plaintext);
  }
  uint64_t of(TrustFault fault) const {
    return faults[static_cast<size_t>(fault)];
  }
};

} // namespace resilient

#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/time.h"

namespace resilient {

// The clear part of a datagram, before the sealed one: a mark that it is ours,
// the phase of the key, and the number.
inline constexpr size_t kDatagramHeaderBytes = 12;
inline constexpr size_t kSealBytes = 16; // behind it
inline constexpr size_t kSealOverheadBytes = kDatagramHeaderBytes + kSealBytes;

using SealKey = std::array<std::byte, 32>;

// Part of a packet, to be sealed.
inline iovec partOf(std::span<const std::byte> bytes) {
  return {const_cast<std::byte*>(bytes.data()), bytes.size()};
}

// The key of one direction of one datagram path. Both ends give the same
// arguments; `initiator`: the key is for the initiator's packets.
//
// The two nonces are fresh for each path, so no key serves two paths, and
// numbers may start at 1 each time. docs/wire_format.md has the text that is
// hashed.
SealKey deriveSealKey(
    const std::string& secret,
    const std::string& initiatorNonce,
    const std::string& answererNonce,
    bool initiator);

// Seals and opens datagrams with AES-256-GCM: without the key, no process can
// make, change or read one. Numbers are the nonces, so none may be sealed twice
// with one key. The owner has to recognise duplicates.
//
// The cipher is that of OpenSSL's libcrypto (libcrypto.h).
//
// Thread: one at a time; the contexts of the cipher change with every call.
class PacketSeal {
 public:
  // Null where there is no libcrypto; `why` then says so.
  static std::unique_ptr<PacketSeal> make(const SealKey& key, std::string& why);
  // The first call loads the library, and the result holds for the process.
  static bool available(std::string& why);
  ~PacketSeal();
  PacketSeal(const PacketSeal&) = delete;
  PacketSeal& operator=(const PacketSeal&) = delete;

  // Seals the parts as one packet. `out` has room for kSealOverheadBytes more.
  // Returns the bytes of the datagram. The parts and `out` must not overlap.
  // The caller counts the numbers up and never goes back: two packets with one
  // number would reveal their XOR and the key that authenticates. `phase` is
  // only written down. The far end has to know `context`, which is not in the
  // datagram.
  size_t seal(
      uint64_t number,
      std::span<const iovec> parts,
      std::byte* out,
      uint8_t phase = 0,
      std::span<const std::byte> context = {});
  size_t seal(
      uint64_t number,
      std::span<const std::byte> packet,
      std::byte* out,
      uint8_t phase = 0,
      std::span<const std::byte> context = {}) {
    const iovec part = partOf(packet);
    return seal(number, {&part, 1}, out, phase, context);
  }
  // False: not sealed with this key and context. Else `packet` is within `out`,
  // which has room for as many bytes as the datagram has.
  //
  // If it returns false, `number` and the bytes at `out` are not authentic and
  // must not be used: AES-GCM decrypts before it can check the tag.
  bool open(
      std::span<const std::byte> datagram,
      uint64_t& number,
      std::byte* out,
      std::span<const std::byte>& packet,
      std::span<const std::byte> context = {});

 private:
  PacketSeal() = default;
  void* sealing_ = nullptr; // EVP_CIPHER_CTX
  void* opening_ = nullptr;
};

// How long one key is used. AES-GCM keeps its strength far beyond 2^32 short
// packets; an hour limits what a key that has been read out of memory opens.
struct SealLimits {
  uint64_t packets = uint64_t{1} << 32;
  Nanos age = std::chrono::hours(1);
};

// The key of the next phase. There is no way back to the present one.
SealKey nextSealKey(const SealKey& key);

// Seals the packets of one direction of a path with one key after the other,
// and forgets each. The far end learns of a new phase from the packets
// themselves: nothing is asked for or acknowledged.
//
// Thread: one at a time.
class PacketSealer {
 public:
  // Null, and `why` says so, as PacketSeal::make().
  static std::unique_ptr<PacketSealer>
  make(const SealKey& key, SealLimits limits, TimePoint now, std::string& why);
  // As PacketSeal::seal(); numbers go on over all phases.
  size_t seal(
      uint64_t number,
      std::span<const iovec> parts,
      std::byte* out,
      TimePoint now,
      std::span<const std::byte> context = {});
  size_t seal(
      uint64_t number,
      std::span<const std::byte> packet,
      std::byte* out,
      TimePoint now,
      std::span<const std::byte> context = {}) {
    const iovec part = partOf(packet);
    return seal(number, {&part, 1}, out, now, context);
  }
  uint64_t phase() const {
    return phase_;
  }

 private:
  PacketSealer() = default;
  void nextPhase(TimePoint now);

  SealKey key_{};
  std::unique_ptr<PacketSeal> seal_;
  SealLimits limits_;
  uint64_t phase_ = 0, packets_ = 0;
  TimePoint since_{};
};

// Opens them. Packets may come late, from the phase before, or be the first of
// one of the next phases, if all of those in between have been lost.
//
// Thread: one at a time.
class PacketOpener {
 public:
  // Phases that may be skipped. The sender changes once in an hour, so more are
  // lost only on a path that has long been given up.
  static constexpr size_t kAhead = 2;
  // Packets of the phase before are opened for so long after the first of a new
  // one: far longer than a network can delay them.
  static constexpr Nanos kPreviousFor = std::chrono::seconds(30);

  static std::unique_ptr<PacketOpener> make(
      const SealKey& key,
      std::string& why);
  // As PacketSeal::open().
  bool open(
      std::span<const std::byte> datagram,
      uint64_t& number,
      std::byte* out,
      std::span<const std::byte>& packet,
      TimePoint now,
      std::span<const std::byte> context = {});
  uint64_t phase() const {
    return phase_;
  }

 private:
  PacketOpener() = default;
  bool prepare(size_t ahead);

  // The present phase and those after it; only the first one from the start.
  std::array<std::unique_ptr<PacketSeal>, kAhead + 1> seals_;
  std::array<SealKey, kAhead + 1> keys_{};
  std::unique_ptr<PacketSeal> previous_;
  TimePoint previousUntil_{};
  uint64_t phase_ = 0;
};

} // namespace resilient

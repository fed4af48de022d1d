#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace resilient {

// The clear part of a datagram, before the sealed one: a mark that it is ours,
// and its number.
inline constexpr size_t kDatagramHeaderBytes = 12;
inline constexpr size_t kSealBytes = 16; // behind it
inline constexpr size_t kSealOverheadBytes = kDatagramHeaderBytes + kSealBytes;

using SealKey = std::array<std::byte, 32>;

// The key of one direction of one datagram path. Both ends give the same
// arguments; `initiator`: the key is for the initiator's packets.
SealKey deriveSealKey(
    const std::string& secret,
    const std::string& initiatorNonce,
    const std::string& answererNonce,
    bool initiator);

// Seals and opens datagrams with AES-256-GCM: without the key, no process can
// make, change or read one. Numbers are the nonces, so none may be sealed twice
// with one key. The owner has to recognise duplicates.
//
// The cipher is that of OpenSSL's libcrypto, looked for at run time: only
// datagrams need it.
class PacketSeal {
 public:
  // Null where there is no libcrypto; `why` then says so.
  static std::unique_ptr<PacketSeal> make(const SealKey& key, std::string& why);
  static bool available(std::string& why);
  ~PacketSeal();
  PacketSeal(const PacketSeal&) = delete;
  PacketSeal& operator=(const PacketSeal&) = delete;

  // `out` has room for kSealOverheadBytes more. Returns the bytes of the
  // datagram.
  size_t
  seal(uint64_t number, std::span<const std::byte> packet, std::byte* out);
  // False: not sealed with this key. Else `packet` is within `out`, which has
  // room for as many bytes as the datagram has.
  bool open(
      std::span<const std::byte> datagram,
      uint64_t& number,
      std::byte* out,
      std::span<const std::byte>& packet);

 private:
  PacketSeal() = default;
  void* sealing_ = nullptr; // EVP_CIPHER_CTX
  void* opening_ = nullptr;
};

} // namespace resilient

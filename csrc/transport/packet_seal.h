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
// The cipher is that of OpenSSL's libcrypto, looked for at run time: only
// datagrams need it.
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

  // `out` has room for kSealOverheadBytes more. Returns the bytes of the
  // datagram. `packet` and `out` must not overlap. The caller counts the
  // numbers up and never goes back: two packets with one number would reveal
  // their XOR and the key that authenticates.
  size_t
  seal(uint64_t number, std::span<const std::byte> packet, std::byte* out);
  // False: not sealed with this key. Else `packet` is within `out`, which has
  // room for as many bytes as the datagram has.
  //
  // If it returns false, `number` and the bytes at `out` are not authentic and
  // must not be used: AES-GCM decrypts before it can check the tag.
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

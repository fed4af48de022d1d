#include "transport/packet_seal.h"

#include <cstring>

#include "base/sha256.h"
#include "transport/libcrypto.h"

namespace resilient {
namespace {

constexpr char kMagic[] = {'T', 'R', 'D'}; // the phase is behind it
constexpr std::string_view kNextLabel = "torch_resilient datagram next key";

// OpenSSL's EVP interface, the same since 1.1.
struct Crypto {
  void* (*newContext)() = nullptr;
  void (*freeContext)(void*) = nullptr;
  const void* (*aes256Gcm)() = nullptr;
  int (*control)(void*, int, int, void*) = nullptr;
  using Init =
      int(void*,
          const void*,
          void*,
          const unsigned char*,
          const unsigned char*);
  using Update = int(void*, unsigned char*, int*, const unsigned char*, int);
  using Final = int(void*, unsigned char*, int*);
  Init *encryptInit = nullptr, *decryptInit = nullptr;
  Update *encryptUpdate = nullptr, *decryptUpdate = nullptr;
  Final *encryptFinal = nullptr, *decryptFinal = nullptr;
  Libcrypto libcrypto;

  Crypto() {
    libcrypto.find(newContext, "EVP_CIPHER_CTX_new");
    libcrypto.find(freeContext, "EVP_CIPHER_CTX_free");
    libcrypto.find(aes256Gcm, "EVP_aes_256_gcm");
    libcrypto.find(control, "EVP_CIPHER_CTX_ctrl");
    libcrypto.find(encryptInit, "EVP_EncryptInit_ex");
    libcrypto.find(decryptInit, "EVP_DecryptInit_ex");
    libcrypto.find(encryptUpdate, "EVP_EncryptUpdate");
    libcrypto.find(decryptUpdate, "EVP_DecryptUpdate");
    libcrypto.find(encryptFinal, "EVP_EncryptFinal_ex");
    libcrypto.find(decryptFinal, "EVP_DecryptFinal_ex");
  }
};

// EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG
constexpr int kGetTag = 0x10, kSetTag = 0x11;

const Crypto& crypto() {
  static const Crypto loaded;
  return loaded;
}

const unsigned char* bytesOf(const void* p) {
  return static_cast<const unsigned char*>(p);
}
unsigned char* bytesOf(void* p) {
  return static_cast<unsigned char*>(p);
}

// The nonce of GCM: 12 bytes, the number behind zeros. Each key is for one
// direction of one path.
std::array<unsigned char, 12> nonceOf(uint64_t number) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data() + 4, &number, sizeof(number));
  return nonce;
}

// Additional data, which is not in the packet.
bool authenticate(
    Crypto::Update* update,
    void* cipher,
    std::span<const std::byte> context) {
  int n = 0;
  return context.empty() ||
      update(
          cipher,
          nullptr,
          &n,
          bytesOf(context.data()),
          static_cast<int>(context.size())) == 1;
}

} // namespace

SealKey deriveSealKey(
    const std::string& secret,
    const std::string& initiatorNonce,
    const std::string& answererNonce,
    bool initiator) {
  HmacSha256 mac(secret);
  // Nonces have one length, so their border is clear.
  mac.update(std::string_view("torch_resilient datagram path"))
      .update(std::string_view(initiator ? "i" : "a"))
      .update(initiatorNonce)
      .update(answererNonce);
  const Digest digest = mac.finish();
  SealKey key;
  static_assert(sizeof(digest) == sizeof(key));
  std::memcpy(key.data(), digest.data(), key.size());
  return key;
}

bool PacketSeal::available(std::string& why) {
  why = crypto().libcrypto.missing();
  return why.empty();
}

std::unique_ptr<PacketSeal> PacketSeal::make(
    const SealKey& key,
    std::string& why) {
  if (!available(why)) {
    return nullptr;
  }
  const Crypto& c = crypto();
  std::unique_ptr<PacketSeal> made(new PacketSeal);
  made->sealing_ = c.newContext();
  made->opening_ = c.newContext();
  if (made->sealing_ == nullptr || made->opening_ == nullptr ||
      c.encryptInit(
          made->sealing_,
          c.aes256Gcm(),
          nullptr,
          bytesOf(key.data()),
          nullptr) != 1 ||
      c.decryptInit(
          made->opening_,
          c.aes256Gcm(),
          nullptr,
          bytesOf(key.data()),
          nullptr) != 1) {
    why = "libcrypto has no AES-256-GCM";
    return nullptr;
  }
  return made;
}

PacketSeal::~PacketSeal() {
  if (sealing_ != nullptr) {
    crypto().freeContext(sealing_);
  }
  if (opening_ != nullptr) {
    crypto().freeContext(opening_);
  }
}

// The header is authenticated as additional data, so no process can move a
// packet to another number. Null arguments keep the key and the cipher of
// make().
size_t PacketSeal::seal(
    uint64_t number,
    std::span<const iovec> parts,
    std::byte* out,
    uint8_t phase,
    std::span<const std::byte> context) {
  const Crypto& c = crypto();
  std::memcpy(out, kMagic, sizeof(kMagic));
  out[sizeof(kMagic)] = std::byte{phase};
  std::memcpy(out + 4, &number, 8);
  const auto nonce = nonceOf(number);
  std::byte* to = out + kDatagramHeaderBytes;
  int n = 0;
  bool done =
      c.encryptInit(sealing_, nullptr, nullptr, nullptr, nonce.data()) == 1 &&
      c.encryptUpdate(
          sealing_, nullptr, &n, bytesOf(out), kDatagramHeaderBytes) == 1 &&
      authenticate(c.encryptUpdate, sealing_, context);
  for (const iovec& part : parts) {
    if (part.iov_len == 0) {
      continue; // OpenSSL 1.1 would take a null pointer for the end
    }
    done = done &&
        c.encryptUpdate(
            sealing_,
            bytesOf(to),
            &n,
            bytesOf(part.iov_base),
            static_cast<int>(part.iov_len)) == 1;
    to += part.iov_len;
  }
  done = done && c.encryptFinal(sealing_, bytesOf(to), &n) == 1 &&
      c.control(sealing_, kGetTag, kSealBytes, to) == 1;
  const auto bytes = static_cast<size_t>(to - out) + kSealBytes;
  // These calls fail only if they are used wrongly. The peer then cannot open
  // the datagram.
  if (!done) {
    std::memset(out, 0, bytes);
  }
  return bytes;
}

bool PacketSeal::open(
    std::span<const std::byte> datagram,
    uint64_t& number,
    std::byte* out,
    std::span<const std::byte>& packet,
    std::span<const std::byte> context) {
  if (datagram.size() < kSealOverheadBytes ||
      std::memcmp(datagram.data(), kMagic, sizeof(kMagic)) != 0) {
    return false;
  }
  std::memcpy(&number, datagram.data() + 4, 8);
  const Crypto& c = crypto();
  const auto nonce = nonceOf(number);
  const std::byte* const sealed = datagram.data() + kDatagramHeaderBytes;
  const size_t bytes = datagram.size() - kSealOverheadBytes;
  std::array<std::byte, kSealBytes> tag;
  std::memcpy(tag.data(), sealed + bytes, tag.size());
  int n = 0, last = 0;
  if (c.decryptInit(opening_, nullptr, nullptr, nullptr, nonce.data()) != 1 ||
      c.decryptUpdate(
          opening_,
          nullptr,
          &n,
          bytesOf(datagram.data()),
          kDatagramHeaderBytes) != 1 ||
      !authenticate(c.decryptUpdate, opening_, context) ||
      c.decryptUpdate(
          opening_,
          bytesOf(out),
          &n,
          bytesOf(sealed),
          static_cast<int>(bytes)) != 1 ||
      c.control(opening_, kSetTag, kSealBytes, tag.data()) != 1 ||
      c.decryptFinal(opening_, bytesOf(out + n), &last) != 1) {
    return false;
  }
  packet = {out, bytes};
  return true;
}

SealKey nextSealKey(const SealKey& key) {
  const Digest digest =
      HmacSha256({reinterpret_cast<const char*>(key.data()), key.size()})
          .update(kNextLabel)
          .finish();
  SealKey next;
  std::memcpy(next.data(), digest.data(), next.size());
  return next;
}

std::unique_ptr<PacketSealer> PacketSealer::make(
    const SealKey& key,
    SealLimits limits,
    TimePoint now,
    std::string& why) {
  std::unique_ptr<PacketSealer> made(new PacketSealer);
  made->seal_ = PacketSeal::make(key, why);
  made->key_ = key;
  made->limits_ = limits;
  made->since_ = now;
  return made->seal_ ? std::move(made) : nullptr;
}

// Without memory for another context the present key goes on: it is still far
// from what the cipher bears, and a path that dies would cost more.
void PacketSealer::nextPhase(TimePoint now) {
  const SealKey next = nextSealKey(key_);
  std::string why;
  if (auto seal = PacketSeal::make(next, why)) {
    seal_ = std::move(seal);
    key_ = next;
    ++phase_;
  }
  packets_ = 0;
  since_ = now;
}

size_t PacketSealer::seal(
    uint64_t number,
    std::span<const iovec> parts,
    std::byte* out,
    TimePoint now,
    std::span<const std::byte> context) {
  if (packets_ >= limits_.packets || now - since_ >= limits_.age) {
    nextPhase(now);
  }
  ++packets_;
  return seal_->seal(number, parts, out, static_cast<uint8_t>(phase_), context);
}

std::unique_ptr<PacketOpener> PacketOpener::make(
    const SealKey& key,
    std::string& why) {
  std::unique_ptr<PacketOpener> made(new PacketOpener);
  made->keys_[0] = key;
  made->seals_[0] = PacketSeal::make(key, why);
  return made->seals_[0] ? std::move(made) : nullptr;
}

// The keys are kept once made: a forged packet then costs no more than the
// attempt to open it.
bool PacketOpener::prepare(size_t ahead) {
  std::string why;
  for (size_t i = 1; i <= ahead; ++i) {
    if (!seals_[i]) {
      keys_[i] = nextSealKey(keys_[i - 1]);
      seals_[i] = PacketSeal::make(keys_[i], why);
    }
  }
  return seals_[ahead] != nullptr;
}

// The phase in the packet only chooses the key; it counts once the packet has
// been opened with it.
bool PacketOpener::open(
    std::span<const std::byte> datagram,
    uint64_t& number,
    std::byte* out,
    std::span<const std::byte>& packet,
    TimePoint now,
    std::span<const std::byte> context) {
  if (datagram.size() < kSealOverheadBytes) {
    return false;
  }
  if (previous_ && now >= previousUntil_) {
    previous_.reset();
  }
  const auto phase = std::to_integer<uint8_t>(datagram[sizeof(kMagic)]);
  const size_t ahead =
      static_cast<uint8_t>(phase - static_cast<uint8_t>(phase_));
  if (ahead == 0xff) {
    return previous_ && previous_->open(datagram, number, out, packet, context);
  }
  if (ahead > kAhead || !prepare(ahead) ||
      !seals_[ahead]->open(datagram, number, out, packet, context)) {
    return false;
  }
  for (size_t i = 0; i < ahead; ++i) {
    previous_ = std::move(seals_[0]);
    std::move(seals_.begin() + 1, seals_.end(), seals_.begin());
    std::copy(keys_.begin() + 1, keys_.end(), keys_.begin());
    seals_.back().reset();
    keys_.back() = {};
    ++phase_;
    previousUntil_ = now + kPreviousFor;
  }
  return true;
}

} // namespace resilient

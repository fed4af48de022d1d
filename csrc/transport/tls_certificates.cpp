#include "transport/tls_certificates.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/syscall.h"
#include "transport/libssl.h"
#include "transport/tls_session.h"

namespace resilient {
namespace {

constexpr int kPem = 1;
constexpr int kVerifyPeer = 1, kFailIfNone = 2;
constexpr unsigned long kCheckRevocation = 0x4 | 0x8; // of the whole chain
constexpr Nanos kLookEvery = std::chrono::seconds(1);
constexpr Nanos kAgainAfter = std::chrono::seconds(10);
// Bundles of all public authorities have a quarter of it.
constexpr size_t kFileBytesMax = 1u << 20;

constexpr const char* kCertificate = "TORCH_RESILIENT_TLS_CERT=";
constexpr const char* kKey = "TORCH_RESILIENT_TLS_KEY=";
constexpr const char* kAuthorities = "TORCH_RESILIENT_TLS_CA=";

Status invalid(const std::string& text) {
  return Status(StatusCode::kInvalidArgument, text);
}

// The words of OpenSSL for what it has just refused.
std::string opensslText() {
  const Libssl& l = libssl();
  const unsigned long error = l.ERR_get_error();
  const char* const reason =
      error != 0 ? l.ERR_reason_error_string(error) : nullptr;
  l.ERR_clear_error();
  return reason != nullptr ? reason : "unknown reason";
}

// The text of a file, for what OpenSSL does not tell about it.
Status readText(
    const std::string& option,
    const std::string& path,
    FileUse use,
    std::string& text) {
  const Status status = readFile(path, use, kFileBytesMax, text);
  return status.ok() ? status
                     : invalid(option + path + ": " + status.message());
}

// Moves what `from` has to say to `to`.
void deliver(TlsSession& from, TlsSession& to) {
  for (auto out = from.output(); !out.empty(); out = from.output()) {
    const std::span<std::byte> room = to.input();
    if (room.empty() || to.failed()) {
      return;
    }
    const size_t n = std::min(room.size(), out.size());
    std::memcpy(room.data(), out.data(), n);
    (void)from.sent(n);
    to.received(n);
    to.proceed();
  }
}

} // namespace

struct TlsCertificates::Contexts {
  Contexts() = default;
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;
  ~Contexts() {
    for (void* const context : {client, server}) {
      if (context != nullptr) {
        libssl().SSL_CTX_free(context);
      }
    }
  }

  void* client = nullptr;
  void* server = nullptr;
};

TlsCertificates::TlsCertificates(
    Files files,
    const std::string& hostName,
    const std::vector<std::string>& addresses)
    : files_(std::move(files)) {
  changed_ = changed();
  Status status = read(contexts_);
  if (status.ok()) {
    status = check(*contexts_, hostName, addresses);
  }
  if (!status.ok()) {
    throw StatusError(status);
  }
}

TlsCertificates::~TlsCertificates() = default;

void* TlsCertificates::context(bool isClient) const {
  return isClient ? contexts_->client : contexts_->server;
}

TlsCertificates::Times TlsCertificates::changed() const {
  Times times{};
  size_t i = 0;
  for (const std::string* const path :
       {&files_.certificate, &files_.key, &files_.authorities}) {
    struct stat about{};
    if (::stat(path->c_str(), &about) == 0) {
      times[i] = about.st_mtim;
      times[i + 1] = about.st_ctim;
    }
    i += 2;
  }
  return times;
}

// Files that are replaced one after the other do not fit together in between:
// these are read again with the next change, or a little later.
void TlsCertificates::refresh(TimePoint now) {
  if (now < lookAt_) {
    return;
  }
  lookAt_ = now + kLookEvery;
  const Times times = changed();
  const bool isSame = std::ranges::equal(
      times, changed_, [](const timespec& a, const timespec& b) {
        return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
      });
  if (isSame) {
    return;
  }
  std::unique_ptr<Contexts> contexts;
  if (const Status status = read(contexts); !status.ok()) {
    lookAt_ = now + kAgainAfter;
    if (saidError_ != status.message()) {
      saidError_ = status.message();
      logMessage(
          LogLevel::kWarning,
          "the certificates have changed and cannot be used, the former ones "
          "stay: " +
              saidError_);
    }
    return;
  }
  saidError_.clear();
  changed_ = times;
  contexts_ = std::move(contexts);
  const Status status = check(*contexts_, "", {});
  logMessage(
      status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
      "the certificates have been read again" +
          (status.ok() ? ""
                       : "; others will refuse that of this host: " +
                   status.message()));
}

Status TlsCertificates::read(std::unique_ptr<Contexts>& contexts) const {
  const Libssl& l = libssl();
  std::string text, authorities;
  for (const Status& status :
       {readText(kCertificate, files_.certificate, FileUse::kPublic, text),
        readText(kKey, files_.key, FileUse::kSecret, text),
        readText(
            kAuthorities, files_.authorities, FileUse::kPublic, authorities)}) {
    if (!status.ok()) {
      return status;
    }
  }
  auto made = std::make_unique<Contexts>();
  l.ERR_clear_error();
  for (const bool isClient : {true, false}) {
    void*& context = isClient ? made->client : made->server;
    context = TlsSession::newContext(isClient);
    if (context == nullptr) {
      return Status(StatusCode::kInternal, "OpenSSL has no memory");
    }
    // Else OpenSSL asks at the terminal.
    l.SSL_CTX_set_default_passwd_cb(
        context, [](char*, int, int, void*) { return -1; });
    if (l.SSL_CTX_use_certificate_chain_file(
            context, files_.certificate.c_str()) != 1) {
      return invalid(
          kCertificate + files_.certificate +
          ": cannot be used as a certificate in PEM form: " + opensslText());
    }
    if (l.SSL_CTX_use_PrivateKey_file(context, files_.key.c_str(), kPem) != 1 ||
        l.SSL_CTX_check_private_key(context) != 1) {
      return invalid(
          kKey + files_.key + ": not the key of " + files_.certificate +
          " in PEM form, without a password: " + opensslText());
    }
    if (l.SSL_CTX_load_verify_locations(
            context, files_.authorities.c_str(), nullptr) != 1) {
      return invalid(
          kAuthorities + files_.authorities +
          ": no certificates of authorities in PEM form: " + opensslText());
    }
    if (authorities.find("-----BEGIN X509 CRL-----") != std::string::npos) {
      l.X509_VERIFY_PARAM_set_flags(
          l.SSL_CTX_get0_param(context), kCheckRevocation);
    }
    l.SSL_CTX_set_verify(context, kVerifyPeer | kFailIfNone, nullptr);
  }
  contexts = std::move(made);
  return Status();
}

// A handshake of the files with themselves shows what a peer would find wrong.
Status TlsCertificates::check(
    const Contexts& contexts,
    const std::string& hostName,
    const std::vector<std::string>& addresses) const {
  const auto client = TlsSession::client(contexts.client, {}, {});
  const auto server = TlsSession::server(
      contexts.server, [](std::span<const uint8_t>) { return NamedKeys(); });
  for (int i = 0; i < 3; ++i) {
    deliver(*client, *server);
    deliver(*server, *client);
  }
  for (const TlsSession* const end : {client.get(), server.get()}) {
    if (!end->certificateFault().empty()) {
      return invalid(
          kCertificate + files_.certificate + ": not valid under " +
          files_.authorities +
          " (TORCH_RESILIENT_TLS_CA): " + end->certificateFault());
    }
    if (end->failed() || end->handshaking()) {
      return invalid(
          kCertificate + files_.certificate +
          ": TLS with itself fails: " + end->status().message());
    }
  }
  if (hostName.empty() || client->isFor(hostName)) {
    return Status();
  }
  std::string missing;
  for (const std::string& address : addresses) {
    if (!client->isFor(address)) {
      missing += " or " + address;
    }
  }
  return addresses.empty() || !missing.empty()
      ? invalid(
            kCertificate + files_.certificate +
            ": it is not for the name of this host, " + hostName +
            ", nor for " +
            (missing.empty() ? "an address" : missing.substr(4)) +
            ", by which others connect: its subjectAltName must have the name, "
            "or all addresses")
      : Status();
}

} // namespace resilient

#pragma once

#include <array>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/time.h"

namespace resilient {

// The certificate of this host with its key, and the authorities whose
// certificates the job accepts, as TLS sessions use them instead of a
// pre-shared key. The handshake inside (wire/hello.h) still proves the job's
// secret: a certificate tells which host speaks, the secret that it is of the
// job. A rank signs only for callers that have named the secret.
//
// The files may be replaced while the job runs, as those who issue certificates
// for a day do, or to add a revocation list: refresh() reads them again. Files
// that cannot be used change nothing. A certificate of this host that others
// will refuse does: what the files say of other hosts counts at once.
//
// Thread: one at a time.
class TlsCertificates {
 public:
  // Paths of PEM files. `certificate` may have further ones behind it, up to
  // the authority. `authorities` may have revocation lists too, and then each
  // authority needs one.
  struct Files {
    std::string certificate, key, authorities;
  };

  // Reads the files. Throws StatusError(kInvalidArgument) that names the option
  // and the file: it cannot be read, others may read the key, the key is of
  // another certificate, the authorities do not accept it, it has expired, or
  // it has neither this host's name nor all of its addresses.
  TlsCertificates(
      Files files,
      const std::string& hostName,
      const std::vector<std::string>& addresses);
  ~TlsCertificates();
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // Reads the files again if one has changed, and looks for that once a second
  // at most; ten seconds after files that could not be used.
  void refresh(TimePoint now);

  // For sessions; valid until the next refresh(). A session keeps what it
  // needs.
  void* context(bool isClient) const;

 private:
  struct Contexts;
  // Two of each file: its contents and its rights have changed then.
  using Times = std::array<timespec, 6>;

  Status read(std::unique_ptr<Contexts>& contexts) const;
  Status check(
      const Contexts& contexts,
      const std::string& hostName,
      const std::vector<std::string>& addresses) const;
  Times changed() const;

  const Files files_;
  std::unique_ptr<Contexts> contexts_;
  Times changed_{};
  TimePoint lookAt_{};
  std::string saidError_; // so that it is said once
};

} // namespace resilient

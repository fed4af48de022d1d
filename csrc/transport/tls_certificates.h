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
// job.
//
// The files may be replaced while the job runs, as those who issue certificates
// for a day do, or to add a revocation list: refresh() reads them again.
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
  // none of `names` (host names and addresses of this host) is in it.
  TlsCertificates(Files files, std::vector<std::string> names);
  ~TlsCertificates();
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // Reads the files again if one has changed, and looks for that once a second
  // at most. If they are no good, the log says why and the former ones stay.
  void refresh(TimePoint now);

  // For sessions; valid until the next refresh(). A session keeps what it
  // needs.
  void* context(bool isClient) const;

 private:
  struct Contexts;
  using Times = std::array<timespec, 3>;

  Status read(std::unique_ptr<Contexts>& contexts) const;
  Times changed() const;

  const Files files_;
  const std::vector<std::string> names_;
  std::unique_ptr<Contexts> contexts_;
  Times changed_{};
  TimePoint lookedAt_{};
};

} // namespace resilient

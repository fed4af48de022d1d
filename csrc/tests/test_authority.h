#pragma once

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/check.h"
#include "tests/tls_pair.h"
#include "transport/tls_certificates.h"

namespace resilient::test {

// Issues certificates by openssl's command line, in a folder of its own.
class TestAuthority {
 public:
  TestAuthority() {
    std::array<char, 32> folder{"/tmp/authority_XXXXXX"};
    CHECK(::mkdtemp(folder.data()) != nullptr);
    folder_ = folder.data();
    run("req -x509 " + kNewKey +
        " -days 30 -subj /CN=authority -keyout ca.key "
        "-out ca.pem");
  }
  ~TestAuthority() {
    std::filesystem::remove_all(folder_);
  }
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  // For a host of this name.
  TlsCertificates::Files issue(const std::string& host) const {
    run("req " + kNewKey + " -subj /CN=else -addext subjectAltName=DNS:" +
        host + " -keyout " + host + ".key -out " + host + ".csr");
    run("x509 -req -in " + host +
        ".csr -CA ca.pem -CAkey ca.key "
        "-CAcreateserial -days 30 -copy_extensions copy -out " +
        host + ".pem");
    return {
        folder_ + '/' + host + ".pem",
        folder_ + '/' + host + ".key",
        folder_ + "/ca.pem"};
  }

 private:
  const std::string kNewKey =
      "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";

  void run(const std::string& words) const {
    const std::string line =
        "cd " + folder_ + " && openssl " + words + " > log 2>&1";
    if (std::system(line.c_str()) != 0) { // NOLINT(concurrency-mt-unsafe)
      throw Failure("failed, see its log (is openssl installed?): " + line);
    }
  }

  std::string folder_;
};

} // namespace resilient::test

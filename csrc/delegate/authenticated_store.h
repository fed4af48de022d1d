#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "delegate/group.h"
#include "wire/record_seal.h"

namespace resilient {

// A store in which every record has a MAC under the job's secret. An attacker
// who can write to the store, but has no secret, can then delete records and
// write nonsense, which fails the start and is named. He can redirect no rank
// and change no setting. Keys contain the generation, so records of an earlier
// one do not pass for those of a later one.
//
// Counters (add) have no MAC: a wrong count makes ranks wait, or fail. Nor have
// refusals: a rank with another secret, or with none, must be able to read why
// the others fail, and a forged one does no more harm than nonsense.
//
// A record without a valid MAC: setIfAbsent() and getAll() throw a StatusError
// (kInvalidArgument) that names it. tryGet() returns a refusal
// (Membership::refusal) that says the same, which its readers understand.
//
// Thread: as the store that it protects.
class AuthenticatedStore final : public KeyValue {
 public:
  AuthenticatedStore(
      std::unique_ptr<KeyValue> store,
      std::shared_ptr<const RecordSeal> seal);

  void set(const std::string& key, const std::string& value) override;
  bool tryGet(const std::string& key, std::string& value) override;
  int64_t add(const std::string& key, int64_t delta) override;
  std::string setIfAbsent(const std::string& key, const std::string& desired)
      override;
  std::vector<std::string> getAll(
      const std::vector<std::string>& keys) override;
  std::unique_ptr<KeyValue> clone() override;
  std::string serverHost() const override {
    return store_->serverHost();
  }
  Nanos roundTrip() const override {
    return store_->roundTrip();
  }

 private:
  std::string protect(const std::string& key, const std::string& value) const;
  Status open(
      const std::string& key,
      const std::string& record,
      std::string& value) const;

  const std::unique_ptr<KeyValue> store_;
  const std::shared_ptr<const RecordSeal> seal_;
};

} // namespace resilient

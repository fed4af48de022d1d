#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"

namespace resilient {

// The MAC of a record covers this besides its key and value.
struct StoreContext {
  int rank = 0; // of the writer, in the group: it stands in its records
  // The members of the group: a record of another group, or of the same one in
  // another order, is not valid here. As in GroupConfig.
  int size = 1;
  std::vector<uint64_t> globalRanks;
};

// Makes and checks the MAC of records, for members of one group.
//
// Immutable, so any thread.
class RecordSeal {
 public:
  // `secrets`: the first one is for what is written, and each for what is read;
  // not empty. `scope` belongs to every key, so that what is written in one
  // scope is not valid in another one.
  RecordSeal(
      const std::vector<std::string>& secrets,
      StoreContext context,
      std::string scope = "");

  // The record for `value`: "<MAC> <rank of the writer> <value>".
  std::string protect(const std::string& key, const std::string& value) const;
  // kInvalidArgument, which names the key and the writer, if it is not
  // authentic.
  Status open(
      const std::string& key,
      const std::string& record,
      std::string& value) const;

 private:
  std::string mac(
      const Digest& key,
      std::string_view name,
      std::string_view writer,
      std::string_view value) const;

  std::vector<Digest> keys_; // one for each secret
  const StoreContext context_;
  const std::string scope_;
};

} // namespace resilient

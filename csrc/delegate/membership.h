#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/options.h"
#include "delegate/group.h"
#include "transport/address.h"

namespace resilient {

// How the ranks of a group find each other through the store. Joining takes
// four requests, whatever the size of the group; the last rank makes two more
// and writes the list of all members. Every other rank reads that list once,
// and needs the store no more.
//
// Keys, where G counts how often the group was made on this store:
//   resilient/generation/<rank>  how often this rank has joined. A group made
//                                again must not read what the last one left
//   resilient/job/G/0       a number for the group, its algorithms, whether it
//                           encrypts (EngineOptions::effectiveEncryption), and
//                           the secret unless an option gives one; or "over"
//                           once a process of that generation has been
//                           replaced: whoever has not joined it belongs to a
//                           later one
//   resilient/at/G/<rank>   PeerAddress
//   resilient/joined/G/0    how many have written the latter
//   resilient/members/G/0   the list (member_list.h)
// Where an address or the list is expected, a text from refusal() may stand.
// With a secret of the job's own the store is an AuthenticatedStore, so these
// are the values inside its records.
// Paper: SHIFT §4.2 exchanges what a connection needs through a key-value
// store.
//
// Thread: one at a time. Calls block for the store.
class Membership {
 public:
  Membership(
      std::shared_ptr<KeyValue> store,
      std::string groupName,
      int rank,
      int size);

  // The values that all members share.
  struct Terms {
    uint64_t group = 0; // a random number that names it on the wire
    std::string secret;
  };
  // The first half: two requests. Throws StatusError, after telling the other
  // ranks, if the options of the ranks contradict each other. On a store that
  // was used before there are one or two more, and two for each generation that
  // the rank skips.
  Terms agree(const PeerAddress& self, const EngineOptions& options);
  // The second half, after which other ranks may connect: two requests.
  // `address` is this rank's PeerAddress as text. Returns the list of members
  // if this rank is the last to join, else "". Throws StatusError, after
  // telling the others, if the ranks cannot form a group. Call it when
  // connections can be accepted, and after agree().
  std::string publish(const std::string& address);

  std::string addressKey(int rank) const;
  std::string listKey() const;

  // The reason why a rank could not join, if that is what `text` holds.
  static std::optional<std::string> refusal(const std::string& text);
  // And the text for it.
  static std::string refusalOf(const Status& status);
  // The status that the other ranks end with.
  static Status couldNotJoin(int rank, const std::string& why);

 private:
  std::string key(const char* what, int rank) const;
  void startGeneration(const PeerAddress& self);
  std::string proposeTerms(const std::string& proposal);
  [[noreturn]] void refuse(const Status& status);
  std::string writeList();

  const std::shared_ptr<KeyValue> store_;
  const std::string groupName_;
  const int rank_;
  const int size_;
  int64_t generation_ = 0;
};

} // namespace resilient

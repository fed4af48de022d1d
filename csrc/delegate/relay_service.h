#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/traffic_class.h"
#include "channel/operation.h"
#include "delegate/group.h"
#include "transport/event_loop.h"
#include "wire/control.h"
#include "wire/frame.h"
#include "wire/relay.h"

namespace resilient {

class Channel;
class LinkHost;
class PeerLink;

// Passes on what other ranks send each other over this one (wire/relay.h), and
// hands what comes over relays for this rank to the link with its sender.
//
// Paper: ATLAS §4.3, where the nodes of a site send for one another.
//
// How it works. A message for a relay gets its receive as soon as it is
// announced, so it needs no credit for longer than a round trip, and is sent on
// when it is whole, with the class it came with. The relay waits for nobody
// while it holds a message: if its own way to the target is slow, the window of
// the flow keeps more from coming; what exceeds `relay_bytes` is refused, which
// ends the flow. So ranks that relay for each other never wait in a circle, and
// what the trainer of this process does (or does not) plays no part.
//
// Not an open proxy. A flow has to be opened by a process that a group of this
// one has as a member, to a process of which the same holds, and what arrives
// has to come from the process that it names as its source. All else is refused
// and counted.
//
// Thread: loop thread. Lifetime: the engine's.
class RelayService {
 public:
  explicit RelayService(LinkHost& host);
  ~RelayService();

  // As MailboxListener::onRelayed().
  RecvOp* receive(const FrameHeader& header, Channel& channel);
  void onNote(PeerLink& from, const RelayNote& note);
  // Flows with it as an end, or as a relay, are over.
  void onLinkClosed(PeerLink& link);
  // This process is about to leave: asks the ends of all flows for nothing more
  // where another way works. It still passes on what it holds, and what has no
  // other way.
  void leave();
  // Everything is over; nothing that is held calls back.
  void close();
  RelayCounters counters() const;
  // RelayCounters::heldBytes, counted anew: for tests.
  uint64_t countHeldBytes() const;

 private:
  struct Held;
  struct Forward;
  // One that others have over this rank.
  struct Flow {
    TimePoint openedAt{};
    bool accepted = false; // until then we keep up the way to both ends
    // By direction, of the messages that have come: see tell().
    struct Passed {
      uint64_t waitingBytes = 0;
      uint64_t bytes = 0;
      uint64_t toldBytes = 0;
    };
    std::array<Passed, 2> passed{}; // by fromOpener
    RelayKey key; // of the opener
    bool announced = false; // the other end has a note that it is open
  };
  using Flows = std::map<RelayFlow, Flow>;

  void arrived(Held& held, const Status& status);
  void passOn(PeerLink& from, const RelayHeader& header, Held& held);
  void pass(PeerLink& from, const RelayNote& note);
  void answer(
      PeerLink& to,
      const RelayFlow& flow,
      bool fromOpener,
      RelayHop hop,
      const std::string& why);
  std::string whyNot(PeerLink& from, const RelayNote& note) const;
  void open(const RelayNote& note);
  void announce(Flows::iterator flow);
  void accepted(Flows::iterator flow);
  void end(Flows::iterator flow);
  void endBoth(Flows::iterator flow, const std::string& why);
  void setInterest(const RelayFlow& flow, bool needed);
  void onHandedOut(const Forward& forward);
  void tell();
  void tell(const RelayFlow& flow, bool fromOpener, Flow::Passed& passed);
  void look();

  LinkHost& host_;
  Flows flows_;
  std::list<Held> held_; // arriving, or about to be passed on
  std::list<Forward> forwards_;
  uint64_t heldBytes_ = 0; // of both
  RelayCounters counters_;
  TimerId timer_ = 0;
  std::vector<RelayFlow> untold_; // flows of which tell() has to look
  TimerId tellTimer_ = 0;
  bool leaving_ = false;
};

} // namespace resilient

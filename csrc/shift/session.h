#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shift/shadow.h"

namespace resilient::shift {

using Clock = std::chrono::steady_clock;

// The control of one protected queue pair: finds the peer's session, keeps the
// path that carries no data connected, switches between the paths and returns.
// Both ends run the same steps and write each key of the store once. Runs on
// the control thread, with the control mutex held.
//
// Keys, with OWN and PEER as the random names of the two sessions and E as the
// number of the switch to come:
//   qp.ADDRESS.NUMBER   session and backup of a queue pair of the application
//   OWN.PEER.r.E.ROUND  the idle path is being connected; first packet number
//   OWN.PEER.p.E.ROUND  1 if the probe on it succeeded, 0 if not
//   OWN.PEER.f.E        fenced: messages received and next packet; or "no"
//   OWN.PEER.w.E.TRY    the leader wants to return to the default path
//   OWN.PEER.d.E.TRY    the sends of this end are drained
//   OWN.PEER.x.E.TRY    the leader has cancelled the return
//   mr.ADDRESS.KEY      a memory region on the backup
class Session : public std::enable_shared_from_this<Session> {
 public:
  explicit Session(Qp& qp);

  // The backup exists: the peer may find it.
  void publish();
  // The application has connected its queue pair.
  void meetPeer();
  // Does what is due; returns whether the next call should come soon.
  bool tick(Clock::time_point now);
  void portDown(int path);
  // The application destroys its queue pair or takes it down itself.
  void end();

 private:
  enum class Build : uint8_t {
    kNone,
    kPause,
    kExchange,
    kProbe,
    kVerdict,
    kReady
  };

  std::string key(const char* kind, uint64_t number, int64_t turn = -1) const;
  std::string peerKey(const char* kind, uint64_t number, int64_t turn = -1)
      const;
  // Asks for a key; the answer is dropped after the session has ended.
  void ask(const std::string& name, void (Session::*answer)(std::string_view));

  void peerFound(std::string_view value);
  int idlePath() const;
  Remote remoteOn(int path) const;

  // The idle path.
  void startRound();
  void peerPacketKnown(std::string_view value);
  void tickProbe(Clock::time_point now);
  void state(bool isGood);
  void peerProbed(std::string_view value);
  void roundDone();

  // A switch.
  void watch(Clock::time_point now);
  void switchWhenReady(Clock::time_point now);
  bool observeCompletions();
  void askForCompletion();
  void beginSwitch(const char* reason);
  std::string_view holdSends();
  void freeze(int oldPath);
  void peerFenced(std::string_view value);
  void finishSwitch();
  void tickSwitch(Clock::time_point now);
  void lookUpKey();
  void regionKnown(std::string_view value);
  void fail(const std::string& reason);
  void refuse();
  void settle();

  // The return.
  void tickReturn(Clock::time_point now);
  void returnWanted(std::string_view);
  void startReturn();
  void peerDrained(std::string_view);
  void returnCancelled(std::string_view);
  void cancelReturn();

  Qp& qp_;
  const std::string name_;
  std::string peer_;
  bool isEnded_ = false;
  Remote peerDefault_;
  Remote peerBackup_;
  // The peer's device, for the keys of its memory.
  std::string peerAddress_;
  bool isPublished_ = false;
  bool isMeeting_ = false;

  uint64_t epoch_ = 1;
  Build build_ = Build::kNone;
  int64_t round_ = 0;
  uint32_t ownPacket_ = 0;
  uint32_t peerPacket_ = 0;
  std::optional<bool> ownVerdict_;
  std::optional<bool> peerVerdict_;
  Clock::time_point deadline_{};
  Clock::time_point readySince_{};

  bool isSwitching_ = false;
  bool isStated_ = false;
  bool isPeerRefusing_ = false;
  std::optional<Progress> peerProgress_;
  Clock::time_point switchSince_{};
  const char* reason_ = "";
  std::optional<uint32_t> keyAsked_;

  std::optional<Clock::time_point> failedSince_;
  uint64_t lastCompleted_ = 0;
  Clock::time_point lastProgress_{};

  bool isReturning_ = false;
  bool isDrainedStated_ = false;
  bool isPeerDrained_ = false;
  int64_t try_ = 0;
  Clock::time_point returnSince_{};
};

} // namespace resilient::shift

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shift/shadow.h"

namespace resilient::shift {

using Clock = std::chrono::steady_clock;

// The control of one protected queue pair: finds the peer's session, keeps the
// path that carries no data connected, switches between the paths and returns.
// Both ends run the same steps and write each key of the store once.
//
// Thread: any, with the control mutex held; mostly the control thread. Calls
// that may block run aside, without the mutex, one after another.
// Lifetime: of its queue pair, which waits for the calls.
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
  // The application has taken its queue pair down while another one carries its
  // requests: they are flushed.
  void takeDown();
  // The application destroys its queue pair.
  void end();
  // Whether a call uses the queue pairs.
  bool isCalling() const {
    return isCalling_;
  }

 private:
  enum class Build : uint8_t {
    kNone,
    kPause,
    kInitialize,
    kExchange,
    kConnect,
    kProbe,
    kVerdict,
    kReady
  };
  // The state that the data path has left for this thread.
  struct Seen {
    Protection protection = Protection::kOn;
    bool hasFailed = false;
    ibv_wc_status error = IBV_WC_RETRY_EXC_ERR;
    const char* untranslatable = nullptr;
    std::optional<uint32_t> missingKey;
  };
  struct Call {
    std::function<void()> call;
    std::function<void()> done;
    bool isUrgent = false;
  };

  std::string key(const char* kind, uint64_t number, int64_t turn = -1) const;
  std::string peerKey(const char* kind, uint64_t number, int64_t turn = -1)
      const;
  // Puts a key, and removes it when the peer needs it no longer.
  void state(const std::string& name, const std::string& value);
  Seen look();
  // Runs a call that may block; `done` is dropped after the session has ended.
  void aside(
      std::function<void()> call,
      std::function<void()> done,
      bool isUrgent = false);
  void nextCall();
  bool isOver() const {
    return isEnded_ || isFailing_;
  }
  // Asks for a key; the answer is dropped after the session has ended.
  void ask(const std::string& name, void (Session::*answer)(std::string_view));

  void peerFound(std::string_view value);
  int idlePath() const;
  Remote remoteOn(int path) const;

  // The idle path.
  void startRound();
  void initialized(int error);
  void peerPacketKnown(std::string_view value);
  void connected(int error);
  void tickProbe(Clock::time_point now);
  void stateVerdict(bool isGood);
  void peerProbed(std::string_view value);
  void roundDone();

  // A switch.
  void watch(Clock::time_point now, const Seen& seen);
  void noteProgress(Clock::time_point now);
  void nothingCompletes(Clock::time_point now);
  void switchWhenReady(Clock::time_point now);
  bool observeCompletions();
  void askForCompletion();
  void beginSwitch(const char* reason);
  std::string_view holdSends();
  void freeze(int oldPath);
  void fenced(std::optional<uint32_t> nextPacket);
  void peerFenced(std::string_view value);
  void finishSwitch();
  void tickSwitch(Clock::time_point now);
  void lookUpKey(uint32_t missing);
  void regionKnown(std::string_view value);
  void fail(const std::string& reason);
  void giveUp(ibv_wc_status status);
  // The application gets its errors.
  void tellFailure();
  void refuse();
  void settle();

  // The return.
  void tickReturn(Clock::time_point now, const Seen& seen);
  void tickDraining(Clock::time_point now);
  void returnWanted(std::string_view);
  void startReturn();
  void peerDrained(std::string_view);
  void returnCancelled(std::string_view);
  void cancelReturn();

  Qp& qp_;
  const std::string name_;
  std::string peer_;
  bool isEnded_ = false;
  // Its queue pairs are being fenced before the application gets its errors.
  bool isFailing_ = false;
  Clock::time_point failSince_{};
  ibv_wc_status failStatus_ = IBV_WC_RETRY_EXC_ERR;
  std::deque<Call> calls_;
  bool isCalling_ = false;
  Remote peerDefault_;
  Remote peerBackup_;
  // The peer's device, for the keys of its memory.
  std::string peerAddress_;
  bool isPublished_ = false;
  bool isMeeting_ = false;

  // Keys of this round, and of former ones.
  std::vector<std::string> stated_;
  std::vector<std::string> oldStated_;

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
  // Switches because of silence without a completion since.
  int silentSwitches_ = 0;

  bool isReturning_ = false;
  bool isDrainedStated_ = false;
  bool isPeerDrained_ = false;
  int64_t try_ = 0;
  // When the return began, or when the next one may.
  Clock::time_point returnSince_{};
};

} // namespace resilient::shift

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "delegate/connector.h"
#include "failover/takeover.h"
#include "path/path_count.h"
#include "transport/relay_path.h"

namespace resilient {

// Paths to a peer on another site over ranks of our own site that are on other
// hosts (wire/relay.h). Each end opens those over its own neighbours: a
// neighbour's NIC stands in for ours.
//
// One is open as soon as the link is up, so that it can take over at once when
// no connection works. Until then it carries nothing. If the link has not come
// up after a while, it is brought up by relays alone. With relay=auto there are
// more, and they share the load while that raises the goodput. With a limit
// declared, each relay's share is known, and all of them do.
//
// A relay that fails is tried again after growing pauses; another one takes its
// place meanwhile.
class RelayConnector final : public Connector {
 public:
  explicit RelayConnector(Link& link) : Connector(link) {}
  ~RelayConnector() override;

  // Some path works, as far as it is known.
  bool usable() const;
  // The same in the words of failover, so that it can ask and rely on them.
  std::vector<ConnectionView> views(TimePoint now) const;
  // Asks those that have not answered for so long.
  void ask(Nanos age);
  TimePoint heardAt() const;
  // The peer is needed now: what it takes to reach it without a connection.
  void onNeeded();
  // Something has been handed to the paths.
  void onSent();
  // The path of that flow, if there is one: for tests.
  const RelayPath* pathOf(const RelayFlow& flow) const;
  // "2 relays: rank 1 (host node7) up, rank 2 (host node8): no answer"; empty
  // without any.
  std::string summary() const;

  // From the relay: a reason if this end does not have the flow, or does not
  // want it; false likewise.
  std::string onNote(const Uid& relay, const RelayNote& note);
  bool onFrame(
      const Uid& relay,
      const RelayHeader& header,
      std::span<const std::byte> frame);
  // The link to a relay is closed.
  void onRelayClosed(const Uid& relay, const std::string& why);

  // Connector
  void offer() override;
  void onPathClosed(Path& path, const Status& why) override;
  void onPathUse(Path& path) override;
  uint8_t classes(const Path& path, const Roles& roles) const override;
  void close() override;
  void fillStats(PeerStats& stats) const override;

 private:
  // Another rank as a relay, for as long as the link lives.
  struct Relay {
    int failures = 0; // in a row
    TimePoint notBefore{};
    std::string lastError;
    uint64_t timesUp = 0;
  };
  struct Flow {
    RelayPath* path = nullptr; // the link's
    Uid relay{};
    TimePoint upAt{};
    bool seeksRelay = false; // holds interest in the link to it
    bool helps = true; // as far as is known: takes its share
  };

  bool wanted() const;
  bool matters() const;
  bool shares() const;
  size_t count() const;
  size_t opened() const;
  bool ownUsable() const;
  bool mayShare(const Flow& flow) const;
  void beginCount();
  void applyCount();
  void look();
  bool open(const Uid& relay);
  void add(
      const Uid& relay,
      const RelayFlow& flow,
      bool opener,
      std::unique_ptr<RelaySeal> seal);
  std::string agree(const RelayNote& note, std::unique_ptr<RelaySeal>& seal)
      const;
  Flow* find(const RelayFlow& flow);
  void lookAgain(Nanos delay);
  void settle(Flow& flow);

  std::vector<Flow> flows_;
  std::map<Uid, Relay> relays_;
  TimerId timer_ = 0;

  // How many of those that may share the load do so.
  PathCount count_{{.min = 0, .max = 0}};
  int mayShare_ = 0;
  bool backlogged_ = false; // at the last look
  TimerId lookTimer_ = 0;
};

} // namespace resilient

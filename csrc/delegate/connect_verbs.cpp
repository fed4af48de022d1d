#include "delegate/connect_verbs.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/random.h"
#include "delegate/connect_tcp.h"

namespace resilient {
namespace {

// Connecting takes milliseconds, or a second without an answer.
constexpr Nanos kLookAgain = std::chrono::milliseconds(2);

// The device may take its time to let go of it.
void destroyElsewhere(std::unique_ptr<VerbsEnd> end) {
  if (end != nullptr) {
    std::thread([end = std::move(end)]() mutable { end.reset(); }).detach();
  }
}

VerbsOffer offerOf(size_t connection, uint64_t number, VerbsEnd& end) {
  const VerbsAddress address = end.queuePair().address();
  VerbsOffer offer;
  offer.connection = static_cast<uint16_t>(connection);
  offer.number = number;
  offer.gid = address.gid;
  offer.queuePair = address.queuePair;
  offer.firstPacket = address.firstPacket;
  offer.mtuBytes = address.mtuBytes;
  offer.lid = address.lid;
  offer.reads = address.reads;
  offer.text = end.port().device;
  return offer;
}

} // namespace

// Shared by the connector and the thread. The last of them may be the loop.
struct VerbsConnector::Work {
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() {
    destroyElsewhere(std::move(end));
  }

  std::unique_ptr<VerbsEnd> end;
  Status status;
  std::atomic<bool> done{false}; // the thread touches nothing any more
};

struct VerbsConnector::Connecting final : Work {
  VerbsAddress remote;
  bool initiator = false;
  VerbsOffer reply; // of the end that answers
};

// --- offering

bool VerbsConnector::wanted() const {
  // RoCE needs a network that loses next to nothing: between sites there is
  // none.
  return link_.host().verbs() != nullptr &&
      link_.address()->site == link_.host().self().site;
}

void VerbsConnector::readEarlyOffers() {
  for (const VerbsOffer& early : std::exchange(early_, {})) {
    onOffer(early);
  }
}

std::optional<VerbsPort> VerbsConnector::portOf(size_t connection) const {
  const TcpPath* const path = connections_.path(connection);
  if (path == nullptr) {
    return std::nullopt;
  }
  const std::vector<VerbsPort>& ports = link_.host().verbsPorts();
  const auto port = link_.host().verbsChoice().byInterface()
      ? std::ranges::find(
            ports,
            interfaceIndexOf(connections_.nicOf(connection)),
            &VerbsPort::interfaceIndex)
      : std::ranges::find(ports, gidOf(path->localSocket()), &VerbsPort::gid);
  return port == ports.end() ? std::nullopt : std::optional(*port);
}

// The device is open already, as VerbsWatch has it: to open it takes no time.
Status VerbsConnector::begin(
    size_t route,
    size_t connection,
    uint64_t number,
    std::function<void(const Status& status)> then) {
  VerbsApi* const api = link_.host().verbs();
  if (api == nullptr) {
    return Status(StatusCode::kNetwork, "this process uses no RDMA");
  }
  const std::optional<VerbsPort> port = portOf(connection);
  if (!port) {
    return Status(
        StatusCode::kNetwork, "no RDMA device has the address of this route");
  }
  if (!port->active) {
    return Status(
        StatusCode::kNetwork, "the port of " + port->device + " is down");
  }
  std::shared_ptr<VerbsDevice> device;
  if (Status status = api->open(port->device, device); !status.ok()) {
    return status;
  }
  forgetOffer(route);
  Attempt& attempt = attempts_[route];
  attempt.connection = connection;
  attempt.number = number;
  attempt.device = port->device;
  const EngineOptions& options = link_.host().options();
  VerbsQueuePairConfig config;
  config.ackTimeout = static_cast<uint8_t>(options.rdma_timeout);
  config.retries = static_cast<uint8_t>(options.rdma_retries);
  auto work = std::make_shared<Work>();
  onThread(
      route,
      work,
      [&work = *work, device = std::move(device), port = *port, config] {
        work.status = VerbsEnd::make(device, port, config, work.end);
      },
      [this, route, work, then = std::move(then)] {
        Attempt& made = attempts_.at(route);
        made.timer = 0;
        if (made.isDeviceLost) {
          work->status = Status(StatusCode::kNetwork, made.device + " failed");
        } else if (work->status.ok()) {
          made.end = std::move(work->end);
        }
        then(work->status);
      });
  return Status();
}

Status VerbsConnector::sendOffer(size_t route, size_t connection) {
  uint64_t number = 0;
  fillRandom(&number, sizeof(number));
  return begin(route, connection, number, [this, route](const Status& status) {
    if (!status.ok()) {
      offerLater(route, status.message());
      return;
    }
    const Attempt& attempt = attempts_.at(route);
    link_.channel().sendControl(
        encode(offerOf(attempt.connection, attempt.number, *attempt.end)));
    link_.changed();
  });
}

void VerbsConnector::forgetOffer(size_t route) {
  if (const auto found = attempts_.find(route); found != attempts_.end()) {
    link_.loop().cancel(found->second.timer);
    destroyElsewhere(std::move(found->second.end));
    attempts_.erase(found);
  }
}

void VerbsConnector::close() {
  RoutePathConnector::close();
  while (!attempts_.empty()) {
    forgetOffer(attempts_.begin()->first);
  }
}

// --- what the peer says

void VerbsConnector::onOffer(const VerbsOffer& offer) {
  if (!link_.usable() || link_.leaving() ||
      offer.connection >= connections_.failover().connections()) {
    return;
  }
  if (!link_.address()) {
    std::erase_if(early_, [&](const VerbsOffer& o) {
      return o.connection == offer.connection;
    });
    early_.push_back(offer);
    return;
  }
  const size_t route = connections_.failover().routeOf(offer.connection);
  learnRoutes();
  if (offer.answer) {
    onAnswer(offer, route);
  } else {
    answer(offer, route);
  }
}

void VerbsConnector::onAnswer(const VerbsOffer& answer, size_t route) {
  if (const auto live = live_.find(route); answer.queuePair == 0 &&
      live != live_.end() && live->second.number == answer.number) {
    closeTold(route, link_.describe() + " says: " + answer.text);
    return;
  }
  const auto found = attempts_.find(route);
  if (found == attempts_.end() || found->second.number != answer.number ||
      found->second.end == nullptr) {
    return; // too late: of an earlier offer
  }
  if (answer.queuePair == 0) {
    answered(route);
    offerLater(route, "the far end: " + answer.text);
    return;
  }
  connect(route, answer, /*initiator=*/true);
}

// An offer for a route with a path means that the peer has closed its end.
void VerbsConnector::answer(const VerbsOffer& offer, size_t route) {
  if (offer.queuePair == 0) {
    offerSoon(route);
    return;
  }
  closeTold(route, "the far end begins anew");
  forgetOffer(route);
  const Status status = begin(
      route,
      offer.connection,
      offer.number,
      [this, route, offer](const Status& made) {
        if (made.ok()) {
          connect(route, offer, /*initiator=*/false);
          return;
        }
        forgetOffer(route);
        refuse(offer.connection, offer.number, made.message());
      });
  if (!status.ok()) {
    refuse(offer.connection, offer.number, status.message());
  }
}

void VerbsConnector::refuse(
    size_t connection,
    uint64_t number,
    const std::string& why) {
  VerbsOffer no;
  no.connection = static_cast<uint16_t>(connection);
  no.answer = true;
  no.number = number;
  no.text = why;
  link_.channel().sendControl(encode(no));
  link_.changed();
}

// --- what happens to our ends

// The word goes out over another path, since this one takes no frame any more.
void VerbsConnector::onPathClosed(Path& path, const Status& why) {
  const auto live = live_.extract(static_cast<RoutePath&>(path).route());
  RoutePathConnector::onPathClosed(path, why);
  if (!live.empty() && link_.usable() && !link_.leaving()) {
    refuse(live.mapped().connection, live.mapped().number, why.message());
  }
}

void VerbsConnector::closeTold(size_t route, const std::string& why) {
  live_.erase(route);
  if (path(route) != nullptr) {
    path(route)->close(Status(StatusCode::kNetwork, why));
  }
}

void VerbsConnector::closeWhere(
    const std::function<bool(size_t route, const Live& live)>& isLost,
    const std::string& why) {
  std::vector<size_t> lost;
  for (const auto& [route, live] : live_) {
    if (isLost(route, live)) {
      lost.push_back(route);
    }
  }
  for (const size_t route : lost) {
    path(route)->close(Status(StatusCode::kNetwork, why));
  }
}

// A thread has the end that is being connected.
void VerbsConnector::dropOffers(const std::string& device) {
  std::vector<size_t> lost;
  for (auto& [route, attempt] : attempts_) {
    if (attempt.device == device && attempt.end == nullptr) {
      attempt.isDeviceLost = true;
    } else if (attempt.device == device) {
      lost.push_back(route);
    }
  }
  for (const size_t route : lost) {
    offerLater(route, device + " failed");
  }
}

// A NIC that is back has no connection yet: the next one brings us here.
void VerbsConnector::offer() {
  RoutePathConnector::offer();
  for (const size_t route : std::exchange(again_, {})) {
    connectAgain(route);
  }
}

void VerbsConnector::connectAgain(size_t route) {
  const auto connection = connections_.anyOf(route);
  if (link_.state() != Link::State::kUp || link_.leaving() ||
      !link_.address() || link_.sameHost() || !wanted() ||
      path(route) != nullptr) {
    return;
  }
  if (!connection || !possible(*connection)) {
    again_.insert(route);
    return;
  }
  if (link_.preferredInitiator()) {
    offerSoon(route);
    return;
  }
  VerbsOffer wish;
  wish.connection = static_cast<uint16_t>(*connection);
  link_.channel().sendControl(encode(wish));
  link_.changed();
}

// The kernel tells of the interface before the device tells of its port, or
// the other way round: what comes first acts, and the second finds no path.
void VerbsConnector::onNic(const std::string& nic, bool works) {
  if (!works) {
    closeWhere(
        [&](size_t route, const Live&) {
          return connections_.nicOf(route) == nic;
        },
        "its interface " + nic + " went down");
    return;
  }
  for (size_t route = 0; route < routes(); ++route) {
    if (connections_.nicOf(route) == nic) {
      connectAgain(route);
    }
  }
}

void VerbsConnector::onEvent(
    const std::string& device,
    const VerbsEvent& event) {
  const auto isOfDevice = [&](const Live& live) {
    return live.port.device == device;
  };
  const auto isOfPort = [&](const Live& live) {
    return isOfDevice(live) && live.port.port == event.port;
  };
  switch (event.kind) {
    case VerbsEvent::Kind::kPortDown:
      return closeWhere(
          [&](size_t, const Live& live) { return isOfPort(live); },
          "the port of " + device + " went down");
    case VerbsEvent::Kind::kDeviceFailed:
      closeWhere(
          [&](size_t, const Live& live) { return isOfDevice(live); },
          device + " failed");
      return dropOffers(device);
    case VerbsEvent::Kind::kQueuePairFailed:
      return closeWhere(
          [&](size_t, const Live& live) {
            return isOfDevice(live) && live.queuePair == event.queuePair;
          },
          "a queue pair of " + device + " failed");
    case VerbsEvent::Kind::kAddressesChanged:
      closeWhere(
          [&](size_t, const Live& live) {
            const auto& ports = link_.host().verbsPorts();
            return isOfPort(live) &&
                std::ranges::find(ports, live.port.gid, &VerbsPort::gid) ==
                ports.end();
          },
          device + " lost the address of the route");
      break;
    case VerbsEvent::Kind::kPortUp:
      break;
    case VerbsEvent::Kind::kDeviceBack:
      // It may be the first that this process has.
      if (link_.state() == Link::State::kUp && link_.address() &&
          !link_.sameHost() && wanted()) {
        learnRoutes();
      }
      break;
  }
  for (size_t route = 0; route < routes(); ++route) {
    connectAgain(route);
  }
}

// --- connecting

void VerbsConnector::connect(
    size_t route,
    const VerbsOffer& remote,
    bool initiator) {
  Attempt& attempt = attempts_.at(route);
  auto connecting = std::make_shared<Connecting>();
  connecting->initiator = initiator;
  connecting->reply = offerOf(attempt.connection, attempt.number, *attempt.end);
  connecting->reply.answer = true;
  connecting->end = std::move(attempt.end);
  connecting->remote = {
      remote.gid,
      remote.queuePair,
      remote.firstPacket,
      remote.mtuBytes,
      remote.lid,
      remote.reads};
  attempt.remoteDevice = remote.text;
  onThread(
      route,
      connecting,
      [&work = *connecting] {
        work.status = work.end->queuePair().connect(work.remote);
      },
      [this, route, connecting] { connected(route, *connecting); });
}

void VerbsConnector::onThread(
    size_t route,
    const std::shared_ptr<Work>& work,
    std::function<void()> job,
    std::function<void()> done) {
  std::thread([work, job = std::move(job)]() mutable {
    job();
    job = nullptr; // what it holds may belong to the device
    work->done.store(true);
  }).detach();
  lookAt(route, work, std::move(done));
}

void VerbsConnector::lookAt(
    size_t route,
    const std::shared_ptr<Work>& work,
    std::function<void()> done) {
  attempts_.at(route).timer = link_.loop().after(
      kLookAgain, [this, route, work, done = std::move(done)] {
        if (work->done.load()) {
          done();
        } else {
          lookAt(route, work, done);
        }
      });
}

void VerbsConnector::connected(size_t route, Connecting& connecting) {
  answered(route);
  Attempt attempt = std::move(attempts_.at(route));
  attempts_.erase(route);
  if (attempt.isDeviceLost) {
    connecting.status =
        Status(StatusCode::kNetwork, attempt.device + " failed");
  }
  if (!connecting.status.ok()) {
    destroyElsewhere(std::move(connecting.end));
    if (!connecting.initiator) {
      refuse(attempt.connection, attempt.number, connecting.status.message());
    }
    offerLater(route, connecting.status.message());
    return;
  }
  VerbsPathConfig config;
  config.route = route;
  config.initiator = connecting.initiator;
  config.silentAfter = fromSeconds(link_.host().options().suspect_after_s);
  config.closeAfter = fromSeconds(link_.host().options().stall_timeout_s);
  config.remoteDevice = attempt.remoteDevice;
  // A negative number: no rule can name it as a connection.
  config.faults = &faults_
                       .try_emplace(
                           route,
                           link_.host().faults(),
                           link_.host().globalRank(),
                           link_.globalRank(),
                           -1 - static_cast<int>(route))
                       .first->second;
  config.loans = link_.host().loans();
  config.remoteReads = connecting.remote.reads;
  config.mtuBytes =
      std::min(connecting.reply.mtuBytes, connecting.remote.mtuBytes);
  live_[route] = {
      attempt.connection,
      attempt.number,
      connecting.end->port(),
      connecting.reply.queuePair};
  add(std::make_unique<VerbsPath>(
      link_.loop(),
      link_.channel(),
      link_.host().nextPathId(),
      std::move(connecting.end),
      std::move(config),
      link_.pathOwner()));
  if (!connecting.initiator) {
    link_.channel().sendControl(encode(connecting.reply));
    link_.changed();
  }
}

} // namespace resilient

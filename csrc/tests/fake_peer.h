#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "base/random.h"
#include "delegate/engine.h"
#include "transport/listener.h"

namespace resilient::test {

// A process that is no engine, and what an engine knows of it.
struct FakePeer {
  EventLoop loop;
  std::string secret = std::string(32, 's');
  ListenerConfig config;
  std::unique_ptr<Listener> listener;
  std::thread thread;

  FakePeer() {
    config.identity.uid.fill(0xff); // so the engine is preferred
    config.identity.secretOf = [this](const KeyId&) { return secret; };
    config.identity.decide = [](const HelloInfo&, const CertifiedFor&) {
      return HelloCode::kOk;
    };
    config.nonce = [] {
      HelloNonce nonce;
      fillRandom(nonce.data(), nonce.size());
      return nonce;
    };
    config.onPeer = [](HelloInfo, StreamSocket, SocketAddress) {};
    config.onPeerLost = [](HelloInfo) {};
  }
  void listen() {
    listener = std::make_unique<Listener>(loop, config);
    thread = std::thread([this] { loop.run(); });
  }
  ~FakePeer() {
    stop();
  }
  void stop() {
    if (thread.joinable()) {
      loop.post([this] { loop.stop(); });
      thread.join();
    }
  }
  // The engine would connect to it from now on.
  void introduceTo(Engine& engine, uint16_t port) {
    engine.callInLoop([&] {
      PeerAddress address;
      address.uid = config.identity.uid;
      address.hostId = engine.self().hostId;
      address.addresses = {{"lo", *SocketAddress::parse("127.0.0.1", port)}};
      PeerLink& link = engine.link(address.uid);
      link.setAddress(address, secret, 1);
      link.addInterest();
    });
  }
};

} // namespace resilient::test

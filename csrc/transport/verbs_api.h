#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

// RDMA verbs as the transport uses them: reliable connections, sends and
// receives. The real half (csrc/verbs) is a library of its own, linked to
// libibverbs and opened at first use, so that this package needs neither it nor
// its headers to run. Tests have a device in memory (tests/verbs_fake.h).
//
// Thread: any, one at a time for each object, unless marked.

namespace resilient {

// One way to reach a device: an address of its NIC. A device with several
// addresses has several of these.
struct VerbsPort {
  using Gid = std::array<std::byte, 16>;

  std::string device; // "mlx5_0"
  uint8_t port = 1;
  uint32_t gidIndex = 0;
  Gid gid{}; // RoCE v2: the IP address; an IPv4 one as ::ffff:a.b.c.d
  uint32_t interfaceIndex = 0; // of the NIC, as the kernel counts
  uint32_t mtuBytes = 0; // the largest packet of the device
  bool active = false;
};

// The part of a queue pair that the far end must know.
struct VerbsAddress {
  VerbsPort::Gid gid{};
  uint32_t queuePair = 0; // 24 bits
  // The number of the first packet, 24 random bits. A new one for each life:
  // packets of a former life must not be taken for those of this one.
  uint32_t firstPacket = 0;
  uint32_t mtuBytes = 0;
  uint16_t lid = 0; // InfiniBand: the address of the port in its subnet
  // Reads of the far end that the device answers at a time.
  uint16_t reads = 0;
};

struct VerbsCompletion {
  enum class Result : uint8_t {
    kOk,
    kFlushed, // the queue pair had failed before, or was fenced
    kFailed, // the far end did not answer, or refused it
  };
  uint64_t request = 0; // as given when it was posted
  bool received = false; // of a receive; not valid after a failure
  uint32_t bytes = 0; // of a receive
  Result result = Result::kOk;
  std::string why; // of a failure: "transport retry counter exceeded"
};

// News of a device that it tells by itself, without a request.
struct VerbsEvent {
  enum class Kind : uint8_t {
    kPortDown,
    kPortUp,
    kAddressesChanged, // of a port: indices may be others, too
    kQueuePairFailed,
    kDeviceFailed, // with everything that was made from it
    kDeviceBack, // opened since it has failed, or is new; VerbsWatch tells it
  };
  Kind kind = Kind::kDeviceFailed;
  uint8_t port = 0; // of the first three kinds
  uint32_t queuePair = 0; // of kQueuePairFailed
};

struct VerbsQueuePairConfig {
  // Requests of each kind that may be posted at a time.
  uint32_t depth = 0;
  // A packet without an answer is sent again after 4.096 us x 2^ackTimeout, so
  // many times; 0: never, which leaves it to the owner to give up.
  uint8_t ackTimeout = 16;
  uint8_t retries = 3;
};

// Memory that a device may read and write. The destructor deregisters it, and
// may block if the device does not answer. Afterwards the device does not
// access it: requests with it fail, and so do reads of the far end.
class VerbsMemory {
 public:
  virtual ~VerbsMemory() = default;
  // For reads of the far end.
  virtual uint32_t remoteKey() const = 0;
};

// A reliable connection with a queue of completions of its own.
class VerbsQueuePair {
 public:
  // Flushes what is posted. The device accesses no memory afterwards.
  virtual ~VerbsQueuePair() = default;

  virtual VerbsAddress address() const = 0;
  // Connects to the far end. Receives may be posted before. It may block for a
  // second, while the neighbour's hardware address is looked up, so call it on
  // a thread of its own; nothing else may be called meanwhile but fd().
  virtual Status connect(const VerbsAddress& remote) = 0;
  // The bytes are lent until the completion. They lie in `memory`.
  virtual Status postReceive(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into) = 0;
  // Every send has a completion.
  virtual Status postSend(
      uint64_t request,
      VerbsMemory& memory,
      std::span<const std::byte> from) = 0;
  // Fetches as many bytes from the far end's memory. The bytes are lent until
  // the completion. Reads complete in order. At most as many at a time as both
  // ends have said (VerbsAddress::reads).
  virtual Status postRead(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into,
      uint64_t remoteAddress,
      uint32_t remoteKey) = 0;
  // Adds completions to the list, in order; at most `max`.
  virtual Status poll(
      std::vector<VerbsCompletion>& completions,
      size_t max) = 0;
  // Readable when a completion has come after arm(). Poll once more after
  // arm(): one may have come before it.
  virtual int fd() const = 0;
  virtual Status arm() = 0;
  // Call when fd() is readable.
  virtual void takeNotifications() = 0;
  // Nothing that arrives is accepted any more, and all that is posted comes
  // back as flushed. May block if the device does not answer.
  virtual Status fence() = 0;
};

class VerbsDevice {
 public:
  virtual ~VerbsDevice() = default;
  virtual const std::string& name() const = 0; // "mlx5_0"
  // `forReads`: the far ends of queue pairs of this device may read it, too.
  virtual Status registerMemory(
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) = 0;
  // Memory that another device has exported as a dma-buf, from `offset` on.
  // `bytes`: the addresses by which requests name it. The caller keeps the
  // descriptor, and may close it afterwards.
  virtual Status registerDmabuf(
      int dmabuf,
      uint64_t offset,
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) = 0;
  // The device must outlive it. It is made on the port that has the address of
  // `port` now: the index of an address may have changed.
  virtual Status makeQueuePair(
      const VerbsPort& port,
      const VerbsQueuePairConfig& config,
      std::unique_ptr<VerbsQueuePair>& queuePair) = 0;
  // Readable when there is an event. One thread at a time takes events, but
  // others may make and destroy queue pairs meanwhile.
  virtual int eventsFd() const = 0;
  virtual void takeEvents(std::vector<VerbsEvent>& events) = 0;
};

class VerbsApi {
 public:
  virtual ~VerbsApi() = default;
  // The names of the devices that the host has now. It opens none.
  virtual Status devices(std::set<std::string>& names) = 0;
  // The addresses of all devices, RoCE v2 and InfiniBand ones, of ports that
  // are up or down.
  virtual Status ports(std::vector<VerbsPort>& ports) = 0;
  // Opens the device, or gives the one that is open already. May block if the
  // device does not answer.
  virtual Status open(
      const std::string& name,
      std::shared_ptr<VerbsDevice>& device) = 0;
  // This one has failed: the next open() opens it anew. It and what was made
  // from it stay valid objects.
  virtual void forget(const VerbsDevice& device) = 0;
};

// The library that is installed with this package, or null; `why` tells then
// what is missing. Any thread; the answer of the first call stands.
VerbsApi* systemVerbs(std::string& why);

// The library exports one function, VerbsOpen, under this name. It returns null
// for another version than its own.
constexpr const char* kVerbsOpenName = "resilient_verbs_open";
using VerbsOpen = VerbsApi*(uint32_t version);
// Raise it with every change of this file. With classes of another layout,
// calls into the library would overwrite memory.
constexpr uint32_t kVerbsApiVersion = 4;

} // namespace resilient

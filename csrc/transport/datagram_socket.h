#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/syscall.h"
#include "base/time.h"
#include "transport/socket.h"

namespace resilient {

// A UDP socket for many datagrams at a time: the kernel cuts what is sent and
// joins what arrives (UDP_SEGMENT, UDP_GRO), where it can.
//
// It never blocks and is not thread-safe. It holds 512 KiB of receive buffers
// once it is open.
class DatagramSocket {
 public:
  // The maximum of one send().
  static constexpr size_t kMaxBatchBytes = 61440;
  static constexpr size_t kMaxBatch = 64; // datagrams

  // Bound to the address (its port 0: any) and, if given, to the interface. On
  // failure `socket` is unchanged.
  static Status open(
      const SocketAddress& local,
      const std::string& interface,
      DatagramSocket& socket);
  // From then on, only datagrams from there are received.
  Status connect(const SocketAddress& remote);

  int fd() const {
    return fd_.get();
  }
  uint16_t port() const;

  // `data`: datagrams of `each` bytes one after the other, the last one may be
  // shorter. False: the socket is full; nothing, or only the first `sent`
  // bytes, have gone. Datagrams that the network does not take (too large, no
  // route) count as sent, as if they were lost. `each` must not be 0. Keep to
  // kMaxBatch and kMaxBatchBytes: beyond them the kernel may refuse the batch,
  // which can end batching for this socket.
  bool send(std::span<const std::byte> data, size_t each, size_t& sent);
  // Gives what has come to `with`, datagram by datagram, and when the kernel
  // got it, never too early; false if there may be more.
  //
  // The bytes are valid during the call only. `with` must not destroy or
  // receive from this socket.
  using Receiver =
      std::function<void(std::span<const std::byte>, TimePoint arrived)>;
  bool receive(const Receiver& with);
  // A datagram was too large for our own interface since the last call.
  bool takeTooLarge() {
    const bool was = tooLarge_;
    tooLarge_ = false;
    return was;
  }
  void setDscp(int dscp) {
    (void)resilient::setDscp(fd_.get(), dscp);
  }

 private:
  static constexpr size_t kReceiveBuffer = 65536;
  static constexpr size_t kReceiveBuffers = 8;

  bool sendEach(std::span<const std::byte> data, size_t each, size_t& sent);

  FileDescriptor fd_;
  // After the first failure that only the batching explains, false for good.
  bool segments_ = true; // UDP_SEGMENT works
  bool tooLarge_ = false;
  uint64_t failed_ = 0; // datagrams that the kernel did not take
  std::unique_ptr<std::byte[]> buffers_;
};

} // namespace resilient

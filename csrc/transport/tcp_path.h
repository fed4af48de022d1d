#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "channel/channel.h"
#include "failover/health.h"
#include "path/bbr_restart.h"
#include "path/faults.h"
#include "path/route_pacing.h"
#include "transport/event_loop.h"
#include "transport/frame_reader.h"
#include "transport/path.h"
#include "transport/stream_socket.h"

namespace resilient {

// One established TCP connection as a path of a channel: moves frames between
// the channel and the socket, nothing else. Fault injection (path/faults.h)
// acts here, on the real socket.
//
// Thread: loop thread. Lifetime: owned by its PeerLink; `faults` belongs to
// the connection index and outlives the connection (it counts its cuts).
//
// The socket is watched edge-triggered. Two rules follow. After a write that
// did not take everything, socketFull_ must be set, because EPOLLOUT comes only
// then. After an event, reading must go on until the kernel has no more, or a
// later turn must continue (readLater).
//
// With TLS, frames are sealed into records on their way to the socket, and
// opened into their places. Records that were sealed leave before more are. A
// frame counts as written when its last record is in the kernel.
//
// close() leaves accepted bytes to the kernel, which a goodbye needs. reset()
// drops them: after a failure another path sends them, and they must not
// linger.
class TcpPath final : public Path, public Handler {
 public:
  TcpPath(
      EventLoop& loop,
      Channel& channel,
      PathId id,
      int index,
      StreamSocket socket,
      PathFaults& faults,
      PathOwner& owner);
  ~TcpPath() override;

  // Both ends use the same.
  int index() const {
    return index_;
  }

  // Path
  bool hasRoom() const override;
  size_t takeFrame(bool chunks = true) override;
  bool flush() override;
  void close(const Status& why) override;
  void reset(const Status& why) override;
  TimePoint heardAt() const override {
    return heardAt_;
  }
  // It makes system calls: do not ask for every frame.
  PathEvidence evidence() const override;
  void faultsChanged(bool concerned) override;
  void fill(PathStats& stats) const override;

  // The kernel's own view: of packets, not of frames that wait for others in
  // front of them. As of this turn of the loop; of an earlier one while nothing
  // was sent and all is acknowledged. Links have dozens of connections, and are
  // looked at every few milliseconds.
  const std::optional<TcpInfo>& kernelView() const;
  // As of now.
  uint64_t bytesReceived() const {
    const auto info = tcpInfo(socket_.get(), /*askForBbr=*/false);
    return info ? info->bytesReceived : 0;
  }
  // See transport/socket.h.
  bool setCongestionControl(const std::string& name) {
    seen_ = {};
    return resilient::setCongestionControl(socket_.get(), name);
  }
  void setDscp(int dscp) {
    (void)resilient::setDscp(socket_.get(), dscp);
  }
  // Follows what has been measured; now and then. Changes the socket only if
  // the limit grows by a quarter or halves; does nothing on a connection within
  // one host. Returns what BBR has measured, if it controls the connection.
  std::optional<BbrView> tune();
  // The kernel sends no faster than that, in bytes per second; 0: no limit.
  // `view`: what tune() has returned.
  void limitPace(uint64_t bytesPerS, const BbrView& view);
  std::optional<BbrView> bbr() const { // nothing with another control
    if (seen_.info && !seen_.info->bbr) {
      return {}; // only we change it
    }
    const auto& info = kernelView();
    return info ? bbrView(*info) : std::nullopt;
  }
  // `view`: what tune() has returned.
  PacedConnection paced(const BbrView& view) const {
    return {view.arrives, view.inFlightBytes, channel_.inFlightBytes(id())};
  }
  // BBR begins anew if that is due (BbrRestart), with the window and the rate
  // that it had; never while it carries messages. Does nothing if the route has
  // become longer: BBR would begin with the shortest round trip of the kernel's
  // last five minutes.
  void restartBbr(const BbrView& view);
  // The kernel had not found the link's rate yet, at the last tune().
  bool startingUp() const {
    return startUpBytes_ != 0;
  }
  SocketAddress localSocket() const {
    return resilient::localAddress(socket_.get());
  }
  SocketAddress remoteSocket() const {
    return resilient::remoteAddress(socket_.get());
  }
  // With TLS, a secret of this very connection, which only its two ends know
  // and that nobody can find out later; else nothing.
  std::optional<std::string> ownSecret() const;
  // The far end's records are not as it has sealed them, or its stream was cut
  // short: something on the way has changed it.
  bool tlsFailed() const {
    return tls_ && tls_->failed();
  }
  const std::string& localAddress() const {
    return localAddress_;
  }
  const std::string& remoteAddress() const {
    return remoteAddress_;
  }

  void onEvents(uint32_t events) override;

 private:
  // Frames taken from the channel but not written; enough for one system call
  // to be worth its cost, little enough that priorities still matter.
  static constexpr size_t kBatchBytes = 1u << 20;
  static constexpr size_t kBatchFrames = 64;
  static constexpr size_t kMinBatchBytes = 64u << 10;
  static constexpr Nanos kAheadTime = std::chrono::milliseconds(5);
  // Bounds of what the kernel holds unsent; the first is that of SocketOptions.
  static constexpr size_t kMinUnsent = 128u << 10;
  static constexpr size_t kMaxUnsent = 2u << 20;
  // While BBR starts up: for so long at the rate at which it sends, at most
  // so much.
  static constexpr Nanos kStartUpTime = std::chrono::milliseconds(20);
  static constexpr size_t kMaxStartUpUnsent = 32u << 20;
  // With a fault that delays, what is "on the wire" waits here instead.
  static constexpr size_t kDelayedBytes = 64u << 20;
  // A link limited by a fault has a queue of this length, like a router's:
  // what is bound to it cannot be overtaken any more.
  static constexpr Nanos kLimitedQueue = std::chrono::milliseconds(20);
  // Reads in one turn of the loop, so that no path starves the others.
  static constexpr size_t kReadPerTurn = 4u << 20;
  static constexpr size_t kReadBuffer = 16u << 10;

  size_t bytesAhead() const;
  size_t batchBytes() const;
  void writeOut();
  void lookAtFaults();
  void end(const Status& why);
  // kFull: the kernel may have more. kShort: it had less than was asked for.
  // kNothing: no data, or the path is closed.
  enum class Read { kNothing, kShort, kFull };
  Read readSome(size_t& total);
  Read readSealed(size_t& total);
  void openRecords();
  Read readFailed();
  Status closedByOther() const;
  size_t gather(struct iovec* out, size_t capacity, size_t limit) const;
  bool send(struct iovec* parts, size_t count, size_t& sent);
  void wrote(size_t bytes);
  void resetWhenRead(const Status& why);
  void cut();
  // Reads in the next turn, as if these events had come again.
  void readLater(uint32_t events);
  void applyFaultState();
  void armFaultTimer(TimePoint at);

  EventLoop& loop_;
  const int index_;
  FileDescriptor socket_;
  const std::unique_ptr<TlsSession> tls_; // null: in plaintext
  PathFaults& faults_;
  std::string localAddress_, remoteAddress_;
  bool local_ = false; // the far end is on this host
  size_t unsentLimit_ = kMinUnsent;
  size_t startUpBytes_ = 0; // not 0 while BBR starts up
  uint64_t paceLimit_ = 0; // as set in the kernel; 0: none
  // BBR knew this when it began anew. Empty once it has found it out again.
  struct Known {
    bool found = false; // the link's rate
    uint64_t arrives = 0, sends = 0; // bytes per second
    uint64_t bytesAcked = 0; // total
  };
  Known beforeRestart_;
  BbrRestart restart_;
  TimePoint heardAt_;

  // Writing. releases_[i] belongs to the i-th unwritten frame of the channel.
  std::deque<TimePoint> releases_;
  size_t unwrittenBytes_ = 0;
  size_t frontWritten_ = 0; // bytes of the first unwritten frame
  uint64_t writtenTotal_ = 0; // on this connection
  uint64_t sends_ = 0; // system calls that took bytes
  // kernelView()'s.
  struct Seen {
    std::optional<TcpInfo> info;
    TimePoint at = TimePoint::min();
    uint64_t sends = 0; // as of then
  };
  mutable Seen seen_;
  bool socketFull_ = false; // it would block: EPOLLOUT will come
  bool deaf_ = false; // a fault: nothing is read
  // Posted functions hold a weak reference: the path may be destroyed before
  // they run.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  TimerId faultTimer_ = 0;

  FrameReader reader_;
  std::unique_ptr<std::byte[]> buffer_;
};

} // namespace resilient

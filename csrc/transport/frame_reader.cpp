#include "transport/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace resilient {

Status FrameReader::placed(size_t bytes, TimePoint now) {
  payloadRead_ += static_cast<uint32_t>(bytes);
  if (payloadRead_ < payloadBytes_) {
    return Status();
  }
  inPayload_ = false;
  headerRead_ = 0;
  return channel_.onPayload(path_, now);
}

// A frame without payload is complete with its header, so it ends there: the
// loop would wait for bytes that never come.
Status
FrameReader::consume(const std::byte* data, size_t bytes, TimePoint now) {
  while (bytes != 0) {
    size_t take = 0;
    Status status;
    if (!inPayload_) {
      take = std::min(kFrameHeaderBytes - headerRead_, bytes);
      std::memcpy(header_.data() + headerRead_, data, take);
      headerRead_ += take;
      if (headerRead_ < kFrameHeaderBytes) {
        return Status();
      }
      FrameHeader header;
      status = decodeFrame(header_, header);
      if (status.ok()) {
        status = channel_.onHeader(path_, header, now);
      }
      if (status.ok()) {
        inPayload_ = true;
        payloadBytes_ = header.payloadBytes;
        payloadRead_ = 0;
        if (payloadBytes_ == 0) {
          status = placed(0, now);
        }
      }
    } else {
      take = std::min(missing(), bytes);
      if (std::byte* const to = destination()) {
        std::memcpy(to, data, take);
      }
      status = placed(take, now);
    }
    if (!status.ok()) {
      return status;
    }
    data += take;
    bytes -= take;
  }
  return Status();
}

} // namespace resilient

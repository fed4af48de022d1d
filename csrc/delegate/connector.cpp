#include "delegate/connector.h"

namespace resilient {

std::string Link::describe() const {
  const int32_t rank = newestRank_ >= 0 ? newestRank_ : globalRank_;
  std::string s =
      rank >= 0 ? "rank " + std::to_string(rank) : std::string("a peer");
  if (address_) {
    s += " (host " + address_->hostName + ", pid " +
        std::to_string(address_->pid);
    if (!address_->addresses.empty()) {
      s += ", " + address_->addresses.front().address.toString();
    }
    s += ')';
  }
  return s;
}

void Link::say(LogLevel level, const std::string& line) {
  if (logEnabled(level)) {
    LogRateLimit& limit = level == LogLevel::kWarning ? warnings_ : lines_;
    if (const auto dropped = limit.pass(loop().now())) {
      logMessage(level, line + LogRateLimit::suffix(*dropped));
    }
  }
}

LogLevel Link::levelOfLoss(const Status& why) const {
  if (why.code() == StatusCode::kProtocol) {
    return LogLevel::kWarning;
  }
  return leaving_ ? LogLevel::kDebug : LogLevel::kInfo;
}

} // namespace resilient

#pragma once

#include <exception>
#include <string>
#include <utility>

namespace resilient {

// Every way for work to end. One list keeps enum and text equal. The values
// travel in kReject, kCancel and notices: never reorder them. kInternal stays
// the last, since decoders take it for the upper bound (wire/control.cpp).
#define RESILIENT_STATUS_CODES(X)                                             \
  X(kOk, "ok")                                                                \
  X(kTimeout, "timed out") /* the operation's limit passed */                 \
  X(kPeerDied, "peer died") /* its host refuses us */                         \
  X(kPeerLeft, "peer left") /* it said goodbye */                             \
  X(kMismatch, "operations do not match") /* ranks called different things */ \
  X(kNetwork, "network failure")                                              \
  X(kProtocol, "protocol violation") /* malformed bytes from a peer */        \
  X(kAborted, "aborted") /* abort() or shutdown here */                       \
  X(kInvalidArgument, "invalid argument") /* the caller's mistake */          \
  X(kInternal, "internal error") /* our mistake */

enum class StatusCode : unsigned char {
#define X(name, text) name,
  RESILIENT_STATUS_CODES(X)
#undef X
};

const char* statusCodeText(StatusCode code);

// The outcome of an operation: ok, or a code and a sentence for people.
//
// Messages name the attempt and then the reason, without a final stop: callers
// put their own words in front.
class Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const {
    return code_ == StatusCode::kOk;
  }
  StatusCode code() const {
    return code_;
  }
  const std::string& message() const {
    return message_;
  }
  std::string toString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// Carries a Status through code that unwinds: a coroutine after a failed
// transfer, a constructor that cannot proceed.
//
// It must not leave a turn of the loop, where an exception ends the process.
class StatusError : public std::exception {
 public:
  explicit StatusError(Status status)
      : status_(std::move(status)), what_(status_.toString()) {}
  const Status& status() const {
    return status_;
  }
  const char* what() const noexcept override {
    return what_.c_str();
  }

 private:
  Status status_;
  std::string what_;
};

} // namespace resilient

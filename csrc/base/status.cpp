#include "base/status.h"

namespace resilient {

const char* statusCodeText(StatusCode code) {
  switch (code) {
#define X(name, text)    \
  case StatusCode::name: \
    return text;
    RESILIENT_STATUS_CODES(X)
#undef X
  }
  return "unknown status";
}

std::string Status::toString() const {
  if (message_.empty()) {
    return statusCodeText(code_);
  }
  return message_;
}

} // namespace resilient

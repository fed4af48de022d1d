#include "backend/errors.h"

namespace resilient {

namespace {
std::string text(const Status& status) {
  return status.message().empty() ? status.toString() : status.message();
}
} // namespace

std::exception_ptr exceptionFor(const Status& status) {
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text(status)));
}

Status copyFailed(const std::exception& error) {
  return Status(
      StatusCode::kInternal,
      std::string("copying tensors from the device failed: ") + error.what());
}

void throwStatus(const Status& status) {
  if (status.code() == StatusCode::kInvalidArgument) {
    throwInvalid(text(status));
  }
  C10_THROW_ERROR(DistBackendError, text(status));
}

void throwInvalid(const std::string& message) {
  C10_THROW_ERROR(ValueError, message);
}

void throwCallError(const std::string& message) {
  throw CallError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

} // namespace resilient

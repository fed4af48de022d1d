#pragma once

#include <memory>

#include "backend/device_staging.h"

namespace resilient {

// See pretendDevice() in device_staging.h.
bool devicePretended();
std::unique_ptr<DeviceStaging> makePretendedStaging();

} // namespace resilient

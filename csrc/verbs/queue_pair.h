#pragma once

#include <memory>

#include "base/status.h"
#include "transport/verbs_api.h"
#include "verbs/handles.h"

namespace resilient {

// A queue pair of its own completion queue on the port that has the address of
// `port` now.
Status makeQueuePair(
    const std::shared_ptr<OpenDevice>& device,
    const VerbsPort& port,
    const VerbsQueuePairConfig& config,
    std::unique_ptr<VerbsQueuePair>& queuePair);

} // namespace resilient

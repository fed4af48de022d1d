#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/options.h"

namespace resilient {

// torch.distributed options of a group: c10d's own, and the settings of the
// engine. The process has one engine, so the settings of the group that starts
// it hold for all; a later group takes them over whether it brings options or
// not (new_group() cannot pass any).
struct GroupOptions : c10d::Backend::Options {
  // The settings of processEngineOptions(nullptr). Throws StatusError for an
  // environment variable with a value that cannot be used.
  GroupOptions();
  explicit GroupOptions(const EngineOptions& engineOptions);

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<GroupOptions>(*this);
  }
#endif

  // Changes after the group was made have no effect.
  EngineOptions engine;
};

// The engine settings for a group made now: those of the running engine, else
// `given`, else the environment.
// Any thread. "Running" means that a group holds the engine: after the last one
// has gone, the next group decides anew.
EngineOptions processEngineOptions(const GroupOptions* given);

} // namespace resilient

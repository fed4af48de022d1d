#pragma once

#include <functional>

#include "base/time.h"

namespace resilient {

// Threads on which futures are completed. A future's callbacks are user code
// (communication hooks in Python): they take the GIL, start collectives, and
// may wait for those. They must not run on the engine's loop thread, which
// would have to serve what they wait for.
//
// Tasks of one level run one after the other in the order of posting. A task
// that waits for a future it made itself (PowerSGD does) would wait for its own
// thread if there were one level only; so a future requested on a thread of
// level n is completed on level n + 1.
//
// Any thread may call these functions. The threads start with the first task of
// their level, are detached and never end. A forked child gets its own.
class FutureThreads {
 public:
  // The level for futures requested by the calling thread: 0, or one more than
  // that of the completion thread we are on.
  static int levelForCaller();

  // After stop() tasks are dropped: the process is ending.
  // Never blocks. `task` must not throw. Levels above the last one share it.
  static void post(int level, std::function<void()> task);

  // Lets running tasks end, for at most `limit`; no task starts afterwards.
  // Call without the GIL. Returns false if a task was still running.
  // Tasks that have not started are kept without being destroyed.
  static bool stop(Nanos limit);
};

} // namespace resilient

#pragma once

namespace resilient {

// Threads do not survive fork(): what was made before it is unusable in the
// child. The generation is 0 in the first process and grows by one in each
// forked child; objects remember the one they were made in.
// Any thread may call it. The first call registers the handler: earlier forks
// are not counted. Later calls cost one relaxed load.
int forkGeneration();

} // namespace resilient

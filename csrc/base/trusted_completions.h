#pragma once

namespace resilient {

// Only a build for benchmarks/verbs_safety.py (make safety-cost) has true here.
// It shows what memory safety costs while nothing fails, and must not be used
// for anything else: it takes the completion of a send for an acknowledgement
// of the frames in it, and a receive ends without a look at what devices may
// still write to it.
#ifdef RESILIENT_TRUST_COMPLETIONS
inline constexpr bool kTrustsCompletions = true;
#else
inline constexpr bool kTrustsCompletions = false;
#endif

} // namespace resilient

#pragma once

// Mistakes that tests switch on one by one, to see that the simulation finds
// each of them. Only a build with RESILIENT_PLANTED_BUGS has the switches; in
// any other RESILIENT_PLANTED(x) is the constant false.

#ifdef RESILIENT_PLANTED_BUGS

namespace resilient {

struct PlantedBugs {
  bool noDuplicateCheck = false; // a chunk that is here counts again
  bool acknowledgeEarly = false; // before the payload is here
  bool noRequeue = false; // chunks of a dead path are not sent again
  bool noDetach = false; // frames of a cancelled send read its buffer
  bool countRepeats = false; // acknowledgements of a chunk's two copies
  bool ignoreCredit = false; // the sender sends without credit
  bool forgetCredit = false; // the receiver never gives credit back
  bool matchByArrival = false; // instead of by number
  bool keepDestination = false; // a finished message is still written to
};

inline PlantedBugs plantedBugs;

} // namespace resilient

#define RESILIENT_PLANTED(bug) (::resilient::plantedBugs.bug)
#else
#define RESILIENT_PLANTED(bug) false
#endif

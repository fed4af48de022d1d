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
  bool sendEarly = false; // bytes that are not there yet
  bool copyToPinned = false; // though it is still being read from the far end
  bool deliverPinned = false; // the receive ends while it is
  bool endPinsEarly = false; // when the path is removed
  bool copyTooLittle = false; // a copy lacks the first chunk that is needed
  bool copyReferred = false; // ends the send; the far end reads what comes next
  bool forgetSettled = false; // the sender never hears that it may send
  bool keepToKindOfPath = false; // though none of that kind works

  // failover
  bool noProbation = false; // a connection that comes back carries at once
  bool noHoldDown = false; // however often it has been lost
  bool noReconnect = false; // a lost connection is not made again
  bool neverSuspect = false; // silence is noticed only at the stall time-out
  bool trustDatagrams = false; // beside connections, however long silent
  bool suspectAll = false; // also if no other connection can take over
  bool forgetTaint = false; // silent neighbours need not answer anew
  bool neverOffRoute = false; // other pairs of NICs are not tried
  bool ignoreNicDown = false; // the kernel's news of our NICs
  bool reserveWhenNothingWorks = false;
  bool standbyFirstRouteOnly = false; // the standby never takes over
  bool keepClassOnDeadNic = false;

  // relays
  bool relayAcknowledges = false; // instead of the receiver
  bool acknowledgeOverGaps = false; // frames before it have not come
  bool noRelayRequeue = false; // what a dead relay had is not sent again
  bool anyFlowNumber = false; // frames of an old flow count in the new one
  bool neverSilentRelay = false; // a relay that says nothing is trusted
  bool forgetRelayLimit = false; // a relay takes whatever comes
  bool uncountedForwards = false; // what waits for its target is not counted
  bool keepRelayCredit = false; // nor given back when its flow ends
  bool neverTellPassed = false; // a sender never hears what has left a relay
  bool ignoreBusy = false; // a relay that needs its uplink gets chunks
};

inline PlantedBugs plantedBugs;

} // namespace resilient

#define RESILIENT_PLANTED(bug) (::resilient::plantedBugs.bug)
#else
#define RESILIENT_PLANTED(bug) false
#endif

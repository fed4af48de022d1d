#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/cost.h"

namespace resilient {

// The collectives with the algorithm and its tuning given, for collectives.h,
// which chooses, and for tests, which try all. Rounds and bytes of each are in
// the .cpp files and in docs/collectives.md. Every pair of ranks that an
// algorithm connects exchanges at least one message, empty if need be: that is
// how ranks that call different things find out.

// Tunings must be equal on all ranks: they decide how the data is cut, and with
// it the sizes and slots of messages.
Task allReduceWith(
    AllReduceAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    Tuning tuning);

Task reduceWith(
    ReduceAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int root,
    Tuning tuning);

Task broadcastWith(
    BroadcastAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t bytes,
    int root,
    Tuning tuning);

Task allGatherWith(
    AllGatherAlgorithm algorithm,
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes,
    Tuning tuning);

Task reduceScatterWith(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction,
    Tuning tuning);

Task barrierWith(BarrierAlgorithm algorithm, Communicator& comm);

// A slot names a message of one direction between two ranks within one
// operation: 16 bits for the part of a coalesced operation, 8 for the phase
// of an algorithm, 40 for the index within it.
// slotOf() leaves the part to coalesced(). It does not check that the phase is
// below 256 and the index below 2^40; larger ones would reach into the field
// above.
inline constexpr int kSlotPhaseShift = 40;
inline constexpr int kSlotPartShift = 48;

constexpr uint64_t slotOf(unsigned phase, uint64_t index) {
  return (static_cast<uint64_t>(phase) << kSlotPhaseShift) | index;
}

} // namespace resilient

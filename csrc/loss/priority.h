#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/signature.h"

// Which packets deserve protection (Paper: SMART §3.1). Pure: no clock, no
// chance but from a seed. The element types are float32, bfloat16, float16 and
// float64; others throw std::invalid_argument. Data needs no alignment.
//
// Any thread may call anything here at any time.
namespace resilient {

// Whether loss priority can be measured for elements of this type.
bool hasMagnitude(DType dtype);
// "float32", "bfloat16", "float16" or "float64".
DType magnitudeType(std::string_view name);

// The threshold tau: the magnitude that the largest `topFraction` (in (0, 1];
// the paper's K, 0.01 by default) of a sample reach. The sample is uniform, of
// at most 4096 elements, the same for the same seed. Elements that are not
// finite count as infinite. 0 if there is no element.
double sampledThreshold(
    DType dtype,
    const std::byte* data,
    size_t count,
    double topFraction,
    uint64_t seed);

// The same from such a sample, of at least one magnitude, which it orders.
// "Orders" as std::nth_element does. It must not contain NaN: see
// sampleValue().
double thresholdOf(std::span<double> sample, double topFraction);

// How many packets `count` elements fill if the first packet has
// `firstPacketElements` (fewer may be there; 0: there is no such first packet)
// and each other `elementsPerPacket` > 0, the last the rest.
size_t
packetCount(size_t count, size_t elementsPerPacket, size_t firstPacketElements);

// Equation 1: out[p] = the mean of |g| over the elements of packet p, for all
// packetCount() packets. Sums are in float32, except of float64: meant for
// packets of some thousand elements. Every processor gives the same bits.
void meanMagnitudes(
    DType dtype,
    const std::byte* data,
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements,
    float* out);

// Sets high[p] = 1 for each packet of high priority, else 0, and returns how
// many are high. High are those with a mean of at least `threshold`. If these
// are fewer than `minFraction` of all, then as many of the largest: late in a
// training, when no packet reaches the threshold, the largest are still
// protected. A mean that is not finite is always high: its loss would hide from
// the training that it diverges. A mean of zero never is: a lost packet is
// replaced by zeros. Equal means are taken in the order of packets.
size_t packetsOfTopFraction(
    std::span<const float> means,
    double threshold,
    double minFraction,
    std::vector<uint8_t>& high);

// False if any element is infinite or not a number.
bool allFinite(DType dtype, const std::byte* data, size_t count);

} // namespace resilient

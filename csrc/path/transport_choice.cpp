#include "path/transport_choice.h"

#include <cstdio>
#include <utility>

namespace resilient {
namespace {

// With this share of lost segments, every other message of 4 MiB waits for one.
constexpr double kLossy = 2e-4;
// From this use of a limit on, bytes count more than the time of one burst.
constexpr double kBusy = 0.3, kBusyNoMore = 0.2;
// Fewer gaps are no habit of a network.
constexpr double kSeveral = 4;
// A third of the packets of a burst of 64 KiB.
constexpr double kMany = 16;

// "512 KiB", of a power of two.
std::string sizeText(uint64_t bytes) {
  return bytes >= 1u << 20 ? std::to_string(bytes >> 20) + " MiB"
                           : std::to_string(bytes >> 10) + " KiB";
}

std::string numberText(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", number);
  return text;
}

std::string percentText(double share) {
  char text[32];
  std::snprintf(
      text, sizeof(text), share < 1e-3 ? "%.2f %%" : "%.1f %%", 100 * share);
  return text;
}

} // namespace

TransportChoice::Choice TransportChoice::choose(
    const RouteEvidence& e,
    TimePoint now) {
  // From here on connections get going in time, for less than half of
  // the processor time.
  constexpr uint64_t kMostWithoutLoss = 4u << 20;
  streamLoss_.observe(e.segments, e.segmentsLost, e.streamQueueing);
  datagramLoss_.observe(e.packets, e.packetsLost, /*queueing=*/false);
  // A host that is too busy to read loses hundreds at once: for a connection,
  // that is one loss.
  datagramBurstsLost_.observe(e.packets, e.lossBursts, /*queueing=*/false);
  datagramLosses_.observe(
      datagramLossRate(), e.lossBurstPackets, e.segments, e.segmentsLost);
  // If connections alone lose, they were too fast for a queue that was gone
  // when the losses were seen. While all goes as datagrams, connections send
  // too little to show it. How many are lost in a row, datagrams tell.
  streamLosses_.observe(
      streamLoss_.rate(), e.lossBurstPackets, e.packets, e.packetsLost);
  if (streamLosses_.verdict() == LossComparison::Verdict::kOneAlone) {
    streamLoss_.forget();
    streamLosses_.forget();
  }
  observeBursts(e);
  const View v = view(e);
  if (e.streamIdle && e.datagramsIdle) {
    idleView_ = v;
  }
  Choice choice;
  upTo_ = 0;
  if (avoids(choice.news, now)) {
    return choice;
  }
  const bool lossy = v.stream.lossRate >= kLossy;
  limitIsBusy_ = e.limitUse > (limitIsBusy_ ? kBusyNoMore : kBusy);
  if (limitIsBusy_ && !lossy) {
    return choice;
  }
  choice.upTo = datagramsUpTo(v.stream, v.datagrams, v.linkBytesPerS);
  if (!lossy) {
    choice.upTo = std::min(choice.upTo, kMostWithoutLoss);
  }
  if (choice.upTo > 0 && !std::exchange(said_, true)) {
    choice.news = "messages " +
        (choice.upTo == UINT64_MAX ? "of all sizes"
                                   : "up to " + sizeText(choice.upTo)) +
        " as datagrams: " +
        (lossy ? percentText(v.stream.lossRate) + " of the packets are lost"
               : "connections begin slowly after a pause");
  }
  upTo_ = choice.upTo;
  return choice;
}

// Many are lost if UDP is blocked for a moment, but only once: that says
// nothing about the next ones.
double TransportChoice::datagramLossRate() const {
  return datagramBurstsLost_.lost() < kSeveral ? 0 : datagramLoss_.rate();
}

TransportChoice::View TransportChoice::view(const RouteEvidence& e) const {
  View v;
  v.stream = e.stream;
  v.stream.lossRate = streamLoss_.rate();
  if (datagramLosses_.verdict() != LossComparison::Verdict::kOneAlone) {
    v.stream.lossRate = std::max(v.stream.lossRate, datagramBurstsLost_.rate());
  }
  if (v.stream.lossRate >= kLossy && e.streamBytesPerS > 0) {
    v.stream.mostBytesPerS = e.streamBytesPerS;
  }
  v.datagrams = e.datagrams;
  if (e.datagramBytesPerS > 0) {
    // Datagrams that try more than they have shown may get it.
    v.linkBytesPerS = std::max(
        {e.streamBytesPerS, e.datagramBytesPerS, e.datagrams.bytesPerS});
  }
  v.linkBytesPerS = std::min(v.linkBytesPerS, e.limitBytesPerS);
  return v;
}

// Bursts of one kind that began on an idle route, while the other kind had
// none. Connections are compared by bursts of the size that datagrams had: they
// may be late only for what is larger, and early for what is smaller.
void TransportChoice::observeBursts(const RouteEvidence& e) {
  const bool streams = std::exchange(streamBursts_, e.streamBurst.number) !=
      e.streamBurst.number;
  const bool datagrams =
      std::exchange(datagramBursts_, e.datagramBurst.number) !=
      e.datagramBurst.number;
  const auto& burst = streams ? e.streamBurst : e.datagramBurst;
  if (!idleView_ || idleView_->stream.roundTripS <= 0 ||
      e.limitBytesPerS < INFINITY || streams == datagrams ||
      !(streams ? e.datagramsIdle : e.streamIdle) ||
      burst.bytes < kLeastBurstBytes) {
    return;
  }
  const auto bytes = static_cast<double>(burst.bytes);
  const View& v = *idleView_;
  constexpr double kAsLarge = 2;
  if (streams) {
    if (bytes <= kAsLarge * datagramBytes_ &&
        datagramBytes_ <= kAsLarge * bytes) {
      streamLateness_.observe(
          toSeconds(burst.took),
          streamAnswerS(v.stream, v.linkBytesPerS, bytes));
      streamsTried_ = streamsTried_ || streamLateness_.known();
    }
  } else if (upTo_ > 0) { // else a few chunks, which fit into any limit
    datagramBytes_ = bytes;
    datagramLateness_.observe(
        toSeconds(burst.took),
        datagramAnswerS(v.datagrams, v.linkBytesPerS, bytes));
  }
}

// Datagrams arrive later than predicted, and than they probably would over the
// connections. As long as these are only predicted, it takes more to say so.
// Connections that have carried nothing yet are tried once where late datagrams
// are also lost, whatever is predicted: they begin more slowly than they go on.
bool TransportChoice::isLate() const {
  constexpr double kLate = 1.5, kHardlyLate = 1.2, kBetter = 1.25;
  if (!idleView_ || !datagramLateness_.known()) {
    return false;
  }
  if (!streamsTried_ && datagramBurstsLost_.lost() >= kSeveral &&
      datagramLoss_.lost() >= kMany) {
    return datagramLateness_.factor() > kLate;
  }
  const View& v = *idleView_;
  return datagramLateness_.factor() >
      (streamLateness_.known() ? kHardlyLate : kLate) &&
      datagramLateness_.factor() *
          datagramAnswerS(v.datagrams, v.linkBytesPerS, datagramBytes_) >
      kBetter * streamLateness_.factor() *
          streamAnswerS(v.stream, v.linkBytesPerS, datagramBytes_);
}

// The connections carry the messages of a route that loses many datagrams, also
// before it is known whether they lose as many.
bool TransportChoice::avoids(std::string& news, TimePoint now) {
  using Verdict = LossComparison::Verdict;
  // Parity makes up for less than this at a low price, or at a bearable one as
  // long as the connections may lose as many.
  constexpr double kMuch = 0.05, kTooMuch = 0.1;
  if (avoidedSince_ != TimePoint{}) {
    // The connections have turned out to be as late: that is the network.
    const bool inVain = avoidedAsLate_ && streamLateness_.known() && !isLate();
    if (!inVain && now - avoidedSince_ < avoidedFor_) {
      return true;
    }
    avoidedSince_ = TimePoint{};
    datagramLoss_.forget();
    datagramBurstsLost_.forget();
    datagramLosses_.forget();
    if (!inVain) {
      datagramLateness_ = Lateness();
    }
    return false;
  }
  if (isLate()) {
    streamLateness_ = Lateness();
    avoid(
        /*late=*/true,
        "they take " + numberText(datagramLateness_.factor()) +
            " times as long as their rate explains",
        news,
        now);
    return true;
  }
  const double rate = datagramLossRate();
  if (rate < kMuch || datagramLosses_.verdict() == Verdict::kShared ||
      (rate < kTooMuch && datagramLosses_.verdict() == Verdict::kUnknown)) {
    return false;
  }
  if (datagramLosses_.verdict() == Verdict::kOneAlone) {
    avoid(
        /*late=*/false,
        percentText(rate) +
            " of them are lost, and fewer of the connections' segments",
        news,
        now);
  }
  return true;
}

void TransportChoice::avoid(
    bool late,
    const std::string& why,
    std::string& news,
    TimePoint now) {
  constexpr Nanos kLeast = std::chrono::minutes(1);
  constexpr Nanos kMost = std::chrono::minutes(16);
  avoidedSince_ = now;
  avoidedFor_ = std::clamp(2 * avoidedFor_, kLeast, kMost);
  avoidedAsLate_ = late;
  news = "no messages as datagrams for the next " + durationText(avoidedFor_) +
      ": " + why + "; UDP may be policed";
}

} // namespace resilient

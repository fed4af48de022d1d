#include "failover/takeover.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Nanos kRecent = milliseconds(20);

ConnectionView good(Nanos answerAge = milliseconds(5)) {
  ConnectionView c;
  c.connected = true;
  c.answerAge = answerAge;
  c.roundTrip = milliseconds(4);
  return c;
}

ConnectionView onProbation(Nanos answerAge = milliseconds(40)) {
  ConnectionView c = good(answerAge);
  c.onProbation = true;
  return c;
}

TEST(takeover_by_one_on_probation_needs_a_late_answer) {
  CHECK(canTakeOver(good(seconds(60)))); // idle
  CHECK(canTakeOver(onProbation()));
  CHECK(canTakeOver(onProbation(milliseconds(105)))); // 100 + 1.5 * 4
  CHECK(!canTakeOver(onProbation(milliseconds(106))));
  CHECK(!isGood(onProbation()));
}

TEST(takeover_is_not_by_one_in_doubt) {
  for (bool ConnectionView::* flaw :
       {&ConnectionView::suspect,
        &ConnectionView::stalled,
        &ConnectionView::nicDown}) {
    for (ConnectionView c : {good(), onProbation()}) {
      c.*flaw = true;
      CHECK(!answers(c));
      CHECK(!canTakeOver(c));
    }
  }
  CHECK(!canTakeOver(ConnectionView()));
}

TEST(takeover_silent_path_is_suspect_if_one_on_probation_answers) {
  const ConnectionView paths[] = {good(milliseconds(50)), onProbation()};
  // 40 ms old: it is asked, and then it has.
  CHECK(!judgeSilence(paths, 0, kRecent).takenOver);
  const ConnectionView asked[] = {
      good(milliseconds(50)), onProbation(milliseconds(4))};
  CHECK(judgeSilence(asked, 0, kRecent).takenOver);
}

TEST(takeover_doubts_paths_together_that_may_have_failed_together) {
  const ConnectionView paths[] = {
      good(milliseconds(50)), good(milliseconds(48)), good(milliseconds(6))};
  const SilenceVerdict verdict = judgeSilence(paths, 0, kRecent);
  CHECK(verdict.takenOver);
  CHECK(verdict.doubtful == std::vector<size_t>{1});
}

// It is the network, or the peer: all would be sent twice, for nothing.
TEST(takeover_by_none_if_all_are_silent) {
  const ConnectionView paths[] = {
      good(milliseconds(50)),
      good(milliseconds(48)),
      onProbation(milliseconds(60))};
  const SilenceVerdict verdict = judgeSilence(paths, 0, kRecent);
  CHECK(!verdict.takenOver);
  CHECK(verdict.doubtful == std::vector<size_t>{1});
}

TEST(takeover_trusts_those_on_probation_only_if_no_other_works) {
  const ConnectionView withGood[] = {good(), onProbation()};
  CHECK(trustedEarly(withGood).empty());
  // A connection over a NIC that is down, or stalled, is none that works.
  ConnectionView down = good(), stalled = good();
  down.nicDown = stalled.stalled = true;
  const ConnectionView withNone[] = {
      down, stalled, onProbation(), onProbation(milliseconds(500))};
  CHECK(trustedEarly(withNone) == std::vector<size_t>{2});
  const ConnectionView silent[] = {down, onProbation(milliseconds(500))};
  CHECK(trustedEarly(silent) == std::vector<size_t>{1});
}

TEST(takeover_replaces_what_the_kernel_retransmits_late) {
  CHECK(!worthReplacing(milliseconds(209), milliseconds(5)));
  CHECK(worthReplacing(milliseconds(210), milliseconds(5)));
}

TEST(takeover_attempt_has_priority_once_it_is_connected) {
  const TimePoint now{seconds(100)};
  CHECK(!keepsPriority({}, now, seconds(1))); // its SYN may be lost
  CHECK(keepsPriority(now - milliseconds(999), now, seconds(1)));
  CHECK(!keepsPriority(now - seconds(1), now, seconds(1)));
}

TEST(takeover_syn_timeout_grows_with_the_outage) {
  const Nanos roundTrip = milliseconds(5);
  CHECK_EQ(synTimeout(Nanos(0), roundTrip), Nanos(milliseconds(40)));
  CHECK_EQ(synTimeout(milliseconds(480), roundTrip), Nanos(milliseconds(60)));
  CHECK_EQ(synTimeout(seconds(2), roundTrip), Nanos(milliseconds(250)));
  CHECK_EQ(synTimeout(seconds(60), roundTrip), Nanos(milliseconds(600)));
  // Never too short for a long way, or an unknown one.
  CHECK_EQ(synTimeout(Nanos(0), milliseconds(300)), Nanos(milliseconds(1200)));
  CHECK_EQ(synTimeout(Nanos(0), Nanos(0)), Nanos(milliseconds(600)));
}

} // namespace
} // namespace resilient::test

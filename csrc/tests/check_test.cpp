#include "tests/check.h"

#include <string>
#include <vector>

#include "base/log.h"

using namespace resilient::test;

namespace {

std::string failureOf(void (*body)()) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

} // namespace

TEST(check_reports_what_failed) {
  const std::string text = failureOf(+[] { CHECK(1 > 2); });
  CHECK_CONTAINS(text, "CHECK(1 > 2)");
  CHECK_CONTAINS(text, "check_test.cpp:");
}

TEST(check_eq_shows_both_values) {
  const std::string text = failureOf(+[] {
    const std::vector<int> two{1, 2};
    CHECK_EQ(two, std::vector<int>(1, 3));
  });
  CHECK_CONTAINS(text, "[1, 2] != [3]");
}

TEST(check_eq_compares_integers_by_value) {
  CHECK_EQ(size_t{3}, 3);
  CHECK(!failureOf(+[] { CHECK_EQ(uint64_t{0} - 1, -1); }).empty());
}

TEST(check_throws_wants_the_type_and_the_text) {
  CHECK_THROWS(std::runtime_error, "bad", throw std::runtime_error("so bad"));
  CHECK(
      !failureOf(+[] { CHECK_THROWS(std::runtime_error, "", 1 + 1); }).empty());
  CHECK(!failureOf(+[] {
           CHECK_THROWS(
               std::runtime_error, "good", throw std::runtime_error("bad"));
         }).empty());
}

TEST(for_seeds_leaves_the_failing_seed_noted) {
  const auto forced = runState().forcedSeed;
  runState().forcedSeed.reset();
  const std::string text = failureOf(
      +[] { forSeeds(1000, [](uint64_t seed) { CHECK(seed < 5); }, 3); });
  const auto noted = runState().currentSeed;
  runState().forcedSeed = forced;
  CHECK_CONTAINS(text, "seed < 5");
  CHECK(noted == 5u);
  runState().currentSeed.reset();
}

TEST(each_test_begins_with_the_log_of_a_new_process) {
  static std::string lines;
  const auto run = [](void (*body)()) {
    CHECK(runTest({"a test within a test", __FILE__, body}, ""));
  };
  run(+[] {
    resilient::setLogSink([](std::string_view line) { lines += line; });
    resilient::setLogLevel(resilient::LogLevel::kError);
    resilient::setLogRank(3);
  });
  run(+[] {
    CHECK(resilient::logEnabled(resilient::LogLevel::kWarning));
    CHECK(!resilient::logEnabled(resilient::LogLevel::kInfo));
    resilient::logMessage(
        resilient::LogLevel::kWarning, "a line that a test expects to see");
  });
  CHECK_EQ(lines, "");
}

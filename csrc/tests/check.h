#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"

// The test harness of the C++ core: a test is a function that throws when it
// fails. Written for this project, so that the core's tests need nothing but
// a compiler, under every sanitizer.
//
//   TEST(numbers_add_up) {
//     CHECK_EQ(1 + 1, 2);
//   }
//
// csrc/tests/main.cpp holds main():
// `core_tests [part of a name] [--seed N] [--jobs N]`.
// A randomized test takes its seeds from seeds() and so replays from the line
// printed when it fails.
namespace resilient::test {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TestCase {
  const char* name;
  const char* file;
  void (*body)();
};

inline std::vector<TestCase>& allTests() {
  static std::vector<TestCase> tests;
  return tests;
}

struct Register {
  Register(const char* name, const char* file, void (*body)()) {
    allTests().push_back({name, file, body});
  }
};

struct RunState {
  std::optional<uint64_t> forcedSeed; // from --seed
  std::optional<uint64_t> currentSeed; // printed if the test fails
};

inline RunState& runState() {
  static RunState state;
  return state;
}

// Tells the harness which seed is being run, for the report of a failure.
inline void noteSeed(uint64_t seed) {
  runState().currentSeed = seed;
}

// How many random cases a test runs: `usual`, unless the environment asks for
// another number (`make nightly` does).
inline uint64_t caseCount(uint64_t usual) {
  const char* text = std::getenv("RESILIENT_TEST_CASES");
  if (text == nullptr || *text == '\0') {
    return usual;
  }
  char* end = nullptr;
  uint64_t value = std::strtoull(text, &end, 10);
  if (*end != '\0' || value == 0) {
    throw Failure(
        std::string("RESILIENT_TEST_CASES=") + text + ": want a number > 0");
  }
  return value;
}

// Runs `body(seed)` for caseCount(usual) seeds counting up from `first`, or
// only for the seed given by --seed.
inline void forSeeds(
    uint64_t usual,
    const std::function<void(uint64_t)>& body,
    uint64_t first = 1) {
  if (runState().forcedSeed) {
    noteSeed(*runState().forcedSeed);
    body(*runState().forcedSeed);
    return;
  }
  const uint64_t count = caseCount(usual);
  for (uint64_t i = 0; i < count; ++i) {
    noteSeed(first + i);
    body(first + i);
  }
  runState().currentSeed.reset();
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::same_as<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::same_as<T, std::nullptr_t>) {
    out << "nullptr";
  } else if constexpr (std::same_as<T, uint8_t> || std::same_as<T, int8_t>) {
    out << static_cast<int>(value); // a number, not a character
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { value.toString(); }) {
    out << value.toString();
  } else if constexpr (requires {
                         value.size();
                         value.begin();
                       }) {
    out << '[';
    const char* separator = "";
    for (const auto& element : value) {
      out << separator << show(element);
      separator = ", ";
    }
    out << ']';
  } else {
    out << "(value of " << sizeof(T) << " bytes)";
  }
  return out.str();
}

[[noreturn]] inline void
fail(const char* file, int line, const std::string& what) {
  std::ostringstream out;
  out << file << ':' << line << ": " << what;
  throw Failure(out.str());
}

// Integers of different signs compare by value, as std::cmp_equal does.
template <typename A, typename B>
bool equal(const A& a, const B& b) {
  constexpr bool kBothIntegers = std::integral<A> && std::integral<B> &&
      !std::same_as<A, bool> && !std::same_as<B, bool> &&
      !std::same_as<A, char> && !std::same_as<B, char>;
  if constexpr (kBothIntegers) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void checkEqual(
    const A& a,
    const B& b,
    const char* textA,
    const char* textB,
    const char* file,
    int line) {
  if (!equal(a, b)) {
    fail(
        file,
        line,
        std::string("CHECK_EQ(") + textA + ", " + textB + "): " + show(a) +
            " != " + show(b));
  }
}

// Passes if `text` holds `part`.
inline void checkContains(
    std::string_view text,
    std::string_view part,
    const char* file,
    int line) {
  if (text.find(part) == std::string_view::npos) {
    fail(
        file,
        line,
        "\"" + std::string(part) + "\" is not in \"" + std::string(text) +
            "\"");
  }
}

// Runs one test; false, having said why and how to run it again, if it failed.
inline bool runTest(const TestCase& test, const char* program) {
  // The log belongs to the process, and an engine's options change it: without
  // this, a test would depend on those that ran before it.
  setLogSink({});
  setLogLevel(LogLevel::kWarning);
  setLogRank(-1);
  runState().currentSeed.reset();
  std::string error;
  try {
    test.body();
    return true;
  } catch (const std::exception& e) {
    error = e.what();
  } catch (...) {
    error = "threw something that is no std::exception";
  }
  std::string text = std::string("FAILED ") + test.name + " (" + test.file +
      ")\n  " + error + "\nto run it again: " + program + " " + test.name;
  if (runState().currentSeed) {
    text += " --seed " + std::to_string(*runState().currentSeed);
  }
  std::cerr << text + "\n";
  return false;
}

// Runs the tests in as many processes, each of which takes the next that none
// has taken; returns how many did not pass.
inline int runInProcesses(
    const std::vector<const TestCase*>& tests,
    int processes,
    const char* program) {
  struct Shared {
    std::atomic<int> next{0}, passed{0};
  };
  void* const memory = mmap(
      nullptr,
      sizeof(Shared),
      PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_ANONYMOUS,
      -1,
      0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("cannot share memory between processes");
  }
  Shared* const shared = new (memory) Shared;
  const int count = static_cast<int>(tests.size());
  std::vector<pid_t> children;
  for (int i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      for (int at = shared->next++; at < count; at = shared->next++) {
        shared->passed += runTest(*tests[static_cast<size_t>(at)], program);
      }
      std::exit(0); // not _exit: leaks are looked for at the end
    }
    if (child < 0) {
      throw std::runtime_error("cannot fork");
    }
    children.push_back(child);
  }
  bool died = false;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    died |= status != 0;
  }
  const int failed = count - shared->passed;
  munmap(memory, sizeof(Shared));
  if (died) {
    std::cerr << "FAILED: a process of tests did not end well\n";
  }
  return std::max(failed, int(died));
}

inline int runTests(int argc, char** argv) {
  std::string filter;
  bool list = false;
  int jobs = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      runState().forcedSeed = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--jobs") == 0 && i + 1 < argc) {
      jobs = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--list") == 0) {
      list = true;
    } else if (argv[i][0] == '-' || !filter.empty()) {
      std::cerr << "usage: " << argv[0]
                << " [part of a test's name] [--seed N] [--jobs N] [--list]\n";
      return 2;
    } else {
      filter = argv[i];
    }
  }
  std::vector<const TestCase*> tests;
  for (const TestCase& test : allTests()) {
    if (std::string_view(test.name).find(filter) != std::string_view::npos) {
      tests.push_back(&test);
    }
  }
  if (tests.empty()) {
    // A filter that finds nothing must not look like success.
    std::cerr << "no test matches \"" << filter << "\"\n";
    return 2;
  }
  if (list) {
    for (const TestCase* test : tests) {
      std::cout << test->name << "\n";
    }
    return 0;
  }
  const int count = static_cast<int>(tests.size());
  int failed = 0;
  if (jobs > 1) {
    failed = runInProcesses(tests, std::min(jobs, count), argv[0]);
  } else {
    for (const TestCase* test : tests) {
      failed += !runTest(*test, argv[0]);
    }
  }
  std::cout << count - failed << " of " << count << " tests passed\n";
  return failed == 0 ? 0 : 1;
}

} // namespace resilient::test

#define TEST(name)                                          \
  static void name();                                       \
  static const ::resilient::test::Register register_##name( \
      #name, __FILE__, &name);                              \
  static void name()

#define CHECK(...)                                                            \
  do {                                                                        \
    if (!(__VA_ARGS__)) {                                                     \
      ::resilient::test::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"); \
    }                                                                         \
  } while (false)

#define CHECK_EQ(a, b) \
  ::resilient::test::checkEqual((a), (b), #a, #b, __FILE__, __LINE__)

#define CHECK_CONTAINS(text, part) \
  ::resilient::test::checkContains((text), (part), __FILE__, __LINE__)

// The expression must throw a `Type`; what() of it must contain `part`.
#define CHECK_THROWS(Type, part, expression)                                   \
  do {                                                                         \
    bool thrown_ = false;                                                      \
    try {                                                                      \
      (void)(expression);                                                      \
    } catch (const Type& e_) {                                                 \
      thrown_ = true;                                                          \
      ::resilient::test::checkContains(e_.what(), (part), __FILE__, __LINE__); \
    }                                                                          \
    if (!thrown_) {                                                            \
      ::resilient::test::fail(                                                 \
          __FILE__, __LINE__, #expression " did not throw " #Type);            \
    }                                                                          \
  } while (false)

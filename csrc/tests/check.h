#pragma once

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

// The test harness of the C++ core: a test is a function that throws when it
// fails. Written for this project, so that the core's tests need nothing but
// a compiler, under every sanitizer.
//
//   TEST(numbers_add_up) {
//     CHECK_EQ(1 + 1, 2);
//   }
//
// csrc/tests/main.cpp holds main(): `core_tests [part of a name] [--seed N]`.
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

inline int runTests(int argc, char** argv) {
  std::string filter;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      runState().forcedSeed = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--list") == 0) {
      list = true;
    } else if (argv[i][0] == '-' || !filter.empty()) {
      std::cerr << "usage: " << argv[0]
                << " [part of a test's name] [--seed N] [--list]\n";
      return 2;
    } else {
      filter = argv[i];
    }
  }
  int run = 0;
  std::vector<std::string> again;
  for (const TestCase& test : allTests()) {
    if (std::string_view(test.name).find(filter) == std::string_view::npos) {
      continue;
    }
    ++run;
    if (list) {
      std::cout << test.name << "\n";
      continue;
    }
    runState().currentSeed.reset();
    std::string error;
    try {
      test.body();
      continue;
    } catch (const std::exception& e) {
      error = e.what();
    } catch (...) {
      error = "threw something that is no std::exception";
    }
    std::string line = std::string(argv[0]) + " " + test.name;
    if (runState().currentSeed) {
      line += " --seed " + std::to_string(*runState().currentSeed);
    }
    std::cerr << "FAILED " << test.name << " (" << test.file << ")\n  " << error
              << "\n";
    again.push_back(line);
  }
  if (run == 0) {
    // A filter that finds nothing must not look like success.
    std::cerr << "no test matches \"" << filter << "\"\n";
    return 2;
  }
  if (!list) {
    std::cout << run - static_cast<int>(again.size()) << " of " << run
              << " tests passed\n";
  }
  for (const std::string& line : again) {
    std::cerr << "to run it again: " << line << "\n";
  }
  return again.empty() ? 0 : 1;
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

#include "base/options.h"

#include <cstdlib>
#include <limits>

#include "base/log.h"
#include "base/status.h"
#include "tests/check.h"

namespace resilient {

namespace {

// Sets a variable for one test.
class Variable {
 public:
  Variable(std::string name, const std::string& value)
      : name_("TORCH_RESILIENT_" + std::move(name)) {
    setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Variable() {
    unsetenv(name_.c_str());
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::string name_;
};

std::string errorOf(const std::string& suffix, const std::string& value) {
  Variable variable(suffix, value);
  try {
    EngineOptions::fromEnvironment();
  } catch (const StatusError& error) {
    CHECK(error.status().code() == StatusCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

} // namespace

TEST(options_have_their_defaults) {
  const EngineOptions options = EngineOptions::fromEnvironment();
  CHECK_EQ(options.chunk_bytes, 524288);
  CHECK_EQ(options.wan_connections, 0);
  CHECK_EQ(options.stage_after_s, 0.002);
  CHECK(options.dump_on_sigusr1);
  CHECK(!options.eager_connect);
  CHECK_EQ(options.log_level, "warning");
  CHECK_EQ(options.interface, "");
  CHECK_EQ(options.collective_algorithm, "auto");
  CHECK_EQ(options.site, "auto");
  CHECK_EQ(options.declaredSite(), "");
}

TEST(options_defaults_are_valid_and_read_back) {
  EngineOptions options;
  options.validate();
  for (const OptionInfo& option : optionTable()) {
    options.setFromString(option.name, option.defaultText);
    CHECK_EQ(options.getAsString(option.name), option.defaultText);
    CHECK(!option.doc.empty() && !option.unit.empty());
  }
}

TEST(options_variable_is_the_field_in_capitals) {
  for (const OptionInfo& option : optionTable()) {
    std::string capitals;
    for (const char c : option.name) {
      capitals += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    }
    CHECK_EQ(option.variable, "TORCH_RESILIENT_" + capitals);
  }
}

TEST(options_come_from_the_environment) {
  Variable chunk("CHUNK_BYTES", " 1M ");
  Variable stall("STALL_TIMEOUT_S", "1.5e-1");
  Variable eager("EAGER_CONNECT", "Yes");
  Variable dump("DUMP_ON_SIGUSR1", "0");
  Variable level("LOG_LEVEL", "DEBUG");
  Variable nic("INTERFACE", "eth1");
  Variable unset("WAN_CONNECTIONS", "");
  const EngineOptions options = EngineOptions::fromEnvironment();
  CHECK_EQ(options.chunk_bytes, 1048576);
  CHECK_EQ(options.stall_timeout_s, 0.15);
  CHECK(options.eager_connect);
  CHECK(!options.dump_on_sigusr1);
  CHECK_EQ(options.log_level, "debug");
  CHECK_EQ(options.interface, "eth1");
  CHECK_EQ(options.wan_connections, 0);
}

TEST(an_empty_site_in_the_environment_is_a_value) {
  Variable site("SITE", "");
  CHECK_EQ(EngineOptions::fromEnvironment().site, "");
  Variable east("SITE", "east");
  CHECK_EQ(EngineOptions::fromEnvironment().declaredSite(), "east");
}

TEST(options_number_that_finds_itself) {
  EngineOptions options;
  options.setFromString("wan_connections", "7");
  CHECK_EQ(options.wan_connections, 7);
  CHECK_EQ(options.getAsString("wan_connections"), "7");
  options.setFromString("wan_connections", " Auto ");
  CHECK_EQ(options.wan_connections, 0);
  CHECK_EQ(options.getAsString("wan_connections"), "auto");
}

TEST(options_choice_is_one_of_its_words) {
  EngineOptions options;
  options.setFromString("nic_policy", "Standby");
  CHECK_EQ(options.nic_policy, "standby");
  for (const char* word : {"", "or", "spread or standby", "stand"}) {
    CHECK_THROWS(
        StatusError,
        "spread or standby",
        options.setFromString("nic_policy", word));
  }
}

TEST(options_gid_index_is_auto_or_a_number) {
  EngineOptions options;
  CHECK(!options.gidIndex());
  for (const char* text : {"0", " 3 ", "255"}) {
    options.setFromString("rdma_gid_index", text);
    options.validate();
    CHECK_EQ(*options.gidIndex(), static_cast<uint32_t>(std::atoi(text)));
  }
  for (const char* text : {"256", "-1", "first", ""}) {
    options.rdma_gid_index = text;
    CHECK_THROWS(
        StatusError,
        "rdma_gid_index=\"" + std::string(text) +
            "\": expected \"auto\" or a whole number (index) from 0 to 255",
        options.validate());
  }
}

TEST(options_bounds_are_included) {
  EngineOptions options;
  for (const OptionInfo& option : optionTable()) {
    if (option.min == option.max) {
      continue; // no number
    }
    const bool whole = option.kind != OptionKind::Seconds;
    for (const double bound : {option.min, option.max}) {
      const std::string text = whole
          ? std::to_string(static_cast<int64_t>(bound))
          : std::to_string(bound);
      options.setFromString(option.name, text);
      const double step = bound == option.min ? -1 : 1;
      const std::string past = whole
          ? std::to_string(static_cast<int64_t>(bound + step))
          : std::to_string(bound + step);
      CHECK_THROWS(
          StatusError, option.name, options.setFromString(option.name, past));
    }
  }
}

TEST(options_errors_name_variable_value_and_form) {
  const std::string error = errorOf("CHUNK_BYTES", "12 apples");
  CHECK_CONTAINS(error, "TORCH_RESILIENT_CHUNK_BYTES");
  CHECK_CONTAINS(error, "\"12 apples\"");
  CHECK_CONTAINS(error, "whole number of bytes from 4096 to 67108864");
  CHECK_CONTAINS(
      errorOf("WAN_CONNECTIONS", "4K"),
      "\"auto\" or a whole number (connections) from 1 to 64");
  CHECK_CONTAINS(errorOf("NIC_POLICY", "or"), "spread or standby");
  CHECK_CONTAINS(
      errorOf("RDMA_RETRIES", "7"),
      "7 would mean for ever on some devices) from 0 to 6");
  CHECK_CONTAINS(errorOf("HEARTBEAT_S", "soon"), "from 0.01 to 3600");
  CHECK_CONTAINS(errorOf("EAGER_CONNECT", "maybe"), "true or false");
  CHECK_CONTAINS(errorOf("LOG_LEVEL", "loud"), "debug, info, warning or error");
}

TEST(options_refuse_numbers_that_are_none) {
  for (const char* text :
       {"1.5",
        "0x10000",
        "-1",
        "1e6",
        "M",
        "9999999999999999999999",
        "9000000000G",
        "524288 524288",
        "+524288"}) {
    CHECK_CONTAINS(errorOf("CHUNK_BYTES", text), "CHUNK_BYTES");
  }
  for (const char* text : {"nan", "inf", "-0.5", "1s", "1,5", "  "}) {
    CHECK_CONTAINS(errorOf("LINGER_S", text), "LINGER_S");
  }
}

TEST(options_numbers_for_sites) {
  const auto sites =
      SiteNumbers::parse(" eu-west=50M, us=16384 ,*=1G", 1, 1ll << 40);
  CHECK(sites.has_value());
  CHECK_EQ(sites->of("eu-west").value(), 50 << 20);
  CHECK_EQ(sites->of("us").value(), 16384);
  CHECK_EQ(sites->of("asia").value(), 1 << 30);
  CHECK_EQ(sites->of("").value(), 1 << 30);
  // The others do not include our own site, if there are sites at all.
  CHECK(!sites->beyond("asia", "asia").has_value());
  CHECK_EQ(sites->beyond("asia", "africa").value(), 1 << 30);
  CHECK_EQ(sites->beyond("us", "us").value(), 16384);
  CHECK_EQ(sites->beyond("", "").value(), 1 << 30);
  const auto named = SiteNumbers::parse("us=7", 0, 63);
  CHECK_EQ(named->of("us").value(), 7);
  CHECK(!named->of("eu").has_value());
  CHECK_EQ(SiteNumbers::parse("46", 0, 63)->of("eu").value(), 46);
  CHECK(!SiteNumbers::parse("", 0, 63)->of("eu").has_value());
  for (const char* text :
       {"us",
        "us=",
        "=7",
        "us=64",
        "us=-1",
        "us=1,us=2",
        "1,2",
        "us=1,",
        "u s=1",
        "us=1;eu=2",
        "us==1",
        ","}) {
    CHECK(!SiteNumbers::parse(text, 0, 63).has_value());
  }
  CHECK_CONTAINS(
      errorOf("WAN_RATE_LIMIT", "us=5"), "expected bytes per second");
  CHECK_CONTAINS(errorOf("WAN_DSCP", "64"), "from 0 to 63");
}

TEST(options_words_for_sites) {
  const auto sites =
      SiteNumbers::parseWords(" udp , eu-west = tcp,us=udp", kWanTransports);
  CHECK(sites.has_value());
  constexpr auto kTcp = static_cast<int64_t>(WanTransport::kTcp);
  constexpr auto kUdp = static_cast<int64_t>(WanTransport::kUdp);
  CHECK_EQ(sites->of("eu-west").value(), kTcp);
  CHECK_EQ(sites->of("us").value(), kUdp);
  CHECK_EQ(sites->of("asia").value(), kUdp);
  const auto named = SiteNumbers::parseWords("us=udp", kWanTransports);
  CHECK_EQ(named->of("us").value(), kUdp);
  CHECK(!named->of("eu").has_value());
  CHECK(!SiteNumbers::parseWords("", kWanTransports)->of("eu").has_value());
  for (const char* text :
       {"UDP",
        "1",
        "udp tcp",
        "udp,tcp",
        "us=",
        "=udp",
        "us=sctp",
        "us=udp,us=tcp",
        "*=udp,tcp",
        "udp,",
        "u s=udp"}) {
    CHECK(!SiteNumbers::parseWords(text, kWanTransports).has_value());
  }
}

// Each error names the variable, its value and what it should be.
TEST(options_errors_about_datagrams) {
  for (const char* text : {"sctp", "us=", "tcp,udp", "us=udp,us=tcp"}) {
    const std::string error = errorOf("WAN", text);
    CHECK_CONTAINS(error, "TORCH_RESILIENT_WAN)");
    CHECK_CONTAINS(error, std::string("\"") + text + "\"");
    CHECK_CONTAINS(error, "expected auto, tcp or udp, or a list such as");
  }
  const std::string parity = errorOf("WAN_PARITY", "raid");
  CHECK_CONTAINS(parity, "TORCH_RESILIENT_WAN_PARITY");
  CHECK_CONTAINS(parity, "\"raid\"");
  CHECK_CONTAINS(parity, "reed_solomon or xor");
}

TEST(options_assigned_directly_are_validated) {
  EngineOptions options;
  options.heartbeat_s = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS(StatusError, "heartbeat_s", options.validate());
  options = EngineOptions();
  options.log_level = "loud";
  CHECK_THROWS(StatusError, "log_level", options.validate());
  options = EngineOptions();
  options.reconnect_min_s = 2;
  CHECK_THROWS(StatusError, "reconnect_min_s=2 exceeds", options.validate());
}

TEST(options_a_failed_assignment_changes_nothing) {
  EngineOptions options;
  options.setFromString("chunk_bytes", "8K");
  CHECK_THROWS(
      StatusError, "chunk_bytes", options.setFromString("chunk_bytes", "1"));
  CHECK_EQ(options.chunk_bytes, 8192);
  CHECK_THROWS(
      StatusError, "no option", options.setFromString("chunkbytes", "8K"));
  CHECK_THROWS(StatusError, "no option", options.getAsString(""));
}

TEST(options_never_show_a_secret) {
  EngineOptions options;
  CHECK_EQ(options.getAsString("secret"), "");
  options.setFromString("secret", "swordfish-swordfish");
  CHECK_EQ(options.secret, "swordfish-swordfish");
  CHECK_EQ(options.getAsString("secret"), "(set)");
  options.secret_file = "key.txt";
  try {
    options.validate();
    CHECK(false);
  } catch (const StatusError& error) {
    CHECK_CONTAINS(error.what(), "secret_file");
    CHECK_EQ(std::string(error.what()).find("swordfish"), std::string::npos);
  }
}

TEST(options_refuse_a_secret_that_can_be_guessed) {
  CHECK_EQ(errorOf("SECRET", "0123456789abcdef"), "");
  const std::string error = errorOf("SECRET", "0123456789abcde");
  CHECK_CONTAINS(error, "TORCH_RESILIENT_SECRET");
  CHECK_CONTAINS(error, "at least 16 random ones");
  CHECK_EQ(error.find("0123"), std::string::npos);
}

TEST(options_know_what_python_reads) {
  Variable metrics("METRICS", "folder");
  Variable record("RECORD_DIR", "folder");
  Variable timeline("TIMELINE", "folder");
  Variable cuda("CUDA", "0"); // read by setup.py
  CHECK(unknownVariables().empty());
}

TEST(options_warn_of_misspelled_variables) {
  Variable misspelled("PATH_REMOTE", "8");
  const std::vector<std::string> expected = {"TORCH_RESILIENT_PATH_REMOTE"};
  CHECK_EQ(unknownVariables(), expected);
  std::string logged;
  setLogSink([&](std::string_view line) { logged += line; });
  EngineOptions::fromEnvironment();
  setLogSink({});
  CHECK_CONTAINS(logged, "TORCH_RESILIENT_PATH_REMOTE, which nothing reads");
  CHECK_EQ(logged.find("did you mean"), std::string::npos);
}

TEST(options_propose_the_variable_that_was_meant) {
  const auto warning = [](const char* suffix) {
    Variable misspelled(suffix, "8");
    std::string logged;
    setLogSink([&](std::string_view line) { logged += line; });
    EngineOptions::fromEnvironment();
    setLogSink({});
    return logged;
  };
  CHECK_CONTAINS(
      warning("CHUNK_BITES"), "did you mean TORCH_RESILIENT_CHUNK_BYTES?");
  CHECK_CONTAINS(
      warning("WAN_CONECTIONS"),
      "did you mean TORCH_RESILIENT_WAN_CONNECTIONS?");
  CHECK_CONTAINS(warning("ISTE"), "did you mean TORCH_RESILIENT_SITE?");
  CHECK_CONTAINS(
      warning("SOCKET_BUFFER"),
      "did you mean TORCH_RESILIENT_SOCKET_BUFFER_BYTES?");
  CHECK_CONTAINS(warning("METRIC"), "did you mean TORCH_RESILIENT_METRICS?");
}

TEST(options_propose_the_field_that_was_meant) {
  EngineOptions options;
  CHECK_THROWS(
      StatusError,
      "there is no option \"wan_conections\": did you mean wan_connections?",
      options.setFromString("wan_conections", "8"));
  CHECK_THROWS(
      StatusError,
      "did you mean heartbeat_s?",
      options.getAsString("Heartbeat"));
}

} // namespace resilient

#include "base/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/log.h"
#include "base/status.h"

extern char** environ; // NOLINT: POSIX declares it in no header we may use

namespace resilient {

namespace {

constexpr std::string_view kPrefix = "TORCH_RESILIENT_";

// By pipelining/recording.py and _observe/ of torch_resilient, and setup.py.
constexpr std::array<std::string_view, 5> kReadByPython = {
    "TORCH_RESILIENT_TIMELINE",
    "TORCH_RESILIENT_METRICS",
    "TORCH_RESILIENT_RECORD_DIR",
    "TORCH_RESILIENT_CUDA",
    "TORCH_RESILIENT_VERBS"};

[[noreturn]] void invalid(const std::string& message) {
  throw StatusError(Status(StatusCode::kInvalidArgument, message));
}

std::string numberText(double value) {
  std::array<char, 64> buffer;
  // The shortest text that reads back as the same number.
  auto result =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), result.ptr};
}

std::string boundText(OptionKind kind, double bound) {
  return kind == OptionKind::Seconds
      ? numberText(bound)
      : std::to_string(static_cast<int64_t>(bound));
}

std::string expectation(const OptionInfo& option) {
  const std::string range = boundText(option.kind, option.min) + " to " +
      boundText(option.kind, option.max);
  switch (option.kind) {
    case OptionKind::Bytes:
      return "a whole number of bytes from " + range +
          " (K, M, G stand for KiB, MiB, GiB)";
    case OptionKind::Count:
      return "a whole number (" + option.unit + ") from " + range;
    case OptionKind::AutoCount:
      return "\"auto\" or a whole number (" + option.unit + ") from 1 to " +
          boundText(option.kind, option.max);
    case OptionKind::Seconds:
      return "a number of seconds from " + range;
    case OptionKind::Flag:
      return "true or false (also 1/0, yes/no, on/off)";
    case OptionKind::Choice:
      return option.unit;
    case OptionKind::Text:
    case OptionKind::Secret:
      return option.unit;
  }
  return option.unit;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') {
      c = static_cast<char>(c - 'A' + 'a');
    }
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) {
    return {};
  }
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// The whole text must be a number: no blanks, no sign "+", no fraction. A
// product with the unit that overflows is no number either.
std::optional<int64_t> parseInteger(std::string_view text, bool suffixes) {
  int64_t unit = 1;
  if (suffixes && !text.empty()) {
    switch (text.back()) {
      case 'k':
      case 'K':
        unit = int64_t{1} << 10;
        break;
      case 'm':
      case 'M':
        unit = int64_t{1} << 20;
        break;
      case 'g':
      case 'G':
        unit = int64_t{1} << 30;
        break;
      default:
        break;
    }
    if (unit != 1) {
      text.remove_suffix(1);
    }
  }
  int64_t number = 0;
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  int64_t value = 0;
  if (error != std::errc() || end != text.data() + text.size() ||
      __builtin_mul_overflow(number, unit, &value)) {
    return std::nullopt;
  }
  return value;
}

std::optional<double> parseSeconds(std::string_view text) {
  double value = 0;
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

std::optional<bool> parseFlag(std::string_view text) {
  const std::string word = lower(text);
  if (word == "1" || word == "true" || word == "yes" || word == "on") {
    return true;
  }
  if (word == "0" || word == "false" || word == "no" || word == "off") {
    return false;
  }
  return std::nullopt;
}

// One of the words in "debug, info, warning or error".
bool isChoice(const OptionInfo& option, std::string_view value) {
  std::string_view rest = option.unit;
  for (;;) {
    const size_t end = std::min(rest.find(", "), rest.find(" or "));
    if (rest.substr(0, end) == value) {
      return true;
    }
    if (end == std::string_view::npos) {
      return false;
    }
    rest.remove_prefix(end + (rest[end] == ',' ? 2 : 4));
  }
}

// NaN is within no bounds.
bool inBounds(const OptionInfo& option, double value) {
  return value >= option.min && value <= option.max;
}

// Checks one field by its own bounds. Relations between fields are for
// validate() alone: setFromString() must be able to set them one after the
// other.
bool acceptable(const OptionInfo& option, const EngineOptions& options) {
  return std::visit(
      [&](auto member) {
        const auto& value = options.*member;
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, bool>) {
          return true;
        } else if constexpr (std::is_same_v<T, std::string>) {
          return option.kind != OptionKind::Choice || isChoice(option, value);
        } else {
          return inBounds(option, static_cast<double>(value));
        }
      },
      option.member);
}

std::string valueText(const OptionInfo& option, const EngineOptions& options) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = options.*member;
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, bool>) {
          return value ? "true" : "false";
        } else if constexpr (std::is_same_v<T, std::string>) {
          return option.kind == OptionKind::Secret && !value.empty() ? "(set)"
                                                                     : value;
        } else if constexpr (std::is_same_v<T, double>) {
          return numberText(value);
        } else if (option.kind == OptionKind::AutoCount && value == 0) {
          return "auto";
        } else {
          return std::to_string(value);
        }
      },
      option.member);
}

// False if the text is no value of this option; `options` is then unchanged.
// Works on a copy, which gives the strong guarantee that options.h promises
// (options_a_failed_assignment_changes_nothing).
bool assign(
    const OptionInfo& option,
    EngineOptions& options,
    std::string_view text) {
  EngineOptions changed = options;
  switch (option.kind) {
    case OptionKind::Bytes:
    case OptionKind::Count:
    case OptionKind::AutoCount: {
      const bool automatic = option.kind == OptionKind::AutoCount &&
          lower(trimmed(text)) == "auto";
      auto value = automatic
          ? std::optional<int64_t>(0)
          : parseInteger(trimmed(text), option.kind == OptionKind::Bytes);
      if (!value) {
        return false;
      }
      changed.*std::get<int64_t EngineOptions::*>(option.member) = *value;
      break;
    }
    case OptionKind::Seconds: {
      auto value = parseSeconds(trimmed(text));
      if (!value) {
        return false;
      }
      changed.*std::get<double EngineOptions::*>(option.member) = *value;
      break;
    }
    case OptionKind::Flag: {
      auto value = parseFlag(trimmed(text));
      if (!value) {
        return false;
      }
      changed.*std::get<bool EngineOptions::*>(option.member) = *value;
      break;
    }
    case OptionKind::Choice:
      changed.*std::get<std::string EngineOptions::*>(option.member) =
          lower(trimmed(text));
      break;
    case OptionKind::Text:
    case OptionKind::Secret:
      changed.*std::get<std::string EngineOptions::*>(option.member) =
          std::string(text);
      break;
  }
  if (!acceptable(option, changed)) {
    return false;
  }
  options = std::move(changed);
  return true;
}

[[noreturn]] void reject(
    const OptionInfo& option,
    const std::string& name,
    std::string_view value) {
  invalid(
      name + "=\"" + std::string(value) + "\": expected " +
      expectation(option));
}

const OptionInfo& find(std::string_view name) {
  for (const OptionInfo& option : optionTable()) {
    if (option.name == name) {
      return option;
    }
  }
  invalid(noSuchOption(name));
}

// How many characters must be added, removed, replaced or swapped with the
// next one to make `b` of `a`.
//
// The optimal string alignment distance: a pair that was swapped is not edited
// again.
size_t editDistance(std::string_view a, std::string_view b) {
  // Rows of the table for the last two lengths of `a`, and for the present one.
  std::vector<size_t> before, last(b.size() + 1), now(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0);
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = std::min(now[j], before[j - 2] + 1);
      }
    }
    before = std::exchange(last, now);
  }
  return last[b.size()];
}

std::vector<std::string> knownVariables() {
  std::vector<std::string> names(kReadByPython.begin(), kReadByPython.end());
  for (const OptionInfo& option : optionTable()) {
    names.push_back(option.variable);
  }
  return names;
}

// 'did you mean X? `...` lists all', or only the second part if none of the
// `names` is similar. A name without its unit counts as similar.
//
// The prefix that all variables share does not count for the length: with it,
// more edits would pass as similar.
std::string suggestion(
    std::string_view name,
    const std::vector<std::string>& names) {
  const size_t ownPart =
      name.size() - (name.starts_with(kPrefix) ? kPrefix.size() : 0);
  size_t limit = 2 + ownPart / 8; // edits; as many make another word
  const std::string* best = nullptr;
  for (const std::string& each : names) {
    const bool noUnit = !name.empty() && each.size() > name.size() &&
        each.starts_with(name) && each[name.size()] == '_';
    const size_t edits = noUnit ? 1 : editDistance(name, each);
    if (edits < limit) {
      limit = edits;
      best = &each;
    }
  }
  return (best == nullptr ? "" : "did you mean " + *best + "? ") +
      "`python -m torch_resilient.options` lists all";
}

} // namespace

const std::vector<OptionInfo>& optionTable() {
  static const std::vector<OptionInfo> table = [] {
    std::vector<OptionInfo> rows = {
#define X(kind, field, suffix, preset, min, max, unit, doc) \
  OptionInfo{                                               \
      OptionKind::kind,                                     \
      #field,                                               \
      "TORCH_RESILIENT_" #suffix,                           \
      "",                                                   \
      min,                                                  \
      max,                                                  \
      unit,                                                 \
      doc,                                                  \
      &EngineOptions::field},
#include "base/options.def"
#undef X
    };
    const EngineOptions defaults;
    for (OptionInfo& row : rows) {
      row.defaultText = valueText(row, defaults);
    }
    return rows;
  }();
  return table;
}

EngineOptions EngineOptions::fromEnvironment() {
  EngineOptions options;
  for (const OptionInfo& option : optionTable()) {
    const char* text = std::getenv(option.variable.c_str());
    // An empty site is a value: no sites. The others count as not set.
    const bool given = text != nullptr &&
        (*text != '\0' || option.member == OptionMember(&EngineOptions::site));
    if (given && !assign(option, options, text)) {
      reject(option, option.variable, text);
    }
  }
  options.validate();
  const std::vector<std::string> known = knownVariables();
  for (const std::string& variable : unknownVariables()) {
    logMessage(
        LogLevel::kWarning,
        "the environment sets " + variable +
            ", which nothing reads: " + suggestion(variable, known));
  }
  return options;
}

void EngineOptions::setFromString(
    std::string_view name,
    std::string_view text) {
  const OptionInfo& option = find(name);
  if (!assign(option, *this, text)) {
    reject(option, option.name, text);
  }
}

std::string EngineOptions::getAsString(std::string_view name) const {
  return valueText(find(name), *this);
}

// The checks of single fields come first, so the relations are compared only
// between values that are in their bounds. Lists for sites are parsed here and
// thrown away: the engine parses them again.
void EngineOptions::validate() const {
  for (const OptionInfo& option : optionTable()) {
    if (!acceptable(option, *this)) {
      reject(option, option.name, valueText(option, *this));
    }
  }
  if (suspect_after_s > stall_timeout_s) {
    invalid(
        "suspect_after_s=" + numberText(suspect_after_s) +
        " exceeds stall_timeout_s=" + numberText(stall_timeout_s) +
        ": lower the first or raise the second");
  }
  if (reconnect_min_s > reconnect_max_s) {
    invalid(
        "reconnect_min_s=" + numberText(reconnect_min_s) +
        " exceeds reconnect_max_s=" + numberText(reconnect_max_s) +
        ": lower the first or raise the second");
  }
  if (!site.empty() && !isSiteName(site)) {
    invalid(
        "site=\"" + site.substr(0, 80) +
        "\" (TORCH_RESILIENT_SITE): expected up to 64 letters, digits, '.', "
        "'_' and '-'");
  }
  if (!SiteNumbers::parse(wan_rate_limit, kMinRateLimit, kMaxRateLimit)) {
    invalid(
        "wan_rate_limit=\"" + wan_rate_limit.substr(0, 200) +
        "\" (TORCH_RESILIENT_WAN_RATE_LIMIT): expected bytes per second from " +
        std::to_string(kMinRateLimit) +
        ", such as 50M (K, M, G stand for KiB, MiB, GiB), or a list such as "
        "eu-west=50M,*=1G with each site once");
  }
  if (!SiteNumbers::parse(wan_dscp, 0, kMaxDscp)) {
    invalid(
        "wan_dscp=\"" + wan_dscp.substr(0, 200) +
        "\" (TORCH_RESILIENT_WAN_DSCP): expected a number from 0 to " +
        std::to_string(kMaxDscp) +
        ", or a list such as eu-west=10,*=0 with each site once");
  }
  if (!SiteNumbers::parseWords(wan, kWanTransports)) {
    invalid(
        "wan=\"" + wan.substr(0, 200) +
        "\" (TORCH_RESILIENT_WAN): expected auto, tcp or udp, or a list "
        "such as eu-west=udp,*=tcp with each site once");
  }
  if (rdma_gid_index != "auto" && !gidIndex()) {
    reject(find("rdma_gid_index"), "rdma_gid_index", rdma_gid_index);
  }
  if (encryption == "required" && rdma == "required") {
    invalid(
        "encryption=required (TORCH_RESILIENT_ENCRYPTION) excludes "
        "rdma=required (TORCH_RESILIENT_RDMA): an RDMA device sends plaintext; "
        "leave one of them at auto");
  }
  const int certificateFiles =
      !tls_cert.empty() + !tls_key.empty() + !tls_ca.empty();
  if (certificateFiles != 0 && certificateFiles != 3) {
    invalid(
        "tls_cert, tls_key and tls_ca (TORCH_RESILIENT_TLS_CERT, _TLS_KEY, "
        "_TLS_CA) need each other: set all three, or none");
  }
  if (certificateFiles != 0 && encryption == "off") {
    invalid(
        "tls_cert (TORCH_RESILIENT_TLS_CERT) is set, and encryption=off "
        "(TORCH_RESILIENT_ENCRYPTION) makes no use of it: unset one");
  }
  if (certificateFiles != 0 && secret.empty() && secret_file.empty()) {
    invalid(
        "tls_cert (TORCH_RESILIENT_TLS_CERT) needs a secret of the job's own, "
        "too: a certificate proves which host it is, the secret that it is of "
        "this job (TORCH_RESILIENT_SECRET_FILE)");
  }
  if (!secret.empty() && secret.size() < kSecretBytesMin) {
    invalid(
        "secret (TORCH_RESILIENT_SECRET) has " + std::to_string(secret.size()) +
        " characters: expected at least " + std::to_string(kSecretBytesMin) +
        " random ones, such as \"openssl rand -hex 32\" prints");
  }
  if (!secret.empty() && !secret_file.empty()) {
    invalid(
        "both secret and secret_file are set "
        "(TORCH_RESILIENT_SECRET, TORCH_RESILIENT_SECRET_FILE): unset one");
  }
}

std::optional<uint32_t> EngineOptions::gidIndex() const {
  constexpr int64_t kMax = 255;
  const auto value = parseInteger(trimmed(rdma_gid_index), /*suffixes=*/false);
  return value && *value >= 0 && *value <= kMax
      ? std::optional(static_cast<uint32_t>(*value))
      : std::nullopt;
}

std::string EngineOptions::declaredSite() const {
  return site == kInferSite ? "" : site;
}

bool isSiteName(std::string_view text) {
  return !text.empty() && text.size() <= 64 &&
      std::ranges::all_of(text, [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
            (c >= 'A' && c <= 'Z') || c == '.' || c == '_' || c == '-';
      });
}

std::optional<SiteNumbers>
SiteNumbers::parse(std::string_view text, int64_t min, int64_t max) {
  return parseWith(text, [=](std::string_view number) {
    const auto value = parseInteger(number, /*suffixes=*/true);
    return value && *value >= min && *value <= max ? value : std::nullopt;
  });
}

std::optional<SiteNumbers> SiteNumbers::parseWords(
    std::string_view text,
    std::span<const std::string_view> words) {
  return parseWith(text, [=](std::string_view word) -> std::optional<int64_t> {
    const auto at = std::ranges::find(words, word);
    return at == words.end() ? std::nullopt
                             : std::optional<int64_t>(at - words.begin());
  });
}

std::optional<SiteNumbers> SiteNumbers::parseWith(
    std::string_view text,
    const ParseValue& parseValue) {
  SiteNumbers result;
  if (trimmed(text).empty()) {
    return result;
  }
  for (bool last = false; !last;) {
    const size_t comma = text.find(',');
    last = comma == std::string_view::npos;
    std::string_view number = trimmed(text.substr(0, comma));
    std::string_view site = "*";
    if (const size_t equals = number.find('=');
        equals != std::string_view::npos) {
      site = trimmed(number.substr(0, equals));
      number = trimmed(number.substr(equals + 1));
    }
    const auto value = parseValue(number);
    if (!value || result.named(site) || (site != "*" && !isSiteName(site))) {
      return std::nullopt;
    }
    result.numbers_.emplace_back(site, *value);
    text.remove_prefix(last ? text.size() : comma + 1);
  }
  return result;
}

std::optional<int64_t> SiteNumbers::named(std::string_view site) const {
  for (const auto& [name, value] : numbers_) {
    if (name == site) {
      return value;
    }
  }
  return std::nullopt;
}

std::vector<std::string> SiteNumbers::sites() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : numbers_) {
    if (name != "*") {
      names.push_back(name);
    }
  }
  return names;
}

std::vector<std::string> unknownVariables() {
  const std::vector<std::string> known = knownVariables();
  std::vector<std::string> unknown;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (name.starts_with(kPrefix) &&
        std::ranges::find(known, name) == known.end()) {
      unknown.emplace_back(name);
    }
  }
  std::ranges::sort(unknown);
  return unknown;
}

std::string noSuchOption(std::string_view name) {
  std::vector<std::string> names;
  for (const OptionInfo& option : optionTable()) {
    names.push_back(option.name);
  }
  return "there is no option \"" + std::string(name) +
      "\": " + suggestion(lower(name), names);
}

} // namespace resilient

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace resilient {

// Anyone who hears a handshake can try guesses at the secret. The least length
// keeps short passwords out. It does not make a longer one random, which the
// user has to see to.
inline constexpr size_t kSecretBytesMin = 16;

// Every setting of the engine, with its default. The fields, their meaning
// and their bounds are in options.def. A field bears the same name here, in
// Python, in docs/options.md and (in capitals) in the environment. A plain
// value without a lock. The engine copies it when it starts, so later changes
// reach later engines only.
struct EngineOptions {
#define RESILIENT_FIELD_Bytes int64_t
#define RESILIENT_FIELD_Count int64_t
#define RESILIENT_FIELD_AutoCount int64_t
#define RESILIENT_FIELD_Seconds double
#define RESILIENT_FIELD_Flag bool
#define RESILIENT_FIELD_Text std::string
#define RESILIENT_FIELD_Choice std::string
#define RESILIENT_FIELD_Secret std::string
#define X(kind, field, suffix, preset, min, max, unit, doc) \
  RESILIENT_FIELD_##kind field = preset;
#include "base/options.def"
#undef X
#undef RESILIENT_FIELD_Bytes
#undef RESILIENT_FIELD_Count
#undef RESILIENT_FIELD_AutoCount
#undef RESILIENT_FIELD_Seconds
#undef RESILIENT_FIELD_Flag
#undef RESILIENT_FIELD_Text
#undef RESILIENT_FIELD_Choice
#undef RESILIENT_FIELD_Secret

  // The defaults, changed by every TORCH_RESILIENT_* variable that is set and
  // not empty (TORCH_RESILIENT_SITE: that is set). Throws
  // StatusError(kInvalidArgument), which names the
  // variable, its value (not that of a secret) and what would be right. Reads
  // the environment without a lock, as getenv() does: no other thread may
  // change it meanwhile.
  static EngineOptions fromEnvironment();

  // Sets one field from text, in the form the environment uses: "64M" for
  // bytes, "0.5" for seconds, "true" for flags. Throws
  // StatusError(kInvalidArgument) if there is no such field, or the text is
  // no such value, or it is out of bounds; the field is then unchanged.
  void setFromString(std::string_view name, std::string_view text);

  // The field as text that setFromString takes back. A secret that is set reads
  // "(set)". Throws StatusError(kInvalidArgument) for an unknown field. Unlike
  // other texts, that one cannot be passed back.
  std::string getAsString(std::string_view name) const;

  // `rdma_gid_index`; nothing if it is auto.
  std::optional<uint32_t> gidIndex() const;

  // `encryption` as it works out: off without a secret of the job's own.
  std::string effectiveEncryption() const {
    return secret.empty() && encryption == "auto" ? "off" : encryption;
  }

  // `site`, or empty if it is not declared.
  std::string declaredSite() const;

  // Checks the bounds of all fields and the relations between them; throws
  // StatusError(kInvalidArgument). For options that were assigned directly.
  void validate() const;
};

// The value of `site` that leaves it to the group to find out.
inline constexpr std::string_view kInferSite = "auto";

// 1 to 64 letters, digits, '.', '_' and '-'.
bool isSiteName(std::string_view text);

// Numbers for sites, as wan_rate_limit and wan_dscp have them:
// "eu-west=50M, *=1G", where * stands for all that are not named, or one number
// alone, which is the same as * with it.
//
// An immutable value after parsing. Look-ups are linear: lists have a few
// entries.
class SiteNumbers {
 public:
  // Nothing if the text is malformed, names a site twice or has a number out
  // of bounds. An empty text has no numbers.
  static std::optional<SiteNumbers>
  parse(std::string_view text, int64_t min, int64_t max);
  // The same with words for the numbers 0, 1, ...: "tcp, eu-west=udp".
  static std::optional<SiteNumbers> parseWords(
      std::string_view text,
      std::span<const std::string_view> words);

  // The number written for this very name, "*" included; nothing if it is not
  // there.
  std::optional<int64_t> named(std::string_view site) const;
  // The sites that have numbers of their own.
  std::vector<std::string> sites() const;
  // Some site has this number.
  bool has(int64_t number) const {
    return std::ranges::any_of(
        numbers_, [&](const auto& n) { return n.second == number; });
  }
  // The value for all others.
  std::optional<int64_t> other() const {
    return named("*");
  }
  std::optional<int64_t> of(std::string_view site) const {
    const auto number = named(site);
    return number ? number : other();
  }
  // The same, but the others do not include `own`, our site, unless it is
  // empty: then no sites are declared.
  std::optional<int64_t> beyond(std::string_view own, std::string_view site)
      const {
    return site == own && !own.empty() ? named(site) : of(site);
  }

 private:
  using ParseValue =
      std::function<std::optional<int64_t>(std::string_view text)>;
  static std::optional<SiteNumbers> parseWith(
      std::string_view text,
      const ParseValue& value);

  std::vector<std::pair<std::string, int64_t>> numbers_;
};

// The transport to other hosts, and the words of the option wan for them.
enum class WanTransport : uint8_t {
  kAuto, // both: each message over what brings it there first
  kTcp,
  kUdp,
};
inline constexpr std::array<std::string_view, 3> kWanTransports{
    "auto",
    "tcp",
    "udp"};

// The bounds of a number in wan_rate_limit and in wan_dscp.
inline constexpr int64_t kMinRateLimit = 16 << 10; // bytes per second
inline constexpr int64_t kMaxRateLimit = int64_t{1} << 50;
inline constexpr int64_t kMaxDscp = 63;

enum class OptionKind : uint8_t {
  Bytes,
  Count,
  AutoCount,
  Seconds,
  Flag,
  Text,
  Choice,
  Secret,
};

// The kind of an option decides which of these types its field has: see the
// macros in EngineOptions.
using OptionMember = std::variant<
    int64_t EngineOptions::*,
    double EngineOptions::*,
    bool EngineOptions::*,
    std::string EngineOptions::*>;

// One row of options.def.
struct OptionInfo {
  OptionKind kind;
  std::string name;
  std::string variable; // "TORCH_RESILIENT_CHUNK_BYTES"
  std::string defaultText; // as getAsString gives it
  double min = 0, max = 0; // bounds of a number, both included
  std::string unit;
  std::string doc;
  OptionMember member;
};

// All options, in the order of the table. Built on first use, thread-safe;
// never changes afterwards.
const std::vector<OptionInfo>& optionTable();

// Variables that begin with TORCH_RESILIENT_ and that nothing reads: most
// likely misspelled. fromEnvironment() logs them as a warning.
std::vector<std::string> unknownVariables();

// 'there is no option "linger": did you mean linger_s? ...', for a name that is
// in no row of the table.
std::string noSuchOption(std::string_view name);

} // namespace resilient

#include "datagram/recovery.h"

#include <charconv>

#include "base/options.h"

namespace resilient {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') {
    text.remove_prefix(1);
  }
  while (!text.empty() && text.back() == ' ') {
    text.remove_suffix(1);
  }
  return text;
}

// Takes the text before the first `border` off, and the border; all, if there
// is none.
std::string_view cut(std::string_view& text, char border) {
  const size_t at = text.find(border);
  const std::string_view front = trimmed(text.substr(0, at));
  text =
      at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return front;
}

bool parseCount(std::string_view text, int min, int max, int& value) {
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && at == end && value >= min && value <= max;
}

std::optional<RecoveryScheme> parseScheme(std::string_view text) {
  RecoveryScheme scheme;
  const bool bare = text.find(':') == std::string_view::npos;
  const std::string_view name = cut(text, ':');
  if (name == "semantic" && bare) {
    return scheme;
  }
  if (name == "selective_repeat" && bare) {
    scheme.kind = RecoveryKind::kSelectiveRepeat;
    return scheme;
  }
  if (name == "uniform_fec") {
    scheme.kind = RecoveryKind::kUniformFec;
    const std::string_view data = cut(text, ':');
    // A block holds at most 100 data symbols, and no more parity than data.
    if (parseCount(data, 1, 100, scheme.data) &&
        parseCount(trimmed(text), 1, scheme.data, scheme.parity)) {
      return scheme;
    }
  }
  return std::nullopt;
}

int parseClass(std::string_view name) {
  for (size_t c = 0; c < kTrafficClassCount; ++c) {
    if (name == trafficClassName(static_cast<TrafficClass>(c))) {
      return static_cast<int>(c);
    }
  }
  return -1;
}

} // namespace

std::optional<RecoveryTable> RecoveryTable::parse(
    std::string_view text,
    ParityKind code) {
  RecoveryTable table;
  table.base_.code = code;
  if (trimmed(text).ends_with(',')) {
    return std::nullopt;
  }
  while (!trimmed(text).empty()) {
    std::string_view entry = cut(text, ',');
    std::string_view where = "*";
    if (entry.find('=') != std::string_view::npos) {
      where = cut(entry, '=');
    }
    auto scheme = parseScheme(entry);
    const bool classNamed = where.find('/') != std::string_view::npos;
    const std::string_view site = cut(where, '/');
    const int cls = classNamed ? parseClass(trimmed(where)) : -1;
    const bool anySite = site == "*" || (site.empty() && classNamed);
    if (!scheme || (classNamed && cls < 0) || (!anySite && !isSiteName(site))) {
      return std::nullopt;
    }
    scheme->code = code;
    const auto key =
        std::pair(anySite ? std::string() : std::string(site), cls);
    if (!table.schemes_.emplace(key, *scheme).second) {
      return std::nullopt;
    }
  }
  return table;
}

RecoverySchemes RecoveryTable::of(const std::string& site) const {
  RecoverySchemes schemes;
  for (size_t c = 0; c < kTrafficClassCount; ++c) {
    const int cls = static_cast<int>(c);
    schemes[c] = base_;
    // From the least exact to the most.
    for (const auto& key :
         {std::pair(std::string(), -1),
          std::pair(std::string(), cls),
          std::pair(site, -1),
          std::pair(site, cls)}) {
      if (const auto at = schemes_.find(key); at != schemes_.end()) {
        schemes[c] = at->second;
      }
    }
  }
  return schemes;
}

} // namespace resilient

#include "base/text.h"

#include <cstddef>
#include <cstdint>

namespace resilient {
namespace {

// The length of the code point that `text` begins with; 0: not UTF-8.
//
// Strict: overlong forms, surrogates and values above U+10FFFF are no UTF-8. An
// overlong form could hide a control character from the check below.
size_t codePointBytes(std::string_view text, uint32_t& point) {
  const auto byte = [&](size_t i) {
    return static_cast<uint8_t>(i < text.size() ? text[i] : 0);
  };
  const uint8_t lead = byte(0);
  size_t bytes = 0;
  uint32_t min = 0;
  if (lead < 0x80) {
    point = lead;
    return 1;
  } else if ((lead & 0xe0) == 0xc0) {
    bytes = 2;
    min = 0x80;
    point = lead & 0x1f;
  } else if ((lead & 0xf0) == 0xe0) {
    bytes = 3;
    min = 0x800;
    point = lead & 0x0f;
  } else if ((lead & 0xf8) == 0xf0) {
    bytes = 4;
    min = 0x10000;
    point = lead & 0x07;
  } else {
    return 0;
  }
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) {
      return 0;
    }
    point = point << 6 | (byte(i) & 0x3f);
  }
  const bool surrogate = point >= 0xd800 && point <= 0xdfff;
  return point < min || point > 0x10ffff || surrogate ? 0 : bytes;
}

} // namespace

std::string withoutControls(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    uint32_t point = 0;
    const size_t bytes = codePointBytes(text, point);
    if (bytes == 0) {
      clean += '?';
      text.remove_prefix(1);
      continue;
    }
    // The last two separate lines and paragraphs.
    const bool control = point < 0x20 || (point >= 0x7f && point <= 0x9f) ||
        point == 0x2028 || point == 0x2029;
    clean += control ? std::string_view(" ") : text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return clean;
}

} // namespace resilient

#include "base/text.h"

#include "tests/check.h"
#include "wire/control.h"

namespace resilient {
namespace {

TEST(text_loses_its_control_characters_only) {
  CHECK_EQ(withoutControls("a\nb\x1b[2J\x07\x7f c"), "a b [2J   c");
  CHECK_EQ(
      withoutControls("gr\xc3\xbc\xc3\x9f \xf0\x9f\x9a\x80"),
      "gr\xc3\xbc\xc3\x9f \xf0\x9f\x9a\x80");
  // CSI as one character, and what ends a line elsewhere.
  CHECK_EQ(
      withoutControls(
          "\xc2\x9b"
          "2J\xc2\x85|\xe2\x80\xa8|"),
      " 2J | |");
}

TEST(text_becomes_valid_utf8) {
  CHECK_EQ(
      withoutControls(
          "\x9b"
          "2J"),
      "?2J"); // CSI in one byte
  CHECK_EQ(withoutControls("a\xc3"), "a?"); // cut
  CHECK_EQ(withoutControls("\xe2\x28\xa1"), "?(?");
  CHECK_EQ(withoutControls("\xc0\x9b|\xe0\x82\x9b"), "??|???"); // too long
  CHECK_EQ(withoutControls("\xed\xa0\x80"), "???"); // half a pair
  CHECK_EQ(withoutControls("\xf8\xff"), "??");
  CHECK_EQ(withoutControls(std::string_view("\0x", 2)), " x");
}

// Texts of a peer reach exceptions, logs and dumps.
TEST(text_of_a_peer_has_no_control_characters) {
  const std::string hostile = "up\n[resilient rank 0 E] \x1b[2J\x9b";
  const std::string tame = "up [resilient rank 0 E]  [2J?";
  Notice notice;
  notice.text = hostile;
  CHECK_EQ(decodeNotice(encode(notice))->text, tame);
  Report report;
  report.pending = hostile;
  CHECK_EQ(decodeReport(encode(report))->pending, tame);
  PathsLost lost;
  lost.reason = hostile;
  CHECK_EQ(decodePathsLost(encode(lost))->reason, tame);
  const Status status =
      decodeReason(encodeReason(StatusCode::kMismatch, hostile));
  CHECK_EQ(status.message(), tame);
}

} // namespace
} // namespace resilient

#pragma once

#include <string>
#include <string_view>

namespace resilient {

// Text of a peer, of the store or of another process, fit for a terminal, a
// log and Python: valid UTF-8 on one line. Each control character becomes a
// space, each byte that is no UTF-8 a question mark. The result is never longer
// than `text`, and a second call changes nothing.
std::string withoutControls(std::string_view text);

} // namespace resilient

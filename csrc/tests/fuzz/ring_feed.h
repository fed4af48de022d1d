#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "tests/fuzz/fuzz_input.h"
#include "transport/shared_memory.h"

namespace resilient::test {

// Lets a peer write what it likes into the words of shared rings, decided by
// arbitrary bytes, while we write and read there. We touch nothing outside the
// rings, and the counts of one end never go back.
//
// A program of steps: put, publish, look, take out, and words of the peer,
// right ones among them.
class RingFeed : private FuzzInput {
 public:
  RingFeed(std::span<const uint8_t> input, SharedMemory& memory)
      : FuzzInput("ring feed", input),
        memory_(memory),
        out_(memory, 0),
        in_(memory, 0) {
    // The memory is used again and again: making it costs most.
    for (int writer : {0, 1}) {
      memory.ring(writer).written = 0;
      memory.ring(writer).read = 0;
      memory.ring(writer).done = 0;
    }
  }

  void run() {
    while (!input_.empty() && !refused_) {
      step();
    }
  }
  // The peer has claimed the impossible, and we have noticed.
  bool refused() const {
    return refused_;
  }
  uint64_t taken() const {
    return in_.read();
  }

 private:
  uint64_t number() {
    return numberOr([this](uint64_t b) { return memory_.ringBytes() - b; });
  }

  void step() {
    SharedMemory::Ring& ours = memory_.ring(0);
    SharedMemory::Ring& theirs = memory_.ring(1);
    switch (byte() % 10) {
      case 0: {
        const std::array<std::byte, 4096> piece{};
        const size_t room = out_.room();
        require(room <= out_.capacity(), "there is more room than ring");
        const size_t n = out_.put(
            piece.data(), std::min<uint64_t>(number() * 64, piece.size()));
        require(n <= room, "more is put than there is room for");
        break;
      }
      case 1:
        out_.publish();
        break;
      case 2: {
        const auto before = std::pair(out_.read(), out_.done());
        refused_ = !out_.refresh();
        require(
            out_.read() >= before.first && out_.done() >= before.second &&
                out_.done() <= out_.read() && out_.read() <= out_.written(),
            "counts of the writer go back, or cross");
        break;
      }
      case 3:
      case 4: {
        std::span<const std::byte> bytes;
        if (!in_.peek(bytes)) {
          refused_ = true;
          break;
        }
        require(
            bytes.empty() ||
                (bytes.data() >= memory_.data(1) &&
                 bytes.data() + bytes.size() <=
                     memory_.data(1) + memory_.ringBytes()),
            "the reader looks outside the ring");
        in_.pop(std::min<uint64_t>(number() * 64, bytes.size()));
        break;
      }
      case 5:
        in_.finish();
        break;
      // The peer, as it should be,
      case 6:
        ours.read = out_.written();
        break;
      case 7:
        theirs.written =
            in_.read() + std::min<uint64_t>(number() * 64, memory_.ringBytes());
        break;
      // or as it likes.
      case 8:
        (byte() % 2 == 0 ? ours.done : ours.read) = number();
        break;
      case 9:
        (byte() % 4 == 0 ? theirs.written : ours.written) =
            in_.read() + number();
        break;
    }
  }

  SharedMemory& memory_;
  RingWriter out_;
  RingReader in_;
  bool refused_ = false;
};

} // namespace resilient::test

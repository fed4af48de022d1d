#include "delegate/path_set.h"

#include <memory>
#include <utility>
#include <vector>

#include "tests/channel_pair.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

class NoOwner final : public PathOwner {
 public:
  void onPathClosed(Path&, const Status&) override {}
  void onPathReady(Path&) override {}
  void onPathUse(Path&) override {}
};

// Takes all of `frames`, which stand for those of the channel.
class TakingPath final : public Path {
 public:
  TakingPath(PathId id, Channel& channel, PathOwner& owner, size_t& frames)
      : Path(PathKind::kDatagram, id, channel, owner), frames_(frames) {}

  bool hasRoom() const override {
    return true;
  }
  size_t takeFrame(bool) override {
    if (frames_ == 0) {
      return 0;
    }
    --frames_;
    ++taken;
    return 1;
  }
  bool flush() override {
    return false;
  }
  void close(const Status&) override {}
  TimePoint heardAt() const override {
    return {};
  }
  void faultsChanged(bool) override {}

  size_t taken = 0;

 private:
  size_t& frames_;
};

// Or a path that has come back would never show what it carries.
TEST(path_set_gives_a_new_path_what_the_older_one_could_hold_alone) {
  ChannelPair pair;
  NoOwner owner;
  PathSet paths(pair.a.channel);
  size_t frames = 0;
  std::vector<TakingPath*> each;
  for (const PathId id : {1, 2, 3}) {
    auto path = std::make_unique<TakingPath>(id, pair.a.channel, owner, frames);
    each.push_back(path.get());
    paths.add(std::move(path));
  }
  for (int message = 0; message < 6; ++message) {
    frames = 5;
    paths.pump(nullptr, pair.now);
    CHECK_EQ(frames, 0u);
  }
  for (const TakingPath* path : each) {
    CHECK_EQ(path->taken, 10u);
  }
}

} // namespace
} // namespace resilient::test

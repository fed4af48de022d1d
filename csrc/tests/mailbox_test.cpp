#include "channel/mailbox.h"

#include "tests/channel_pair.h"

namespace resilient::test {
namespace {

constexpr uint64_t kGroup = 1;

OpSignature signature(OpKind kind, uint64_t count = 4) {
  OpSignature s;
  s.kind = kind;
  s.count = count;
  return s;
}

struct ExactSend : TestSend {
  ExactSend(
      std::string_view text,
      uint64_t sequence,
      uint64_t order,
      const OpSignature& s)
      : TestSend(text, kCollectiveBit | sequence) {
    pointToPoint = false;
    key.order = order;
    signature = s;
  }
};

struct ExactRecv : TestRecv {
  ExactRecv(Channel* from, size_t size, uint64_t sequence, uint64_t order)
      : TestRecv(from, size, kCollectiveBit | sequence) {
    ordered = false;
    key.order = order;
  }
};

TEST(mailbox_keeps_the_order_of_a_tag) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend one("one"), two("two"), other("xyz", 5);
  pair.a.channel.send(&one, pair.now);
  pair.a.channel.send(&two, pair.now);
  pair.a.channel.send(&other, pair.now);
  const auto first = pair.take(pair.a, 1);
  CHECK(pair.move(pair.a, 2).has_value()); // the second overtakes
  TestRecv r1(&pair.b.channel, 3), r2(&pair.b.channel, 3);
  TestRecv r3(&pair.b.channel, 3, 5);
  pair.b.mailbox.post(&r1);
  pair.b.mailbox.post(&r2);
  pair.b.mailbox.post(&r3);
  pair.b.completions.drain();
  CHECK_EQ(r1.ends + r2.ends, 0);
  CHECK(pair.give(pair.b, 1, *first).ok());
  pair.settle({1, 2});
  CHECK_EQ(r1.content, "one");
  CHECK_EQ(r2.content, "two");
  CHECK_EQ(r3.content, "xyz");
  pair.checkEmpty();
}

TEST(mailbox_any_source_takes_turns_by_post) {
  ChannelPair pair;
  pair.up(1);
  TestRecv any(nullptr, 3), exact(&pair.b.channel, 3), any2(nullptr, 3);
  for (TestRecv* r : {&any, &exact, &any2}) {
    pair.b.mailbox.post(r);
  }
  TestSend s1("111"), s2("222"), s3("333");
  for (TestSend* s : {&s1, &s2, &s3}) {
    pair.a.channel.send(s, pair.now);
  }
  pair.settle({1});
  CHECK_EQ(any.content, "111");
  CHECK_EQ(exact.content, "222");
  CHECK_EQ(any2.content, "333");
  CHECK(any.matchedSource == &pair.b.channel);
}

TEST(mailbox_receive_of_the_wrong_kind_fails_on_both_sides) {
  ChannelPair pair;
  pair.up(1);
  TestSend size(text(300)), dtype(text(300)), good(text(300));
  dtype.signature.dtype = DType::kFloat32;
  TestRecv r1(&pair.b.channel, 301), r2(&pair.b.channel, 300),
      r3(&pair.b.channel, 300);
  r2.signature.dtype = DType::kInt32;
  for (TestSend* s : {&size, &dtype, &good}) {
    pair.a.channel.send(s, pair.now);
  }
  for (TestRecv* r : {&r1, &r2, &r3}) {
    pair.b.mailbox.post(r);
  }
  pair.settle({1});
  for (const Status& s : {size.status, dtype.status, r1.status, r2.status}) {
    CHECK_EQ(s.code(), StatusCode::kMismatch);
  }
  CHECK_CONTAINS(r1.status.message(), "300 bytes");
  CHECK_CONTAINS(size.status.message(), "301 bytes");
  CHECK_CONTAINS(r2.status.message(), "float32");
  CHECK_EQ(r3.content, text(300)); // those after it are not hurt
  CHECK(good.status.ok());
  pair.checkEmpty();
}

TEST(mailbox_cancelled_receive_leaves_its_message) {
  ChannelPair pair;
  pair.up(1);
  auto gone = std::make_unique<TestRecv>(&pair.b.channel, 3);
  pair.b.mailbox.post(gone.get());
  pair.b.mailbox.cancel(gone.get(), "over");
  gone.reset();
  TestSend send("abc");
  pair.a.channel.send(&send, pair.now);
  TestRecv next(&pair.b.channel, 3);
  pair.b.mailbox.post(&next);
  pair.settle({1});
  CHECK_EQ(next.content, "abc");
  pair.checkEmpty();
}

TEST(mailbox_cancel_while_arriving_tells_the_sender) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(300)), second(text(300, 2));
  auto gone = std::make_unique<TestRecv>(&pair.b.channel, 300);
  pair.b.mailbox.post(gone.get());
  pair.a.channel.send(&send, pair.now);
  pair.a.channel.send(&second, pair.now);
  const auto frame = pair.take(pair.a, 1);
  CHECK(pair.begin(pair.b, 1, *frame).ok()); // half in the user's buffer
  CHECK(pair.b.channel.destination(1) == gone->data);
  pair.b.mailbox.cancel(gone.get(), "over");
  gone.reset();
  CHECK(pair.finish(pair.b, 1, *frame).ok());
  TestRecv next(&pair.b.channel, 300);
  pair.b.mailbox.post(&next);
  pair.settle({1});
  CHECK_EQ(send.status.code(), StatusCode::kAborted);
  CHECK_EQ(send.status.message(), "over");
  CHECK_EQ(next.content, text(300, 2));
  pair.checkEmpty();
}

TEST(mailbox_cancel_of_what_has_ended_is_silent) {
  ChannelPair pair;
  pair.up(1);
  TestSend send("abc");
  TestRecv recv(&pair.b.channel, 3);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value()); // whole, its owner not told yet
  pair.b.mailbox.cancel(&recv, "over");
  pair.settle({1});
  CHECK_EQ(recv.ends, 0);
  CHECK(send.status.ok());
  pair.checkEmpty();
}

TEST(mailbox_exact_messages_match_by_name) {
  ChannelPair pair;
  pair.up(1);
  const OpSignature s = signature(OpKind::kAllReduce);
  ExactSend s1("bbb", 7, 1, s), s0("aaa", 7, 0, s), early("ccc", 8, 0, s);
  pair.a.channel.send(&s1, pair.now);
  pair.a.channel.send(&s0, pair.now);
  pair.a.channel.send(&early, pair.now);
  pair.settle({1}); // before anything of it is known here
  ExactRecv r0(&pair.b.channel, 3, 7, 0), r1(&pair.b.channel, 3, 7, 1);
  ExactRecv r2(&pair.b.channel, 3, 8, 0);
  pair.b.mailbox.begin(kGroup, 7, s);
  pair.b.mailbox.post(&r0);
  pair.b.mailbox.post(&r1);
  pair.b.mailbox.begin(kGroup, 8, s);
  pair.b.mailbox.post(&r2);
  pair.settle({1});
  CHECK_EQ(r0.content, "aaa");
  CHECK_EQ(r1.content, "bbb");
  CHECK_EQ(r2.content, "ccc");
  pair.b.mailbox.end(kGroup, 7, Status());
  pair.b.mailbox.end(kGroup, 8, Status());
  CHECK_EQ(pair.b.mismatches, 0);
  pair.checkEmpty();
}

TEST(mailbox_mismatch_before_begin) {
  ChannelPair pair;
  pair.up(1);
  ExactSend send("aaa", 3, 0, signature(OpKind::kBroadcast));
  pair.a.channel.send(&send, pair.now);
  pair.settle({1});
  CHECK_EQ(pair.b.mismatches, 0); // nobody knows yet
  pair.b.mailbox.begin(kGroup, 3, signature(OpKind::kAllReduce));
  CHECK_EQ(pair.b.mismatches, 1);
  CHECK_EQ(pair.b.lastLocal.kind, OpKind::kAllReduce);
  CHECK_EQ(pair.b.lastRemote.kind, OpKind::kBroadcast);
  pair.settle({1});
  pair.checkEmpty();
}

TEST(mailbox_mismatch_after_begin) {
  ChannelPair pair;
  pair.up(1);
  pair.b.mailbox.begin(kGroup, 3, signature(OpKind::kAllReduce));
  ExactRecv recv(&pair.b.channel, 300, 3, 0);
  pair.b.mailbox.post(&recv);
  ExactSend send(text(300), 3, 0, signature(OpKind::kAllReduce, 5));
  pair.a.channel.send(&send, pair.now);
  pair.settle({1});
  CHECK_EQ(pair.b.mismatches, 1);
  CHECK_EQ(send.status.code(), StatusCode::kMismatch);
  CHECK_CONTAINS(send.status.message(), "uint8[5]");
  CHECK_CONTAINS(send.status.message(), "uint8[4]");
  CHECK_EQ(recv.ends, 0); // its collective decides
  pair.b.mailbox.end(kGroup, 3, Status(StatusCode::kMismatch, "no"));
  pair.settle({1});
  CHECK_EQ(recv.status.message(), "no");
  pair.checkEmpty();
}

TEST(mailbox_refuses_stragglers_with_the_reason) {
  ChannelPair pair;
  pair.up(1);
  const OpSignature s = signature(OpKind::kAllReduce);
  pair.b.mailbox.begin(kGroup, 1, s);
  pair.b.mailbox.end(kGroup, 1, Status(StatusCode::kTimeout, "too late"));
  ExactSend same(text(300), 1, 0, s);
  pair.a.channel.send(&same, pair.now);
  pair.settle({1});
  CHECK_EQ(same.status.code(), StatusCode::kTimeout);
  CHECK_EQ(same.status.message(), "too late");
  ExactSend other(text(300), 1, 1, signature(OpKind::kBarrier));
  pair.a.channel.send(&other, pair.now);
  pair.settle({1});
  CHECK_EQ(other.status.code(), StatusCode::kMismatch);
  CHECK_EQ(pair.b.mismatches, 1);
  // The reasons are kept for a number of collectives only.
  for (uint64_t n = 2; n < 600; ++n) {
    pair.b.mailbox.begin(kGroup, n, s);
    pair.b.mailbox.end(kGroup, n, Status());
  }
  ExactSend old(text(300), 1, 2, s);
  pair.a.channel.send(&old, pair.now);
  pair.settle({1});
  CHECK_EQ(old.status.code(), StatusCode::kAborted);
  CHECK_CONTAINS(old.status.message(), "long ago");
  pair.checkEmpty();
}

TEST(mailbox_closed_group_takes_nothing) {
  ChannelPair pair;
  pair.up(1);
  TestSend before(text(300)), after(text(300));
  TestRecv waiting(&pair.b.channel, 5, 9), late(&pair.b.channel, 5, 9);
  pair.a.channel.send(&before, pair.now);
  pair.b.mailbox.post(&waiting);
  CHECK(pair.move(pair.a, 1).has_value());
  pair.b.mailbox.closeGroup(kGroup);
  pair.a.channel.send(&after, pair.now);
  pair.b.mailbox.post(&late); // once waited for ever
  pair.settle({1});
  CHECK_EQ(before.status.code(), StatusCode::kPeerLeft);
  CHECK_EQ(after.status.code(), StatusCode::kPeerLeft);
  CHECK_EQ(waiting.status.code(), StatusCode::kAborted);
  CHECK_EQ(late.status.code(), StatusCode::kAborted);
  pair.checkEmpty();
}

TEST(mailbox_failed_source_fails_its_receives_only) {
  ChannelPair pair;
  pair.up(1);
  TestRecv exact(&pair.b.channel, 3), any(nullptr, 3);
  TestSend arrived("abc", 4);
  TestRecv takes(&pair.b.channel, 3, 4);
  pair.b.mailbox.post(&exact);
  pair.b.mailbox.post(&any);
  pair.a.channel.send(&arrived, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  pair.b.channel.fail(Status(StatusCode::kPeerDied, "it died"));
  pair.b.mailbox.post(&takes); // what is here whole may still be received
  TestRecv late(&pair.b.channel, 3);
  pair.b.mailbox.post(&late);
  pair.b.completions.drain();
  CHECK_EQ(exact.status.message(), "it died");
  CHECK_EQ(late.status.message(), "it died");
  CHECK_EQ(any.ends, 0); // another source may serve it
  CHECK(takes.status.ok());
  CHECK_EQ(takes.content, "abc");
  pair.b.mailbox.cancel(&any, "over");
  pair.a.channel.fail(Status(StatusCode::kAborted, "over"));
  pair.a.completions.drain();
}

} // namespace
} // namespace resilient::test

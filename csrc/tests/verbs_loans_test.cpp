#include "transport/verbs_loans.h"

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/path_contract.h"
#include "tests/verbs_fake.h"

// Loans with two devices in memory, one of which does not answer. What paths do
// with loans is in verbs_path_test.cpp.

namespace resilient {

using namespace std::chrono_literals;

namespace {

struct Lender {
  explicit Lender(VerbsLoans::Limits limits) {
    limits.fromBytes = 1;
    user.run([&] {
      loans = std::make_unique<VerbsLoans>(user.loop, limits);
      for (size_t i = 0; i < devices.size(); ++i) {
        CHECK(fake.open("fake" + std::to_string(i), devices[i]).ok());
        loans->use(devices[i]);
      }
    });
  }
  ~Lender() {
    fake.hang("fake1", false);
    user.run([this] { loans.reset(); });
  }

  VerbsLoans::Loan lend() {
    VerbsLoans::Loan loan = 0;
    user.run([&] { loan = loans->lend({&all, 1}); });
    CHECK(loan != 0);
    return loan;
  }
  // In the loop.
  bool isKnown(size_t device, size_t offset = 0) {
    return loans->find(*devices[device], all.subspan(offset, 100)) != nullptr;
  }
  bool isSettled() const {
    return loans->settled(all) == all.size();
  }

  test::VerbsFake fake;
  std::array<std::shared_ptr<VerbsDevice>, 2> devices;
  test::PathUser user{1};
  std::unique_ptr<VerbsLoans> loans;
  std::vector<std::byte> memory = std::vector<std::byte>(20u << 20);
  std::span<std::byte> all{memory}; // two pieces
};

} // namespace

TEST(verbs_loans_give_up_waiting_for_a_device_that_hangs) {
  VerbsLoans::Limits limits;
  limits.registerWithin = 30ms;
  Lender lender(limits);
  std::atomic<int> told{0};
  const auto onSettled =
      std::make_shared<std::function<void()>>([&] { ++told; });
  lender.user.run([&] { lender.loans->watch(onSettled); });
  lender.fake.hang("fake1", true);
  const VerbsLoans::Loan loan = lender.lend();
  lender.user.until(
      "nobody waits any more", [&] { return lender.isSettled(); });
  CHECK(told > 0);
  // The other device has not waited for it.
  lender.user.until("one device knows it", [&] {
    return lender.isKnown(0) && lender.isKnown(0, 17u << 20);
  });
  lender.user.run([&] { CHECK(!lender.isKnown(1)); });
  // An answer that comes late is of use to the rest of the operation.
  lender.fake.hang("fake1", false);
  lender.user.until("both devices know it", [&] {
    return lender.isKnown(1) && lender.isKnown(1, 17u << 20);
  });
  lender.user.run([&] { lender.loans->end(loan); });
  lender.user.until(
      "it is deregistered", [&] { return lender.fake.memories() == 0; });
}

TEST(verbs_loans_wait_for_a_device_that_hangs_once_only) {
  VerbsLoans::Limits limits;
  limits.registerWithin = 1s;
  Lender lender(limits);
  lender.fake.hang("fake1", true);
  lender.lend();
  lender.user.until("it is given up", [&] { return lender.isSettled(); });
  const auto settlesAtOnce = [&] {
    const auto begin = std::chrono::steady_clock::now();
    lender.lend();
    lender.user.until("it is settled", [&] { return lender.isSettled(); });
    return std::chrono::steady_clock::now() - begin < limits.registerWithin;
  };
  CHECK(settlesAtOnce());
  // It has answered: it is waited for again.
  lender.fake.hang("fake1", false);
  lender.user.until("both devices know it", [&] { return lender.isKnown(1); });
  lender.fake.hang("fake1", true);
  CHECK(!settlesAtOnce());
}

TEST(verbs_loans_wait_for_no_device_that_has_failed) {
  VerbsLoans::Limits limits;
  limits.registerWithin = limits.letGoWithin = 1h;
  Lender lender(limits);
  lender.fake.hang("fake1", true);
  const VerbsLoans::Loan loan = lender.lend();
  lender.user.until("one device knows it", [&] {
    return lender.isKnown(0) && lender.isKnown(0, 17u << 20);
  });
  lender.user.run([&] {
    CHECK(!lender.isSettled());
    lender.loans->drop(*lender.devices[1]);
    CHECK(lender.isSettled());
  });
  const VerbsLoans::Loan next = lender.lend();
  lender.user.until(
      "the next one is settled, too", [&] { return lender.isSettled(); });
  // The failed device may still access the first loan.
  std::atomic<bool> isFirstGone{false}, isNextGone{false};
  lender.user.run([&] {
    lender.loans->revoke(next, [&](const Status& status) {
      CHECK(status.ok());
      isNextGone = true;
    });
    lender.loans->revoke(loan, [&](const Status& status) {
      CHECK(status.ok());
      isFirstGone = true;
    });
  });
  lender.user.until("the other device has let go", [&] {
    return isNextGone && lender.fake.memories() == 0;
  });
  CHECK(!isFirstGone);
  lender.fake.hang("fake1", false);
  lender.user.until("it is gone", [&] { return isFirstGone.load(); });
  lender.user.until(
      "it is deregistered", [&] { return lender.fake.memories() == 0; });
}

TEST(verbs_loans_keep_memory_of_a_device_that_does_not_answer) {
  VerbsLoans::Limits limits;
  limits.letGoWithin = 30ms;
  Lender lender(limits);
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> kept = owner;
  const VerbsLoans::Loan loan = lender.lend();
  lender.user.until(
      "it is registered", [&] { return lender.fake.memories() == 4; });
  lender.fake.hang("fake1", true);
  std::atomic<bool> isGone{false};
  lender.user.run([&] {
    lender.loans->revoke(
        loan,
        [&](const Status& status) {
          CHECK_CONTAINS(status.message(), "an RDMA device does not answer");
          isGone = true;
        },
        [held = std::move(owner)] { return held; });
  });
  lender.user.until("its time is over", [&] { return isGone.load(); });
  lender.user.until("the other device has let go", [&] {
    return lender.fake.memories() == 2;
  });
  CHECK(!kept.expired());
  // Not even the end of the process group frees it.
  lender.user.run([&] { lender.loans.reset(); });
  CHECK(!kept.expired());
  lender.fake.hang("fake1", false);
  lender.user.until("it is free", [&] { return kept.expired(); });
  CHECK_EQ(lender.fake.memories(), 0u);
}

} // namespace resilient

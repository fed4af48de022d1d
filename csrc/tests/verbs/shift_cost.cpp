// What the library of `torch-resilient shift` costs while nothing fails: posts
// and polls with it and without, over a device that answers at once. The two
// alternate, so that both see the same machine.
//
//   shift_cost [ROUNDS]
//
// Prints nanoseconds: the median of all rounds, and the difference. Fails if
// the library has allocated memory.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "shift/data_path.h"
#include "shift/real_verbs.h"
#include "shift/runtime.h"
#include "shift/session.h"

namespace {

using namespace resilient::shift;

std::atomic<uint64_t> allocations{0};
uint64_t allocationsOfLibrary = 0;
constexpr int kBatch = 16;
constexpr int kCalls = 20000;
// Requests that the device has and that have not been polled.
int outstandingSends = 0;
int outstandingReceives = 0;

int fakeSend(ibv_qp*, ibv_send_wr*, ibv_send_wr**) {
  ++outstandingSends;
  return 0;
}

int fakeReceive(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) {
  ++outstandingReceives;
  return 0;
}

int fakePoll(ibv_cq*, int count, ibv_wc* completions) {
  int given = 0;
  for (int* left : {&outstandingSends, &outstandingReceives}) {
    while (given < count && *left > 0) {
      completions[given].status = IBV_WC_SUCCESS;
      completions[given].opcode =
          left == &outstandingSends ? IBV_WC_SEND : IBV_WC_RECV;
      completions[given++].qp_num = 17;
      --*left;
    }
  }
  return given;
}

struct Bench {
  ibv_context context{};
  ibv_qp handle{};
  ibv_cq queue{};
  Device device;
  Cq cq;
  Qp qp{Limits{128, 128, 2, 2, 64}};
  std::vector<uint8_t> memory = std::vector<uint8_t>(4096);

  Bench() {
    context.ops.post_send = fakeSend;
    context.ops.post_recv = fakeReceive;
    context.ops.poll_cq = fakePoll;
    handle.context = queue.context = &context;
    handle.qp_num = 17;
    device.id = 1;
    device.app = &context;
    device.real = context.ops;
    cq.device = qp.device = &device;
    cq.app = &queue;
    qp.app = &handle;
    qp.sendCq = qp.receiveCq = &cq;
    qp.core.setPacketRules(4096, 0);
    runtime().deviceByContext.insert(
        reinterpret_cast<uint64_t>(&context), &device);
    runtime().cqByHandle.insert(reinterpret_cast<uint64_t>(&queue), &cq);
    runtime().qpByHandle.insert(reinterpret_cast<uint64_t>(&handle), &qp);
    runtime().qpByNumber.insert(numberKey(device, 0, 17), &qp);
  }

  void use(bool isProtected) {
    context.ops.post_send = isProtected ? postSend : fakeSend;
    context.ops.post_recv = isProtected ? postReceive : fakeReceive;
    context.ops.poll_cq = isProtected ? pollCq : fakePoll;
  }

  void post(bool isSend) {
    ibv_sge piece{reinterpret_cast<uint64_t>(memory.data()), 4096, 1};
    if (isSend) {
      ibv_send_wr wanted{};
      wanted.sg_list = &piece;
      wanted.num_sge = 1;
      wanted.opcode = IBV_WR_RDMA_WRITE;
      wanted.send_flags = IBV_SEND_SIGNALED;
      ibv_send_wr* bad = nullptr;
      ibv_post_send(&handle, &wanted, &bad);
    } else {
      ibv_recv_wr wanted{1, nullptr, &piece, 1};
      ibv_recv_wr* bad = nullptr;
      ibv_post_recv(&handle, &wanted, &bad);
    }
  }

  int poll() {
    ibv_wc completions[kBatch];
    return ibv_poll_cq(&queue, kBatch, completions);
  }
};

using Clock = std::chrono::steady_clock;

double nanoseconds(Clock::duration time) {
  return std::chrono::duration<double, std::nano>(time).count();
}

double costOfEmptyPolls(Bench& bench) {
  const auto begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) {
    bench.poll();
  }
  return nanoseconds(Clock::now() - begin) / kCalls;
}

// A batch of posts and then their polls; only one of them is timed.
double cost(Bench& bench, bool isSend, bool timesPosts) {
  Clock::duration total{};
  for (int i = 0; i < kCalls / kBatch; ++i) {
    const auto begin = Clock::now();
    for (int k = 0; k < kBatch; ++k) {
      bench.post(isSend);
    }
    const auto middle = Clock::now();
    while (bench.poll() != 0) {
    }
    total += timesPosts ? middle - begin : Clock::now() - middle;
  }
  return nanoseconds(total) / kCalls;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void compare(
    Bench& bench,
    int rounds,
    const char* name,
    const std::function<double(Bench&)>& run) {
  std::vector<double> plain;
  std::vector<double> guarded;
  guarded.reserve(static_cast<size_t>(rounds));
  uint64_t made = 0;
  for (int round = 0; round < rounds; ++round) {
    bench.use(false);
    plain.push_back(run(bench));
    bench.use(true);
    const uint64_t before = allocations;
    guarded.push_back(run(bench));
    made += allocations - before;
  }
  std::printf(
      "%-28s bare %6.1f ns, with the library %6.1f ns: +%.1f ns; allocations: "
      "%llu\n",
      name,
      median(plain),
      median(guarded),
      median(guarded) - median(plain),
      static_cast<unsigned long long>(made));
  allocationsOfLibrary += made;
}

} // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

int main(int count, char** words) {
  const int rounds = count > 1 ? std::max(std::atoi(words[1]), 1) : 101;
  static Bench bench;
  compare(bench, rounds, "empty poll", costOfEmptyPolls);
  compare(
      bench, rounds, "post_send", [](Bench& b) { return cost(b, true, true); });
  compare(bench, rounds, "post_recv", [](Bench& b) {
    return cost(b, false, true);
  });
  compare(bench, rounds, "poll, one completion of 16", [](Bench& b) {
    return cost(b, true, false);
  });
  std::printf(
      "memory of a queue pair of 128 + 128 requests: %zu KiB\n",
      (sizeof(Qp) + 512 * sizeof(SendRequest) + 512 * sizeof(ReceiveRequest) +
       512 * 4 * sizeof(Piece) + size_t{512} * 64) /
          1024);
  return allocationsOfLibrary == 0 ? 0 : 1;
}

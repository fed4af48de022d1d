// Device staging as operations use it, on the strict device: the caller's
// thread copies in, the submit queue hands over, another thread stands for the
// engine, and the staging thread copies back. For the sanitizers; the tests of
// the package check whole operations.

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "backend/host_tensors.h"
#include "backend/staging_thread.h"
#include "base/random.h"
#undef CHECK // of c10
#include "tests/check.h"
#include "tests/device/strict_device.h"
#include "tests/device/strict_memory.h"

namespace resilient {

namespace {

constexpr int64_t kElements = 1000;

at::TensorOptions onDeviceOptions(int device) {
  return at::TensorOptions()
      .dtype(at::kFloat)
      .device(
          c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
}

// One operation that adds 1 to a tensor, on its way.
struct Operation {
  explicit Operation(const at::Tensor& tensor) {
    data = static_cast<float*>(tensors.add(tensor, Use::kInputOutput));
    tensors.copyIn();
  }

  // Does the work of the engine, and then that of the staging thread.
  void run() {
    for (int64_t i = 0; i < kElements; ++i) {
      data[i] += 1;
    }
    StagingThread::post([this] {
      tensors.copyBack();
      tensors.dropTemporaries();
      issued.store(true);
      issued.notify_all();
    });
  }

  void wait() {
    issued.wait(false);
    for (const auto& staging : tensors.devices()) {
      staging->blockCurrentStream();
    }
  }

  HostTensors tensors;
  float* data = nullptr;
  std::atomic<bool> issued{false};
};

void start(SubmitQueue& queue, Operation& operation) {
  queue.push(
      0,
      [&operation] { return operation.tensors.inputsReady(); },
      kNever,
      [&operation](SubmitQueue::Handover how) {
        CHECK(how == SubmitQueue::Handover::kReady);
        operation.run();
      });
}

// The elements, after all that the current stream has to do.
float only(const at::Tensor& tensor) {
  const at::Tensor host = tensor.cpu();
  const float first = host.data_ptr<float>()[0];
  CHECK(host.eq(first).all().item<bool>());
  return first;
}

} // namespace

TEST(staging_is_in_order_with_the_kernels_of_several_threads) {
  strict::registerDevice();
  strict::setCopyTime(0.0005);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      const int device = caller % strict::kDevices;
      strict::setDeviceAndContext(device);
      SubmitQueue queue;
      Prng random(static_cast<uint64_t>(caller));
      for (int round = 0; round < 20; ++round) {
        const at::Tensor tensor =
            at::empty({kElements}, onDeviceOptions(device));
        tensor.fill_(round); // a kernel that the copy must wait for
        std::vector<std::unique_ptr<Operation>> operations;
        for (uint64_t i = 0; i <= random.below(3); ++i) {
          operations.push_back(std::make_unique<Operation>(tensor));
          start(queue, *operations.back());
          operations.back()->wait();
        }
        // Freed while copies of it may be under way.
        Operation last(at::full({kElements}, -1, onDeviceOptions(device)));
        start(queue, last);
        CHECK_EQ(
            only(tensor),
            static_cast<float>(round) + static_cast<float>(operations.size()));
        last.wait();
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

// A message in pieces, as the engine carries it: its thread reads what has come
// and says what is final, while the staging thread copies in both directions.
TEST(staging_copies_pieces_while_the_engine_works_on_others) {
  strict::registerDevice();
  strict::setCopyTime(0.0005);
  for (int round = 0; round < 5; ++round) {
    const int64_t elements = (6 << 20) / 4 + round;
    const at::Tensor from = at::arange(elements).to(at::kFloat);
    const at::Tensor tensor =
        from.to(onDeviceOptions(round % strict::kDevices));
    HostTensors tensors;
    auto* data = static_cast<float*>(tensors.add(tensor, Use::kInputOutput));
    tensors.copyIn();
    CHECK(tensors.pieces() != nullptr);
    StagedPieces& pieces = *tensors.pieces();
    pieces.setTaker(
        [&] { StagingThread::post([&] { tensors.copyFinalBack(); }); });
    std::atomic<int> news{0};
    pieces.watch([&] {
      ++news;
      news.notify_all();
    });
    while (!tensors.inputsReady()) {
      std::this_thread::yield();
    }
    std::atomic<bool> polled{false};
    StagingThread::pollUntil([&] {
      const bool all = tensors.pollPieces();
      polled.store(all);
      polled.notify_all();
      return all;
    });
    std::thread engine([&] {
      const auto bytes = static_cast<size_t>(elements) * 4;
      constexpr size_t kStep = 300000;
      for (size_t at = 0; at < bytes; at += kStep) {
        const size_t step = std::min(kStep, bytes - at);
        for (int seen = news.load();
             pieces.available(reinterpret_cast<char*>(data) + at, step) < step;
             seen = news.load()) {
          news.wait(seen);
        }
        for (size_t i = at / 4; i < (at + step) / 4; ++i) {
          data[i] += 1;
        }
        pieces.resultIsFinal(reinterpret_cast<char*>(data) + at, step);
      }
    });
    engine.join();
    pieces.watch({});
    polled.wait(false);
    std::atomic<bool> issued{false};
    StagingThread::post([&] {
      tensors.copyBack();
      tensors.dropTemporaries();
      issued.store(true);
      issued.notify_all();
    });
    issued.wait(false);
    for (const auto& staging : tensors.devices()) {
      staging->blockCurrentStream();
    }
    CHECK(tensor.cpu().eq(from + 1).all().item<bool>());
  }
}

TEST(staging_is_asked_from_any_thread_while_it_copies_back) {
  strict::registerDevice();
  strict::setCopyTime(0.0005);
  SubmitQueue queue;
  for (int round = 0; round < 20; ++round) {
    const at::Tensor tensor = at::zeros({kElements}, onDeviceOptions(0));
    Operation operation(tensor);
    start(queue, operation);
    std::thread asks([&] {
      while (!operation.tensors.outputsReady() || !operation.issued.load()) {
        std::this_thread::yield();
      }
    });
    operation.wait();
    CHECK_EQ(only(tensor), 1.0F);
    asks.join();
  }
}

} // namespace resilient

#include "collectives/algorithms.h"
#include "collectives/compute.h"

namespace resilient {
namespace {

// Puts the number of the part into the slots: two parts of one operation never
// use the same. Transfers belong to the inner communicator, which cancels them
// itself.
class PartCommunicator : public Communicator {
 public:
  PartCommunicator(Communicator& inner, uint64_t part)
      : inner_(inner), base_(part << kSlotPartShift) {}

  int rank() const override {
    return inner_.rank();
  }
  int size() const override {
    return inner_.size();
  }
  void startSend(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      const void* data,
      size_t bytes) override {
    inner_.startSend(transfer, peer, base_ | slot, data, bytes);
  }
  void startRecv(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      void* data,
      size_t bytes) override {
    inner_.startRecv(transfer, peer, base_ | slot, data, bytes);
  }
  void cancel(Transfer& transfer) override {
    inner_.cancel(transfer);
  }
  size_t available(const void* data, size_t bytes) const override {
    return inner_.available(data, bytes);
  }
  void startFetch(Transfer& transfer, const void* data, size_t bytes) override {
    inner_.startFetch(transfer, data, bytes);
  }
  void resultIsFinal(const void* data, size_t bytes) override {
    inner_.resultIsFinal(data, bytes);
  }
  const Topology* topology() const override {
    return inner_.topology();
  }
  void startLearning(Transfer& transfer) override {
    inner_.startLearning(transfer);
  }
  void startYield(Transfer& transfer) override {
    inner_.startYield(transfer);
  }

 private:
  Communicator& inner_;
  uint64_t base_;
};

constexpr size_t kPartsMax = size_t{1} << (64 - kSlotPartShift);

} // namespace

// Each part's communicator lives for one iteration. It need not live longer:
// transfers refer to the inner communicator, and a part that fails is destroyed
// before its communicator.
Task coalesced(
    Communicator& comm,
    std::vector<std::function<Task(Communicator&)>> parts) {
  require(
      parts.size() <= kPartsMax,
      "coalesced operation",
      "more than 65536 parts");
  for (size_t i = 0; i < parts.size(); ++i) {
    PartCommunicator part(comm, i);
    Task task = parts[i](part);
    co_await task;
  }
}

} // namespace resilient

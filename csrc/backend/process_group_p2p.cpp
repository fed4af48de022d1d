// Messages between two ranks. They are delivered in the order of the calls
// for each (source, destination, tag); any number may be outstanding.
// Paper: PIPEMORPH §3.2. No queue fills up on a slow link, so no call blocks,
// and a message does not wait for those to other peers.

#include "backend/checks.h"
#include "backend/process_group.h"

namespace resilient {

namespace {

void checkMessage(
    const char* operation,
    const std::vector<at::Tensor>& tensors,
    int tag) {
  if (tensors.size() != 1) {
    rejectCall(
        operation,
        "takes a single tensor (got " + std::to_string(tensors.size()) + ")");
  }
  checkTensor(operation, tensors[0]);
  if (tag < 0) {
    rejectCall(operation, "Tag must be nonnegative");
  }
}

void checkPeer(const char* operation, int peer, int rank, int size) {
  if (peer < 0 || peer >= size) {
    rejectCall(
        operation,
        "invalid rank: " + std::to_string(peer) + " (the group has " +
            std::to_string(size) + " ranks)");
  }
  if (peer == rank) {
    rejectCall(
        operation,
        "rank " + std::to_string(rank) +
            " cannot exchange messages with itself; copy the tensor instead");
  }
}

} // namespace

ProcessGroupResilient::WorkPtr
ProcessGroupResilient::send(Tensors& tensors, int dstRank, int tag) {
  checkUsable("send");
  checkMessage("send", tensors, tag);
  checkPeer("send", dstRank, rank_, size_);
  auto work = makeWork(c10d::OpType::SEND, "resilient:send", tensors, tensors);
  return launch(std::move(work), dstRank, tag, true, tensors[0]);
}

ProcessGroupResilient::WorkPtr
ProcessGroupResilient::recv(Tensors& tensors, int srcRank, int tag) {
  checkUsable("recv");
  checkMessage("recv", tensors, tag);
  checkPeer("recv", srcRank, rank_, size_);
  auto work = makeWork(c10d::OpType::RECV, "resilient:recv", tensors, tensors);
  return launch(std::move(work), srcRank, tag, false, tensors[0]);
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::recvAnysource(
    Tensors& tensors,
    int tag) {
  checkUsable("recvAnysource");
  checkMessage("recvAnysource", tensors, tag);
  if (size_ == 1) {
    rejectCall("recvAnysource", "the group has no other rank to receive from");
  }
  auto work = makeWork(
      c10d::OpType::RECVANYSOURCE, "resilient:recvAnySource", tensors, tensors);
  return launch(std::move(work), -1, tag, false, tensors[0]);
}

} // namespace resilient

// Collectives that move data without reducing it.

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "backend/checks.h"
#include "backend/process_group.h"

namespace resilient {

namespace {

using Tensors = std::vector<at::Tensor>;

uint64_t elements(const Tensors& tensors) {
  uint64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    count += static_cast<uint64_t>(tensor.numel());
  }
  return count;
}

// The parts of a gathered tensor, by rank, as views of it.
// The number of elements must be divisible by `size`. A tensor that cannot be
// split along its first dimension is viewed as rows.
Tensors partsOf(const at::Tensor& tensor, int64_t size) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (tensor.dim() > 0 && tensor.size(0) % size == 0) {
    return tensor.unflatten(0, {size, tensor.size(0) / size}).unbind();
  }
  return tensor.view({size, tensor.numel() / size}).unbind();
}

} // namespace

ProcessGroupResilient::WorkPtr ProcessGroupResilient::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& opts) {
  constexpr const char* kName = "broadcast";
  checkUsable(kName);
  checkRoot(kName, opts.rootRank, size_);
  checkRootTensor(kName, opts.rootTensor, tensors);
  checkSingle(kName, tensors);
  const int root = static_cast<int>(opts.rootRank);
  auto work = makeWork(
      c10d::OpType::BROADCAST, "resilient:broadcast", tensors, tensors);
  void* data = work->tensors().add(
      tensors[0], rank_ == root ? Use::kInput : Use::kOutput);
  const size_t bytes = tensors[0].nbytes();
  return launch(
      std::move(work),
      signatureOf(OpKind::kBroadcast, tensors[0], tensors[0].numel(), root),
      opts,
      [data, bytes, root](Communicator& comm) {
        return resilient::broadcast(comm, data, bytes, root);
      });
}

// The input may be the rank's own part of the output. Input and output then are
// one operand of the operation; as two they would conflict and cost a copy of
// the input.
ProcessGroupResilient::Body ProcessGroupResilient::allGatherPart(
    WorkResilient& work,
    const at::Tensor& output,
    const at::Tensor& input) {
  const bool inPlace = isInPlace(output, rank_ * input.nbytes(), input);
  auto* out = static_cast<char*>(
      work.tensors().add(output, inPlace ? Use::kInputOutput : Use::kOutput));
  std::vector<void*> pointers;
  for (int r = 0; r < size_; ++r) {
    pointers.push_back(out + r * input.nbytes());
  }
  const void* in =
      inPlace ? pointers[rank_] : work.tensors().add(input, Use::kInput);
  std::vector<size_t> bytes(size_, input.nbytes());
  return
      [pointers = std::move(pointers), bytes = std::move(bytes), in](
          Communicator& comm) { return allGather(comm, in, pointers, bytes); };
}

// Outputs are added rank by rank, and all tensors of a rank before those of the
// next: the order of add() decides which result remains where outputs share
// memory. Inputs may come after all outputs, because conflicts are found in
// either order.
std::vector<ProcessGroupResilient::Body> ProcessGroupResilient::allGatherParts(
    WorkResilient& work,
    const TensorLists& outputs,
    const Tensors& inputs) {
  struct Part {
    const void* in = nullptr;
    std::vector<void*> out;
    std::vector<size_t> bytes;
  };
  std::vector<Part> parts(inputs.size());
  for (int r = 0; r < size_; ++r) { // gloo copies the results in this order
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& output = outputs[r][i];
      const bool inPlace = r == rank_ && isInPlace(output, 0, inputs[i]);
      void* out = work.tensors().add(
          output, inPlace ? Use::kInputOutput : Use::kOutput);
      parts[i].out.push_back(out);
      parts[i].bytes.push_back(output.nbytes());
      if (inPlace) {
        parts[i].in = out;
      }
    }
  }
  std::vector<Body> bodies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Part& part = parts[i];
    if (part.in == nullptr) {
      part.in = work.tensors().add(inputs[i], Use::kInput);
    }
    bodies.push_back([part = std::move(part)](Communicator& comm) {
      return allGather(comm, part.in, part.out, part.bytes);
    });
  }
  return bodies;
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::allgather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "allgather";
  checkUsable(kName);
  if (inputs.empty()) {
    rejectCall(kName, "requires non-empty input tensor list");
  }
  if (outputs.size() != inputs.size()) {
    rejectCall(
        kName,
        "requires input/output tensor lists to have the same length (" +
            std::to_string(inputs.size()) + " and " +
            std::to_string(outputs.size()) + ")");
  }
  const size_t expected = inputs.size() * static_cast<size_t>(size_);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].size() != expected) {
      rejectCall(
          kName,
          "invalid output tensor list at index " + std::to_string(i) +
              " (expected length " + std::to_string(expected) + ", got " +
              std::to_string(outputs[i].size()) + ")");
    }
  }
  checkSingle(kName, inputs, "input ");
  const Tensors& output = outputs[0];
  checkLike(kName, inputs[0], output);
  checkSameNumel(kName, "output", rank_, output[rank_], inputs[0]);
  auto work =
      makeWork(c10d::OpType::ALLGATHER, "resilient:all_gather", inputs, output);
  TensorLists byRank;
  for (const at::Tensor& tensor : output) {
    byRank.push_back({tensor});
  }
  auto bodies = allGatherParts(*work, byRank, inputs);
  return launch(
      std::move(work),
      signatureOf(
          OpKind::kAllGather, inputs[0], elements(output), layoutOf(output)),
      opts,
      combine(std::move(bodies)));
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::allgather_coalesced(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "allgather_coalesced";
  checkUsable(kName);
  if (inputs.empty()) {
    rejectCall(kName, "requires non-empty input tensor list");
  }
  // outputs[rank][tensor]
  if (outputs.size() != static_cast<size_t>(size_)) {
    rejectCall(kName, "output lists should be equal to world size");
  }
  Tensors flat;
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      rejectCall(
          kName,
          "invalid output size: (expected length " +
              std::to_string(inputs.size()) + ", got " +
              std::to_string(list.size()) + ")");
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkLike(kName, inputs[i], {list[i]}, i);
      if (list[i].numel() != inputs[i].numel()) {
        rejectCall(
            kName,
            "invalid size of output tensor at index " + std::to_string(i) +
                " (expected " + std::to_string(inputs[i].numel()) +
                " elements, got " + std::to_string(list[i].numel()) + ")");
      }
    }
    flat.insert(flat.end(), list.begin(), list.end());
  }
  auto work = makeWork(
      c10d::OpType::ALLGATHER_COALESCED, "resilient:all_gather", inputs, flat);
  auto bodies = allGatherParts(*work, outputs, inputs);
  auto signature = signatureOf(
      OpKind::kAllGather, inputs[0], elements(flat), layoutOf(flat));
  signature.tensors = tensorCount(inputs.size());
  return launch(std::move(work), signature, opts, combine(std::move(bodies)));
}

ProcessGroupResilient::WorkPtr
ProcessGroupResilient::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "all_gather_into_tensor";
  checkUsable(kName);
  if (inputs.empty()) {
    rejectCall(kName, "requires non-empty input tensor list");
  }
  if (outputs.size() != inputs.size()) {
    rejectCall(
        kName, "requires input/output tensor lists to have the same length");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkLike(kName, outputs[i], {inputs[i]});
    if (outputs[i].numel() != inputs[i].numel() * size_) {
      rejectCall(
          kName,
          "output tensor size must be equal to world_size times input tensor "
          "size (" +
              std::to_string(outputs[i].numel()) + " elements, input " +
              std::to_string(inputs[i].numel()) + ", world size " +
              std::to_string(size_) + ")");
    }
  }
  auto work = makeWork(
      c10d::OpType::_ALLGATHER_BASE, "resilient:all_gather", inputs, outputs);
  std::vector<Body> parts;
  if (outputs.size() > 1 && HostTensors::anyOverlap(outputs)) {
    // As separate operands, since gloo copies the parts of rank 0 first.
    TensorLists byRank(size_);
    for (const at::Tensor& output : outputs) {
      auto ofRanks = partsOf(output, size_);
      for (int r = 0; r < size_; ++r) {
        byRank[r].push_back(std::move(ofRanks[r]));
      }
    }
    parts = allGatherParts(*work, byRank, inputs);
  } else {
    for (size_t i = 0; i < inputs.size(); ++i) {
      parts.push_back(allGatherPart(*work, outputs[i], inputs[i]));
    }
  }
  auto signature = signatureOf(
      OpKind::kAllGather, inputs[0], elements(outputs), layoutOf(outputs));
  signature.tensors = tensorCount(inputs.size());
  return launch(std::move(work), signature, opts, combine(std::move(parts)));
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::gather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& opts) {
  constexpr const char* kName = "gather";
  checkUsable(kName);
  checkRoot(kName, opts.rootRank, size_);
  checkSingle(kName, inputs, "input ");
  const at::Tensor& input = inputs[0];
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (rank_ == root) {
    if (outputs.size() != 1) {
      rejectCall(
          kName,
          "requires a single-element output list containing a list with " +
              std::to_string(size_) + " tensors.");
    }
    parts = outputs[0];
    checkParts(kName, "output", parts, size_);
    checkLike(kName, input, parts);
    checkSameNumel(kName, "output", rank_, parts[rank_], input);
  } else if (!outputs.empty()) {
    rejectCall(kName, "requires empty output on non-root");
  }
  auto work = makeWork(c10d::OpType::GATHER, "resilient:gather", inputs, parts);
  std::vector<void*> pointers;
  std::vector<size_t> outputBytes;
  for (const at::Tensor& part : parts) {
    pointers.push_back(work->tensors().add(part, Use::kOutput));
    outputBytes.push_back(part.nbytes());
  }
  const void* in = work->tensors().add(input, Use::kInput);
  const size_t bytes = input.nbytes();
  // The parts' sizes may differ by rank, so none is in the signature; sizes
  // that do not fit are found when the message comes.
  return launch(
      std::move(work),
      signatureOf(OpKind::kGather, input, 0, root),
      opts,
      [pointers = std::move(pointers),
       outputBytes = std::move(outputBytes),
       in,
       bytes,
       root](Communicator& comm) {
        return resilient::gather(comm, in, bytes, pointers, outputBytes, root);
      });
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ScatterOptions& opts) {
  constexpr const char* kName = "scatter";
  checkUsable(kName);
  checkRoot(kName, opts.rootRank, size_);
  checkSingle(kName, outputs, "output ");
  const at::Tensor& output = outputs[0];
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (rank_ == root) {
    if (inputs.size() != 1) {
      rejectCall(
          kName,
          "requires a single-element input list containing a list with " +
              std::to_string(size_) + " tensors.");
    }
    parts = inputs[0];
    checkParts(kName, "input", parts, size_);
    checkLike(kName, output, parts);
    checkSameNumel(kName, "input", rank_, parts[rank_], output);
  } else if (!inputs.empty()) {
    rejectCall(kName, "requires empty input on non-root");
  }
  auto work =
      makeWork(c10d::OpType::SCATTER, "resilient:scatter", parts, outputs);
  std::vector<const void*> pointers;
  std::vector<size_t> inputBytes;
  for (const at::Tensor& part : parts) {
    pointers.push_back(work->tensors().add(part, Use::kInput));
    inputBytes.push_back(part.nbytes());
  }
  void* out = work->tensors().add(output, Use::kOutput);
  const size_t bytes = output.nbytes();
  return launch(
      std::move(work),
      signatureOf(OpKind::kScatter, output, 0, root),
      opts,
      [pointers = std::move(pointers),
       inputBytes = std::move(inputBytes),
       out,
       bytes,
       root](Communicator& comm) {
        return resilient::scatter(comm, pointers, inputBytes, out, bytes, root);
      });
}

namespace {

// Bytes that go to or come from each rank when a tensor is split along its
// first dimension: evenly, or as the user says.
// The texts are c10d's. A mistake of this rank only is refused here; sizes that
// do not fit those of another rank are found when the messages arrive.
std::vector<size_t> splitBytes(
    const char* operation,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int size) {
  // A 0-dim or empty tensor has no rows to speak of.
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size != 0) {
      rejectCall(
          operation,
          "Tensor's dim 0 does not divide equally across group size (" +
              std::to_string(rows) + " rows, " + std::to_string(size) +
              " ranks)");
    }
    return std::vector<size_t>(size, tensor.nbytes() / size);
  }
  if (splits.size() != static_cast<size_t>(size)) {
    rejectCall(operation, "Number of tensor splits not equal to group size");
  }
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0 || split > rows) {
      rejectCall(operation, "invalid split size " + std::to_string(split));
    }
    sum += split;
  }
  if (sum != rows) {
    rejectCall(
        operation,
        "Split sizes doesn't match total dim 0 size (their sum is " +
            std::to_string(sum) + ", the tensor has " + std::to_string(rows) +
            " rows)");
  }
  const size_t rowBytes = rows == 0 ? 0 : tensor.nbytes() / rows;
  std::vector<size_t> bytes;
  for (const int64_t split : splits) {
    bytes.push_back(static_cast<size_t>(split) * rowBytes);
  }
  return bytes;
}

template <typename Pointer>
std::vector<Pointer> offsets(void* base, const std::vector<size_t>& bytes) {
  std::vector<Pointer> pointers;
  auto* p = static_cast<char*>(base);
  for (const size_t n : bytes) {
    pointers.push_back(p);
    p += n;
  }
  return pointers;
}

} // namespace

ProcessGroupResilient::WorkPtr ProcessGroupResilient::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& outputSplitSizes,
    std::vector<int64_t>& inputSplitSizes,
    const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "all_to_all_single";
  checkUsable(kName);
  checkLike(kName, output, {input});
  auto inputBytes = splitBytes(kName, input, inputSplitSizes, size_);
  auto outputBytes = splitBytes(kName, output, outputSplitSizes, size_);
  if (inputBytes[rank_] != outputBytes[rank_]) {
    rejectCall(
        kName,
        "the part for this rank itself has " +
            std::to_string(inputBytes[rank_]) + " bytes in the input and " +
            std::to_string(outputBytes[rank_]) + " in the output");
  }
  auto work = makeWork(
      c10d::OpType::ALLTOALL_BASE, "resilient:all_to_all", {input}, {output});
  void* out = work->tensors().add(output, Use::kOutput);
  void* in = work->tensors().add(input, Use::kInput);
  // Sizes differ by rank.
  return launch(
      std::move(work),
      signatureOf(OpKind::kAllToAll, input, 0),
      opts,
      [inputs = offsets<const void*>(in, inputBytes),
       inputBytes,
       outputs = offsets<void*>(out, outputBytes),
       outputBytes](Communicator& comm) {
        return allToAll(comm, inputs, inputBytes, outputs, outputBytes);
      });
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "all_to_all";
  checkUsable(kName);
  checkParts(kName, "input", inputs, size_);
  checkParts(kName, "output", outputs, size_);
  checkAlike(kName, inputs);
  checkLike(kName, inputs[0], outputs);
  checkSameNumel(kName, "output", rank_, outputs[rank_], inputs[rank_]);
  auto work =
      makeWork(c10d::OpType::ALLTOALL, "resilient:all_to_all", inputs, outputs);
  std::vector<const void*> in;
  std::vector<void*> out;
  std::vector<size_t> inputBytes;
  std::vector<size_t> outputBytes;
  for (const at::Tensor& output : outputs) {
    out.push_back(work->tensors().add(output, Use::kOutput));
    outputBytes.push_back(output.nbytes());
  }
  for (const at::Tensor& input : inputs) {
    in.push_back(work->tensors().add(input, Use::kInput));
    inputBytes.push_back(input.nbytes());
  }
  return launch(
      std::move(work),
      signatureOf(OpKind::kAllToAll, inputs[0], 0),
      opts,
      [in = std::move(in),
       out = std::move(out),
       inputBytes = std::move(inputBytes),
       outputBytes = std::move(outputBytes)](Communicator& comm) {
        return allToAll(comm, in, inputBytes, out, outputBytes);
      });
}

} // namespace resilient

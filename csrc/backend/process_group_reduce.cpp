// Collectives that reduce.

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "backend/checks.h"
#include "backend/process_group.h"
#include "backend/sparse.h"

namespace resilient {

ProcessGroupResilient::Body ProcessGroupResilient::allReducePart(
    WorkResilient& work,
    const at::Tensor& tensor,
    const Reduction& reduction) {
  void* data = work.tensors().add(tensor, Use::kInputOutput);
  const auto count = static_cast<size_t>(tensor.numel());
  return [data, count, reduction](Communicator& comm) {
    return allReduce(comm, data, count, reduction);
  };
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  constexpr const char* kName = "allreduce";
  checkUsable(kName);
  // Sparse gradients of DDP come here too.
  if (tensors.size() == 1 && tensors[0].defined() &&
      tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  checkSingle(kName, tensors);
  const Reduction reduction = reductionFor(kName, opts.reduceOp, tensors[0]);
  auto work = makeWork(
      c10d::OpType::ALLREDUCE, "resilient:all_reduce", tensors, tensors);
  auto body = allReducePart(*work, tensors[0], reduction);
  return launch(
      std::move(work),
      signatureOf(
          OpKind::kAllReduce,
          reduction,
          static_cast<uint64_t>(tensors[0].numel())),
      opts,
      std::move(body));
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::allreduce_sparse(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  constexpr const char* kName = "allreduce_sparse";
  checkUsable(kName);
  if (tensors.size() != 1 || !tensors[0].defined()) {
    rejectCall(kName, "requires a single-element tensor list");
  }
  if (tensors[0].layout() != at::kSparse) {
    rejectCall(kName, "unsupported layout");
  }
  if (opts.reduceOp != c10d::ReduceOp::SUM) {
    rejectCall(
        kName,
        "unsupported reduction operation (allreduce of sparse tensors only "
        "works with ReduceOp.SUM)");
  }
  auto work = makeWork(
      c10d::OpType::_ALLREDUCE_SPARSE,
      "resilient:sparse_all_reduce",
      tensors,
      tensors);
  auto sparse =
      std::make_shared<SparseAllReduce>(tensors[0], size_, work->tensors());
  work->tensors().keep(sparse);
  work->setEpilogue([sparse] { sparse->store(); });
  // The number of stored elements differs by rank.
  OpSignature signature = signatureOf(OpKind::kAllReduceSparse, tensors[0], 0);
  signature.reduceOp = ReduceOp::kSum;
  return launch(std::move(work), signature, opts, [sparse](Communicator& comm) {
    return sparse->run(comm);
  });
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* kName = "allreduce_coalesced";
  checkUsable(kName);
  checkAlike(kName, tensors);
  const Reduction reduction = reductionFor(kName, opts.reduceOp, tensors[0]);
  auto work = makeWork(
      c10d::OpType::ALLREDUCE_COALESCED,
      "resilient:all_reduce",
      tensors,
      tensors);
  std::vector<Body> parts;
  uint64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(allReducePart(*work, tensor, reduction));
    count += static_cast<uint64_t>(tensor.numel());
  }
  auto signature =
      signatureOf(OpKind::kAllReduce, reduction, count, layoutOf(tensors));
  signature.tensors = tensorCount(tensors.size());
  return launch(std::move(work), signature, opts, combine(std::move(parts)));
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::reduce(
    Tensors& tensors,
    const c10d::ReduceOptions& opts) {
  constexpr const char* kName = "reduce";
  checkUsable(kName);
  checkRoot(kName, opts.rootRank, size_);
  checkRootTensor(kName, opts.rootTensor, tensors);
  checkSingle(kName, tensors);
  const Reduction reduction = reductionFor(kName, opts.reduceOp, tensors[0]);
  const int root = static_cast<int>(opts.rootRank);
  auto work =
      makeWork(c10d::OpType::REDUCE, "resilient:reduce", tensors, tensors);
  void* data = work->tensors().add(
      tensors[0], rank_ == root ? Use::kInputOutput : Use::kInput);
  const auto count = static_cast<size_t>(tensors[0].numel());
  return launch(
      std::move(work),
      signatureOf(OpKind::kReduce, reduction, count, root),
      opts,
      [data, count, reduction, root](Communicator& comm) {
        return resilient::reduce(comm, data, count, reduction, root);
      });
}

// Inputs may have different sizes by rank. In place (the output is this rank's
// input), both are one operand: reduceScatter() allows exactly this overlap,
// and a temporary would be a needless copy.
ProcessGroupResilient::Body ProcessGroupResilient::reduceScatterPart(
    WorkResilient& work,
    const at::Tensor& output,
    const Tensors& inputs,
    const Reduction& reduction) {
  constexpr const char* kName = "reduce_scatter";
  if (inputs.size() != static_cast<size_t>(size_)) {
    rejectCall(
        kName,
        "invalid input tensor list size, must be world size (got " +
            std::to_string(inputs.size()) + ", the group has " +
            std::to_string(size_) + " ranks)");
  }
  checkLike(kName, output, inputs);
  checkSameNumel(kName, "input", rank_, inputs[rank_], output);
  const bool inPlace = isInPlace(inputs[rank_], 0, output);
  std::vector<const void*> pointers;
  std::vector<size_t> counts;
  void* out = nullptr;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ && inPlace) {
      out = work.tensors().add(output, Use::kInputOutput);
      pointers.push_back(out);
    } else {
      pointers.push_back(work.tensors().add(inputs[r], Use::kInput));
    }
    counts.push_back(static_cast<size_t>(inputs[r].numel()));
  }
  if (!inPlace) {
    out = work.tensors().add(output, Use::kOutput);
  }
  return [pointers = std::move(pointers),
          counts = std::move(counts),
          out,
          reduction](Communicator& comm) {
    return reduceScatter(comm, pointers, counts, out, reduction);
  };
}

ProcessGroupResilient::Body ProcessGroupResilient::reduceScatterPart(
    WorkResilient& work,
    const at::Tensor& output,
    const at::Tensor& input,
    const Reduction& reduction) {
  constexpr const char* kName = "reduce_scatter_tensor";
  checkLike(kName, output, {input});
  if (input.numel() != output.numel() * size_) {
    rejectCall(
        kName,
        "input tensor must be the same size as output size times world size (" +
            std::to_string(input.numel()) + " elements, output " +
            std::to_string(output.numel()) + ", world size " +
            std::to_string(size_) + ")");
  }
  // Only the exact place of our own part may be written while it is read. The
  // parts are then separate operands.
  if (isInPlace(input, rank_ * output.nbytes(), output)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return reduceScatterPart(
        work, output, input.view(-1).chunk(size_), reduction);
  }
  const auto* in =
      static_cast<const char*>(work.tensors().add(input, Use::kInput));
  void* out = work.tensors().add(output, Use::kOutput);
  std::vector<const void*> pointers;
  for (int r = 0; r < size_; ++r) {
    pointers.push_back(in + r * output.nbytes());
  }
  std::vector<size_t> counts(size_, static_cast<size_t>(output.numel()));
  return [pointers = std::move(pointers),
          counts = std::move(counts),
          out,
          reduction](Communicator& comm) {
    return reduceScatter(comm, pointers, counts, out, reduction);
  };
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::reduce_scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "reduce_scatter";
  checkUsable(kName);
  checkSingle(kName, outputs);
  if (inputs.size() != 1) {
    rejectCall(kName, "requires a single-element input tensor list");
  }
  const Reduction reduction = reductionFor(kName, opts.reduceOp, outputs[0]);
  auto work = makeWork(
      c10d::OpType::REDUCE_SCATTER,
      "resilient:reduce_scatter",
      inputs[0],
      outputs);
  auto body = reduceScatterPart(*work, outputs[0], inputs[0], reduction);
  uint64_t count = 0;
  for (const at::Tensor& input : inputs[0]) {
    count += static_cast<uint64_t>(input.numel());
  }
  return launch(
      std::move(work),
      signatureOf(
          OpKind::kReduceScatter, reduction, count, layoutOf(inputs[0])),
      opts,
      std::move(body));
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

ProcessGroupResilient::WorkPtr
ProcessGroupResilient::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "reduce_scatter_tensor";
  checkUsable(kName);
  checkAlike(kName, inputs);
  if (outputs.size() != inputs.size()) {
    rejectCall(
        kName, "requires input/output tensor lists to have the same length");
  }
  const Reduction reduction = reductionFor(kName, opts.reduceOp, inputs[0]);
  auto work = makeWork(
      c10d::OpType::_REDUCE_SCATTER_BASE,
      "resilient:reduce_scatter",
      inputs,
      outputs);
  std::vector<Body> parts;
  uint64_t count = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back(reduceScatterPart(*work, outputs[i], inputs[i], reduction));
    count += static_cast<uint64_t>(inputs[i].numel());
  }
  auto signature =
      signatureOf(OpKind::kReduceScatter, reduction, count, layoutOf(inputs));
  signature.tensors = tensorCount(inputs.size());
  return launch(std::move(work), signature, opts, combine(std::move(parts)));
}

} // namespace resilient

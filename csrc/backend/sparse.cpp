#include "backend/sparse.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "base/random.h"
#include "base/status.h"

namespace resilient {

namespace {

int64_t hashOf(at::IntArrayRef sizes) {
  uint64_t hash = 0;
  for (const int64_t size : sizes) {
    hash = mixBits(hash ^ static_cast<uint64_t>(size));
  }
  return static_cast<int64_t>(hash);
}

} // namespace

SparseAllReduce::SparseAllReduce(
    const at::Tensor& tensor,
    int size,
    HostTensors& tensors)
    : tensor_(tensor),
      tensors_(tensors),
      headers_(size),
      allIndices_(size),
      allValues_(size) {
  at::AutoDispatchBelowADInplaceOrView below;
  // A coalesced tensor is returned as it is: detached copies of its parts are
  // not needed, since the caller must leave it alone until we are done.
  const at::Tensor input = onDevice(tensor) ? tensor : tensor.coalesce();
  indices_ = staged(input._indices());
  values_ = staged(input._values());
  header_ = {
      input._nnz(), input.sparse_dim(), input.dim(), hashOf(input.sizes())};
}

at::Tensor SparseAllReduce::staged(const at::Tensor& part) {
  if (!onDevice(part)) {
    return part.contiguous();
  }
  void* data = tensors_.add(part, Use::kInput);
  return at::from_blob(data, part.sizes(), part.options().device(at::kCPU));
}

// Headers have a fixed size, so the ranks can exchange them before they know
// anything of each other. Each rank checks all of them, so all ranks fail if
// one shape differs.
Task SparseAllReduce::gatherHeaders(Communicator& comm) {
  std::vector<void*> outputs;
  for (Header& header : headers_) {
    outputs.push_back(&header);
  }
  co_await allGather(
      comm,
      &header_,
      std::move(outputs),
      std::vector<size_t>(headers_.size(), sizeof(Header)));
  for (size_t r = 0; r < headers_.size(); ++r) {
    const Header& other = headers_[r];
    if (other.sparseDims != header_.sparseDims || other.dims != header_.dims ||
        other.shapeHash != header_.shapeHash || other.stored < 0) {
      throw StatusError(Status(
          StatusCode::kMismatch,
          "all_reduce of sparse tensors: rank " + std::to_string(r) +
              " has a tensor of another shape (" + std::to_string(other.dims) +
              " dimensions, " + std::to_string(other.sparseDims) +
              " of them sparse; here " + std::to_string(header_.dims) +
              " and " + std::to_string(header_.sparseDims) + ")"));
    }
  }
}

Task SparseAllReduce::gatherIndices(Communicator& comm) {
  std::vector<void*> outputs;
  std::vector<size_t> bytes;
  for (size_t r = 0; r < headers_.size(); ++r) {
    allIndices_[r] =
        at::empty({header_.sparseDims, headers_[r].stored}, indices_.options());
    outputs.push_back(allIndices_[r].data_ptr());
    bytes.push_back(allIndices_[r].nbytes());
  }
  co_await allGather(
      comm, indices_.const_data_ptr(), std::move(outputs), std::move(bytes));
}

Task SparseAllReduce::gatherValues(Communicator& comm) {
  std::vector<void*> outputs;
  std::vector<size_t> bytes;
  for (size_t r = 0; r < headers_.size(); ++r) {
    auto shape = values_.sizes().vec();
    shape[0] = headers_[r].stored;
    allValues_[r] = at::empty(shape, values_.options());
    outputs.push_back(allValues_[r].data_ptr());
    bytes.push_back(allValues_[r].nbytes());
  }
  co_await allGather(
      comm, values_.const_data_ptr(), std::move(outputs), std::move(bytes));
}

Task SparseAllReduce::run(Communicator& comm) {
  // Each part begins when the one before it is complete, so it knows sizes.
  return coalesced(
      comm,
      {[this](Communicator& c) { return gatherHeaders(c); },
       [this](Communicator& c) { return gatherIndices(c); },
       [this](Communicator& c) { return gatherValues(c); }});
}

void SparseAllReduce::store() {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor indices = at::cat(allIndices_, 1);
  const at::Tensor values = at::cat(allValues_, 0);
  // coalesce() sorts stably and adds equal indices in order: rank order.
  const at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(indices, values, tensor_.sizes())
          .coalesce();
  if (!onDevice(tensor_)) {
    tensor_.copy_(sum);
    return;
  }
  tensors_.devices().front()->writeSparse(tensor_, sum);
}

} // namespace resilient

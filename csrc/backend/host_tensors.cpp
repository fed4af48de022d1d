#include "backend/host_tensors.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ParallelGuard.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "backend/errors.h"

namespace resilient {

DType dtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kComplexHalf:
      return DType::kComplex32;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kQUInt4x2:
    case at::kQUInt2x4:
      // Their storage is smaller than elements times element size.
      throwCallError(
          std::string("tensors of type ") +
          c10::toString(tensor.scalar_type()) +
          " cannot be sent; send their underlying bytes (int_repr())");
    default:
      break;
  }
  switch (tensor.element_size()) {
    case 1:
      return DType::kOpaque1;
    case 2:
      return DType::kOpaque2;
    case 4:
      return DType::kOpaque4;
    case 8:
      return DType::kOpaque8;
    case 16:
      return DType::kOpaque16;
    default:
      throwCallError(
          std::string("tensors of type ") +
          c10::toString(tensor.scalar_type()) + " cannot be sent");
  }
}

namespace {

constexpr size_t kNotSmall = 64u << 10;

bool usableDirectly(const at::Tensor& t) {
  // Conjugated, negated and zero tensors hold other bytes than they show.
  return !onDevice(t) && t.is_contiguous() && !t.is_conj() && !t.is_neg() &&
      !t._is_zerotensor();
}

// The bytes from a tensor's first to just past its last element.
std::pair<const char*, const char*> extent(const at::Tensor& t) {
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    last += (t.size(d) - 1) * t.stride(d); // strides are never negative
  }
  return {begin, begin + (last + 1) * t.element_size()};
}

} // namespace

// Ranges are disjoint, so the last one that begins before `end` also ends last:
// no other range needs to be compared.
bool HostTensors::Ranges::overlaps(const char* begin, const char* end) const {
  const auto after = ends_.lower_bound(end);
  return after != ends_.begin() && std::prev(after)->second > begin;
}

// Merges the new range with all that it overlaps, which keeps them disjoint.
void HostTensors::Ranges::add(const char* begin, const char* end) {
  auto at = ends_.lower_bound(end);
  while (at != ends_.begin() && std::prev(at)->second > begin) {
    --at;
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = ends_.erase(at);
  }
  ends_.emplace(begin, end);
}

bool HostTensors::conflicts(const at::Tensor& tensor, Use use) {
  if (tensor.numel() == 0 || tensor._is_zerotensor()) {
    return false;
  }
  const auto [begin, end] = extent(tensor);
  const bool conflict = written_.overlaps(begin, end) ||
      (use != Use::kInput && read_.overlaps(begin, end));
  if (use != Use::kOutput) {
    read_.add(begin, end);
  }
  if (use != Use::kInput) {
    written_.add(begin, end);
  }
  return conflict;
}

bool HostTensors::anyOverlap(const std::vector<at::Tensor>& tensors) {
  HostTensors together;
  return std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
    return together.conflicts(tensor, Use::kOutput);
  });
}

DeviceStaging& HostTensors::stagingFor(c10::Device device) {
  for (const auto& staging : devices_) {
    if (staging->device() == device) {
      return *staging;
    }
  }
  devices_.push_back(std::make_unique<DeviceStaging>(device));
  return *devices_.back();
}

void HostTensors::waitForDevice(c10::Device device) {
  stagingFor(device);
  waitsForDevices_ = true;
}

// Three cases: the engine uses a contiguous host tensor where it is; a device
// tensor gets a pinned buffer; any other host tensor gets a plain temporary. An
// output with several elements at one address cannot hold a result. The
// operation is then refused when all tensors are known, not here, because other
// ranks must learn of it (launch() in process_group.cpp).
//
// The guard keeps autograd out: temporaries and copies are no operations of the
// program.
void* HostTensors::add(const at::Tensor& tensor, Use use) {
  const bool staged = onDevice(tensor);
  const bool direct =
      (staged || !conflicts(tensor, use)) && usableDirectly(tensor);
  if (use != Use::kInput && !direct && refusal_.empty() &&
      at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refusal_ = "tensor " + std::to_string(slots_.size()) +
        " cannot hold a result: several of its elements are at one address, "
        "as in an expanded tensor. Pass a tensor made by clone() or "
        "contiguous()";
  }
  if (staged) {
    stagingFor(tensor.device());
  }
  at::Tensor host = tensor;
  if (!direct) {
    at::AutoDispatchBelowADInplaceOrView below;
    // Not at::empty: see DeviceStaging::hostBuffer.
    host = staged
        ? DeviceStaging::hostBuffer(tensor)
        : at::Tensor(
              at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
  }
  slots_.push_back({tensor, host, use, direct, staged});
  return use == Use::kInput ? const_cast<void*>(host.const_data_ptr())
                            : host.mutable_data_ptr();
}

uint64_t HostTensors::bytes() const {
  uint64_t sum = 0;
  for (const Slot& slot : slots_) {
    sum += slot.host.nbytes() * (slot.use == Use::kInputOutput ? 2 : 1);
  }
  return sum;
}

GpuAddress HostTensors::gpu() const {
  for (const Slot& slot : slots_) {
    if (slot.user.is_cuda() && slot.host.nbytes() >= kNotSmall) {
      return {
          slot.user.device().index(),
          static_cast<const std::byte*>(slot.user.const_data_ptr())};
    }
  }
  return {};
}

std::vector<std::span<std::byte>> HostTensors::memory() const {
  std::vector<std::span<std::byte>> all;
  for (const Slot& slot : slots_) {
    if (slot.host.nbytes() >= kNotSmall) {
      auto* const data = const_cast<void*>(slot.host.const_data_ptr());
      all.emplace_back(static_cast<std::byte*>(data), slot.host.nbytes());
    }
  }
  return all;
}

// Results leave in pieces only if the order in which they are written does not
// matter, and if a range of bytes of the buffer is one of the tensor.
void HostTensors::choosePieces() {
  const auto large = [](const Slot& slot) {
    return slot.staged &&
        slot.host.nbytes() >= 2 * StagedPieces::kMinPieceBytes;
  };
  if (std::ranges::none_of(slots_, large)) {
    return;
  }
  std::vector<at::Tensor> results;
  for (const Slot& slot : slots_) {
    if (slot.staged && slot.use != Use::kInput) {
      results.push_back(slot.user);
    }
  }
  const bool apart = !anyOverlap(results);
  pieces_ = std::make_shared<StagedPieces>();
  for (Slot& slot : slots_) {
    if (!large(slot)) {
      continue;
    }
    const at::Tensor& user = slot.user;
    slot.resultInPieces = slot.use != Use::kInput && apart &&
        user.is_contiguous() && !user.is_conj() && !user.is_neg();
    slot.buffer = pieces_->add(
        slot.host.const_data_ptr(),
        slot.host.nbytes(),
        slot.use != Use::kOutput,
        slot.resultInPieces);
  }
}

// Small tensors first: they are there when the first piece is.
void HostTensors::copyIn() {
  if (devices_.empty() &&
      std::ranges::all_of(slots_, [](const Slot& s) { return s.direct; })) {
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  choosePieces();
  std::set<DeviceStaging*> issued;
  for (const Slot& slot : slots_) {
    if (slot.direct || slot.use == Use::kOutput) {
      continue;
    }
    if (!slot.staged) {
      slot.host.copy_(slot.user);
    } else if (!slot.buffer) {
      DeviceStaging& staging = stagingFor(slot.user.device());
      staging.copyToHost(slot.host, slot.user);
      issued.insert(&staging);
    }
  }
  for (const Slot& slot : slots_) {
    if (slot.buffer && slot.use != Use::kOutput) {
      DeviceStaging& staging = stagingFor(slot.user.device());
      staging.copyToHostInPieces(
          slot.host,
          slot.user,
          *slot.buffer,
          StagedPieces::pieceEnds(slot.host.nbytes()));
      issued.insert(&staging);
    }
  }
  for (const auto& staging : devices_) {
    if (waitsForDevices_ || issued.contains(staging.get())) {
      staging->copiesToHostIssued();
    }
  }
  if (pieces_) {
    std::string streams;
    for (const auto& staging : devices_) {
      if (issued.contains(staging.get())) {
        streams += (streams.empty() ? "" : " and ") + staging->callerStream();
      }
    }
    pieces_->setStreams(std::move(streams));
  }
}

bool HostTensors::inputsReady() const {
  return std::ranges::all_of(
      devices_, [](const auto& d) { return d->copiesToHostBegun(); });
}

bool HostTensors::pollPieces() {
  bool all = true;
  try {
    for (const auto& staging : devices_) {
      // Asked first: copies that end from now on are taken by the next call.
      const bool done = staging->copiesToHostDone();
      while (const auto copied = staging->takeCopied()) {
        pieces_->arrived(copied->buffer, copied->end);
      }
      all = all && done;
    }
  } catch (const std::exception& e) {
    pieces_->failed(copyFailed(e));
    return true;
  }
  return all;
}

bool HostTensors::outputsReady() const {
  return std::ranges::all_of(
      devices_, [](const auto& d) { return d->copiesToDeviceDone(); });
}

std::string HostTensors::waitsFor() const {
  std::string text;
  for (const auto& staging : devices_) {
    if (!staging->copiesToHostBegun()) {
      text += (text.empty() ? "" : " and ") + staging->callerStream();
    }
  }
  return text;
}

std::vector<at::Tensor> HostTensors::hosts() const {
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : slots_) {
    tensors.push_back(slot.host);
  }
  return tensors;
}

void HostTensors::dropTemporaries() {
  for (Slot& slot : slots_) {
    if (!slot.direct) {
      slot.host = at::Tensor();
    }
  }
}

bool HostTensors::needsCopyBack() const {
  for (const Slot& slot : slots_) {
    if (!slot.direct && slot.use != Use::kInput) {
      return true;
    }
  }
  return false;
}

void HostTensors::copyRangesBack(const std::vector<BufferRange>& ranges) {
  for (const Slot& slot : slots_) {
    const auto width = static_cast<size_t>(slot.user.element_size());
    for (const BufferRange& range : ranges) {
      if (slot.resultInPieces && slot.buffer == range.buffer) {
        stagingFor(slot.user.device())
            .copyToDevice(
                slot.user,
                slot.host,
                static_cast<int64_t>(range.begin / width),
                static_cast<int64_t>(range.end / width));
      }
    }
  }
}

void HostTensors::copyFinalBack() {
  at::AutoDispatchBelowADInplaceOrView below;
  copyRangesBack(pieces_->takeFinal());
}

void HostTensors::leaveResults() {
  for (const auto& staging : devices_) {
    if (staging->hasCopiesToDevice()) {
      staging->copiesToDeviceIssued();
    }
  }
}

void HostTensors::copyBack() {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::ParallelGuard serial(true); // no second pool of OpenMP threads
  if (pieces_) {
    copyRangesBack(pieces_->takeRest());
  }
  for (const Slot& slot : slots_) {
    if (slot.direct || slot.use == Use::kInput || slot.resultInPieces) {
      continue;
    }
    if (slot.staged) {
      stagingFor(slot.user.device()).copyToDevice(slot.user, slot.host);
    } else {
      slot.user.copy_(slot.host);
    }
  }
  leaveResults();
}

bool isInPlace(const at::Tensor& whole, size_t offset, const at::Tensor& part) {
  return usableDirectly(whole) && usableDirectly(part) &&
      static_cast<const char*>(whole.const_data_ptr()) + offset ==
      part.const_data_ptr();
}

} // namespace resilient

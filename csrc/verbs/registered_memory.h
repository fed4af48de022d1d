#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/status.h"
#include "transport/verbs_api.h"
#include "verbs/handles.h"

namespace resilient {

// Memory that is registered with one device.
class RegisteredMemory final : public VerbsMemory {
 public:
  // The far end can read it only if `forReads`, and never write to it by
  // itself.
  static Status make(
      const std::shared_ptr<OpenDevice>& device,
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory);
  // As VerbsDevice::registerDmabuf().
  static Status fromDmabuf(
      const std::shared_ptr<OpenDevice>& device,
      int dmabuf,
      uint64_t offset,
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory);

  // Whether the bytes belong to this memory, and this to the domain.
  bool covers(std::span<const std::byte> bytes, const ibv_pd* domain) const;
  uint32_t key() const {
    return region_->lkey;
  }
  uint32_t remoteKey() const override {
    return region_->rkey;
  }

 private:
  RegisteredMemory(
      std::shared_ptr<OpenDevice> device,
      std::span<const std::byte> bytes,
      RegionHandle region)
      : device_(std::move(device)), bytes_(bytes), region_(std::move(region)) {}

  std::shared_ptr<OpenDevice> device_;
  // libibverbs says the offset instead of the address for a dma-buf.
  std::span<const std::byte> bytes_;
  RegionHandle region_;
};

} // namespace resilient

// The Python module torch_resilient._cuda: kernels on addresses. It knows
// nothing of torch: torch_resilient/smart/_cuda_loss.py checks tensors, chooses
// device and stream, and makes the results.
// Apart from alignment nothing is checked here: a wrong address or size is a
// fault of the device. Tensors must stay alive until their stream has run the
// kernels.

#include <pybind11/pybind11.h>

#include <string>

#include "cuda/loss_kernels.h"
#include "loss/priority.h"

namespace py = pybind11;

namespace resilient::cuda {
namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

PYBIND11_MODULE(_cuda, m) {
  m.def(
      "mean_magnitudes",
      [](const std::string& dtype,
         uintptr_t data,
         size_t count,
         size_t elementsPerPacket,
         size_t firstPacketElements,
         uintptr_t out,
         uintptr_t stream) {
        meanMagnitudes(
            magnitudeType(dtype),
            at<void>(data),
            count,
            elementsPerPacket,
            firstPacketElements,
            at<float>(out),
            at<CUstream_st>(stream));
      });
  m.def("packet_count", &packetCount);
  m.def(
      "sampled_threshold",
      [](const std::string& dtype,
         uintptr_t data,
         size_t count,
         double topFraction,
         uint64_t seed,
         uintptr_t room,
         uintptr_t stream) {
        const DType type = magnitudeType(dtype);
        // Only this function waits for the device.
        const py::gil_scoped_release release;
        return sampledThreshold(
            type,
            at<void>(data),
            count,
            topFraction,
            seed,
            at<double>(room),
            at<CUstream_st>(stream));
      });
  m.def(
      "all_finite",
      [](const std::string& dtype,
         uintptr_t data,
         size_t count,
         uintptr_t finite,
         uintptr_t stream) {
        allFinite(
            magnitudeType(dtype),
            at<void>(data),
            count,
            at<int32_t>(finite),
            at<CUstream_st>(stream));
      });
  m.def(
      "encode_xor",
      [](uintptr_t data,
         uintptr_t parity,
         size_t blocks,
         size_t symbols,
         size_t paritySymbols,
         size_t bytes,
         uintptr_t stream) {
        encodeXor(
            {at<void>(data),
             at<void>(parity),
             blocks,
             symbols,
             paritySymbols,
             bytes},
            at<CUstream_st>(stream));
      });
  m.def(
      "recover_xor",
      [](uintptr_t data,
         uintptr_t parity,
         size_t blocks,
         size_t symbols,
         size_t paritySymbols,
         size_t bytes,
         uintptr_t have,
         uintptr_t parityHere,
         uintptr_t filled,
         uintptr_t stream) {
        recoverXor(
            {at<void>(data),
             at<void>(parity),
             blocks,
             symbols,
             paritySymbols,
             bytes},
            at<bool>(have),
            at<bool>(parityHere),
            at<unsigned long long>(filled),
            at<CUstream_st>(stream));
      });
}

} // namespace
} // namespace resilient::cuda

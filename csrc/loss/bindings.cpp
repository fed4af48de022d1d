// The Python module torch_resilient._loss: the codes and priorities of this
// folder on buffers, for tests, benchmarks and studies. It knows nothing of
// torch.

// All functions work on the caller's buffers, without a copy and without the
// GIL. No other thread may change them meanwhile. Wrong shapes and names raise
// ValueError before anything is written.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/signature.h"
#include "loss/kernels.h"
#include "loss/parity_code.h"
#include "loss/parity_code_internal.h"
#include "loss/priority.h"

namespace py = pybind11;

namespace resilient {
namespace {

using kernels::Kernel;

ParityKind kindOf(std::string_view name) {
  if (name == "xor") {
    return ParityKind::kXor;
  }
  if (name == "reed_solomon") {
    return ParityKind::kReedSolomon;
  }
  throw std::invalid_argument(
      "kind: expected 'xor' or 'reed_solomon', got '" + std::string(name) +
      "'");
}

Kernel kernelOf(const std::optional<std::string>& name) {
  if (!name) {
    return kernels::fastest();
  }
  for (Kernel kernel : kernels::kKernels) {
    if (*name == kernels::kernelName(kernel) && kernels::supported(kernel)) {
      return kernel;
    }
  }
  throw std::invalid_argument(
      "kernel: '" + *name + "' is not one of kernels() on this processor");
}

// One after the other in memory, without gaps.
void checkContiguous(const char* name, const py::buffer_info& info) {
  py::ssize_t expected = info.itemsize;
  for (size_t i = info.shape.size(); i-- > 0;) {
    if (info.shape[i] > 1 && info.strides[i] != expected) {
      throw std::invalid_argument(
          std::string(name) +
          ": expected a contiguous buffer in C order; copy it first");
    }
    expected *= info.shape[i];
  }
}

// A buffer of bytes with two dimensions (symbols, bytes), or three, with
// blocks before them.
struct Blocks {
  Blocks(const char* name, const py::buffer& from, bool writable)
      : info(from.request(writable)) {
    if (info.itemsize != 1 || (info.ndim != 2 && info.ndim != 3)) {
      throw std::invalid_argument(
          std::string(name) +
          ": expected bytes with the dimensions (symbols, bytes) or (blocks, "
          "symbols, bytes), got " +
          std::to_string(info.ndim) + " dimensions of items of " +
          std::to_string(info.itemsize) + " bytes");
    }
    checkContiguous(name, info);
    const bool several = info.ndim == 3;
    blocks = several ? static_cast<size_t>(info.shape[0]) : 1;
    symbols = static_cast<size_t>(info.shape[several ? 1 : 0]);
    bytes = static_cast<size_t>(info.shape[several ? 2 : 1]);
  }
  std::byte* symbol(size_t block, size_t i) const {
    return static_cast<std::byte*>(info.ptr) + (block * symbols + i) * bytes;
  }
  py::buffer_info info;
  size_t blocks;
  size_t symbols;
  size_t bytes;
};

// The flags of the symbols of `like`, one byte each.
struct Flags {
  Flags(
      const char* name,
      const py::buffer& from,
      bool writable,
      const Blocks& like)
      : info(from.request(writable)) {
    checkContiguous(name, info);
    if (info.itemsize != 1 ||
        static_cast<size_t>(info.size) != like.blocks * like.symbols) {
      throw std::invalid_argument(
          std::string(name) + ": expected one bool for each of " +
          std::to_string(like.blocks * like.symbols) + " symbols, got " +
          std::to_string(info.size) + " items of " +
          std::to_string(info.itemsize) + " bytes");
    }
  }
  uint8_t& operator[](size_t i) const {
    return static_cast<uint8_t*>(info.ptr)[i];
  }
  py::buffer_info info;
};

void checkPair(const Blocks& data, const Blocks& parity) {
  if (parity.blocks != data.blocks || parity.bytes != data.bytes) {
    throw std::invalid_argument(
        "parity: expected " + std::to_string(data.blocks) +
        " blocks of symbols of " + std::to_string(data.bytes) +
        " bytes, as in data, got " + std::to_string(parity.blocks) + " of " +
        std::to_string(parity.bytes));
  }
}

BlockShape
shapeOf(const std::string& kind, const Blocks& data, const Blocks& parity) {
  constexpr size_t kMax = 1'000'000; // far more than makes sense, and an int
  if (data.symbols > kMax || parity.symbols > kMax) {
    throw std::invalid_argument("data, parity: at most 1000000 symbols");
  }
  return {
      kindOf(kind),
      static_cast<int>(data.symbols),
      static_cast<int>(parity.symbols)};
}

void encode(
    const std::string& kind,
    const py::buffer& data,
    const py::buffer& parity,
    const std::optional<std::string>& kernel) {
  const Blocks from("data", data, false);
  const Blocks to("parity", parity, true);
  checkPair(from, to);
  const BlockShape shape = shapeOf(kind, from, to);
  const Kernel which = kernelOf(kernel);
  const py::gil_scoped_release release;
  std::vector<const std::byte*> sources(from.symbols);
  std::vector<std::byte*> results(to.symbols);
  for (size_t b = 0; b < from.blocks; ++b) {
    for (size_t i = 0; i < from.symbols; ++i) {
      sources[i] = from.symbol(b, i);
    }
    for (size_t j = 0; j < to.symbols; ++j) {
      results[j] = to.symbol(b, j);
    }
    kernels::encodeParity(which, shape, sources, results, from.bytes);
  }
}

// Returns the number of symbols that came back, and sets their flags in `have`.
int64_t recover(
    const std::string& kind,
    const py::buffer& data,
    const py::buffer& have,
    const py::buffer& parity,
    const py::buffer& parityHere,
    const std::optional<std::string>& kernel) {
  const Blocks into("data", data, true);
  const Blocks from("parity", parity, false);
  checkPair(into, from);
  const Flags arrived("have", have, true, into);
  const Flags here("parity_here", parityHere, false, from);
  const BlockShape shape = shapeOf(kind, into, from);
  const Kernel which = kernelOf(kernel);
  const py::gil_scoped_release release;
  std::vector<std::byte*> symbols(into.symbols);
  const std::unique_ptr<bool[]> flags(new bool[into.symbols]);
  std::vector<const std::byte*> repair(from.symbols);
  int64_t filled = 0;
  for (size_t b = 0; b < into.blocks; ++b) {
    for (size_t i = 0; i < into.symbols; ++i) {
      symbols[i] = into.symbol(b, i);
      flags[i] = arrived[b * into.symbols + i] != 0;
    }
    for (size_t j = 0; j < from.symbols; ++j) {
      repair[j] = here[b * from.symbols + j] != 0 ? from.symbol(b, j) : nullptr;
    }
    filled += kernels::recoverData(
        which, shape, symbols, {flags.get(), into.symbols}, repair, into.bytes);
    for (size_t i = 0; i < into.symbols; ++i) {
      arrived[b * into.symbols + i] = flags[i] ? 1 : 0;
    }
  }
  return filled;
}

// Elements of `dtype`; the buffer's own item type does not matter, since numpy
// has no bfloat16.
struct Elements {
  Elements(const std::string& name, const py::buffer& from)
      : dtype(magnitudeType(name)), info(from.request()) {
    checkContiguous("data", info);
    const auto bytes = static_cast<size_t>(info.size * info.itemsize);
    if (bytes % dtypeBytes(dtype) != 0) {
      throw std::invalid_argument(
          "data: " + std::to_string(bytes) +
          " bytes are no whole number of elements of " + name);
    }
    count = bytes / dtypeBytes(dtype);
  }
  const std::byte* data() const {
    return static_cast<const std::byte*>(info.ptr);
  }
  DType dtype;
  py::buffer_info info;
  size_t count;
};

py::array_t<float> means(
    const std::string& dtype,
    const py::buffer& data,
    size_t elementsPerPacket,
    size_t firstPacketElements) {
  const Elements from(dtype, data);
  py::array_t<float> result(
      static_cast<py::ssize_t>(
          packetCount(from.count, elementsPerPacket, firstPacketElements)));
  float* out = result.mutable_data();
  const py::gil_scoped_release release;
  meanMagnitudes(
      from.dtype,
      from.data(),
      from.count,
      elementsPerPacket,
      firstPacketElements,
      out);
  return result;
}

double threshold(
    const std::string& dtype,
    const py::buffer& data,
    double topFraction,
    uint64_t seed) {
  const Elements from(dtype, data);
  const py::gil_scoped_release release;
  return sampledThreshold(
      from.dtype, from.data(), from.count, topFraction, seed);
}

bool finite(const std::string& dtype, const py::buffer& data) {
  const Elements from(dtype, data);
  const py::gil_scoped_release release;
  return allFinite(from.dtype, from.data(), from.count);
}

// A yardstick for benchmarks/parity_codes.py, not a code: it reads ten lines
// and writes one, as XOR parity of one symbol for ten does.
typedef uint64_t Line __attribute__((vector_size(64)));

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void foldTen(const std::byte* from, std::byte* to, size_t lines) {
  for (size_t i = 0; i < lines; ++i) {
    Line sum = {};
    for (size_t k = 0; k < 10; ++k) {
      Line line;
      std::memcpy(&line, from + 64 * (10 * i + k), 64);
      sum ^= line;
    }
    std::memcpy(to + 64 * i, &sum, 64);
  }
}

void foldLines(const py::buffer& data, const py::buffer& out) {
  const py::buffer_info from = data.request();
  const py::buffer_info to = out.request(true);
  checkContiguous("data", from);
  checkContiguous("out", to);
  const auto lines = static_cast<size_t>(from.size * from.itemsize) / 640;
  if (static_cast<size_t>(to.size * to.itemsize) < 64 * lines) {
    throw std::invalid_argument("out: expected a tenth of the bytes of data");
  }
  const py::gil_scoped_release release;
  foldTen(
      static_cast<const std::byte*>(from.ptr),
      static_cast<std::byte*>(to.ptr),
      lines);
}

std::vector<std::string> kernelsHere() {
  std::vector<std::string> result;
  for (Kernel kernel : kernels::kKernels) {
    if (kernels::supported(kernel)) {
      result.emplace_back(kernels::kernelName(kernel));
    }
  }
  return result;
}

PYBIND11_MODULE(_loss, m) {
  m.def(
      "encode",
      &encode,
      py::arg("kind"),
      py::arg("data"),
      py::arg("parity"),
      py::arg("kernel") = py::none());
  m.def(
      "recover",
      &recover,
      py::arg("kind"),
      py::arg("data"),
      py::arg("have"),
      py::arg("parity"),
      py::arg("parity_here"),
      py::arg("kernel") = py::none());
  m.def(
      "mean_magnitudes",
      &means,
      py::arg("dtype"),
      py::arg("data"),
      py::arg("elements_per_packet"),
      py::arg("first_packet_elements") = 0);
  m.def(
      "sampled_threshold",
      &threshold,
      py::arg("dtype"),
      py::arg("data"),
      py::arg("top_fraction"),
      py::arg("seed"));
  m.def("all_finite", &finite, py::arg("dtype"), py::arg("data"));
  m.def("kernels", &kernelsHere);
  m.def("fold_lines", &foldLines, py::arg("data"), py::arg("out"));
}

} // namespace
} // namespace resilient

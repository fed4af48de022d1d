#include "cuda/loss_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/thread_bodies.h"
#include "loss/priority.h"

namespace resilient::cuda {
namespace {

constexpr size_t kBlockThreads = 256;
// The limit of a grid in its first dimension; further blocks loop.
constexpr size_t kMaxBlocks = 0x7fffffff;

__device__ size_t firstThread() {
  return static_cast<size_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
}

__device__ size_t allThreads() {
  return static_cast<size_t>(gridDim.x) * kBlockThreads;
}

struct ShuffleDown {
  template <typename Value>
  __device__ Value operator()(Value value, unsigned places) const {
    return __shfl_down_sync(0xffffffffu, value, places);
  }
};

template <typename Body>
__global__ void __launch_bounds__(kBlockThreads)
    runEach(Body body, size_t threads) {
  for (size_t i = firstThread(); i < threads; i += allThreads()) {
    body(i);
  }
}

template <typename Type>
__global__ void __launch_bounds__(kBlockThreads)
    runMeans(PacketMeans<Type> means) {
  const size_t thread = firstThread() % kWarpThreads;
  // The same for all threads of a warp.
  for (size_t packet = firstThread() / kWarpThreads; packet < means.packets;
       packet += allThreads() / kWarpThreads) {
    const auto partial = means.partial(packet, thread);
    const auto sum = foldSums(partial.low, partial.high, ShuffleDown());
    if (thread == 0) {
      means.put(packet, sum);
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    runMark(MarkRecovered mark, unsigned long long* filled) {
  for (size_t i = firstThread(); i < mark.threads(); i += allThreads()) {
    if (mark(i)) {
      atomicAdd(filled, 1ull);
    }
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string(what) + ": CUDA: " + cudaGetErrorString(error));
  }
}

template <typename... Parameters, typename... Arguments>
void launch(
    const char* what,
    void (*kernel)(Parameters...),
    size_t threads,
    cudaStream_t stream,
    Arguments... arguments) {
  if (threads == 0) {
    return;
  }
  const size_t blocks = (threads + kBlockThreads - 1) / kBlockThreads;
  kernel<<<
      static_cast<unsigned>(std::min(blocks, kMaxBlocks)),
      static_cast<unsigned>(kBlockThreads),
      0,
      stream>>>(arguments...);
  check(cudaGetLastError(), what);
}

template <typename Body>
void launchEach(const char* what, const Body& body, cudaStream_t stream) {
  launch(what, runEach<Body>, body.threads(), stream, body, body.threads());
}

// Calls function(Type{}, elements).
template <typename Function>
void withElements(DType dtype, const void* data, Function function) {
  const auto call = [&]<typename Type>(Type type) {
    using Storage = typename Type::Storage;
    if (reinterpret_cast<uintptr_t>(data) % sizeof(Storage) != 0) {
      throw std::invalid_argument(
          "data: its address is no multiple of the size of an element");
    }
    function(type, static_cast<const Storage*>(data));
  };
  switch (dtype) {
    case DType::kFloat32:
      return call(magnitude::OfFloat32{});
    case DType::kBFloat16:
      return call(magnitude::OfBFloat16{});
    case DType::kFloat16:
      return call(magnitude::OfFloat16{});
    case DType::kFloat64:
      return call(magnitude::OfFloat64{});
    default:
      throw std::invalid_argument(
          std::string("dtype ") + dtypeName(dtype) + " has no magnitude");
  }
}

// Calls function(Word{}, words in a symbol) with the widest word that fits.
template <typename Function>
void withWord(const XorBlocks& blocks, Function function) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(blocks.data) |
      reinterpret_cast<uintptr_t>(blocks.parity) | blocks.bytes;
  if (all % 16 == 0) {
    function(Word16{}, blocks.bytes / 16);
  } else if (all % 4 == 0) {
    function(uint32_t{}, blocks.bytes / 4);
  } else {
    function(uint8_t{}, blocks.bytes);
  }
}

} // namespace

void meanMagnitudes(
    DType dtype,
    const void* data,
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements,
    float* out,
    cudaStream_t stream) {
  const size_t packets =
      packetCount(count, elementsPerPacket, firstPacketElements);
  withElements(dtype, data, [&]<typename Type>(Type, const auto* elements) {
    const PacketMeans<Type> means{
        elements, count, elementsPerPacket, firstPacketElements, packets, out};
    launch(
        "mean_magnitudes",
        runMeans<Type>,
        packets * kWarpThreads,
        stream,
        means);
  });
}

double sampledThreshold(
    DType dtype,
    const void* data,
    size_t count,
    double topFraction,
    uint64_t seed,
    double* room,
    cudaStream_t stream) {
  if (count == 0) {
    return resilient::sampledThreshold(dtype, nullptr, 0, topFraction, seed);
  }
  std::vector<double> sample(std::min(count, magnitude::kThresholdSample));
  withElements(dtype, data, [&]<typename Type>(Type, const auto* elements) {
    launchEach(
        "sampled_threshold",
        ThresholdSample<Type>{elements, count, seed, room, sample.size()},
        stream);
  });
  check(
      cudaMemcpyAsync(
          sample.data(),
          room,
          sample.size() * sizeof(double),
          cudaMemcpyDeviceToHost,
          stream),
      "sampled_threshold");
  check(cudaStreamSynchronize(stream), "sampled_threshold");
  return thresholdOf(sample, topFraction);
}

void allFinite(
    DType dtype,
    const void* data,
    size_t count,
    int32_t* finite,
    cudaStream_t stream) {
  withElements(dtype, data, [&]<typename Type>(Type, const auto* elements) {
    launchEach("all_finite", AllFinite<Type>(elements, count, finite), stream);
  });
}

void encodeXor(const XorBlocks& blocks, cudaStream_t stream) {
  withWord(blocks, [&]<typename Word>(Word, size_t words) {
    launchEach(
        "encode_xor",
        EncodeXor<Word>{
            {blocks.blocks, blocks.symbols, blocks.paritySymbols, words},
            static_cast<const Word*>(blocks.data),
            static_cast<Word*>(blocks.parity)},
        stream);
  });
}

// Two kernels on one stream: the first repairs and only reads the flags, the
// second sets them. In one kernel, a thread that repairs the next word of a
// symbol could find it marked as present.
void recoverXor(
    const XorBlocks& blocks,
    bool* have,
    const bool* parityHere,
    unsigned long long* filled,
    cudaStream_t stream) {
  withWord(blocks, [&]<typename Word>(Word, size_t words) {
    const XorFlags flags{
        {blocks.blocks, blocks.symbols, blocks.paritySymbols, words},
        have,
        parityHere};
    launchEach(
        "recover_xor",
        RecoverXor<Word>{
            flags,
            static_cast<Word*>(blocks.data),
            static_cast<const Word*>(blocks.parity)},
        stream);
    const MarkRecovered mark{flags};
    launch("recover_xor", runMark, mark.threads(), stream, mark, filled);
  });
}

} // namespace resilient::cuda

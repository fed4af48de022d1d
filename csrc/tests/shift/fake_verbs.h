#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <cstdint>

// Devices in memory in place of libibverbs, for tests of the library that
// `torch-resilient shift` preloads. Two hosts, a and b, with the devices a0 and
// a1, b0 and b1: a0 and b0 are on network 0, a1 and b1 on network 1. A thread
// delivers packets. Queue pairs are reliable connections that SEND, WRITE and
// WRITE_WITH_IMM; numbers and keys repeat on different devices, as they do in
// real ones, so that confusions show.
//
// All functions may be called from any thread.
namespace resilient::shift::fake {

enum class Fault : uint8_t {
  kNone,
  // Packets of both hosts are lost: error completions after kTimeout.
  kLoss,
  // Packets of both hosts are lost, and no completion tells.
  kSilence,
  // Only acknowledgements are lost.
  kAcknowledgements,
  // As kLoss, and the ports tell that they are down.
  kPorts,
};

void setFault(int network, Fault fault);
// From now on, a network carries a packet of each queue pair in so long.
void setPace(int network, std::chrono::milliseconds pace);
// The packets that a network has delivered.
uint64_t delivered(int network);
// How often a queue pair of a device was moved to the error state on purpose.
uint64_t fences();

// ibv_modify_qp to RTR does not return on this network while this holds: its
// neighbours do not answer.
void holdConnects(int network, bool isHeld);
// The same for all queue pairs of a device and the error state.
void holdFences(const char* device, bool isHeld);
// ibv_reg_mr and its like do not return on this device while this holds: they
// pin many gigabytes.
void holdRegistrations(const char* device, bool isHeld);
// How many calls are held.
int heldCalls();

} // namespace resilient::shift::fake

#pragma once

namespace resilient::lab {

// The process that carries a lab's packets: reads from the hosts' TUN devices,
// treats what it reads (lab/emulator.h), writes it to others. A host that is a
// guest with a kernel of its own has a packet socket instead, and its networks
// carry Ethernet frames.
//
// `control` is a SOCK_SEQPACKET socket to the owner of the lab, `owner` a
// pidfd of that process. Returns when either says that the owner is gone;
// throws StatusError if the system refuses what it needs.
//
// A request is one message of lines; each is a verb and its arguments. The
// answer is one message: "ok" and what was asked for, or "error" and why; then
// the lines after the one that failed were not done.
//
//   nic NIC NETWORK [ADDRESS...]      its TUN device comes with the message
//   ethernet NIC NETWORK ADDRESS      its packet socket comes with the message
//   address NIC ADDRESS...            more of them
//   pipe PIPE SOURCE_NIC TARGET_NIC SEED
//   set PIPE name=value...            the fields of PipeSettings
//   limiter LIMITER RATE QUEUE        makes it if it is the next number
//   carrier NIC 0|1
//   counters PIPE...                  of these, in this order
//
// Numbers count from 0 in the order of making; addresses are 32 hex digits, as
// of Packet::destination(). A network has NICs of one of the two sorts.
//
// A device is passed with its line by SCM_RIGHTS, one for each message.
// Requests are answered in order, between packets. Messages have at most 128
// KiB; the owner cuts longer lists (testing/carrier.py). Both descriptors are
// borrowed.
//
// Call it in a process of its own: it takes real-time priority if that is
// allowed, locks its memory, and ignores SIGCHLD.
void carrier(int control, int owner);

} // namespace resilient::lab

"""Copies and alters datagrams that this host sends, for test_datagrams.py.

Arguments: interface, destination port, number of datagrams. Says how many it has sent.
"""

from __future__ import annotations

import json
import socket
import struct
import sys

IPV4 = 0x0800
EVERYTHING = 0x0003  # only a socket with this protocol sees outgoing packets
OUTGOING = 4  # sll_pkttype


def without_checksum(packet: bytes, begin: int) -> bytearray:
    """The packet with a UDP header, at `begin`, that claims no checksum."""
    changed = bytearray(packet)
    changed[begin + 6 : begin + 8] = b"\0\0"
    return changed


def main() -> None:
    """Sends each datagram that it sees twice more: as it is, and with a bit changed."""
    interface, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERYTHING)) as raw:
        raw.bind((interface, EVERYTHING))
        raw.settimeout(20)
        sent = 0
        seen = set()
        while sent < count:
            packet, address = raw.recvfrom(65536)
            header = 4 * (packet[0] & 15)
            if address[2] != OUTGOING or packet[9] != socket.IPPROTO_UDP or len(packet) > 1500:
                continue
            (to,) = struct.unpack_from("!H", packet, header + 2)
            if to != port or packet[header + 8 :] in seen:
                continue  # not theirs, or ours
            copied = without_checksum(packet, header)
            altered = bytearray(copied)
            altered[-1] ^= 1
            for each in (copied, altered):
                seen.add(bytes(each[header + 8 :]))
                raw.sendto(each, (interface, IPV4))
            sent += 1
    print(json.dumps({"copied": sent, "altered": sent}), flush=True)


if __name__ == "__main__":
    main()

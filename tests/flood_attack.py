"""A stranger that connects to a port at a given rate, for test_flood.py.

Arguments: address, port, calls a second, first words (none, half or whole: of a hello, or tls),
addresses to call from, the name of the job's secret in hex, which a whole hello has, and a
ClientHello in hex, for tls. Says once a second
how many calls it has made, in a row of JSON.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import struct
import sys
import time

from handshake_client import HELLO_BYTES, hello

# Held at a time; then the oldest is reset. As many as a usual limit on open files allows twice.
HELD = 2000
IP_BIND_ADDRESS_NO_PORT = 24
AT_ONCE = struct.pack("ii", 1, 0)


def main() -> None:
    """Calls until it is killed."""
    address, port, rate, words, sources = (
        sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    )  # fmt: skip
    if words == "tls":
        said = bytes.fromhex(sys.argv[7])
    else:
        said = hello(bytes.fromhex(sys.argv[6]), os.urandom(16), os.urandom(16))[
            : {"none": 0, "half": HELLO_BYTES // 2, "whole": HELLO_BYTES}[words]
        ]
    held: collections.deque[socket.socket] = collections.deque()
    calls, told = 0, 0
    began = time.monotonic()
    while True:
        elapsed = time.monotonic() - began
        if elapsed >= told + 1:
            told += 1
            print(json.dumps({"kind": "flood", "second": told, "calls": calls}), flush=True)
        if calls >= elapsed * rate:
            time.sleep(0.001)
            continue
        if len(held) >= HELD:
            held.popleft().close()
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        caller.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        caller.bind((f"127.1.{calls % sources // 250}.{1 + calls % sources % 250}", 0))
        caller.connect_ex((address, port))
        if said:  # over loopback the connection stands at once, unless the queue is full
            with contextlib.suppress(OSError):
                caller.send(said)
        held.append(caller)
        calls += 1


if __name__ == "__main__":
    main()

"""The calling end of a connection, for tests that attack.

Written from docs/wire_handshake.md and docs/wire_format.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

HELLO_BYTES = 96
CHALLENGE_BYTES = 88
VERSION = 1
OK, BUSY = 0, 5


def hello(
    key_id: bytes, initiator: bytes, acceptor: bytes, *, slot: int = 0, rank: int = -1
) -> bytes:
    """The first message."""
    return (
        b"RSLH"
        + struct.pack("<HH", VERSION, HELLO_BYTES)
        + key_id
        + initiator
        + acceptor
        + struct.pack("<HHiQ", slot, slot + 1, rank, 64 << 20)
        + os.urandom(32)
    )


def key_id_of(secret: bytes) -> bytes:
    """The name of a secret."""
    return hashlib.sha256(b"resilient key id" + secret).digest()[:8]


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _expand(secret: bytes, info: bytes) -> bytes:
    return _mac(secret, info + b"\1")


def _label(secret: bytes, label: bytes, context: bytes) -> bytes:
    """HKDF-Expand-Label (RFC 8446, 7.1)."""
    name = b"tls13 " + label
    return _expand(
        secret,
        struct.pack(">HB", 32, len(name)) + name + struct.pack(">B", len(context)) + context,
    )


def _tls_key(secret: bytes, label: bytes) -> bytes:
    base = _mac(b"torch_resilient tls", secret)
    return _expand(base, label + struct.pack("<H", VERSION))


def tls_name(secret: bytes) -> bytes:
    """A fresh name of a secret, by which a caller tells which one it has."""
    nonce = os.urandom(16)
    return nonce + _mac(_tls_key(secret, b"pre-shared key name"), nonce)[:16]


def _extension(kind: int, content: bytes) -> bytes:
    return struct.pack(">HH", kind, len(content)) + content


def _hello_with(extensions: bytes, more: int = 0) -> bytes:
    """A ClientHello whose extensions end with so many further bytes."""
    extensions = (
        _extension(43, b"\2\3\4")  # TLS 1.3
        + _extension(10, b"\0\2\0\x1d")  # X25519
        + _extension(51, struct.pack(">HHH", 36, 0x1D, 32) + os.urandom(32))
        + extensions
    )
    body = (
        b"\3\3"
        + os.urandom(32)
        + b"\0"
        + struct.pack(">HH", 2, 0x1301)
        + b"\1\0"
        + struct.pack(">H", len(extensions) + more)
        + extensions
    )
    return b"\1" + (len(body) + more).to_bytes(3, "big") + body


def _record(message: bytes) -> bytes:
    return b"\x16\3\1" + struct.pack(">H", len(message)) + message


def client_hello(secret: bytes) -> bytes:
    """The first message of an encrypted connection: a record with a ClientHello that is right in
    every respect, as a listener on the network could have recorded it."""
    name = tls_name(secret)
    identity = struct.pack(">H", len(name)) + name + struct.pack(">I", 0)
    binders = 2 + 1 + 32  # their length, that of the one, and itself
    message = _hello_with(
        _extension(45, b"\1\1")  # psk_dhe_ke
        + struct.pack(">HHH", 41, 2 + len(identity) + binders, len(identity))
        + identity,
        binders,
    )
    early = _mac(bytes(32), _tls_key(secret, b"pre-shared key"))
    binder_key = _label(early, b"ext binder", hashlib.sha256().digest())
    binder = _mac(_label(binder_key, b"finished", b""), hashlib.sha256(message).digest())
    return _record(message + struct.pack(">HB", 33, 32) + binder)


def certified_hello(secret: bytes) -> bytes:
    """The same in a job with certificates."""
    return _record(
        _hello_with(
            _extension(13, b"\0\4\4\3\x08\4")  # ECDSA and RSA, with SHA-256
            + _extension(16, b"\0\x21\x20" + tls_name(secret))
        )
    )


def read(s: socket.socket, count: int) -> bytes:
    """Reads exactly `count` bytes; raises OSError if there are fewer."""
    data = b""
    while len(data) < count:
        part = s.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


class Caller:
    """A handshake in steps: many can be under way at once. Each step may raise OSError."""

    def __init__(self, port: int, secret: bytes, acceptor: bytes) -> None:
        """Starts as a process with a new uid, for a high path slot."""
        self.secret = secret
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.said = hello(key_id_of(secret), os.urandom(16), acceptor, slot=2047)
        self.socket.sendall(self.said)

    def prove(self) -> None:
        """Answers the challenge."""
        self.said += read(self.socket, CHALLENGE_BYTES)
        proof = b"RSLP" + struct.pack("<HH", VERSION, 40)
        proof += hmac.digest(self.secret, b"resilient client" + self.said + proof, "sha256")
        self.socket.sendall(proof)

    def verdict(self) -> int:
        """Returns the verdict of the acceptor."""
        header = read(self.socket, 8)
        (length,) = struct.unpack_from("<H", header, 6)
        return int(struct.unpack_from("<H", read(self.socket, length - 8))[0])


def data_frame(message: int, payload: bytes) -> bytes:
    """A whole message in one chunk, for a group that does not exist."""
    head = b"TRF1" + bytes([1, 3]) + struct.pack("<HII", 0, len(payload), len(payload))
    head += struct.pack("<QQQQ", 0, message, len(payload), 0)
    head += struct.pack("<QQQ", 0x1234, 7, message - 1)  # group, tag, order
    head += bytes([1, 0, 0, 1]) + struct.pack("<iQi", -1, len(payload), 0)
    return head + struct.pack("<I", checksum(head)) + payload


def checksum(head: bytes) -> int:
    """Returns the checksum of a header that lacks it."""
    wide = (1 << 64) - 1
    *words, last = struct.unpack("<11QI", head)
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = (h ^ word) * 0xFF51AFD7ED558CCD & wide
        h ^= h >> 32
    h = (h ^ last) * 0xC4CEB9FE1A85EC53 & wide
    return (h ^ h >> 32) & 0xFFFFFFFF

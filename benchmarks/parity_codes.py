"""Encoding and decoding of parity against what the memory allows."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from common import Row, add_common_arguments, median, write_rows

from torch_resilient import _loss
from torch_resilient.smart import _cuda_loss

ABOUT = """\
Packets of 1376 bytes in blocks of 100 + 10 or 20 + 2, one thread, once over a working set that no
cache holds and once over half a megabyte. All ways take turns in each round.

  memcpy         copies the data packets
  limit          the XOR of each ten lines of 64 bytes in the order of memory: reads everything and
                 writes a tenth, as XOR (100 + 10) must, without its order of packets
  xor, rs        encode: parity from data. decode n lost: n data packets of each block come back
  avx2           the same with AVX2 only, where the processor has more
  isal           Intel's ISA-L, where it is installed (Debian: libisal2). It is called from Python
                 for each block; the time of an empty call is subtracted

GB/s are those of data packets; share = rate / that of limit in the same round. Ends with status 1
if encoding XOR from memory is below 80 % of the limit.

With --device cuda instead the kernels of csrc/cuda over data in the GPU's memory: XOR (100 + 10)
and priorities. There the limit is a copy within that memory, and GB/s of all ways are those of
bytes read and written. No way that is slow changes the status.
"""

PACKET = 1376
TARGET = 0.8
Kind = Literal["xor", "reed_solomon"]
Bytes = npt.NDArray[np.uint8]


@dataclass
class Way:
    """Something to measure: `run` once over all data."""

    name: str
    run: Callable[[], float]  # seconds


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def decode_way(name: str, kind: Kind, data: Bytes, parity: Bytes, lost: int, repeats: int) -> Way:
    """Decoding after a burst of `lost` in each block; checked once."""
    blocks, packets = data.shape[:2]
    have = np.ones((blocks, packets), dtype=bool)
    first = packets // 3
    have[:, first : first + lost] = False
    here = np.ones(parity.shape[:2], dtype=bool)
    before = data[-1].copy()
    data[-1, first : first + lost] = 0
    assert _loss.recover(kind, data, have.copy(), parity, here) == blocks * lost
    assert bool((data[-1] == before).all())

    def run() -> float:
        flags = [have.copy() for _ in range(repeats)]

        def decode() -> None:
            for each in flags:
                _loss.recover(kind, data, each, parity, here)

        return timed(decode)

    return Way(f"{name} decode {lost} lost", run)


def isal_way(name: str, data: Bytes, parity: Bytes, repeats: int) -> Way | None:
    """Encoding with ISA-L; None if it is not installed. Checked: `parity` holds our result."""
    found = ctypes.util.find_library("isal")
    if found is None:
        return None
    library: Any = ctypes.CDLL(found)
    blocks, k = data.shape[:2]
    m = parity.shape[1]
    matrix = (ctypes.c_ubyte * ((k + m) * k))()
    library.gf_gen_cauchy1_matrix(matrix, k + m, k)
    tables = (ctypes.c_ubyte * (32 * k * m))()
    library.ec_init_tables(k, m, ctypes.byref(matrix, k * k), ctypes.byref(tables))
    result = np.empty_like(parity)

    def pointers(array: Bytes) -> list[Any]:
        count = array.shape[1]
        base = array.ctypes.data
        return [
            (ctypes.c_void_p * count)(*(base + PACKET * (b * count + i) for i in range(count)))
            for b in range(blocks)
        ]

    calls = list(zip(pointers(data), pointers(result), strict=True))
    # gf_inv looks at its first argument only: what the calls themselves cost.
    encode, nothing = library.ec_encode_data, library.gf_inv

    def over(function: Any) -> None:
        for _ in range(repeats):
            for sources, results in calls:
                function(PACKET, k, m, tables, sources, results)

    over(encode)
    assert bool((result == parity).all())

    def run() -> float:
        assert len(result) == blocks  # which keeps the memory of `results`
        return timed(lambda: over(encode)) - timed(lambda: over(nothing))

    return Way(f"{name} isal encode", run)


def ways(data: Bytes, repeats: int) -> list[Way]:
    """The ways to measure over `data`, a number of packets that is a multiple of 100."""
    flat = data.reshape(-1)
    copy = np.ones_like(flat)
    folded = np.ones(flat.size // 10 + 64, dtype=np.uint8)

    def again(function: Callable[[], object]) -> Callable[[], float]:
        def loop() -> None:
            for _ in range(repeats):
                function()

        return lambda: timed(loop)

    result = [
        Way("memcpy", again(lambda: np.copyto(copy, flat))),
        Way("limit", again(lambda: _loss.fold_lines(flat, folded))),
    ]
    shapes: list[tuple[str, Kind, int, int, tuple[int, ...]]] = [
        ("xor 100+10", "xor", 100, 10, (10,)),
        ("rs 100+10", "reed_solomon", 100, 10, (1, 10)),
        ("rs 20+2", "reed_solomon", 20, 2, (2,)),
    ]
    for name, kind, k, m, losses in shapes:
        blocks = data.reshape(-1, k, PACKET)
        parity = np.ones((len(blocks), m, PACKET), dtype=np.uint8)

        def encode(
            kernel: str | None = None,
            kind: Kind = kind,
            blocks: Bytes = blocks,
            parity: Bytes = parity,
        ) -> None:
            _loss.encode(kind, blocks, parity, kernel)

        encode()
        result.append(Way(f"{name} encode", again(encode)))
        if _loss.kernels()[-1] != "avx2" and "avx2" in _loss.kernels():
            result.append(Way(f"{name} avx2 encode", again(lambda e=encode: e("avx2"))))  # type: ignore[misc]
        if kind == "reed_solomon" and (isal := isal_way(name, blocks, parity, repeats)):
            result.append(isal)
        result += [decode_way(name, kind, blocks, parity, lost, repeats) for lost in losses]
    return result


def measure(place: str, packets: int, repeats: int, rounds: int) -> list[Row]:
    """A row for each way."""
    generator = np.random.default_rng(1)
    words = generator.integers(0, 2**64, packets * PACKET // 8, dtype=np.uint64)
    data = words.view(np.uint8).reshape(packets, PACKET)
    all_ways = ways(data, repeats)
    seconds: dict[str, list[float]] = {way.name: [] for way in all_ways}
    for number in range(rounds + 1):
        for way in all_ways:
            taken = way.run()
            if number > 0:  # the first one warms up
                seconds[way.name].append(taken)
    return [
        {
            "benchmark": "parity_codes",
            "place": place,
            "kernel": _loss.kernels()[-1],
            "way": name,
            "data_bytes": data.size,
            "bytes_per_s": data.size * repeats / median(taken),
            "of_limit": median(
                [limit / own for limit, own in zip(seconds["limit"], taken, strict=True)]
            ),
        }
        for name, taken in seconds.items()
    ]


def measure_cuda(rounds: int, quick: bool) -> list[Row]:
    """A row for each kernel of csrc/cuda, and one for a copy, on the current GPU."""
    size = (100 if quick else 1000) * 1_376_000  # beyond its cache; whole blocks
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(data)
    blocks = data.view(-1, 100, PACKET)
    parity = blocks.new_empty(len(blocks), 10, PACKET)
    here = torch.ones(parity.shape[:2], dtype=torch.bool, device="cuda")
    have = torch.ones(blocks.shape[:2], dtype=torch.bool, device="cuda")
    have[:, 33:43] = False
    flags = have.clone()
    gradient = torch.randn(size // 4, device="cuda")
    half = gradient.bfloat16()

    def decode() -> None:
        flags.copy_(have)
        _cuda_loss.recover_xor(blocks, flags, parity, here)

    # (name, bytes read and written, call)
    cuda_ways: list[tuple[str, int, Callable[[], object]]] = [
        ("limit", 2 * size, lambda: copy.copy_(data)),
        ("xor 100+10 encode", size + size // 10, lambda: _cuda_loss.encode_xor(blocks, parity)),
        ("xor 100+10 decode 10 lost", size + size // 10, decode),
        ("means float32", size, lambda: _cuda_loss.mean_magnitudes(gradient, PACKET // 4)),
        ("means bfloat16", size // 2, lambda: _cuda_loss.mean_magnitudes(half, PACKET // 2)),
        ("all_finite float32", size, lambda: _cuda_loss.all_finite(gradient)),
        ("torch.isfinite float32", size, lambda: bool(torch.isfinite(gradient).all())),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in cuda_ways}
    for number in range(rounds + 1):
        for name, _, call in cuda_ways:
            begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begun.record()
            call()
            ended.record()
            ended.synchronize()
            if number > 0:  # the first one warms up
                seconds[name].append(begun.elapsed_time(ended) / 1e3)
    moved = {name: count for name, count, _ in cuda_ways}
    limit = moved["limit"] / median(seconds["limit"])
    return [
        {
            "benchmark": "parity_codes",
            "place": "cuda",
            "kernel": torch.cuda.get_device_name(),
            "way": name,
            "data_bytes": size,
            "bytes_per_s": moved[name] / median(taken),
            "of_limit": moved[name] / median(taken) / limit,
        }
        for name, taken in seconds.items()
    ]


def print_rows(place: str, kernel: str, rows: Sequence[Row]) -> None:
    """The table of one place."""
    print(f"from {place}, kernel {kernel}")
    print(f"  {'':<26}  {'GB/s':>7}  {'share':>6}")
    for row in rows:
        rate = row["bytes_per_s"] / 1e9
        print(f"  {row['way']:<26}  {rate:7.2f}  {row['of_limit']:6.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="samples (default 15, quick: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    rounds = options.rounds or (5 if options.quick else 15)
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if options.device == "cuda":
        if not (torch.cuda.is_available() and _cuda_loss.available()):
            parser.error("--device cuda: needs a GPU, and torch_resilient built with its kernels")
        rows = measure_cuda(rounds, options.quick)
        print_rows("cuda", rows[0]["kernel"], rows)
        write_rows(options.json, rows)
        return 0
    rows = []
    # 275 MB, or 138: beyond 32 MiB of cache. 0.55 MB: half of 1 MiB.
    for place, packets, repeats in (
        ("memory", 100_000 if options.quick else 200_000, 1),
        ("cache", 400, 50 if options.quick else 200),
    ):
        measured = measure(place, packets, repeats, rounds)
        print_rows(place, _loss.kernels()[-1], measured)
        rows += measured
    write_rows(options.json, rows)
    (share,) = (
        row["of_limit"]
        for row in rows
        if row["place"] == "memory" and row["way"] == "xor 100+10 encode"
    )
    if share < TARGET:
        print(f"MISSED: XOR reaches {share:.2f} of the limit of memory, not {TARGET}")
    return int(share < TARGET)


if __name__ == "__main__":
    sys.exit(main())

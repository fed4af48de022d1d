"""Kernels for priorities and XOR parity (csrc/cuda), on addresses in the current device's memory.

Only where torch has CUDA and its compiler was there. For smart/_cuda_loss.py, which checks
what it gives to these. RuntimeError, with CUDA's text, if a kernel cannot be started.
"""

def mean_magnitudes(
    dtype: str,
    data: int,
    count: int,
    elements_per_packet: int,
    first_packet_elements: int,
    out: int,
    stream: int,
) -> None: ...
def packet_count(count: int, elements_per_packet: int, first_packet_elements: int) -> int: ...
def sampled_threshold(
    dtype: str, data: int, count: int, top_fraction: float, seed: int, room: int, stream: int
) -> float: ...
def all_finite(dtype: str, data: int, count: int, finite: int, stream: int) -> None: ...
def encode_xor(
    data: int,
    parity: int,
    blocks: int,
    symbols: int,
    parity_symbols: int,
    symbol_bytes: int,
    stream: int,
) -> None: ...
def recover_xor(
    data: int,
    parity: int,
    blocks: int,
    symbols: int,
    parity_symbols: int,
    symbol_bytes: int,
    have: int,
    parity_here: int,
    filled: int,
    stream: int,
) -> None: ...

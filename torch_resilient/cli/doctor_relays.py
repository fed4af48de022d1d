"""The part of `torch-resilient doctor` about relays: who passes on what for whom."""

from __future__ import annotations

from torch_resilient.cli.doctor_checks import Facts, over_relays


def about(facts: Facts) -> list[str]:
    """A line about the ways over other ranks, and one about what this rank passes on."""
    lines = []
    ways = {}
    for peer in sorted({link.peer for link in facts.links}):
        if relays := over_relays(facts.links, peer):
            ways[peer] = ", ".join(map(str, relays))
    if ways:
        text = "; ".join(f"to rank {peer} over {relays}" for peer, relays in ways.items())
        lines.append(f"{facts.where}: relays: {text}")
    relayed = facts.relayed
    if relayed is not None and (relayed.bytes or relayed.refused):
        share = relayed.bytes / relayed.bytes_sent if relayed.bytes_sent else 0.0
        lines.append(
            f"{facts.where}: passes on for others: {relayed.bytes / 1e6:.1f} MB, "
            f"{min(share, 1.0):.0%} of all it sent, at most {relayed.held_max_bytes / 1e6:.1f} MB "
            f"waiting, {relayed.refused} refused"
        )
    return lines

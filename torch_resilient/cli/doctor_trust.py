"""The part of `torch-resilient doctor` about encryption: how each link is protected; checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_resilient.cli.doctor_checks import Facts, Finding

_WORKS = ("up", "reserve", "proving")
_SOURCES = (
    ("TORCH_RESILIENT_SECRET_FILE", "a secret file"),
    ("TORCH_RESILIENT_SECRET", "the variable TORCH_RESILIENT_SECRET"),
)
_CERTIFICATE = "TORCH_RESILIENT_TLS_CERT"


def key_source(facts: Facts) -> str:
    """The source of the job's secret, for people."""
    given = (text for name, text in _SOURCES if name in facts.environment)
    return next(given, "torch's store, which tells it to everybody who can reach it")


def _proof(facts: Facts) -> str:
    """By what the two ends of a link prove themselves, for people."""
    secret = key_source(facts)
    return f"certificates and {secret}" if _CERTIFICATE in facts.environment else secret


def about(facts: Facts) -> list[str]:
    """For each link of a rank one line: its cipher, the source of its keys, forward secrecy."""
    lines = []
    for link in facts.links:
        if link.kind == "shm" or link.state not in _WORKS:
            continue
        if link.cipher:
            keys = "of its own" if link.forward_secret else f"from {key_source(facts)}"
            secrecy = "forward secrecy" if link.forward_secret else "no forward secrecy"
            how = f"{link.cipher}, keys {keys}, {secrecy}; proved by {_proof(facts)}"
        elif link.local:
            how = "in plaintext, within the host"
        else:
            how = "in plaintext"
        # Several connections of two interfaces have one line.
        over = f" {link.nic}-{link.remote_nic}" if link.nic else ""
        line = f"  to rank {link.peer}{over} ({link.kind}): {how}"
        if line not in lines:
            lines.append(line)
    return lines


def check_encryption(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Bytes between hosts that anybody on the way can read and change. Without a finding where the
    user has chosen so: TORCH_RESILIENT_ENCRYPTION=off."""
    open_links = [
        (facts, link)
        for facts in all_facts
        for link in facts.links
        if link.state in _WORKS and not (link.cipher or link.local or link.kind == "shm")
    ]
    if not open_links:
        return
    first, link = open_links[0]
    if first.environment.get("TORCH_RESILIENT_ENCRYPTION") == "off":
        return
    if any(name in first.environment for name, _ in _SOURCES):
        if link.kind == "rdma":
            yield Finding(
                "encryption",
                f"{first.where} - rank {link.peer}",
                "RDMA carries data between hosts in plaintext, since devices do not encrypt",
                "whoever is on the network between them can read and change it",
                "if others share that network, set `TORCH_RESILIENT_RDMA=off`, or "
                "`TORCH_RESILIENT_ENCRYPTION=required`, on all ranks",
            )
        return
    yield Finding(
        "encryption",
        f"{first.where} - rank {link.peer}",
        "connections between hosts are not encrypted: the job's secret comes from torch's store, "
        "which has no password",
        "whoever can reach the store, or is on the network, can read and change all data and run "
        "code in the job",
        "`torch-resilient secret job.secret`, copy the file to all hosts, and set "
        "`TORCH_RESILIENT_SECRET_FILE=job.secret` on all ranks; on a network that nobody else "
        "uses, `TORCH_RESILIENT_ENCRYPTION=off` says that plaintext is intended",
    )

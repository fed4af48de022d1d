"""`torch-resilient doctor`: finds problems that break or slow down a job, and how to fix them.

Started alone, it checks this machine. With --host it also connects to a host and port as a rank
would. As the program of a torchrun job it checks every host and every pair of hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from torch_resilient.cli import (
    doctor_facts,
    doctor_peers,
    doctor_rdma,
    doctor_relays,
    doctor_trust,
)
from torch_resilient.cli.doctor_checks import Facts, Finding, check_host, check_job, check_target
from torch_resilient.cli.errors import bad_input, printable

ABOUT = """\
examples:
  torch-resilient doctor                                     this machine
  torch-resilient doctor --host node0 --port 29500           also the connection to the store
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
      --no-python torch-resilient doctor                     all hosts and their connections

It checks the build of torch_resilient, the start of the backend with the settings of the
environment, misspelled variables, names that resolve to loopback (127.0.1.1 in /etc/hosts),
interfaces of containers (docker0), limits on open files and on TCP's buffers, /dev/shm, and RDMA
devices: library, rights, locked memory, ports and addresses. In a job it also checks versions,
ports and firewalls for every pair of interfaces, RDMA between them, large messages (MTU), buffers
for the measured round trip, clocks, and what protects the data between hosts: for every link it
shows the cipher, where its keys come from, and whether it has forward secrecy. It tells which ranks
can pass on messages for which.

Each finding has an observation, its effect on a job, and a command that fixes it.
exit status: 0 without findings, 1 with findings, 2 for bad input.
"""


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "doctor",
        help="check a machine, or the hosts of a job, before training",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--host", help="name or address of a host to connect to, such as that of rank 0"
    )
    parser.add_argument("--port", type=int, help="port of that host, such as MASTER_PORT")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.set_defaults(run=run)


def finding_text(finding: Finding) -> str:
    """For people, with each part on lines of its own."""

    def part(name: str, text: str) -> str:
        # Commands must not be broken at hyphens or across lines.
        return textwrap.fill(
            text,
            width=100,
            initial_indent=f"  {name:7}",
            subsequent_indent=" " * 9,
            break_long_words=False,
            break_on_hyphens=False,
        )

    lines = [
        f"[{finding.check}] {finding.where}",
        part("seen", finding.seen),
        part("so", finding.why),
        part("mend", finding.remedy),
    ]
    return "\n".join(lines)


def about_text(facts: Facts) -> str:
    """One line about the subject of the checks."""
    interfaces = ", ".join(
        f"{each.name} (MTU {each.mtu_bytes})" for each in facts.interfaces if each.up
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return f"{facts.where}: {versions}; interfaces {interfaces or 'none'}"


def _print(all_facts: Sequence[Facts], findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        told = {
            "facts": [facts.as_json() for facts in all_facts],
            "findings": [finding.as_json() for finding in findings],
        }
        print(json.dumps(told))
        return
    for facts in all_facts:
        # Facts of other hosts, by way of the store.
        lines = (
            about_text(facts),
            *doctor_rdma.about(facts),
            *doctor_relays.about(facts),
            *doctor_trust.about(facts),
        )
        for line in lines:
            print(printable(line))
    print()
    for finding in findings:
        print(f"{printable(finding_text(finding))}\n")
    number = len(findings)
    print("nothing to mend" if not number else f"{number} to mend" if number > 1 else "1 to mend")


def run(options: argparse.Namespace) -> int:
    """Runs the checks and prints the findings; returns the exit status."""
    in_job = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if (options.host is None) != (options.port is None):
        return bad_input("doctor", ValueError("--host and --port go together"))
    if options.port is not None and not 1 <= options.port <= 65535:
        return bad_input("doctor", ValueError(f"--port: expected 1 to 65535, got {options.port}"))
    if options.host is not None and in_job:
        return bad_input("doctor", ValueError("--host is for one machine; this is a torchrun job"))
    if in_job and os.environ["WORLD_SIZE"] != "1":
        try:
            all_facts = doctor_peers.examine()
        except ValueError as error:  # for example, no MASTER_ADDR
            return bad_input("doctor", error)
        except RuntimeError as error:
            sys.stderr.write(f"torch-resilient doctor: {printable(str(error))}\n")
            return 1
        if all_facts is None:
            return 0  # rank 0 reports
        findings = check_job(all_facts)
        hosts: set[str] = set()
        for each in all_facts:
            if each.host_key not in hosts:
                hosts.add(each.host_key)
                findings += doctor_rdma.check_rdma(each)
        findings += doctor_rdma.check_pairs(all_facts)
        findings += doctor_trust.check_encryption(all_facts)
    else:
        facts = doctor_facts.collect(options.host or os.environ.get("MASTER_ADDR", ""))
        doctor_facts.try_backend(facts)
        all_facts = [facts]
        findings = check_host(facts, several_hosts=doctor_facts.is_remote_name(options.host))
        findings += doctor_rdma.check_rdma(facts)
        if options.host is not None:
            target = doctor_facts.try_target(options.host, options.port)
            # Reports an unresolvable name only once.
            findings = [finding for finding in findings if finding.check != "master"]
            findings += check_target(facts, target)
    _print(all_facts, findings, options.json)
    sys.stdout.flush()
    return 1 if findings else 0

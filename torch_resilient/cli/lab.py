"""`torch-resilient lab`: a command on several hosts of one machine, joined by links with faults."""

from __future__ import annotations

import argparse
import itertools
import os
import string
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input
from torch_resilient.testing import (
    Counters,
    Host,
    LabUnavailable,
    NetworkLab,
    VerbsLab,
    script,
)

ABOUT = f"""\
Makes hosts a, b, c... as network namespaces of this machine, with a NIC eth0, eth1... for each
network, and runs COMMAND on each host until all commands have ended. Needs root. It leaves nothing
behind, even if it is killed.

With --verbs the hosts are guests with a Linux kernel of their own (User Mode Linux) and real RDMA
verbs in software (Soft-RoCE): the RDMA device rxe0 on eth0, rxe1 on eth1... They see the files of
this machine, and what they write is lost. A network `control` without RDMA carries MASTER_ADDR.
`make verbs-lab` builds their kernel once. `ib_write_bw`, `ibv_devices` and other programs for verbs
are in the Debian packages perftest and ibverbs-utils.

environment of each COMMAND
  NODE_RANK, RANK  0 on a, 1 on b...       WORLD_SIZE, NNODES  number of hosts
  LOCAL_RANK       0                       LAB_HOST            a, b...
  TORCH_RESILIENT_SITE  with --sites: site0, site1...; keeps an existing value, even an empty one
  MASTER_ADDR, MASTER_PORT                 an address of a, 29500
  PET_NNODES and so on                     the same values for torchrun, instead of arguments

examples:
  torch-resilient lab --delay 20ms --rate 1gbit -- torchrun --nproc-per-node 1 train.py
  torch-resilient lab --links 2 --script "2s eth0 down; 5s eth0 up" -- python train.py
  torch-resilient lab --hosts 4 --sites 2 --delay 20ms --uplink 500mbit -- python train.py
  torch-resilient lab --delay 5ms -- sh -c 'ping -c 3 $MASTER_ADDR'
  torch-resilient lab --verbs -- ibv_devices
  torch-resilient lab --verbs --script "3s eth0 down; 6s eth0 up" -- python train.py
  torch-resilient lab --verbs -- \\
    sh -c '[ $RANK = 0 ] && exec ib_write_bw -d rxe0; sleep 1; ib_write_bw -d rxe0 $MASTER_ADDR'

script of events:
{script.__doc__.partition(chr(10))[2] if script.__doc__ else ""}
exit status: the first nonzero one of the commands, else 0; 2 for bad input or without root.
"""


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "lab",
        help="run a job on emulated hosts, over links with delay, drops and outages",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT...]",
    )
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="number of hosts; default: 2"
    )
    parser.add_argument(
        "--links",
        type=int,
        metavar="N",
        help="NICs and networks of each host; default: 1, with --verbs 2",
    )
    parser.add_argument(
        "--verbs",
        action="store_true",
        help="hosts with RDMA devices: guests of User Mode Linux with Soft-RoCE; at most 8",
    )
    parser.add_argument(
        "--sites",
        type=int,
        default=0,
        metavar="N",
        help="share the hosts among N sites: --delay, --rate, --drop and --set hold between sites "
        "only; inside, the network is as fast as the machine. Sets TORCH_RESILIENT_SITE",
    )
    for name, what in (
        ("delay", "one way, such as 20ms"),
        ("rate", "of each direction between two hosts, such as 1gbit"),
        ("drop", "share of packets, such as 0.1%%"),
    ):
        parser.add_argument(f"--{name}", metavar="X", help=what)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="X=Y",
        help="any setting of a script's `set`, such as burst=10",
    )
    parser.add_argument(
        "--uplink", metavar="RATE", help="rate that all hosts of a site share, each way"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="add a network `control` without these settings, for MASTER_ADDR. To keep data off "
        "it, set TORCH_RESILIENT_INTERFACE=eth0",
    )
    parser.add_argument("--script", metavar="TEXT", help="events, timed from the commands' start")
    parser.add_argument("--script-file", type=Path, metavar="FILE", help="events from a file")
    parser.add_argument("--seed", type=int, default=1, help="decides which packets are dropped")
    parser.add_argument(
        "--sysctl",
        action="append",
        default=[],
        metavar="X=Y",
        help='setting of each host, such as "net.ipv4.tcp_wmem=4096 65536 67108864"',
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    command = options.command_line[options.command_line[:1] == ["--"] :]
    try:
        if not command:
            raise ValueError("expected a command after --, such as: -- python train.py")
        _check(options)
        with _make(options) as lab:
            events = _build(lab, options)
            return _run_job(lab, command, events, options.sites)
    except (LabUnavailable, ValueError, LookupError, OSError) as error:
        return bad_input("lab", error)
    except KeyboardInterrupt:
        return 130


def _check(options: argparse.Namespace) -> None:
    """Completes the options. Raises ValueError."""
    if options.links is None:
        options.links = 2 if options.verbs else 1
    hosts_max, links_max = (8, 8) if options.verbs else (len(string.ascii_lowercase), 16)
    for name, least, most in (("hosts", 2, hosts_max), ("links", 1, links_max), ("sites", 0, 26)):
        if not least <= getattr(options, name) <= most:
            raise ValueError(f"--{name}: expected {least} to {most}")
    if options.sites and (options.sites == 1 or options.hosts % options.sites):
        raise ValueError(f"--sites: expected at least 2, and a divisor of {options.hosts} hosts")
    if options.uplink and not options.sites:
        raise ValueError("--uplink: is for a site; give --sites, or --rate for a host")
    if options.script and options.script_file:
        raise ValueError("--script: excludes --script-file")


def _make(options: argparse.Namespace) -> NetworkLab:
    """The lab: with --verbs complete, else empty. Raises LabUnavailable."""
    if options.verbs:
        return VerbsLab(options.hosts, nics=options.links, seed=options.seed)
    return NetworkLab(seed=options.seed)


def _build(lab: NetworkLab, options: argparse.Namespace) -> str:
    """Makes hosts and networks; returns the script. Raises ValueError, OSError."""
    names = string.ascii_lowercase
    asked = [f"{n}={getattr(options, n)}" for n in ("delay", "rate", "drop") if getattr(options, n)]
    settings: dict[str, Any] = script.parse_settings(asked + options.set)
    sysctl = {}
    for each in options.sysctl:
        key, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--sysctl: expected NAME=VALUE, got {each!r}")
        sysctl[key] = value
    if isinstance(lab, VerbsLab):
        hosts = list(lab.hosts.values())
        for host, (key, value) in itertools.product(hosts, sysctl.items()):
            host.sysctl(key, value)
    else:
        hosts = [lab.host(name, sysctl=sysctl) for name in names[: options.hosts]]
    size = options.hosts // options.sites if options.sites else 1
    sites = [hosts[i : i + size] for i in range(0, len(hosts), size)]
    for number in range(options.links):
        network = lab.networks.get(f"eth{number}") or lab.network(hosts)
        for one, other in itertools.combinations(sites, 2):
            network.set(direction=f"{_names(one)}<->{_names(other)}", **settings)
        if options.uplink:
            for site in sites:
                rest = [host for host in hosts if host not in site]
                rate = script.parse_rate(options.uplink)
                network.share_rate(f"{_names(site)}->{_names(rest)}", rate)
                network.share_rate(f"{_names(rest)}->{_names(site)}", rate)
    if options.control and not options.verbs:
        lab.network(hosts, name="control")
    text: str = options.script or ""
    if options.script_file:
        text = options.script_file.read_text(encoding="utf-8")
    lab.parse(text)  # errors before the job begins
    return text


def _names(hosts: list[Host]) -> str:
    return ",".join(host.name for host in hosts)


def _run_job(lab: NetworkLab, command: list[str], events: str, sites: int) -> int:
    first = next(iter(lab.hosts.values()))
    network = lab.networks.get("control") or next(iter(lab.networks.values()))
    common = {
        "MASTER_ADDR": network.address(first),
        "MASTER_PORT": "29500",
        "NNODES": str(len(lab.hosts)),
    }
    jobs = []
    readers = []
    for rank, host in enumerate(lab.hosts.values()):
        own = {**common, "NODE_RANK": str(rank)}
        environment = {
            **os.environ,
            **own,
            **{f"PET_{name}": value for name, value in own.items()},
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(lab.hosts)),
            "LAB_HOST": host.name,
        }
        if sites:
            site = rank * sites // len(lab.hosts)  # as _build distributes the hosts
            environment.setdefault("TORCH_RESILIENT_SITE", f"site{site}")
        job = host.popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        jobs.append(job)
        reader = threading.Thread(target=_copy_lines, args=(host.name, job.stdout), daemon=True)
        reader.start()
        readers.append(reader)
    player = lab.play(events) if events.strip() else None
    statuses = [job.wait() for job in jobs]
    # A process that a command left behind may hold its output open.
    for reader in readers:
        reader.join(1)
    if player is not None:
        player.cancel()
        for at_s, what in player.done:
            sys.stderr.write(f"lab: {at_s:8.3f} s  {what}\n")
        player.check()
    for each in lab.networks.values():
        for one, other in itertools.permutations(each.hosts, 2):
            _report(each.name, f"{one.name}->{other.name}", each)
    bad = [status for status in statuses if status != 0]
    # Reports a process that a signal ended with the status that a shell uses.
    return 0 if not bad else bad[0] if bad[0] > 0 else 128 - bad[0]


def _report(name: str, direction: str, network: Any) -> None:
    counters: Counters = network.counters(direction)
    if counters.entered.packets == 0:
        return
    causes = ", ".join(
        f"{cause.replace('_', ' ')} {amount.packets}"
        for cause in ("dropped", "queue_full", "outage", "overrun", "refused", "corrupted")
        if (amount := getattr(counters, cause)).packets
    )
    sys.stderr.write(
        f"lab: {name} {direction}: {counters.delivered.bytes / 1e6:.3f} MB in "
        f"{counters.delivered.packets} packets{'; ' + causes if causes else ''}\n"
    )


def _copy_lines(name: str, stream: Any) -> None:
    try:
        for line in stream:
            sys.stdout.write(f"[{name}] {line.decode(errors='replace')}")
            sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`
        stream.close()  # otherwise the command would block on its output forever

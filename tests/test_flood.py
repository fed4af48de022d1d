"""Strangers who call at every rank all the time do not keep a rank from connecting again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from authority import Authority
from conftest import ROOT
from handshake_client import certified_hello, client_hello, key_id_of

from torch_resilient.testing import LabJob, NetworkLab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("failover_program.py")
ATTACK = Path(__file__).with_name("flood_attack.py")
PORT = 29511
SECRET = "the secret of the job that is flooded"
ENDLESS = 100_000
# The time until the listeners are full of strangers and drop them.
FLOODED_S = 3.0
HEALED_MAX_S = 2.0


@pytest.mark.parametrize(
    ("rate", "words", "sources"),
    [
        (1500, "none", 1),
        (10_000, "none", 1),
        (10_000, "half", 5000),
        (1500, "whole", 5000),
        (10_000, "whole", 5000),
        (1500, "tls", 1),  # the recorded beginning of a member's handshake, again and again
        (1500, "tls", 5000),
        (1500, "certified", 5000),  # the same in a job with certificates
    ],
)
def test_a_cut_heals_under_a_flood(
    lab: NetworkLab, rate: int, words: str, sources: int, tmp_path: Path
) -> None:
    """The strangers are next door to each rank, and the ranks 100 ms apart."""
    hosts = a, b = lab.host("a"), lab.host("b")
    link = lab.link(a, b, delay_s=0.05)
    control = lab.link(a, b, name="control")
    environment = {
        "PYTHONPATH": str(ROOT),
        "TORCH_RESILIENT_INTERFACE": "eth0",
        "TORCH_RESILIENT_LISTEN_PORT": str(PORT),
        "TORCH_RESILIENT_SECRET": SECRET,
    }
    beginning = client_hello
    if words == "certified":
        environment |= Authority(tmp_path / "authority").issue("host", names="DNS:a,DNS:b")
        words, beginning = "tls", certified_hello
    settings = {"job": "stream", "count": ENDLESS, "pause_s": 0.01}
    command = [sys.executable, str(PROGRAM), json.dumps(settings)]
    with LabJob(command, hosts, control, environment=environment) as job:

        def arrived_s() -> float:
            row = job.until(lambda r: r["kind"] == "message" and r["rank"] == 1, "a message")
            assert not row["wrong"]
            return float(row["time_s"])

        arrived_s()
        attacks = []
        for host in hosts:
            call = [ATTACK, link.address(host), PORT, rate, words, sources]
            call += [key_id_of(SECRET.encode()).hex(), beginning(SECRET.encode()).hex()]
            attacks.append(
                host.popen([sys.executable, *map(str, call)], stdout=subprocess.PIPE, text=True)
            )
        flooded = time.monotonic() + FLOODED_S
        while (last := arrived_s()) < flooded:
            pass
        cut = ["ss", "--kill", "--tcp", "--no-header", "src", link.address(a), "dst"]
        cut.append(link.address(b))
        if not a.run(cut, capture_output=True, text=True, check=True).stdout:
            pytest.skip("this kernel cuts no connection (CONFIG_INET_DIAG_DESTROY)")
        pause, over = 0.0, time.monotonic() + 2 * HEALED_MAX_S
        while last < over:
            now = arrived_s()
            pause, last = max(pause, now - last), now
        for attack in attacks:
            attack.kill()
            said = attack.communicate()[0].splitlines()
            print(f"{words} {rate} from {sources}: {said[-1]}")
        print(f"longest pause {pause:.2f} s")
        assert pause < HEALED_MAX_S

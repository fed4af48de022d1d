"""Long and shared links in the lab: caps on what is sent to a site, and loss without congestion."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import wait_until
from test_failover import ENDLESS, Job, Row

from torch_resilient.testing import NetworkLab

pytestmark = pytest.mark.lab

MESSAGE_BYTES = 131072
CAP_BYTES_PER_S = 1 << 20
OVER_TCP = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_WAN": "tcp"}


def require_bbr() -> None:
    """Skips the test on a kernel without BBR."""
    names = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "bbr" not in names:
        pytest.skip("this kernel has no bbr")


def rate(
    lab: NetworkLab, job: str, count: int, sites: Sequence[str] | None, **environment: str
) -> float:
    """Bytes per second that rank 1 received in the second half of a stream from rank 0.

    The median over all quarters of the stream within that half: a receiver that was late once, or
    twice, moves few of them.
    """
    hosts = list(lab.hosts.values())
    control = lab.networks["control"]
    settings = {"job": job, "count": count, "pause_s": 0.0}
    names = {f"TORCH_RESILIENT_{name}": value for name, value in environment.items()}
    made = Job(hosts, control, settings, {"TORCH_RESILIENT_INTERFACE": "eth0", **names}, sites)
    times = []
    try:

        def last(row: Row) -> bool:
            if row["kind"] == "message" and row["rank"] == 1:
                times.append(row["time_s"])
            return len(times) == count

        made.until(last, "last message")
        for result in made.end():
            assert result.get("wrong") == 0, result
    finally:
        made.close()
    late, quarter = times[count // 2 - 1 :], count // 4
    took = [end - begin for begin, end in zip(late, late[quarter:], strict=False)]
    return quarter * MESSAGE_BYTES / statistics.median(took)


@pytest.mark.parametrize(("limit", "sites"), [("1M", None), ("*=64M, west=1M", ("east", "west"))])
def test_cap_on_a_site_holds_for_all_connections_to_it(
    lab: NetworkLab, limit: str, sites: Sequence[str] | None
) -> None:
    a, b = lab.host("a"), lab.host("b")
    lab.link(a, b, delay_s=0.001, rate_bytes_per_s=12.5e6)
    lab.link(a, b, name="control")
    capped = rate(lab, "stream", 32, sites, WAN_CONNECTIONS="4", WAN_RATE_LIMIT=limit)
    free = rate(lab, "stream", 32, sites, WAN_CONNECTIONS="4", WAN_RATE_LIMIT="other-site=1M")
    assert 0.7 * CAP_BYTES_PER_S < capped < 1.05 * CAP_BYTES_PER_S
    assert free > 3 * CAP_BYTES_PER_S


@pytest.mark.parametrize("limit", ["4M", ""])
def test_a_link_with_a_limit_has_the_connections_that_carry_it(lab: NetworkLab, limit: str) -> None:
    hosts = [lab.host("a"), lab.host("b")]
    link = lab.link(*hosts, delay_s=0.04, rate_bytes_per_s=12.5e6)
    control = lab.link(*hosts, name="control")
    environment = {**OVER_TCP, "TORCH_RESILIENT_SOCKET_BUFFER_BYTES": "1M"}
    if limit:
        environment["TORCH_RESILIENT_WAN_RATE_LIMIT"] = limit
    settings = {"job": "exchange", "count": ENDLESS, "pause_s": 0.02}
    job = Job(hosts, control, settings, environment, ("east", "west"))
    try:
        job.until(lambda row: row.get("number", -1) >= 10, "round 10")
        command = ["ss", "-Htn", "state", "established", "dst", link.address(hosts[1])]
        shown = hosts[0].run(command, capture_output=True, text=True, check=True).stdout
        assert (len(shown.splitlines()) == 1) == bool(limit), shown
    finally:
        job.close()


def test_loss_without_a_queue_changes_the_congestion_control(lab: NetworkLab) -> None:
    require_bbr()
    sysctl = {"net.ipv4.tcp_congestion_control": "reno"}
    a, b = lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)
    lab.link(a, b, delay_s=0.02, rate_bytes_per_s=12.5e6, drop=0.01)
    lab.link(a, b, name="control")
    connections = {"WAN": "tcp", "WAN_CONNECTIONS": "2"}
    system = rate(lab, "stream", 32, None, WAN_CONGESTION_CONTROL="system", **connections)
    auto = rate(lab, "stream", 200, None, **connections)
    assert auto > 3 * system


def test_bbr_finds_the_rate_of_a_long_fat_link(lab: NetworkLab) -> None:
    """BBR's start-up only ends if the kernel never runs out of bytes: else it sends nearly three
    times as fast as the link is, for ever, and a tenth is lost."""
    sysctl = {
        "net.ipv4.tcp_wmem": "4096 16384 67108864",
        "net.ipv4.tcp_rmem": "4096 131072 67108864",
    }
    require_bbr()
    sysctl["net.ipv4.tcp_congestion_control"] = "bbr"
    hosts = [lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)]
    lab.link(*hosts, delay_s=0.04, rate_bytes_per_s=250e6)
    control = lab.link(*hosts, name="control")
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_WAN_CONNECTIONS": "1"}
    job = Job(hosts, control, {"job": "flood", "count": ENDLESS, "pause_s": 0.0}, environment)
    try:

        def found() -> bool:
            text = hosts[0].run(["ss", "-ti"], capture_output=True, text=True).stdout
            for sent, gain in re.findall(r"bytes_sent:(\d+).*bbr:\(.*?cwnd_gain:([\d.]+)\)", text):
                if int(sent) > 100e6:
                    return float(gain) == 2.0
            return False

        job.until(lambda row: row["kind"] == "ready", "start")
        wait_until(found, "BBR's cruise", timeout_s=30)
    finally:
        job.close()


# Acknowledgements wait behind the other end's burst and then come faster than the link is: without
# the time of arrival, a tenth of each burst of 16 MiB was lost. Those of 1 MiB were over before the
# smoothed round trip showed the queue, and lost as much.
@pytest.mark.parametrize(("name", "count", "learns"), [("large", 12, 3), ("medium", 30, 10)])
def test_bursts_in_both_directions_do_not_overflow_the_queue(
    lab: NetworkLab, name: str, count: int, learns: int
) -> None:
    require_bbr()
    sysctl = {"net.ipv4.tcp_congestion_control": "reno"}
    hosts = [lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)]
    rate, connections = (125e6, "4") if name == "large" else (15.6e6, "1")
    link = lab.link(*hosts, delay_s=0.02, rate_bytes_per_s=rate)
    control = lab.link(*hosts, name="control")
    settings = {"job": name, "count": count, "pause_s": 0.3}
    names = {"TORCH_RESILIENT_WAN_CONNECTIONS": connections}
    job = Job(hosts, control, settings, OVER_TCP | names)
    try:
        # Until then the rate of the link is found out.
        job.until(lambda row: row.get("number") == learns, f"round {learns}")
        before = link.counters()
        for result in job.end():
            assert result["wrong"] == 0
        after = link.counters()
        entered = after.entered.packets - before.entered.packets
        lost = after.queue_full.packets - before.queue_full.packets
        assert lost < 0.02 * entered, (lost, entered)
    finally:
        job.close()


def test_bursts_do_not_wait_for_bbr_to_measure_the_round_trip(lab: NetworkLab) -> None:
    """Ten seconds after BBR has begun, it keeps four segments in flight for 200 ms.

    Between bursts it may: a few small frames are under way then.
    """
    require_bbr()
    sysctl = {"net.ipv4.tcp_congestion_control": "reno"}
    hosts = [lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)]
    lab.link(*hosts, delay_s=0.02, rate_bytes_per_s=15.6e6)
    control = lab.link(*hosts, name="control")
    job = Job(hosts, control, {"job": "medium", "count": ENDLESS, "pause_s": 0.3}, OVER_TCP)
    try:
        job.until(lambda row: row.get("number") == 5, "round 5")
        measured, last = 0, time.monotonic() + 13
        while time.monotonic() < last:
            for host in hosts:
                text = host.run(["ss", "-tin"], capture_output=True, text=True, check=True).stdout
                connections = re.findall(
                    r"ESTAB +\d+ +(\d+) .*\n.*bytes_sent:(\d+).*cwnd_gain:([\d.]+)\)", text
                )
                measured += len(connections)
                for queued, sent, gain in connections:
                    assert int(queued) < 32768 or int(sent) < 4e6 or float(gain) > 1, text
            time.sleep(0.05)
        assert measured > 20
    finally:
        job.close()


def test_a_link_is_quiet_soon_after_a_burst(lab: NetworkLab) -> None:
    """Ranks ask each other how much has arrived, and questions arrive, too: once they went on for
    ever, 800 packets a second."""
    require_bbr()
    hosts = [lab.host("a"), lab.host("b")]
    link = lab.link(*hosts, delay_s=0.02, rate_bytes_per_s=125e6)
    control = lab.link(*hosts, name="control")
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_WAN": "tcp"}
    # As an ordinary user: root has larger buffers, with which this did not happen.
    user = ["setpriv", "--bounding-set", "-net_admin"]
    settings = {"job": "large", "count": 2, "pause_s": 60.0}
    job = Job(hosts, control, settings, environment, prefix=user)
    try:
        job.until(lambda row: row.get("number") == 0, "round 0")

        def quiet() -> bool:
            before = link.counters().entered.packets
            time.sleep(0.5)
            return link.counters().entered.packets - before < 40

        wait_until(quiet, "a quiet link")
    finally:
        job.close()


def test_marks_are_those_of_the_site(lab: NetworkLab) -> None:
    hosts = [lab.host("a"), lab.host("b")]
    link = lab.link(*hosts, delay_s=0.001, rate_bytes_per_s=12.5e6)
    control = lab.link(*hosts, name="control")
    environment = {"TORCH_RESILIENT_WAN_DSCP": "west=10, *=46", "TORCH_RESILIENT_INTERFACE": "eth0"}
    settings = {"job": "exchange", "count": ENDLESS, "pause_s": 0.02}
    job = Job(hosts, control, settings, environment, ("east", "west"))
    try:
        job.until(lambda row: row.get("number", -1) >= 10, "round 10")
        for host, peer, mark in ((hosts[0], hosts[1], 10 << 2), (hosts[1], hosts[0], 46 << 2)):
            command = ["ss", "-Htn", "--tos", "dst", link.address(peer)]
            shown = host.run(command, capture_output=True, text=True, check=True).stdout
            assert f"tos:{mark:#x}" in shown, shown
    finally:
        job.close()

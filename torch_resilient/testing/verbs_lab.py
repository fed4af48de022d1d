"""Hosts with RDMA devices, networks between them, and faults, on one machine without such hardware.

Each host is a guest (testing/guest.py): a User Mode Linux with Soft-RoCE (rxe), the software RDMA
of the Linux kernel, on its data NICs. Real programs with real verbs run there. The networks are
those of NetworkLab: the same carrier, settings, faults and scripts. Like a NetworkLab, a verbs lab
needs root, and nothing outlives it or the program that made it.
"""

from __future__ import annotations

import shutil
import string
from collections.abc import Mapping, Sequence
from typing import Any

from torch_resilient.testing import guest_kernel, lab, namespaces
from torch_resilient.testing.guest import (
    DATA_MTU,
    Guest,
    GuestNetwork,
    GuestSettings,
    attach,
    attach_agent,
    mac_address,
)
from torch_resilient.testing.lab import Host, LabUnavailable, Network, NetworkLab, Nic
from torch_resilient.testing.script import Event, parse_script

CONTROL = "control"
_GUESTS_MAX = 8
_NICS_MAX = 8
# Enough for torch; a guest takes what it uses.
MEMORY_BYTES = 1536 << 20


def verbs_unavailable() -> str | None:
    """Why this process cannot make a verbs lab, or None if it can."""
    if (reason := lab.unavailable()) is not None:
        return reason
    if shutil.which("rdma") is None:
        return "a verbs lab needs the program rdma: install iproute2"
    try:
        guest_kernel.find()
    except FileNotFoundError as error:
        return str(error)
    return None


class VerbsLab(NetworkLab):
    """Guests with RDMA devices; a context manager.

        with VerbsLab() as lab:
            a, b = lab.guests.values()
            server = a.popen(["ib_write_bw", "-d", "rxe0"])
            b.run(["ib_write_bw", "-d", "rxe0", lab.networks["eth0"].address(a)])
            lab.networks["eth0"].down("blackhole")
            b.freeze()

    The guests are called a, b and so on. All are on the networks eth0, eth1 and so on, with the
    RDMA devices rxe0, rxe1 and so on, and on the network `control`, without one.

    guests: how many; two or three are usual. nics: data NICs of each. seed: as in NetworkLab.
    preload: modules such as "torch", which each guest imports once in the background; its Python
    programs then start with them. Those modules see the environment of this process, not that of a
    program. memory_bytes: of each guest, used as needed.

    Raises LabUnavailable if verbs_unavailable() returns a reason or a guest does not start.
    """

    def __init__(
        self,
        guests: int = 2,
        *,
        nics: int = 2,
        seed: int = 1,
        preload: Sequence[str] = (),
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        if (reason := verbs_unavailable()) is not None:
            raise LabUnavailable(reason)
        for name, value, least, most in (
            ("guests", guests, 2, _GUESTS_MAX),
            ("nics", nics, 1, _NICS_MAX),
            ("memory_bytes", memory_bytes, 128 << 20, 1 << 40),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        super().__init__(seed=seed)
        self._settings = GuestSettings(guest_kernel.find(), tuple(preload), memory_bytes)
        self.guests: dict[str, Guest] = {}
        self._is_built = False
        try:
            hosts = [self.host(name) for name in string.ascii_lowercase[:guests]]
            for number in range(nics):
                self.network(hosts, name=f"eth{number}", mtu=DATA_MTU)
            self.network(hosts, name=CONTROL)
            self._is_built = True
            for guest in self.guests.values():
                guest.boot(wait=False)
            for guest in self.guests.values():
                guest.wait_for_boot()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VerbsLab:
        return self

    @property
    def control(self) -> Network:
        """The network for the store of rank 0; keep it free of faults."""
        return self.networks[CONTROL]

    def host(self, name: str, *, sysctl: Mapping[str, object] | None = None) -> Host:
        """Not possible after the guests have started: raises RuntimeError."""
        self._check_not_built()
        with self._lock:
            self._check_name("guest", name, self.hosts)
            spaces = namespaces.Namespaces.create(name, self._carrier.pid_namespace)
            guest = self.guests[name] = Guest(self, name, spaces, self._settings)
            self.hosts[name] = guest
            attach_agent(guest)
        return guest

    def network(self, hosts: Sequence[Host], *, name: str | None = None, **options: Any) -> Network:
        """Not possible after the guests have started: raises RuntimeError."""
        self._check_not_built()
        return super().network(hosts, name=name, **options)

    def parse(self, script: str) -> list[Event]:
        """The events of a script, which may freeze, thaw and kill guests. Raises ScriptError."""
        return parse_script(script, self.networks, self.guests)

    def close(self) -> None:
        """Kills all guests and removes the networks. May be repeated."""
        super().close()
        for guest in self.guests.values():
            guest._end()

    def _check_not_built(self) -> None:
        self._check_open()
        if self._is_built:
            raise RuntimeError("the guests run: ask VerbsLab() for guests and NICs")

    def _new_network(self, name: str, index: int) -> Network:
        return GuestNetwork(self, name, index)

    def _attach(self, nic: Nic) -> None:
        assert isinstance(nic.host, Guest)
        if nic.network.name != CONTROL:
            nic.host.rdma_devices[nic.device] = f"rxe{len(nic.host.rdma_devices)}"
        address = "0" * 20 + mac_address(nic.index).replace(":", "")
        with attach(nic) as sock:
            line = f"ethernet {nic.index} {nic.network._index} {address}"
            self._carrier.ask([line], sock.fileno())

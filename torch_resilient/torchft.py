"""The backend for torchft: replicas may leave and join while the training runs.

    manager = torchft.Manager(pg=ProcessGroupResilient(timeout=timedelta(seconds=30)), ...)

torchft must be installed; `import torch_resilient` alone does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_resilient import _registration

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "torchft":
        raise  # torchft is there, but one of its own dependencies is missing
    raise ModuleNotFoundError(
        "torch_resilient.torchft needs torchft: run `pip install torchft`", name=error.name
    ) from None

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["ProcessGroupResilient"]

_RANK_MAX = 1 << 31  # the engine's messages have 32 bits for it


class ProcessGroupResilient(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft over this backend.

    Use it where torchft's examples have ProcessGroupGloo. torchft configures it anew whenever the
    set of replicas changes: the old group ends, and a new one is created from the present replicas.
    `timeout`, a timedelta, bounds every operation and each access to the store.
    """

    _pg: ProcessGroup | None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        # torchft derives these from the digits at the end of the replicas' names, for messages.
        # If the names have no digits the ranks are all alike, and if they are made up, huge.
        ranks = self._global_ranks or ()
        usable = len(set(ranks)) == world_size and max(ranks) < _RANK_MAX
        return _registration.create_group(
            store,
            rank,
            world_size,
            name="torchft",
            timeout=self._timeout,
            global_ranks=ranks if usable else (),
        )

    def getBackendName(self) -> str:
        """The name under which torchft registers the group."""
        return "torchft-resilient"

    def abort(self, errored: bool = True) -> None:
        """Fails all operations; without `errored`, as before a new configuration, see end_group."""
        if not errored and self._pg is not None:
            _registration.end_group(self._pg)
            self._pg = None
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Ends the group after what was sent has arrived."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

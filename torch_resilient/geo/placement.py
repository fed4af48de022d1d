"""The ranks of a plan: which cell, pipeline, stage and site each one belongs to.

Ranks are numbered site by site, as when the hosts of one site are started before those of the
next: within a site pipeline by pipeline, and within a pipeline stage by stage.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_resilient.control.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torch_resilient._reports.topology import Topology

# Names of the dimensions of the mesh.
DATA, STAGE = "dp", "pp"
# An error names at most this many ranks.
_NAMED = 8


class RankPlace(NamedTuple):
    """The place of a rank; `pipeline` is counted within its cell."""

    rank: int
    cell: int
    pipeline: int
    stage: int
    site: str


@dataclass(frozen=True)
class Placement:
    """The ranks of a training across sites.

    Attributes:
        sites: the site of each stage.
        pipelines: of each cell.
        layout: the ranks; the replicas of a layout are the pipelines of all cells in turn.
    """

    sites: tuple[str, ...]
    pipelines: int
    layout: Layout

    def __post_init__(self) -> None:
        if len(self.sites) != self.layout.num_stages:
            raise ValueError(
                f"sites: expected {self.layout.num_stages}, one per stage, got {len(self.sites)}"
            )
        if self.pipelines < 1 or self.layout.num_replicas % self.pipelines:
            raise ValueError(
                f"pipelines: {self.layout.num_replicas} replicas are no whole cells of "
                f"{self.pipelines}"
            )

    @classmethod
    def of(
        cls, plan: Mapping[str, Any], ranks: Mapping[str, Sequence[int]] | None = None
    ) -> Placement:
        """The places that the choice of a plan needs.

        Args:
            plan: the output of `torch-resilient geo plan`.
            ranks: by site, its ranks; the first ones are used. By default, ranks are numbered site
                by site in the order of the plan.

        Raises ValueError if the plan has no choice, or a site has too few ranks.
        """
        choice = plan.get("choice")
        if choice is None:
            raise ValueError("choice: the plan has none: no number of cells fits")
        cell = plan["cell"]
        replicas = choice["cells"] * cell
        partitions: dict[str, int] = choice["partitions"]
        grid: list[list[int]] = [[] for _ in range(replicas)]
        first = 0
        for site, count in partitions.items():
            needed = replicas * count
            own = range(first, first + needed) if ranks is None else ranks.get(site, ())
            if len(own) < needed:
                raise ValueError(f"ranks: {site} has {len(own)}, the plan needs {needed}")
            first += needed
            for replica, row in enumerate(grid):
                row.extend(own[replica * count : (replica + 1) * count])
        layout = Layout(tuple(tuple(row) for row in grid))
        sites = tuple(site for site, count in partitions.items() for _ in range(count))
        return cls(sites, cell, layout)

    def places(self) -> list[RankPlace]:
        """The place of each rank, by rank."""
        return sorted(
            RankPlace(rank, *divmod(replica, self.pipelines), stage, self.sites[stage])
            for replica, row in enumerate(self.layout.ranks)
            for stage, rank in enumerate(row)
        )

    def require(self, topology: Topology) -> None:
        """Compares the sites of the ranks with those of the running job.

        Sites that were inferred have names of their own. Then the ranks of a site must be together,
        and those of different sites apart.

        Raises ValueError, which names the ranks in the wrong site.
        """
        found, places = topology.sites, self.places()
        if places[-1].rank >= len(found):
            raise ValueError(
                f"the plan has rank {places[-1].rank}, the group only {len(found)} ranks"
            )
        if not topology.declared:
            found = self._translated(found, places)
        wrong = [
            f"rank {place.rank} is at {found[place.rank] or 'no site'} and not at {place.site} "
            f"(cell {place.cell}, pipeline {place.pipeline}, stage {place.stage})"
            for place in places
            if found[place.rank] != place.site
        ]
        if wrong:
            more = f"; {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise ValueError(
                f"{'; '.join(wrong[:_NAMED])}{more}: start the ranks in the order of the plan, or "
                "set TORCH_RESILIENT_SITE on each host"
            )

    def _translated(self, found: Sequence[str], places: Sequence[RankPlace]) -> tuple[str, ...]:
        """Inferred sites by the names of the plan: each has that of most of its ranks."""
        if len(set(self.sites)) == 1 and not any(found):
            return (self.sites[0],) * len(found)
        votes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for place in places:
            votes[found[place.rank]][place.site] += 1
        names: dict[str, str] = {}
        # The clearest first: two inferred sites cannot be the same one of the plan.
        for own, counts in sorted(votes.items(), key=lambda each: -max(each[1].values())):
            left = [site for site, _ in counts.most_common() if site not in names.values()]
            names[own] = left[0] if left and own else own
        return tuple(names.get(own, own) for own in found)

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """A mesh with the dimensions "dp", all pipelines, and "pp", their stages.

        The groups of "dp" are within a site. All ranks of the default group must call it. This is
        the only function here that needs torch.
        """
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh(
            device_type, [list(row) for row in self.layout.ranks], mesh_dim_names=(DATA, STAGE)
        )

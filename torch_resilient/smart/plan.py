"""Which rank sends which part of a bucket to which rank."""

from __future__ import annotations

from collections.abc import Sequence


class ReducePlan:
    """The senders and receivers: a shard for each rank, and for each site an agent for each shard.

    The agent of a site for shard j adds up what the ranks of its site have of it and sends the
    partial sum to rank j, which adds up those of all sites. Rank j is its own site's agent for
    shard j. If each rank is a site of its own, it is its own agent for all shards.
    """

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        names = list(dict.fromkeys(sites))
        members = {site: [r for r, s in enumerate(sites) if s == site] for site in names}

        def agent(site: str, shard: int) -> int:
            if sites[shard] == site:
                return shard
            ranks = members[site]
            # Ranks of another site share out its shards by their place in it.
            return ranks[members[sites[shard]].index(shard) % len(ranks)]

        mine = sites[rank]
        self.rank, self.size = rank, len(sites)
        self.site_members = members[mine]
        self.duties = {
            peer: [j for j in range(self.size) if agent(mine, j) == peer] for peer in members[mine]
        }
        # Shards for which this rank sends its site's partial sum to another site.
        self.remote_shards = [j for j in self.duties[rank] if sites[j] != mine]
        # In the order of the sites: who sends this rank's shard; itself for its own site.
        self.senders = [agent(site, rank) for site in names]

"""Sites with their GPUs and prices, and numbers for each pair of them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_resilient._reports.topology import clusters
from torch_resilient.planning.fields import number, require_fields, whole

MAX_SITES = 64
MAX_GPUS = 10_000_000
MAX_PRICE = 1e9

# Prices are for these units.
GB = 1e9
HOUR_MS = 3.6e6


@dataclass(frozen=True)
class Site:
    """A data centre.

    Attributes:
        gpus: those that it has.
        reserve: those of them that are kept free.
        gpu_hour: the price of a GPU for an hour.
    """

    name: str
    gpus: int
    reserve: int = 0
    gpu_hour: float = 0.0

    @property
    def usable(self) -> int:
        return self.gpus - self.reserve


def read_sites(value: object) -> tuple[Site, ...]:
    """Reads the list of sites. Raises ValueError with a text that begins with the field."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"sites: expected a list of sites, got {value!r:.40}")
    if len(value) > MAX_SITES:
        raise ValueError(f"sites: expected at most {MAX_SITES}, got {len(value)}")
    sites: list[Site] = []
    for i, each in enumerate(value):
        where = f"sites[{i}]"
        if not isinstance(each, dict):
            raise ValueError(f"{where}: expected an object, got {each!r:.40}")
        try:
            require_fields(each, ("name", "gpus"), ("reserve", "gpu_hour"))
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from None
        name = each["name"]
        if not isinstance(name, str) or not name or "|" in name:
            raise ValueError(f"{where}.name: expected a name without |, got {name!r}")
        if name in (known.name for known in sites):
            raise ValueError(f"{where}.name: {name} is there twice")
        gpus = whole(f"{where}.gpus", each["gpus"], 0, MAX_GPUS)
        reserve = whole(f"{where}.reserve", each.get("reserve", 0), 0)
        if reserve > gpus:
            raise ValueError(f"{where}.reserve: {reserve} of {gpus} GPUs")
        price = number(f"{where}.gpu_hour", each.get("gpu_hour", 0), MAX_PRICE)
        sites.append(Site(name, gpus, reserve, price))
    return tuple(sites)


@dataclass(frozen=True)
class Pairs:
    """A number for each pair of sites, by direction."""

    values: Mapping[tuple[str, str], float]

    def __call__(self, source: str, destination: str) -> float:
        return self.values[source, destination]


def _pairs_of(sites: Sequence[Site]) -> Iterator[tuple[str, str]]:
    return itertools.permutations([site.name for site in sites], 2)


def read_pairs(
    name: str, value: object, sites: Sequence[Site], maximum: float, positive: bool = False
) -> Pairs:
    """Reads a number, or a table such as {"a|b": 3, "default": 1}; None is 0.

    "a|b" holds in both directions, unless "b|a" is there, too.

    Raises ValueError if a pair is missing or unknown, or a number is not allowed.
    """

    def checked(where: str, each: object) -> float:
        found = number(where, each, maximum)
        if positive and found == 0:
            raise ValueError(f"{where}: expected a number above 0, got {each!r}")
        return found

    if not isinstance(value, dict):
        everywhere = checked(name, 0 if value is None else value)
        return Pairs(dict.fromkeys(_pairs_of(sites), everywhere))
    known = set(_pairs_of(sites))
    names = {site.name for site in sites}
    found: dict[tuple[str, str], float] = {}
    default = checked(f"{name}.default", value["default"]) if "default" in value else None
    for key, each in value.items():
        if key == "default":
            continue
        source, _, destination = key.partition("|")
        if (source, destination) not in known:
            unknown = [part for part in (source, destination) if part not in names]
            fault = f"no such site: {unknown[0]}" if unknown else "expected two sites"
            raise ValueError(f"{name}.{key}: {fault}")
        found[source, destination] = checked(f"{name}.{key}", each)
    values = {}
    for source, destination in _pairs_of(sites):
        either = found.get((source, destination), found.get((destination, source), default))
        if either is None:
            raise ValueError(f"{name}: no value for {source}|{destination}, and no default")
        values[source, destination] = either
    return Pairs(values)


def sites_from_bench(
    measured: object, names: Sequence[str] | None = None, site_s: float = 0.003
) -> dict[str, Any]:
    """Fields of `geo plan` from the output of `torch-resilient bench --json`.

    Ranks with a round trip below `site_s` seconds between them are one site. Sites are in the order
    of their first ranks; without `names` they are "site0", "site1" and so on. Each rank is one GPU.
    Returns `sites`, `node_gbps` and `latency_ms` by pair, and `lan_gbps` if a site has two ranks;
    rates are medians, latencies half of the shortest round trip.

    Raises ValueError, which names the field, for anything else or links that failed.
    """
    try:
        assert isinstance(measured, dict)
        size, links = len(measured["hosts"]), measured["links"]
        round_trips_s = [[0.0] * size for _ in range(size)]
        bytes_per_s = [[0.0] * size for _ in range(size)]
        for link in links:
            source, destination = link["from"], link["to"]
            if "error" in link:
                raise ValueError(
                    f"bench: the link from rank {source} to rank {destination} was not measured"
                )
            round_trips_s[source][destination] = number("bench", link["round_trip_min_s"])
            bytes_per_s[source][destination] = number("bench", link["goodput_bytes_per_s"])
        if len(links) != size * (size - 1):
            raise ValueError(f"bench: expected {size * (size - 1)} links, got {len(links)}")
    except (AssertionError, KeyError, TypeError, IndexError):
        raise ValueError("bench: expected the output of `torch-resilient bench --json`") from None
    place = clusters(round_trips_s, site_s)
    members = [[r for r in range(size) if place[r] == site] for site in sorted({*place})]
    if names is None:
        names = [f"site{site}" for site in range(len(members))]
    if len(names) != len(members):
        raise ValueError(f"sites: {len(names)}, but the ranks of the bench are at {len(members)}")
    result: dict[str, Any] = {
        "sites": [
            {"name": name, "gpus": len(ranks)} for name, ranks in zip(names, members, strict=True)
        ]
    }
    rates: dict[str, float] = {}
    latencies: dict[str, float] = {}
    for a, b in itertools.permutations(range(len(members)), 2):
        links_of = [(i, j) for i in members[a] for j in members[b]]
        key = f"{names[a]}|{names[b]}"
        rates[key] = statistics.median(bytes_per_s[i][j] for i, j in links_of) * 8 / 1e9
        latencies[key] = min(round_trips_s[i][j] for i, j in links_of) / 2 * 1e3
    if rates:
        result["node_gbps"], result["latency_ms"] = rates, latencies
    inside = [bytes_per_s[i][j] for ranks in members for i, j in itertools.permutations(ranks, 2)]
    if inside:
        result["lan_gbps"] = statistics.median(inside) * 8 / 1e9
    return result

"""Decisions of a sweep, without ranks."""

from types import SimpleNamespace

import pytest
import torch
from comm_runs import point

from nearpeak.comm import clock, sweep
from nearpeak.comm.clock import Times
from nearpeak.comm.patterns import fitted_cost
from nearpeak.comm.result import LinkLimit, fit_points
from nearpeak.comm.sweep import SweepOptions, find_links, message_sizes, world_notes
from nearpeak.comm.world import Group
from nearpeak.measure.options import Options

OPTIONS = Options(precision=0.05, max_seconds=1.0)


def world(ranks=2, free=1e9, cores=2):
    backend = SimpleNamespace(
        available_bytes=lambda index: free, properties=lambda index: SimpleNamespace(processors=cores)
    )
    made = SimpleNamespace(
        size=ranks, local_size=ranks, device=torch.device("cpu"), gather=lambda value: [value] * ranks
    )
    return made, backend


@pytest.mark.parametrize(
    ("values", "elapsed", "state"),
    [
        ([1.0] * 20, 0.1, "narrow"),
        ([1.0] * 3, 0.1, "continue"),  # too few for an interval
        ([1.0, 2.0] * 20, 0.1, "continue"),
        ([1.0, 2.0] * 20, 1.5, "time is up"),
        ([1.0] * 3, 1.5, "time is up"),
    ],
)
def test_when_a_point_is_done(values, elapsed, state) -> None:
    assert clock._state(values, elapsed, OPTIONS) == state


def test_the_slowest_rank_and_the_skew_of_each_call() -> None:
    times = Times(by_rank=[[1.0, 5.0], [2.0, 3.0], [1.5, 4.0]])
    assert times.slowest == [2.0, 5.0]
    assert times.skews == [1.0, 2.0]


def test_sizes_that_fit_into_memory(monkeypatch) -> None:
    made, backend = world(free=2**30)
    monkeypatch.setattr(sweep, "backend_of", lambda device: backend)
    sizes, notes = message_sizes(made, SweepOptions(sizes=(2**10, 2**20, 2**30)))
    assert sizes == [2**10, 2**20] and "would not fit into memory" in notes[0]
    sizes, notes = message_sizes(made, SweepOptions())
    assert sizes[:2] == [2**10, 2**12] and sizes[-1] == 2**26 and not notes


def test_notes_on_the_world(monkeypatch) -> None:
    for ranks, text in ((1, "A world of one rank"), (4, "4 ranks share 2 processors")):
        made, backend = world(ranks)
        monkeypatch.setattr(sweep, "backend_of", lambda device, backend=backend: backend)
        assert world_notes(made)[0].startswith(text)


def test_the_link_is_the_most_that_was_seen() -> None:
    made, _ = world()
    group = Group(label="world", ranks=(0, 1), concurrent=1, nodes=1, handle=None)
    points = [point("all_gather", 2**20), point("all_reduce", 2**26)]
    (link,) = find_links(made, [group], points)
    assert link.kind == "measured" and link.bandwidth == points[1].bus_bandwidth
    assert find_links(made, [group], []) == ()


def test_bandwidth_above_the_catalogue_is_flagged() -> None:
    link = LinkLimit(group="world", bandwidth=1e9, kind="catalogue", source="a link")
    flagged = sweep._with_link_flag(point(), [link])
    assert [flag.name for flag in flagged.flags] == ["ABOVE_LINK"]
    assert sweep._with_link_flag(point(), []).flags == ()


def test_fitted_costs_prefer_the_out_of_place_curve() -> None:
    points = [point("all_gather", 4**power, in_place=place) for place in (False, True) for power in range(5, 12)]
    slow = [point("all_gather", 4**power, 1.0, in_place=True) for power in range(5, 12)]
    cost = fitted_cost(fit_points([*points[:7], *slow]))
    assert cost("all_gather", 2**20) == pytest.approx(20e-6 + 2**20 / 100e9)
    assert cost("all_gather", 0) == 0.0 and cost("all_reduce", 2**20) is None

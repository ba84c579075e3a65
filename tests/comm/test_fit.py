import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.comm.fit import BYTES_OF, CurveFit, Regime, bus_factor, find_curve, fit_curve, regime_of
from nearpeak.errors import UsageError
from nearpeak.plan.validation.validate import read_collectives

ROWS = Path(__file__).parents[2] / "benchmarks/measurements/measured_collectives.csv"


def curves():
    """Published curves: (bytes, seconds) by system, operation and ranks."""
    grouped = {}
    for row in read_collectives(ROWS):
        key = row.system, row.op, row.ranks, row.nccl_version
        grouped.setdefault(key, []).append((row.bytes, row.seconds))
    return grouped


def errors(regimes, points):
    return [abs(regime_of(regimes, size).seconds(size) / seconds - 1) for size, seconds in points]


@pytest.mark.parametrize(
    ("op", "factor"),
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, for 4 ranks
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("all_to_all", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_factors_are_those_of_nccl_tests(op, factor) -> None:
    assert bus_factor(op, 4) == pytest.approx(factor)


def test_bus_bandwidths_of_published_rows(tmp_path) -> None:
    # nccl-tests printed both: two digits, rounded
    import csv

    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = {"alltoall": "all_to_all"}
    checked = 0
    for row in rows:
        printed, ranks = float(row["busbw_GBps"]), int(row["num_gpus"])
        if printed < 10:  # two digits after the point say too little
            continue
        op = names.get(row["op"], row["op"])
        ours = float(row["bytes"]) / (float(row["time_us"]) * 1e-6) * bus_factor(op, ranks) / 1e9
        assert ours == pytest.approx(printed, rel=0.01), row
        checked += 1
    assert checked > 1000


def test_unknown_operation() -> None:
    with pytest.raises(UsageError, match="all_reduce"):
        bus_factor("allreduce", 4)
    with pytest.raises(UsageError, match="busiest"):
        bus_factor("all_to_all_v", 4)


def test_fit_of_published_curves() -> None:
    seen = [error for points in curves().values() for error in errors(fit_curve(points), points)]
    assert len(seen) == 2100
    assert sum(seen) / len(seen) < 0.025  # 2.1 %


@pytest.mark.slow
def test_fit_of_published_sizes_that_were_left_out() -> None:
    unseen = []
    for points in curves().values():
        ordered = sorted(points)
        for place in range(2, len(ordered) - 1, 4):
            regimes = fit_curve(ordered[:place] + ordered[place + 1 :])
            unseen += errors(regimes, [ordered[place]])
    assert sum(unseen) / len(unseen) < 0.08  # 7.2 %


@given(
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e12),
    start=st.integers(8, 12),
    count=st.integers(3, 16),
)
def test_one_regime_is_found_as_it_is(latency, bandwidth, start, count) -> None:
    points = [(2.0**k, latency + 2.0**k / bandwidth) for k in range(start, start + count)]
    regimes = fit_curve(points)
    assert len(regimes) == 1
    assert max(errors(regimes, points)) < 1e-6


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=12, unique_by=lambda p: p[0]))
def test_any_points_have_regimes_in_order(points) -> None:
    regimes = fit_curve(points)
    assert [regime.from_bytes for regime in regimes] == sorted({regime.from_bytes for regime in regimes})
    for regime in regimes:
        assert regime.latency_s >= 0 and regime.seconds_per_byte >= 0
        assert math.isfinite(regime.seconds(1e15))


def fitted(**changes) -> CurveFit:
    fields = {
        "op": "all_reduce",
        "group": "world",
        "ranks": 8,
        "nodes": 1,
        "concurrent": 1,
        "dtype": "float32",
        "in_place": True,
        "regimes": (Regime(from_bytes=1024.0, latency_s=1e-5, seconds_per_byte=1e-11),),
        "mean_error": 0.02,
        "worst_error": 0.05,
        "points": 9,
        "largest_bytes": 2.0**30,
    }
    return CurveFit(**{**fields, **changes})


def test_curve_by_ranks_and_nodes() -> None:
    curves = [fitted(), fitted(dtype="bfloat16"), fitted(ranks=4), fitted(nodes=2)]
    assert find_curve(curves, "all_reduce", 8, 1) is curves[1]  # what training sends
    assert find_curve(curves, "all_reduce", 8, 2) is curves[3]
    assert find_curve(curves, "all_gather", 8, 1) is None
    assert find_curve(curves, "all_reduce", 4, 1, concurrent=2) is curves[2]
    assert find_curve(curves, "all_reduce", 8, 2, concurrent=8) is None  # which share the network


def test_smaller_and_larger_sizes_have_the_outer_regimes() -> None:
    fit = fitted(regimes=(Regime(from_bytes=1e3, latency_s=1.0, seconds_per_byte=0.0), *fitted(regimes=()).regimes))
    assert fit.seconds(1) == 1.0
    with pytest.raises(ValueError, match="no regimes"):
        fitted(regimes=()).check()


def test_every_operation_has_its_bytes() -> None:
    assert len(BYTES_OF) == 9

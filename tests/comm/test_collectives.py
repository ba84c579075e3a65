"""Collectives of one rank in this process, and of several that are started."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearpeak.comm.collectives import (
    DTYPES,
    PERIOD,
    PLACES,
    busiest_bytes,
    count_wrong,
    fill,
    uneven_parts,
)
from nearpeak.comm.fit import BYTES_OF
from nearpeak.comm.result import load_run
from nearpeak.comm.sweep import SweepOptions, measure_collectives
from nearpeak.comm.world import Position, check_mesh, explain_positions, join
from nearpeak.errors import UsageError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, PERIOD - 1, PERIOD, 1000])
def test_values_are_known_again(dtype, elements) -> None:
    tensor = torch.empty(elements, dtype=DTYPES[dtype])
    fill(tensor, 3)
    assert count_wrong(tensor, [3]) == 0
    assert count_wrong(tensor, [4]) == elements
    tensor[elements // 2] += 1
    assert count_wrong(tensor, [3]) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4, 25, 100])
def test_sums_are_known(dtype, ranks) -> None:
    parts = []
    for rank in range(ranks):
        part = torch.empty(100, dtype=DTYPES[dtype])
        fill(part, rank)
        parts.append(part)
    total = torch.stack(parts).sum(0, dtype=DTYPES[dtype])
    assert count_wrong(total, range(ranks)) == 0
    assert count_wrong(total[7:], range(ranks), start=7) == 0
    assert count_wrong(parts[0], range(ranks)) > 0


def test_no_number_is_a_wrong_number() -> None:
    tensor = torch.full((100,), float("nan"), dtype=torch.bfloat16)
    assert count_wrong(tensor, range(100)) == 100


def test_uneven_parts_send_everything_and_load_one_rank() -> None:
    parts = uneven_parts(1000, 4)
    assert [sum(row) for row in parts] == [1000] * 4
    received = [sum(row[rank] for row in parts) for rank in range(4)]
    assert received[0] == max(received) > 1.5 * 1000
    assert busiest_bytes(parts, 4) == 4 * 3 * parts[1][0]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fewer_elements_than_ranks(count) -> None:
    assert sum(uneven_parts(count, 4)[0]) == count


def test_mesh_of_all_ranks() -> None:
    check_mesh((), 3)
    check_mesh((2, 2), 4)
    with pytest.raises(UsageError, match="2x3 has 6 places, and the world has 4 ranks"):
        check_mesh((2, 3), 4)


def test_a_world_leaves_the_hook_for_errors_as_it_was() -> None:
    before = sys.excepthook
    with join("gloo"):
        pass
    assert sys.excepthook is before


def test_ranks_exchange_values_without_numpy(monkeypatch) -> None:
    """torch does not require numpy; `distributed.all_gather_object` does."""
    monkeypatch.delenv("RANK", raising=False)

    def missing(*_arguments, **_options):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    with join("gloo") as world:
        assert world.gather({"host": "a", "calls": (1, None)}) == [{"host": "a", "calls": (1, None)}]
        assert world.decide(lambda: "once") == "once"


def test_world_of_one(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    options = SweepOptions(sizes=(1024,), max_seconds=0.001)
    with join("gloo") as world:
        run = measure_collectives(world, options, lambda line: None)
    assert "A world of one rank" in run.notes[0]
    assert {point.op for point in run.points} == set(BYTES_OF) - {"send_recv"}
    assert run.missing == {"send_recv": "it needs two ranks"}
    assert not run.wrong_points() and not run.links
    # nothing crosses a link
    assert all(point.algorithm_bandwidth is None and point.bus_bandwidth is None for point in run.points)
    assert not run.fits


def test_wrong_results_are_seen(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    import nearpeak.comm.collectives as collectives

    monkeypatch.setattr(collectives.distributed, "all_reduce", lambda tensor, group=None: tensor[3:5].zero_())
    with join("gloo") as world:
        run = measure_collectives(world, SweepOptions(ops=("all_reduce",), sizes=(64,), max_seconds=0.001), print)
    (point,) = run.points
    assert point.wrong_ranks == (0,) and point.grade == "F"
    assert [flag.name for flag in point.flags if flag.severity == "wrong"] == ["WRONG_RESULT"]


def test_an_operation_that_the_backend_lacks(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    import nearpeak.comm.collectives as collectives

    def refuse(*_arguments, **_options):
        raise RuntimeError("ProcessGroup does not support reduce")

    monkeypatch.setattr(collectives.distributed, "reduce", refuse)
    with join("gloo") as world:
        run = measure_collectives(world, SweepOptions(ops=("reduce", "barrier"), sizes=(64, 128)), print)
    assert run.missing == {"reduce, float32": "not offered by gloo: ProcessGroup does not support reduce"}
    assert [point.op for point in run.points] == ["barrier"]


def test_missing_ranks_are_named() -> None:
    there = Position(call=18, what="all_reduce of 64 bytes", line="train.py:7")
    behind = Position(call=17, what="broadcast of 64 bytes", line="train.py:3")
    text = explain_positions({0: there, 1: there, 3: behind}, 5, "it did not end within 20 s")
    assert text.splitlines() == [
        "all_reduce of 64 bytes: it did not end within 20 s.",
        "  arrived: ranks 0, 1, at train.py:7",
        "  not arrived: rank 3, at train.py:3 (broadcast of 64 bytes)",
        "  no answer: ranks 2, 4, which died, is stopped, or cannot be reached",
    ]


def started(command):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


FORKED = """
import os, sys
import torch.distributed.fsdp, torch.distributed.tensor.parallel, nearpeak.comm.patterns, nearpeak.render.views.comm
from nearpeak.cli.main import main
ranks, *arguments = sys.argv[1:]
os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
children = []
for rank in range(int(ranks)):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        code = main(["comm", "--backend", "gloo", *arguments])
        sys.stdout.flush()
        os._exit(code)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
"""As torchrun starts ranks, but by fork from a process that has imported torch: imports take longer than the test."""


def run_ranks(ranks, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    try:
        process = started(["-c", FORKED, str(ranks), *arguments])
    finally:
        del os.environ["MASTER_PORT"]
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_two_ranks_run_every_collective_and_pattern(tmp_path) -> None:
    file = tmp_path / "comm.json"
    arguments = ("--bytes", "1k,5k", "--max-seconds", "0.01")
    out = run_ranks(2, *arguments, "--patterns", "--json", str(file))
    assert "were right, element by element" in out
    run = load_run(file)
    assert run.ranks == 2 and run.backend == "gloo" and not run.missing and not run.wrong_points()
    measured = {(point.op, point.in_place) for point in run.points}
    assert measured == {(op, place) for op in PLACES for place in PLACES[op]}
    assert all(len(point.readings) >= 1 and point.low <= point.seconds <= point.high for point in run.points)
    assert {pattern.name for pattern in run.patterns if pattern.is_right} == {
        "data parallel",
        "fully sharded",
        "tensor parallel",
        "expert parallel",
    }
    assert all(pattern.predicted_s > pattern.compute_s for pattern in run.patterns)


@pytest.mark.slow
def test_four_ranks_and_a_mesh(tmp_path) -> None:
    file = tmp_path / "comm.json"
    arguments = ("--mesh", "2x2", "--bytes", "1k", "--dtype", "bfloat16", "--max-seconds", "0.01", "--json", str(file))
    run_ranks(4, *arguments)
    run = load_run(file)
    assert not run.wrong_points() and not run.missing
    by_group = {point.group: point for point in run.points if point.op == "all_reduce"}
    assert {name: (point.ranks, point.concurrent) for name, point in by_group.items()} == {
        "world": (4, 1),
        "mesh[0]": (2, 2),
        "mesh[1]": (2, 2),
    }
    assert {point.op for point in run.points if point.group == "mesh[1]"} == set(BYTES_OF)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)],  # torchrun waits for 30 s
)
def test_a_rank_that_dies_or_stops_is_named(sent) -> None:
    endless = ("--op", "all_reduce", "--bytes", "64k", "--max-seconds", "60", "--precision", "1e-9", "--timeout", "2")
    process = started(["-m", "nearpeak", "comm", "--backend", "gloo", "--ranks", "2", *endless])
    try:
        assert "all_reduce of 65,536 bytes" in process.stderr.readline()  # it measures
        os.kill(_process_of_rank(process.pid, 1), sent)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 4
    assert "all_reduce of 65,536 bytes: " in err, err
    assert "arrived: rank 0, at " in err
    assert "no answer: rank 1, which died, is stopped, or cannot be reached" in err


def _process_of_rank(parent, rank):
    children = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split()
    for child in children:
        try:
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
        except OSError:
            continue
    return None


@pytest.mark.gpu
def test_nccl_with_a_world_of_one(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    options = SweepOptions(sizes=(1024, 2**20, 2**26), dtypes=("float32", "bfloat16"), max_seconds=0.1, patterns=True)
    with join("nccl") as world:
        run = measure_collectives(world, options, lambda line: None)
    assert run.backend.startswith("nccl 2.")
    assert not run.wrong_points()
    assert {point.op for point in run.points} == set(BYTES_OF) - {"send_recv"}
    assert all((point.host_seconds or 0) > 0 for point in run.points if point.op != "barrier")
    assert all(point.bus_bandwidth is None and point.algorithm_bandwidth is None for point in run.points)
    assert all(pattern.is_right for pattern in run.patterns if not pattern.problem), run.patterns

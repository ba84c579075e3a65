import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.network.collectives import OPS
from nearpeak.plan.network.steps import SWITCH, Piece, algorithms, collective_steps
from nearpeak.plan.network.traffic import ring_wire

CASES = [(op, algorithm, ranks) for op in OPS for algorithm in algorithms(op) for ranks in (2, 3, 4, 7, 8)]
CASES = [case for case in CASES if case[0] != "send_recv" or case[2] == 2]


@pytest.mark.parametrize(("op", "algorithm", "ranks"), CASES)
def test_every_rank_ends_with_its_result(op: str, algorithm: str, ranks: int) -> None:
    played = collective_steps(op, ranks, algorithm)
    assert len(played.states) == len(played.steps) + 1
    for held, wanted in zip(played.states[-1], played.result, strict=True):
        assert set(wanted) <= set(held)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_reduce_ends_with_the_sum_everywhere_and_nothing_else(ranks: int) -> None:
    for algorithm in algorithms("all_reduce"):
        played = collective_steps("all_reduce", ranks, algorithm)
        everyone = tuple(range(ranks))
        for held in played.states[-1]:
            assert held == tuple(Piece(part, everyone) for part in range(played.parts))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_bytes_sent_are_those_of_the_formula(op: str) -> None:
    for ranks in (2, 4, 8):
        played = collective_steps(op, ranks)
        for rank in range(ranks):
            assert played.sent_share(rank) == pytest.approx(ring_wire(op, 1.0, ranks))


def test_all_reduce_in_the_switch_sends_once_where_a_ring_sends_nearly_twice() -> None:
    assert collective_steps("all_reduce", 8, "in-switch").sent_share(3) == 1.0
    assert collective_steps("all_reduce", 8, "ring").sent_share(3) == 1.75


@pytest.mark.parametrize(
    ("op", "count"), [("all_reduce", 14), ("all_gather", 7), ("reduce_scatter", 7), ("broadcast", 14)]
)
def test_number_of_steps_of_a_ring_of_8(op: str, count: int) -> None:
    assert len(collective_steps(op, 8, "ring").steps) == count


def test_tree_takes_the_logarithm() -> None:
    assert len(collective_steps("broadcast", 8, "tree").steps) == 3
    assert len(collective_steps("all_reduce", 9, "tree").steps) == 8


def test_ring_sends_only_to_the_next() -> None:
    for step in collective_steps("all_reduce", 5).steps:
        assert {(send.source, send.target) for send in step} == {(rank, (rank + 1) % 5) for rank in range(5)}


def test_switch_multicasts() -> None:
    last = collective_steps("all_gather", 4, "in-switch").steps[-1]
    assert {send.source for send in last} == {SWITCH}
    assert len(last) == 16


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("allreduce", 4), "all_reduce"),
        (("all_gather", 4, "tree"), "ring"),
        (("all_gather", 1), "ranks=2"),
        (("send_recv", 3), "ranks=2"),
        (("all_gather", 5000), "ranks=64"),
    ],
)
def test_errors(arguments, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        collective_steps(*arguments)

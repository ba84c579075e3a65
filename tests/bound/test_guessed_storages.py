"""Bounds of a trace whose storages are guessed: whatever may be in the cache is taken to be there."""

from dataclasses import replace

import nearpeak
from nearpeak.bound.cache import Residency
from nearpeak.bound.floors import as_written, ideal
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op, Storage, Trace
from nearpeak.ops.tensor import Tensor

SIZE = 1_000_000


def tensor(storage: int) -> Tensor:
    return Tensor(shape=(SIZE,), strides=(1,), dtype="int8", storage=storage)


def machine(cache: float) -> Machine:
    return replace(nearpeak.machine("h100-sxm"), cache_bytes=cache)


def moved(trace: Trace, cache: float) -> list[float]:
    """Bytes to and from memory, op by op."""
    on = machine(cache)
    assert on.theoretical is not None
    bounds = as_written(trace, [cost_of(op) for op in trace.ops], on, ceilings="theoretical")
    return [round(bound.memory_seconds * on.theoretical.bandwidth) for bound in bounds]


def chain(*pairs: tuple[int, int], guessed: bool) -> Trace:
    ops = tuple(
        Op(name="aten.neg.default", arguments={"self": tensor(read)}, outputs=(tensor(written),))
        for read, written in pairs
    )
    storages = {item: Storage(bytes=SIZE, kind="intermediate") for pair in pairs for item in pair}
    storages[pairs[0][0]] = Storage(bytes=SIZE, kind="input")
    return Trace(ops=ops, storages=storages, guessed_storages=guessed)


def test_what_was_written_need_not_reach_memory():
    pairs = ((0, 1), (0, 2), (2, 3), (3, 4), (1, 5))  # 1 is wanted at the end, and pushed out before
    assert sum(moved(chain(*pairs, guessed=False), 1.5 * SIZE)[1:-1]) > 0
    assert sum(moved(chain(*pairs, guessed=True), 1.5 * SIZE)[1:-1]) == 0


def test_the_cache_may_hold_what_is_asked_for_first():
    pairs = ((0, 1), (2, 3), (4, 5))
    assert moved(chain(*pairs, guessed=False), 1.5 * SIZE) == [SIZE, SIZE, SIZE]
    assert moved(chain(*pairs, guessed=True), 1.5 * SIZE) == [0, SIZE // 2, SIZE]
    assert moved(chain(*pairs, guessed=True), 0.0) == [2 * SIZE] * 3


def test_the_ideal_stays_below():
    for guessed, expected in ((False, SIZE), (True, SIZE // 2)):
        trace = chain((0, 1), (0, 2), guessed=guessed)
        on = machine(SIZE / 2)
        assert on.theoretical is not None
        costs = [cost_of(op) for op in trace.ops]
        seconds = ideal(trace, costs, on, ceilings="theoretical").memory_seconds
        assert round(seconds * on.theoretical.bandwidth) == expected
        assert seconds <= sum(moved(trace, SIZE / 2)) / on.theoretical.bandwidth


def test_an_op_without_a_formula_may_leave_its_arguments_in_the_cache():
    def trace(guessed: bool) -> Trace:
        unknown = Op(name="unknown.kernel", origin="unknown", arguments={"0": tensor(7)}, outputs=())
        tail = chain((7, 8), guessed=guessed)
        head = chain(*((n, n + 10) for n in range(3)), guessed=guessed)  # uses up what was there before
        storages = {**head.storages, **tail.storages}
        return Trace(ops=(*head.ops, unknown, *tail.ops), storages=storages, guessed_storages=guessed)

    assert moved(trace(False), 2 * SIZE)[-1] == 0
    assert moved(trace(True), 2 * SIZE)[-1] == 0


def test_bytes_that_may_be_held_take_no_room():
    cache = Residency(100)
    cache.access(1, 80)
    cache.may_hold(2, 90)
    assert (cache.resident(1), cache.resident(2)) == (80, 90)
    cache.access(3, 60)  # pushes out half of storage 1, the oldest
    assert (cache.resident(1), cache.resident(2)) == (40, 90)

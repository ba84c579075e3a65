"""What the emulation of Hopper finds: kernels with one thing wrong, each."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from emulated_hopper import _INSTEAD, Barriers, DType, emulated
from scheduled import Schedule, pause

GL, TMA, MBARRIER = (SimpleNamespace(**vars(_INSTEAD[name])) for name in ("gl", "tma", "mbarrier"))
fence, multiply, multiply_wait = (
    _INSTEAD[name] for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")
)
add, wait_until_written = _INSTEAD["async_add_shared_to_global"], _INSTEAD["_wait_until_written"]
SIZE = 4


def described(x):
    return SimpleNamespace(base=x, shape=x.shape, strides=x.stride(), block_shape=[SIZE, SIZE], layout=None)


def run(monkeypatch, partitions, *tensors, programs=1):
    """Partitions take descriptors, tiles in shared memory as many as tensors, and two barriers of one arrival."""

    def kernel(*given):
        tiles = GL.allocate_shared_memory(DType(torch.float32), [len(given), SIZE, SIZE], None)
        barriers = GL.allocate_shared_memory(None, [2, 1], Barriers)
        for slot in range(2):
            MBARRIER.init(barriers.index(slot), count=1)
        GL.warp_specialize([(one, (given, tiles, barriers)) for one in partitions], [], [])

    with emulated((ModuleType("none"),), monkeypatch) as launch:
        launch(kernel, (programs, 1, 1), *map(described, tensors))


def loaded(given, tiles, barriers):
    MBARRIER.expect(barriers.index(0), given[0].block_type.nbytes)
    TMA.async_copy_global_to_shared(given[0], [0, 0], barriers.index(0), tiles.index(0))


def test_a_copy_is_there_when_its_barrier_says_so(monkeypatch):
    found = []

    def early(given, tiles, barriers):
        loaded(given, tiles, barriers)
        found.append(tiles.index(0).load(None))
        MBARRIER.wait(barriers.index(0), 0)
        found.append(tiles.index(0).load(None))

    x = torch.ones(SIZE, SIZE)
    run(monkeypatch, [early], x)
    assert found[0].isnan().all()
    assert torch.equal(found[1].as_subclass(torch.Tensor), x)


def test_the_wrong_phase_is_waited_for_for_ever(monkeypatch):
    def consume(given, tiles, barriers):
        MBARRIER.wait(barriers.index(0), 0)
        MBARRIER.wait(barriers.index(0), 1)

    with pytest.raises(AssertionError, match=r"wait for ever(.|\n)*program 0, partition 1"):
        run(monkeypatch, [loaded, consume], torch.ones(SIZE, SIZE))


def test_more_arrive_than_are_expected(monkeypatch):
    def twice(given, tiles, barriers):
        MBARRIER.arrive(barriers.index(0), count=2)

    with pytest.raises(AssertionError, match="more arrive"):
        run(monkeypatch, [twice], torch.ones(SIZE, SIZE))


@pytest.mark.parametrize("too_early", [False, True])
def test_factors_must_stay_until_a_product_is_there(monkeypatch, too_early):
    found = []

    def consume(given, tiles, barriers):
        loaded(given, tiles, barriers)
        MBARRIER.wait(barriers.index(0), 0)
        product = multiply(tiles.index(0), tiles.index(0), None, use_acc=False, is_async=True)
        if too_early:
            loaded(given, tiles, barriers)
        found.append(multiply_wait(num_outstanding=0, deps=(product,)))

    run(monkeypatch, [consume], torch.ones(SIZE, SIZE))
    assert found[0].isnan().all() if too_early else (found[0] == SIZE).all()


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("use", ["product", "copy"])
def test_what_is_stored_must_be_fenced(monkeypatch, use, fenced):
    def store(given, tiles, barriers):
        tiles.index(0).store(torch.ones(SIZE, SIZE))
        if fenced:
            fence()
        MBARRIER.arrive(barriers.index(0))
        MBARRIER.wait(barriers.index(1), 0)

    def read(given, tiles, barriers):
        MBARRIER.wait(barriers.index(0), 0)
        if use == "product":
            multiply(tiles.index(0), tiles.index(0), None, use_acc=False)
            multiply_wait(num_outstanding=0, deps=())
        else:
            TMA.async_copy_shared_to_global(given[0], [0, 0], tiles.index(0))
            TMA.store_wait(0)
        MBARRIER.arrive(barriers.index(1))

    if fenced:
        run(monkeypatch, [store, read], torch.ones(SIZE, SIZE))
    else:
        with pytest.raises(AssertionError, match="without a fence"):
            run(monkeypatch, [store, read], torch.ones(SIZE, SIZE))


@pytest.mark.parametrize("wait", ["none", "read", "written"])
def test_a_copy_out_reads_and_writes_late(monkeypatch, wait):
    seen = []
    x = torch.zeros(SIZE, SIZE)

    def out(given, tiles, barriers):
        tiles.index(0).store(torch.ones(SIZE, SIZE))
        fence()
        add(given[0], [0, 0], tiles.index(0))
        if wait != "none":
            TMA.store_wait(0) if wait == "read" else wait_until_written()
        tiles.index(0).store(torch.full((SIZE, SIZE), 2.0))
        seen.append(x.clone())
        TMA.store_wait(0)

    run(monkeypatch, [out], x)
    assert (x == (2.0 if wait == "none" else 1.0)).all()
    assert (seen[0] == (1.0 if wait == "written" else 0.0)).all()


def test_what_nobody_waits_for(monkeypatch):
    def product(given, tiles, barriers):
        multiply(tiles.index(0), tiles.index(0), None, use_acc=False)

    def copy(given, tiles, barriers):
        TMA.async_copy_shared_to_global(given[0], [0, 0], tiles.index(0))

    for one in (product, copy):
        with pytest.raises(AssertionError, match="nobody waits"):
            run(monkeypatch, [one], torch.ones(SIZE, SIZE))


def test_threads_go_on_in_an_order_of_the_seed():
    def order(seed, slowest=None):
        schedule, found = Schedule(seed, slowest), []

        def thread(name):
            def run():
                for _ in range(5):
                    pause()
                    found.append(name)

            return run

        for name in "abc":
            schedule.start(thread(name), name)
        schedule.run()
        return "".join(found)

    assert order(0) == order(0)
    assert len({order(seed) for seed in range(8)}) > 4
    assert order(0, slowest="b").endswith("bbbbb")


def test_a_thread_that_fails_ends_the_others():
    schedule = Schedule()

    def fail():
        raise ValueError("wrong")

    schedule.start(fail, "one")
    waiting = schedule.start(lambda: pause(lambda: False), "other")
    with pytest.raises(ValueError, match="wrong"):
        schedule.run()
    assert waiting.ended

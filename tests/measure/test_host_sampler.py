import itertools

import pytest
import torch

from nearpeak.measure import samplers
from nearpeak.measure.samplers import HostEviction, HostSampler


class Clock:
    """Time that passes only when it is told to; reading it costs `read_seconds`."""

    def __init__(self, read_seconds=0.0):
        self.now = 0.0
        self.read_seconds = read_seconds

    def __call__(self):
        self.now += self.read_seconds
        return self.now

    def spend(self, seconds):
        def call():
            self.now += seconds

        return call


def test_a_hot_block_is_one_loop_of_calls_and_one_reading():
    clock = Clock()
    sampler = HostSampler(clock.spend(1e-3), "hot", call_seconds=1e-3, clock=clock)
    assert (sampler.kind, sampler.calls) == ("cpu", 4)  # a block aims at 4 ms
    block = sampler.block()
    assert block.seconds == pytest.approx(1e-3)
    assert block.readings == (block.seconds,)
    assert block.launch_hidden is None
    assert clock.now == pytest.approx(4e-3)
    assert sampler.method == "host clock around a loop of 4 calls"


@pytest.mark.parametrize(("call_seconds", "calls"), [(1.0, 1), (4e-3, 1), (1e-6, 4000), (0.0, 10_000), (1e-9, 10_000)])
def test_a_hot_block_has_as_many_calls_as_fit(call_seconds, calls):
    assert HostSampler(lambda: None, "hot", call_seconds=call_seconds, clock=Clock()).calls == calls


def test_the_number_of_calls_can_be_given():
    assert HostSampler(lambda: None, "hot", call_seconds=1.0, calls=7, clock=Clock()).calls == 7
    assert HostSampler(lambda: None, "cold", call_seconds=1.0, evict=lambda: None, calls=7, clock=Clock()).calls == 7


def test_a_cold_block_reads_every_call_and_takes_their_median():
    clock = Clock()
    lengths = itertools.cycle([1.0, 9.0, 2.0])
    sampler = HostSampler(
        lambda: clock.spend(next(lengths))(), "cold", call_seconds=1.0, evict=lambda: None, clock=clock
    )
    block = sampler.block()
    assert block.readings == pytest.approx((1.0, 9.0, 2.0))
    assert block.seconds == pytest.approx(2.0)


def test_eviction_and_reset_stand_before_each_call_and_outside_its_time():
    clock, order = Clock(), []

    def step(name, seconds):
        def call():
            order.append(name)
            clock.now += seconds

        return call

    sampler = HostSampler(
        step("call", 1.0), "cold", call_seconds=1.0, reset=step("reset", 5.0), evict=step("evict", 7.0), clock=clock
    )
    assert sampler.block().readings == pytest.approx((1.0, 1.0, 1.0))
    assert order == ["reset", "evict", "call"] * 3


def test_a_reset_makes_every_call_its_own_reading_when_hot_too():
    clock = Clock()
    sampler = HostSampler(
        clock.spend(1e-3), "hot", call_seconds=1e-3, reset=clock.spend(1.0), evict=clock.spend(1.0), clock=clock
    )
    assert sampler.block().readings == pytest.approx((1e-3,) * 3)
    assert clock.now == pytest.approx(3 * 1.001)  # the eviction was not run


def test_what_the_clock_itself_takes_is_subtracted():
    clock = Clock(read_seconds=0.25)
    sampler = HostSampler(clock.spend(1.0), "cold", call_seconds=1.0, evict=lambda: None, clock=clock)
    assert sampler.zero_seconds == pytest.approx(0.25)
    assert sampler.block().seconds == pytest.approx(1.0)


def test_a_call_shorter_than_a_reading_of_the_clock_is_never_negative():
    clock = Clock(read_seconds=0.25)
    sampler = HostSampler(lambda: None, "cold", call_seconds=1.0, evict=lambda: None, clock=clock)
    clock.read_seconds = 0.1
    assert sampler.block().seconds == 0.0


def test_the_eviction_sweeps_twice_the_cache(monkeypatch):
    monkeypatch.setattr(samplers, "detect_cpu", lambda: FakeFacts(cache_bytes=2**20))
    swept = []
    monkeypatch.setattr(torch, "sum", lambda tensor: swept.append(tensor.numel() * tensor.element_size()))
    eviction = HostEviction()
    eviction()
    assert eviction.cache_bytes == 2**20
    assert swept == [2 * 2**20]


def test_an_unknown_cache_is_swept_generously(monkeypatch):
    monkeypatch.setattr(samplers, "detect_cpu", lambda: FakeFacts(cache_bytes=None))
    swept = []
    monkeypatch.setattr(torch, "sum", lambda tensor: swept.append(tensor.numel() * tensor.element_size()))
    eviction = HostEviction()
    eviction()
    assert eviction.cache_bytes is None
    assert swept == [2 * samplers.UNKNOWN_CACHE_BYTES]


class FakeFacts:
    def __init__(self, cache_bytes):
        self.cache_bytes = cache_bytes

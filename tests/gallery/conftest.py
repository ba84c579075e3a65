"""What the tests of the examples share: each of them predicted for an H100, and run on a CPU with made-up ceilings."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from nearpeak.gallery import running
from nearpeak.gallery.here import Here
from nearpeak.gallery.parts import Part, Prose, Result
from nearpeak.machines.model import Achievable, LaunchCost, Machine
from nearpeak.measure.options import options_from

CPU = Machine(
    id="made-up-cpu",
    name="made-up CPU",
    kind="cpu",
    vendor="nobody",
    architecture="none",
    processors=2,
    memory_bytes=8e9,
    cache_bytes=8e6,
    achievable=Achievable(
        how="measured",
        note="made up",
        bandwidth=2e10,
        matrix={},
        vector={"float64": 5e10, "float32": 1e11, "bfloat16": 1e11},
        launch=LaunchCost(host_call=2e-6),
    ),
)
"""About what two cores do, so that nothing needs to be calibrated."""


@pytest.fixture(scope="session")
def predicting() -> Callable[[str], Result]:
    """An example predicted for an H100; each is run once for all tests."""
    on_h100 = running.here("h100-sxm")
    return functools.cache(lambda name: running.run(name, on_h100))


@pytest.fixture(scope="session")
def predicting_cpu() -> Callable[[str], Result]:
    """An example predicted for the made-up CPU, and not run there."""
    return functools.cache(lambda name: running.run(name, Here(machine=CPU, device="cpu", measures=False)))


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """An example run on the CPU of the tests, each call once: that it runs, whatever the times are."""

    def once(self: Here, fn: Callable[..., Any], *args: Any, **options: Any) -> float:
        options_from(options)  # an option that `bench` does not have is an error
        start = time.perf_counter()
        fn(*args)
        return time.perf_counter() - start

    monkeypatch.setattr(Here, "measure", once)
    return lambda name: running.run(name, Here(machine=CPU, device="cpu"))


@pytest.fixture(scope="session")
def only() -> Callable[..., list[Part]]:
    """The parts of one type."""
    return lambda result, kind: [part for part in result.parts if isinstance(part, kind)]


@pytest.fixture(scope="session")
def said() -> Callable[[Result], str]:
    """All prose."""
    return lambda result: "\n".join(part.text for part in result.parts if isinstance(part, Prose))

"""`Context`, the machine that an example runs on, and `run_example`, which runs one and returns what it showed.

A context is this machine, where examples are measured, or a machine of the catalogue, for which they only predict.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

import nearpeak
from nearpeak.devices.backends import gpu_backend
from nearpeak.errors import UsageError
from nearpeak.gallery import NAMES
from nearpeak.gallery.parts import ExampleResult, Part, Prediction
from nearpeak.machines.machine import Machine
from nearpeak.measure.page_faults import keep_freed_memory
from nearpeak.plan.cluster.cluster import Cluster

T = TypeVar("T")
GPU_BAND = (0.8, 1.25)
"""Measured / predicted on a GPU that nobody else uses."""
CPU_BAND = (0.5, 2.0)
"""The same on a CPU, which others use too."""
CLUSTER_GPU = "h100-sxm"
"""Whose clusters are planned where there is no GPU."""
FLOOR = (0.9, None)
"""The same where what is predicted is the least that a call can take."""
MEASURE_SECONDS = 0.4
"""For each measurement, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A machine, and what an example may do there."""

    machine: Machine
    device: str
    """"cuda" or "cpu": whose tensors are made, also where nothing runs."""
    measures: bool = True
    progress: Callable[[str], None] = field(default=lambda line: None)

    @property
    def gpu(self) -> bool:
        """Whether the machine is a GPU."""
        return self.device == "cuda"

    def pick(self, *, gpu: T, cpu: T) -> T:
        """Sizes that take milliseconds on either."""
        return gpu if self.gpu else cpu

    @property
    def tensors(self) -> str:
        """The device of tensors: "meta" where nothing runs, so that they take no memory."""
        return self.device if self.measures else "meta"

    @property
    def half(self) -> torch.dtype:
        """bfloat16, or float16 where the machine has no other 16 bits."""
        ceilings = self.machine.achievable or self.machine.theoretical
        has = ceilings is None or "bfloat16" in {*ceilings.matrix, *ceilings.vector}
        return torch.bfloat16 if has else torch.float16

    @contextmanager
    def building(self) -> Iterator[None]:
        """Modules are built inside, on `device`: real ones, or fake ones where nothing runs."""
        with nullcontext() if self.measures else nearpeak.fake():
            yield

    @property
    def band(self) -> tuple[float, float]:
        """Between what measured / predicted is to be, where nothing is said."""
        return GPU_BAND if self.gpu else CPU_BAND

    def cluster(self, gpus: int) -> Cluster:
        """So many of this GPU, as they are usually joined; of H100s where the machine is none or its links unknown."""
        try:
            return Cluster.of(self.machine if self.gpu else CLUSTER_GPU, gpus=gpus)
        except UsageError:
            return Cluster.of(CLUSTER_GPU, gpus=gpus)

    def estimate(self, fn: Callable[..., Any], *args: Any) -> nearpeak.Estimate:
        """A call on this machine, op by op, on fake tensors."""
        with nearpeak.fake():
            stand_ins = tree_map_only(torch.Tensor, self._stand_in, args)
        return nearpeak.estimate(fn, *stand_ins, on=self.machine)

    def predict(self, fn: Callable[..., Any], *args: Any) -> float:
        """What a call is expected to take: its ops at what kernels reach on this machine.

        A machine of the catalogue whose kernels nobody has measured gives the bound instead.
        """
        found = self.estimate(fn, *args)
        return found.as_written_s if found.expected_s is None else found.expected_s

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the machine for one of "meta", for which torch would choose neither its ops nor kernels."""
        if tensor.device.type != "meta":
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def measure(self, fn: Callable[..., Any], *args: Any, **options: Any) -> float | None:
        """What a call takes, in seconds; None where nothing runs. `options` are those of `nearpeak.bench`."""
        if not self.measures:
            return None
        given = {"max_seconds": MEASURE_SECONDS, "warmup_seconds": 0.05, "other_kinds": False, **options}
        return nearpeak.bench(fn, *args, machine=self.machine, **given).seconds

    def row(
        self,
        what: str,
        fn: Callable[..., Any],
        *args: Any,
        band: tuple[float, float | None] | None = None,
        predicted: float | None = None,
        **options: Any,
    ) -> Prediction:
        """A call predicted, or with a prediction of one's own, and measured."""
        self.progress(what)
        low, high = band or self.band
        return Prediction(
            what=what,
            predicted=self.predict(fn, *args) if predicted is None else predicted,
            measured=self.measure(fn, *args, **options),
            low=low,
            high=high,
        )


class SkipExample(Exception):
    """An example that a machine cannot run, and why."""


def make_context(on: str | None = None, progress: Callable[[str], None] | None = None) -> Context:
    """This machine, or one of the catalogue, for which nothing is measured.

    On a CPU the process keeps what it frees from here on, as it does on a GPU: otherwise large results would cost page
    faults besides, or not, as earlier examples left the heap.
    """
    machine = nearpeak.machine(on, progress=progress)
    device = "cuda" if (gpu_backend() is not None if on is None else is_gpu(machine)) else "cpu"
    if on is None and device == "cpu":
        keep_freed_memory()
    return Context(machine=machine, device=device, measures=on is None, progress=progress or (lambda line: None))


def is_gpu(machine: Machine) -> bool:
    """Whether a machine of the catalogue is a GPU."""
    return machine.kind == "gpu"


def title_and_lesson(name: str) -> tuple[str, str]:
    """The title and the lesson of an example: the first line of its docstring, and the rest."""
    title, _, lesson = (inspect.getdoc(_example_module(name)) or "").partition("\n\n")
    return title.removesuffix("."), " ".join(lesson.split())


def example_source(name: str) -> str:
    """The text of an example."""
    return inspect.getsource(_example_module(name))


def run_example(name: str, here: Context) -> ExampleResult:
    """Runs one example."""
    module = _example_module(name)
    title, lesson = title_and_lesson(name)
    start = time.perf_counter()
    parts: list[Part] = []
    skipped = ""
    try:
        for part in module.example(here):
            parts += part if isinstance(part, Iterable) else [part]
    except SkipExample as why:
        skipped = str(why)
    return ExampleResult(
        name=name,
        number=NAMES.index(name) + 1,
        title=title,
        lesson=lesson,
        machine=here.machine.name,
        measured=here.measures,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=(
            ("nearpeak", nearpeak.__version__),
            ("torch", torch.__version__),
            ("Python", platform.python_version()),
        ),
        seconds=time.perf_counter() - start,
        parts=tuple(parts),
        skipped=skipped,
    )


def _example_module(name: str):  # type: ignore[no-untyped-def]
    if name not in NAMES:
        raise UsageError(f"There is no example {name!r}. There are: {', '.join(NAMES)}.")
    return importlib.import_module(f"nearpeak.gallery.examples.{name}")

"""`Context`, the machine that an example runs on, and `run_example`, which runs one and returns what it showed.

A context is this machine, where examples are measured, or a machine of the catalogue, for which they only predict.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

import nearpeak
from nearpeak.devices.backends import gpu_backend
from nearpeak.errors import UsageError
from nearpeak.gallery import NAMES
from nearpeak.gallery.parts import ExampleResult, Part, Prediction
from nearpeak.machines.catalogue import derate
from nearpeak.machines.machine import Machine
from nearpeak.machines.physics import calibration_doubts
from nearpeak.measure.page_faults import keep_freed_memory
from nearpeak.measure.timing import Flag
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.profiles.grade import CALIBRATE

T = TypeVar("T")
GPU_BAND = (0.8, 1.25)
"""Expected range of measured / predicted on a GPU that runs nothing else."""
CPU_BAND = (0.5, 2.0)
"""The same on a CPU, which other processes use too."""
CLUSTER_GPU = "h100-sxm"
"""The GPU of planned clusters where the machine has none."""
FLOOR = (0.9, None)
"""The same where the prediction is a lower bound."""
MEASURE_SECONDS = 0.4
"""Time limit of each measurement."""
RANKS_TIMEOUT_S = 60.0
"""Time limit of processes that an example starts as ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The machine that an example runs on."""

    machine: Machine
    device: str
    """"cuda" or "cpu": the device of tensors, also where nothing is measured."""
    measures: bool = True
    progress: Callable[[str], None] = field(default=lambda line: None)
    flags: list[tuple[Flag, ...]] = field(default_factory=list)
    """Those of each measurement of the example that runs."""
    host_times: list[str] = field(default_factory=list)
    """Calls that were to have a device time, and have one of the host."""

    @property
    def gpu(self) -> bool:
        """Whether the machine is a GPU."""
        return self.device == "cuda"

    def pick(self, *, gpu: T, cpu: T) -> T:
        """Sizes for the kind of machine, such that a call takes milliseconds."""
        return gpu if self.gpu else cpu

    @property
    def tensors(self) -> str:
        """The device of tensors: "meta" where nothing is measured, so that they take no memory."""
        return self.device if self.measures else "meta"

    @property
    def half(self) -> torch.dtype:
        """bfloat16, or float16 where the machine has no bfloat16."""
        ceilings = self.machine.achievable or self.machine.theoretical
        supported = ceilings is None or "bfloat16" in {*ceilings.matrix, *ceilings.vector}
        return torch.bfloat16 if supported else torch.float16

    @contextmanager
    def building(self) -> Iterator[None]:
        """A context manager to build modules in: with fake tensors where nothing is measured."""
        with nullcontext() if self.measures else nearpeak.fake():
            yield

    @property
    def band(self) -> tuple[float, float]:
        """Expected range of measured / predicted."""
        return GPU_BAND if self.gpu else CPU_BAND

    def cluster(self, gpus: int) -> Cluster:
        """A cluster of this GPU; of H100s where the machine is no GPU or its links are not known."""
        try:
            return Cluster.of(self.machine if self.gpu else CLUSTER_GPU, gpus=gpus)
        except UsageError:
            return Cluster.of(CLUSTER_GPU, gpus=gpus)

    def estimate(self, fn: Callable[..., Any], *args: Any) -> nearpeak.Estimate:
        """The estimate of a call on this machine, from fake tensors."""
        with nearpeak.fake():
            fake_args = tree_map_only(torch.Tensor, self._fake_tensor, args)
        return nearpeak.estimate(fn, *fake_args, on=self.machine)

    def predict(self, fn: Callable[..., Any], *args: Any) -> float:
        """Expected seconds of a call: its ops at the efficiency of kernels on this machine.

        Without measured efficiencies, as for most machines of the catalogue, the bound.
        """
        estimate = self.estimate(fn, *args)
        return estimate.as_written_s if estimate.expected_device_s is None else estimate.expected_device_s

    def _fake_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on `device` for a "meta" tensor, for which torch would choose other ops."""
        if tensor.device.type != "meta":
            return tensor
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return fake.requires_grad_(tensor.requires_grad)

    def measure(self, fn: Callable[..., Any], *args: Any, **options: Any) -> float | None:
        """Measured seconds of a call; None where nothing is measured. `options` are those of `nearpeak.bench`."""
        if not self.measures:
            return None
        options = {"max_seconds": MEASURE_SECONDS, "warmup_seconds": 0.05, "other_kinds": False, **options}
        timing = nearpeak.bench(fn, *args, on=self.machine, **options)
        self.flags.append(timing.flags)
        if self.gpu and "kind" not in options and timing.kind not in ("device", "graph"):
            self.host_times.append(f"{timing.name} ({timing.kind})")
        return timing.seconds

    def doubts(self) -> tuple[str, ...]:
        """What is doubtful about the measurements so far, and about the calibration that predictions are from."""
        if not self.measures:
            return ()
        doubtful = [{flag.name: flag for flag in flags if flag.severity != "note"} for flags in self.flags]
        remedies = {name: flag.remedy for flags in doubtful for name, flag in flags.items()}
        counts = Counter(name for flags in doubtful for name in flags)
        found = [
            f"{name} in {count} of {len(doubtful)} measurements. {remedies[name]}"
            for name, count in counts.most_common()
        ]
        if self.host_times:
            found.append(f"Times of the host and not of the GPU: {', '.join(self.host_times)}.")
        calibration = calibration_doubts(self.machine)
        if calibration:
            found.append(f"The calibration behind the predictions is doubtful: {calibration[0]}. {CALIBRATE}")
        return tuple(found)

    def row(
        self,
        what: str,
        fn: Callable[..., Any],
        *args: Any,
        band: tuple[float, float | None] | None = None,
        predicted: float | None = None,
        **options: Any,
    ) -> Prediction:
        """A call, predicted and measured; `predicted` replaces the prediction."""
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
    """Raised by an example that cannot run on this machine, with the reason."""


def make_context(
    on: str | None = None,
    progress: Callable[[str], None] | None = None,
    factors: Mapping[str, float] | None = None,
) -> Context:
    """The context of this machine, or of one of the catalogue, for which nothing is measured.

    With `factors`, as of `machines.catalogue.derate`, predictions for a machine of the catalogue are made from its
    datasheet's figures times these; from its theoretical peaks, where all are 1.

    On a CPU, freed memory stays with the process from now on, as it does on a GPU. Otherwise large results would cost
    page faults or not, depending on earlier examples.
    """
    machine = nearpeak.machine(on, complete=True, progress=progress)
    if factors is not None:
        machine = derate(machine, factors)
    device = "cuda" if (gpu_backend() is not None if on is None else machine.kind == "gpu") else "cpu"
    if on is None and device == "cpu":
        keep_freed_memory()
    return Context(machine=machine, device=device, measures=on is None, progress=progress or (lambda line: None))


def title_and_lesson(name: str) -> tuple[str, str]:
    """The title and the lesson of an example: the first line of its docstring, and the rest."""
    title, _, lesson = (inspect.getdoc(_example_module(name)) or "").partition("\n\n")
    return title.removesuffix("."), " ".join(lesson.split())


def example_source(name: str) -> str:
    """The source code of an example."""
    return inspect.getsource(_example_module(name))


def run_example(name: str, context: Context) -> ExampleResult:
    """Run one example."""
    module = _example_module(name)
    title, lesson = title_and_lesson(name)
    start = time.perf_counter()
    context.flags.clear()
    context.host_times.clear()
    parts: list[Part] = []
    skipped = ""
    try:
        for part in module.example(context):
            parts += part if isinstance(part, Iterable) else [part]
    except SkipExample as reason:
        skipped = str(reason)
    return ExampleResult(
        name=name,
        number=NAMES.index(name) + 1,
        title=title,
        lesson=lesson,
        machine=context.machine.name,
        measured=context.measures,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=(
            ("nearpeak", nearpeak.__version__),
            ("torch", torch.__version__),
            ("Python", platform.python_version()),
        ),
        seconds=time.perf_counter() - start,
        parts=tuple(parts),
        skipped=skipped,
        doubts=context.doubts(),
    )


def run_two(module: Sequence[str]) -> None:
    """Runs a module that starts two ranks on this machine, without a GPU, and ends it where it takes too long."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        env={**os.environ, **loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=RANKS_TIMEOUT_S)
    finally:
        process.terminate()  # torchrun's code ends both ranks; no effect where they have ended
        process.wait()


def _example_module(name: str):  # type: ignore[no-untyped-def]
    if name not in NAMES:
        raise UsageError(f"There is no example {name!r}. There are: {', '.join(NAMES)}.")
    return importlib.import_module(f"nearpeak.gallery.examples.{name}")

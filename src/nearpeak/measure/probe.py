"""A first look, before any time is taken: does it run, where, does it wait, keep memory, change its inputs?"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nearpeak.errors import CaseError, NearpeakError
from nearpeak.measure.case import Case, describe_error
from nearpeak.measure.cuda import CudaDevice, host_seconds
from nearpeak.measure.heap import page_faults
from nearpeak.measure.profiler import busy_seconds, profile_calls
from nearpeak.measure.statistics import median

PROBE_CALLS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the first calls showed."""

    call_seconds: float
    """Wall time of one call, device idle before and after."""
    enqueue_seconds: float
    memory_growth: float
    """Bytes that every call keeps."""
    mutated: tuple[int, ...]
    """Positions of tensors whose values differ after every call."""
    nonfinite: bool
    """The inputs are finite and the result is not."""
    synchronises: bool = False
    kernels: tuple[str, ...] | None = None
    """Names, in order; None where the profiler sees none."""
    kernel_seconds: float | None = None
    """In which at least one kernel ran, by the profiler."""
    off_stream: bool = False
    page_faults: float = 0.0
    """Of a call on the CPU: pages that it gets from the system anew, each time."""


@contextlib.contextmanager
def reporting(case: Case, when: str) -> Iterator[None]:
    """Turns an error of the user's code into a `CaseError` with the original as its cause."""
    try:
        yield
    except NearpeakError:
        raise
    except torch.OutOfMemoryError as error:
        raise CaseError(
            f"{case.name} ran out of memory {when}: {describe_error(error)}. Use smaller inputs, or free memory."
        ) from error
    except Exception as error:
        raise CaseError(f"{case.name} raised an error {when}: {describe_error(error)}") from error


def device_of(case: Case) -> torch.device:
    """Where the case's tensors are; for a case without tensors, where its kernels run."""
    for tensors in (case.tensors(), case.hidden_tensors()):
        devices: set[torch.device] = {tensor.device for tensor in tensors}
        on_gpu = sorted((device for device in devices if device.type == "cuda"), key=str)
        if len(on_gpu) > 1:
            raise CaseError(
                f"{case.name} has tensors on several GPUs ({', '.join(map(str, on_gpu))}). Time one device at a time."
            )
        if on_gpu:
            return on_gpu[0]
        if devices:
            return torch.device("cpu")
    if torch.cuda.is_available():
        with reporting(case, "on its first call"):
            case.call()
            calls = profile_calls(case.call, 1, synchronize=torch.cuda.synchronize)
        if calls and calls[0]:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def probe_host(case: Case) -> Probe:
    """The probe of a case that runs on the CPU."""
    common = _probe(case, synchronize=lambda: None, memory=_resident_bytes)
    available = _available_bytes() or math.inf
    _refuse_endless_growth(case, common.memory_growth, available)
    with reporting(case, "on a repeated call"):
        growth, faults = _steady_memory(case, common.call_seconds)
    _refuse_endless_growth(case, growth, available)
    return replace(common, memory_growth=growth, page_faults=faults)


def probe_cuda(case: Case, device: CudaDevice, *, kernels: bool = True) -> Probe:
    """The probe of a case on a GPU, with what only a GPU can tell: waiting, kernels, streams."""
    common = _probe(case, synchronize=device.synchronize, memory=lambda: torch.cuda.memory_allocated(device.device))
    _refuse_endless_growth(case, common.memory_growth, torch.cuda.mem_get_info(device.device)[0])
    with reporting(case, "while it was probed"):
        common = replace(common, synchronises=_synchronises(case, device, common.enqueue_seconds))
    try:
        profiled = profile_calls(case.call, 3, synchronize=device.synchronize) if kernels else []
    except RuntimeError:  # no CUPTI, or the caller is being profiled already
        return common
    seen = [call for call in profiled if call]
    if not seen:
        return common
    seconds = median([busy_seconds(call) for call in seen])
    several_streams = len({kernel.stream for kernel in seen[-1]}) > 1
    return replace(
        common,
        kernels=tuple(kernel.name for kernel in seen[-1]),
        kernel_seconds=seconds,
        off_stream=several_streams and _off_stream(case, device, seconds),
    )


def _probe(case: Case, *, synchronize: Any, memory: Any) -> Probe:
    tensors = list(case.tensors())
    finite_before = all(_finite(tensor) for tensor in tensors)
    with reporting(case, "on its first call"):
        if case.reset is not None:
            case.reset()
        result = case.call()
        synchronize()
    samples, sizes, walls, enqueues = [], [], [], []
    for _ in range(PROBE_CALLS):
        del result
        with reporting(case, "on a repeated call"):
            if case.reset is not None:
                case.reset()
            synchronize()
            start = time.perf_counter()
            result = case.call()
            enqueues.append(time.perf_counter() - start)
            synchronize()
            walls.append(time.perf_counter() - start)
        samples.append([_sample(tensor) for tensor in tensors])
        sizes.append(memory())
    outputs_finite = all(_finite(tensor) for tensor in Case(lambda: None, result).tensors())
    growths = [b - a for a, b in itertools.pairwise(sizes)]
    mutated = tuple(i for i in range(len(tensors)) if all(_differ(a[i], b[i]) for a, b in itertools.pairwise(samples)))
    return Probe(
        call_seconds=median(walls),
        enqueue_seconds=min(enqueues),
        memory_growth=float(min(growths)) if min(growths) > 0 else 0.0,
        mutated=mutated,
        nonfinite=finite_before and not outputs_finite,
    )


def _steady_memory(case: Case, call_seconds: float) -> tuple[float, float]:
    """Resident bytes that a call adds, and page faults that it has, in the long run.

    The first calls may live on what the allocator had in store.
    """
    calls = max(2, min(20, int(0.1 / max(call_seconds, 1e-6))))
    sizes, faults = [_resident_bytes()], [page_faults()]
    for _ in range(3):
        for _ in range(calls):
            if case.reset is not None:
                case.reset()
            case.call()
        sizes.append(_resident_bytes())
        faults.append(page_faults())
    growth, faulted = (min(b - a for a, b in itertools.pairwise(counts[1:])) / calls for counts in (sizes, faults))
    return max(0.0, growth), faulted


def _synchronises(case: Case, device: CudaDevice, enqueue_seconds: float) -> bool:
    """Whether the call waits for the device: behind a long spin it then returns late."""
    spin = 0.02 + 2 * enqueue_seconds
    if spin > 0.3:  # a call that occupies the host this long cannot be told apart from one that waits
        return False
    device.synchronize()
    device.spin(spin)
    waited = host_seconds(case.call)
    device.synchronize()
    return waited > enqueue_seconds + 0.5 * spin


def _off_stream(case: Case, device: CudaDevice, kernel_seconds: float) -> bool:
    """Whether work is still running on another stream when the current stream is done with the call.

    Waking up from a wait takes the host some ten microseconds, so only a real share of the call counts.
    """
    end = torch.cuda.Event()
    open_ends = 0
    for _ in range(5):
        device.synchronize()
        case.call()
        end.record()
        end.synchronize()
        start = time.perf_counter()
        device.synchronize()
        open_ends += time.perf_counter() - start > max(50e-6, 0.1 * kernel_seconds)
    return open_ends >= 4


def _refuse_endless_growth(case: Case, growth: float, available: float) -> None:
    if growth * 200 > available:
        raise CaseError(
            f"{case.name} keeps {growth / 2**20:.0f} MiB more with every call; a few hundred calls would fill the "
            "memory. Do not append results to a list or keep graphs of autograd alive between calls."
        )


def _sample(tensor: torch.Tensor, size: int = 4096) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return torch.empty(0)  # sparse, nested or without data: not watched
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.dtype.itemsize == 1:
        flat = flat.to(torch.float32) if flat.is_floating_point() else flat
    flat = flat.reshape(-1)
    step = max(1, flat.numel() // size)
    return flat[::step][:size].cpu().clone()


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # by bits, as a NaN equals not even itself


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(_sample(tensor).to(torch.float32)).all())


def _resident_bytes() -> int:
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _available_bytes() -> float | None:
    if sys.platform != "linux":
        return None
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return None

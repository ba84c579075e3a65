"""Trace files of a device, made by code: ops with arguments, their launches and kernels, one after the other."""

import json
from pathlib import Path
from typing import Any

H200 = {"name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "warpSize": 32}
C_NAMES = {
    "float32": "float",
    "bfloat16": "c10::BFloat16",
    "float16": "c10::Half",
    "float8_e4m3fn": "c10::Float8_e4m3fn",
    "int64": "long int",
    "int32": "int",
    "bool": "bool",
    "uint8": "unsigned char",
}


class T:
    """A tensor among the arguments of an op, contiguous unless it has strides."""

    def __init__(self, *shape: int, dtype: str = "bfloat16", strides: tuple[int, ...] | None = None) -> None:
        self.shape, self.dtype = list(shape), dtype
        steps = [1]
        for size in reversed(self.shape[1:]):
            steps.append(steps[-1] * size)
        self.strides = list(strides) if strides is not None else list(reversed(steps[: len(shape)]))


class MadeTrace:
    """Events of a thread and a stream. Ops take 10 us of the host, and kernels run when the one before ends."""

    def __init__(self, *, runtime: str = "cuda", agent: int = 0, properties: dict[str, Any] = H200) -> None:
        self.events: list[dict[str, Any]] = []
        self.runtime, self.agent = runtime, agent
        self.fields: dict[str, Any] = {"deviceProperties": [{"id": 0, **properties}]}
        self.now = 0.0
        self.device_free = 0.0
        self.number = 0

    def event(self, category: str, name: str, start: float, duration: float, **facts: Any) -> None:
        """An event on the host."""
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}
        self.events.append(event | {"args": facts})

    def op(self, name: str, *arguments: Any, us: float | None = 20.0, kernel: str = "kernel") -> None:
        """An op that launches a kernel of `us`; with None, one that launches nothing."""
        self.number += 1
        start, ids = self.now, {"External id": self.number}
        self.event("cpu_op", name, start, 10, **ids, **recorded_inputs(arguments))
        if us is not None:
            self.launch(f"{self.runtime}LaunchKernel", us, kernel, at=start + 3, **ids)
        self.now = start + 12

    def launch(self, call: str, us: float | None, *kernels: str, at: float | None = None, **facts: Any) -> None:
        """A call of the runtime, and the kernels that it makes run; none with `us=None`."""
        correlation = len(self.events) + 1000
        start = self.now if at is None else at
        self.event(f"{self.runtime}_runtime" if self.runtime == "hip" else "cuda_runtime", call, start, 4)
        self.events[-1]["args"] |= {"correlation": correlation, **facts}
        for kernel in kernels if us is not None else ():
            begin = max(self.device_free, start + 5)
            where = {"device": self.agent, "stream": 7, "correlation": correlation, **facts}
            event = {"ph": "X", "cat": "kernel", "name": kernel, "pid": self.agent, "tid": 7, "ts": begin, "dur": us}
            self.events.append(event | {"args": where})
            self.device_free = begin + (us or 0.0)
        if at is None:
            self.now = start + 6

    def write(self, path: Path) -> Path:
        """The file."""
        path.write_text(json.dumps({"schemaVersion": 1, **self.fields, "traceEvents": self.events}))
        return path


def recorded_inputs(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments as the profiler writes them: strings, devices and None without a type."""
    inputs: dict[str, list[Any]] = {
        name: [] for name in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
    }
    for argument in arguments:
        members = argument if isinstance(argument, list) and argument and isinstance(argument[0], T) else None
        tensor = argument if isinstance(argument, T) else None
        if members is not None:
            facts = [[item.shape for item in members], [item.strides for item in members], "TensorList", ""]
        elif tensor is not None:
            facts = [tensor.shape, tensor.strides, C_NAMES[tensor.dtype], ""]
        elif argument is None or isinstance(argument, str):
            facts = [[], [], "", ""]
        else:
            facts = [[], [], "ScalarList" if isinstance(argument, list) else "Scalar", str(argument)]
        for name, fact in zip(inputs, facts, strict=True):
            inputs[name].append(fact)
    return inputs

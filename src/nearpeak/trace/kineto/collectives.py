"""`RecordedCollective`: the collectives of a trace file, with the call, the work and the wait of each.

On a GPU the work is a kernel of the communication library, and torch writes its process group, its sequence number and
its size beside it. On a CPU a thread of the backend does the work inside of a range, "gloo:all_reduce", and the
operator that asked for it, `c10d::allreduce_`, is on the thread of the program.
"""

from __future__ import annotations

import functools
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nearpeak.trace.kineto.recording import NO_FACTS, Recording, Span

COMMUNICATION_WAIT: Final = "nearpeak: wait for communication"
"""The name of the range around `Work.wait` of torch.distributed."""
_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "send_recv",
    "send",
    "recv",
    "scatter",
    "gather",
    "reduce",
)
"""The more specific before the more general: a reduce-scatter is a kind of reduce by its name."""
_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|nvshmem|rocshmem|mscclpp|multimem_|symm(?:etric)?_?mem|deep_ep::|quickreduce"
    r"|cross_device_reduce|(?:one|two)_?shot_?all_?reduce|(?<![a-z])all_?(?:reduce|gather|to_?all)|(?<![a-z])reduce_?scatter",
    re.IGNORECASE,
)
"""Parts of the names of communication kernels: of libraries, and of kernels of its own that a framework has."""
_WORK = re.compile(r"[a-z][a-z0-9_]*:\w+")
"""A range around the work of a collective: the backend, and what it runs."""
_OPERATOR = re.compile(r"(?:_?c10d(?:_functional)?(?:_autograd)?)::(\w+)")
_WAIT_OPERATOR = "_c10d_functional::wait_tensor"
_NO_WORK = ("wait_tensor", "wrap_tensor")


def collective_named(name: str) -> str | None:
    """The collective in the name of an operator, a range or a kernel; None where there is none.

    >>> [collective_named(name) for name in ("c10d::_reduce_scatter_base_", "gloo:all_reduce", "c10d::alltoall_base_")]
    ['reduce_scatter', 'all_reduce', 'all_to_all']
    """
    flat = name.lower().replace("_", "")
    return next((kind for kind in _KINDS if kind.replace("_", "") in flat), None)


@functools.cache  # a file has few different names
def collective_of(kernel: str) -> str | None:
    """The collective that a communication kernel runs, by its name; None for every other kernel.

    >>> collective_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), collective_of("ampere_bf16_gemm")
    ('all_reduce', None)
    >>> collective_of("void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 4>")
    'all_reduce'
    """
    if not _COMMUNICATION.search(kernel):
        return None
    name = kernel.lower().replace("_", "").replace("crossdevicereduce", "allreduce").replace("quickreduce", "allreduce")
    return collective_named(name) or "unknown"


class RecordedCollective(NamedTuple):
    """One collective. Times are microseconds."""

    kind: str
    called: float
    """When the program called it; on a GPU, when its kernel began, which is when the rank was there."""
    start: float
    """When its work began."""
    end: float
    name: str
    group: str = ""
    """Its process group; "" if the file does not tell."""
    sequence: int | None = None
    """Its number in that group."""
    bytes: float | None = None
    """What one rank gives or gets, the larger."""
    ranks: int | None = None
    """The number of ranks in its group."""
    call: Span | None = None
    """The operator that asked for it."""
    stream: int = 0


def host_collectives(threads: Mapping[Any, Sequence[Span]]) -> list[RecordedCollective]:
    """The collectives that backends run on the host, by the time of their calls."""
    calls: list[Span] = []
    works: dict[str, list[Span]] = {}
    for spans in threads.values():
        outer_end = -math.inf
        for span in spans:
            if span.kind == "op" and (operator := _OPERATOR.fullmatch(span.name)):
                inner = span.start < outer_end  # a functional collective calls the ordinary one
                outer_end = max(outer_end, span.end)
                name = operator[1]
                if not inner and collective_named(name) and not name.lstrip("_").startswith(_NO_WORK):
                    calls.append(span)
            elif span.kind == "annotation" and _WORK.fullmatch(span.name) and (kind := collective_named(span.name)):
                works.setdefault(kind, []).append(span)
    for pending in works.values():
        pending.sort(key=lambda span: span.start)
    found = []
    for call in sorted(calls, key=lambda span: span.start):
        kind = collective_named(call.name) or "unknown"
        pending = works.get(kind, [])
        place = bisect_left(pending, call.start, key=lambda span: span.start)
        work = pending.pop(place) if place < len(pending) else call
        found.append(_of_call(kind, call, work))
    found += [
        RecordedCollective(kind, work.start, work.start, work.end, work.name, bytes=_input_bytes(work))
        for kind, pending in works.items()
        for work in pending
    ]
    return sorted(found, key=lambda item: item.called)


def _of_call(kind: str, call: Span, work: Span) -> RecordedCollective:
    return RecordedCollective(
        kind, call.start, max(work.start, call.start), max(work.end, call.end), work.name, "", None, _input_bytes(call),
        None, call,
    )  # fmt: skip


def communication_waits(threads: Iterable[Sequence[Span]]) -> list[Span]:
    """The waits of the program for communication: `Work.wait`, and the operator of functional collectives."""
    return [
        span
        for spans in threads
        for span in spans
        if _is_wait(span.name) and (span.kind == "op" or span.name != _WAIT_OPERATOR)
    ]


@functools.cache
def _is_wait(name: str) -> bool:
    return name.startswith(COMMUNICATION_WAIT) or name == _WAIT_OPERATOR


_DTYPE_BYTES = {
    "float": 4,
    "double": 8,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long": 8,
    "long int": 8,
    "int": 4,
    "short": 2,
    "bool": 1,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "half": 2,
    "bfloat16": 2,
}


def _input_bytes(span: Span) -> float | None:
    """The bytes of the largest tensor or list of tensors among the inputs; None if they are not known."""
    inputs = span.inputs
    if inputs is None or not isinstance(inputs.dims, list) or not isinstance(inputs.types, list):
        return None
    sizes = []
    for dims, dtype in zip(inputs.dims, inputs.types, strict=False):
        size = _DTYPE_BYTES.get(str(dtype).lower(), 4 if dtype == "TensorList" else 0)
        if size and isinstance(dims, list):
            sizes.append(size * _elements(dims))
    return max(sizes, default=None) or None


def _elements(dims: list[Any]) -> float:
    if all(isinstance(size, (int, float)) for size in dims):
        return float(math.prod(dims)) if dims else 0.0
    return sum(_elements(part) for part in dims if isinstance(part, list))


def device_collectives(recording: Recording) -> list[RecordedCollective]:
    """The collectives whose work are kernels of a device, by start; see `RecordedCollective.called`."""
    return sorted(_device_collectives(recording), key=lambda item: item.called)


def _device_collectives(recording: Recording) -> Iterator[RecordedCollective]:
    for span in recording.device_spans:
        facts, kind = span.collective, collective_of(span.name)
        if kind is None and facts is None:
            continue
        facts = facts or NO_FACTS
        yield RecordedCollective(
            collective_named(facts.kind) or kind or "unknown",
            span.start,
            span.start,
            span.end,
            span.name,
            facts.group,
            facts.sequence,
            facts.bytes,
            facts.ranks,
            None,
            span.stream,
        )


def groups_of(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that a file describes, by its name."""
    info = metadata.get("distributedInfo")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            return {}
    listed = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for item in listed if isinstance(listed, list) else ():
        ranks = item.get("ranks") if isinstance(item, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            groups[str(item.get("pg_name"))] = tuple(ranks)
    return groups

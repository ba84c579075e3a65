"""`CapturedNodes`: the nodes of the CUDA graph that a stream is being captured into.

They are asked of the driver, which allows that during a capture: "All operations other than destroy and node removal
are permitted on the graph while the capture sequence is in progress" (CUDA Driver API, cuStreamGetCaptureInfo). Nothing
is launched, allocated or waited for.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from nearpeak.ops.graph import GraphNode, NodeKind

_KINDS: dict[int, NodeKind] = {0: "kernel", 1: "memcpy", 2: "memset"}
"""Of `CUgraphNodeType`; nodes of other kinds run nothing on the device that a profiler shows."""
_CAPTURING = 1


class _KernelParameters(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2`."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class CapturedNodes:
    """The nodes so far of the graph that the current stream is being captured into, numbered as they are added."""

    def __init__(self, driver: Any, graph: int) -> None:
        self._driver, self._graph = driver, ctypes.c_void_p(graph)
        self._nodes: list[int] = []
        self._known: set[int] = set()

    def count(self) -> int:
        """How many nodes there are."""
        count = ctypes.c_size_t()
        _check(self._driver.cuGraphGetNodes(self._graph, None, ctypes.byref(count)), "cuGraphGetNodes")
        if count.value != len(self._nodes):
            self._read(count.value)
        return len(self._nodes)

    def _read(self, count: int) -> None:
        handles = (ctypes.c_void_p * count)()
        number = ctypes.c_size_t(count)
        _check(self._driver.cuGraphGetNodes(self._graph, handles, ctypes.byref(number)), "cuGraphGetNodes")
        known = len(self._nodes)
        new = self._unknown(handles[known:])  # they come last, as far as has been seen
        if len(new) < count - known:  # the driver does not promise it
            new = self._unknown(handles[:])
        self._nodes += new
        self._known.update(new)

    def _unknown(self, handles: Sequence[int | None]) -> list[int]:
        return [handle for handle in handles if handle is not None and handle not in self._known]

    def describe(self) -> list[GraphNode | None]:
        """All nodes; None for one that runs nothing on the device."""
        return [self._describe(node) for node in self._nodes]

    def edges(self) -> list[tuple[int, int]] | None:
        """Pairs of nodes of which the second waits for the first, by number; None if the driver does not tell."""
        get_edges, extra = getattr(self._driver, "cuGraphGetEdges_v2", None), 1
        if get_edges is None:  # before CUDA 12.3, edges have no data
            get_edges, extra = self._driver.cuGraphGetEdges, 0
        count = ctypes.c_size_t()
        if get_edges(self._graph, *[None] * (2 + extra), ctypes.byref(count)) != 0:
            return None
        first, second = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data = [(ctypes.c_uint64 * count.value)()][:extra]  # of programmatic launches
        if get_edges(self._graph, first, second, *data, ctypes.byref(count)) != 0:
            return None
        numbers = {handle: number for number, handle in enumerate(self._nodes)}
        return [(numbers[before], numbers[after]) for before, after in zip(first, second, strict=True)]

    def _describe(self, handle: int) -> GraphNode | None:
        node, number = ctypes.c_void_p(handle), ctypes.c_int()
        _check(self._driver.cuGraphNodeGetType(node, ctypes.byref(number)), "cuGraphNodeGetType")
        kind = _KINDS.get(number.value)
        if kind != "kernel":
            return None if kind is None else GraphNode(kind=kind)
        parameters = _KernelParameters()
        _check(
            self._driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(parameters)), "cuGraphKernelNodeGetParams_v2"
        )
        return GraphNode(
            kind="kernel",
            name=self._kernel_name(parameters),
            grid=tuple(parameters.grid),
            block=tuple(parameters.block),
        )

    def _kernel_name(self, parameters: _KernelParameters) -> str:
        name = ctypes.c_char_p()
        for getter, handle in (("cuFuncGetName", parameters.function), ("cuKernelGetName", parameters.kernel)):
            function = getattr(self._driver, getter, None)  # since CUDA 12.3
            if function is not None and handle and function(ctypes.byref(name), ctypes.c_void_p(handle)) == 0:
                return demangled((name.value or b"").decode(errors="replace"))
        return ""


def nodes_of_capture() -> CapturedNodes | None:
    """The nodes of the graph that torch's current stream is being captured into; None if the driver does not tell."""
    driver = _load_driver()
    if driver is None:
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    result = driver.cuStreamGetCaptureInfo_v2(
        stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    )
    if result != 0 or status.value != _CAPTURING or graph.value is None:
        return None
    return CapturedNodes(driver, graph.value)


@functools.cache
def _load_driver() -> Any:
    """The driver library, which torch has loaded; None where it is not there or is older than its calls."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    calls = ("cuStreamGetCaptureInfo_v2", "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams_v2")
    return driver if all(hasattr(driver, call) for call in calls) else None


def _check(result: int, call: str) -> None:
    if result != 0:
        raise RuntimeError(f"{call} returned {result}")


@functools.cache
def demangled(name: str) -> str:
    """The name of a C++ function as profilers write it; other names as they are.

    >>> demangled("triton_poi_fused_add_0")
    'triton_poi_fused_add_0'
    """
    demangle = _load_demangler() if name.startswith("_Z") else None
    if demangle is None:
        return name
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


@functools.cache
def _load_demangler() -> Any:
    try:
        demangle = getattr(ctypes.CDLL("libstdc++.so.6"), "__cxa_demangle")
    except (AttributeError, OSError):
        return None
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return demangle

"""The nodes of a capture, asked of a driver that is made up."""

from typing import Any

import pytest

from nearpeak.devices.cuda_graph import CapturedNodes, demangled
from nearpeak.ops.graph import GraphNode

KERNEL, MEMCPY, EMPTY = 0, 1, 5
NAME = b"_ZN2at6native6kernelEi"


class Driver:
    """A graph of nodes by handle: kind, and grid and block of a kernel."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, tuple[int, int, int], tuple[int, int, int]]] = {}
        self.waits: list[tuple[int, int]] = []
        self.reverse = False

    def cuGraphGetNodes(self, graph: Any, handles: Any, count: Any) -> int:  # noqa: N802, as the driver has it
        listed = list(self.nodes)[:: -1 if self.reverse else 1]
        if handles is not None:
            handles[:] = listed[: len(handles)]
        count._obj.value = len(listed)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.nodes[node.value][0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:  # noqa: N802
        _, grid, block = self.nodes[node.value]
        parameters._obj.grid[:], parameters._obj.block[:], parameters._obj.function = grid, block, node.value
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:  # noqa: N802
        name._obj.value = NAME
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, first: Any, second: Any, data: Any, count: Any) -> int:  # noqa: N802
        return self.cuGraphGetEdges(graph, first, second, count)

    def cuGraphGetEdges(self, graph: Any, first: Any, second: Any, count: Any) -> int:  # noqa: N802
        if first is not None:
            first[:], second[:] = zip(*self.waits, strict=True)
        count._obj.value = len(self.waits)
        return 0


def graph() -> tuple[Driver, CapturedNodes]:
    driver = Driver()
    return driver, CapturedNodes(driver, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_nodes_are_numbered_as_they_are_added(reverse: bool):
    driver, nodes = graph()
    driver.reverse = reverse  # the driver promises no order
    assert nodes.count() == 0
    driver.nodes[48] = (KERNEL, (4, 1, 1), (128, 1, 1))
    assert nodes.count() == 1
    driver.nodes |= {16: (EMPTY, (0, 0, 0), (0, 0, 0))}
    assert nodes.count() == 2
    driver.nodes |= {32: (MEMCPY, (0, 0, 0), (0, 0, 0))}
    assert nodes.count() == nodes.count() == 3
    assert nodes.describe() == [
        GraphNode(kind="kernel", name="at::native::kernel(int)", grid=(4, 1, 1), block=(128, 1, 1)),
        None,
        GraphNode(kind="memcpy"),
    ]


@pytest.mark.parametrize("older", [False, True])
def test_edges_are_pairs_of_numbers(older: bool, monkeypatch: pytest.MonkeyPatch):
    if older:
        monkeypatch.delattr(Driver, "cuGraphGetEdges_v2")
    driver, nodes = graph()
    driver.nodes = {handle: (KERNEL, (1, 1, 1), (1, 1, 1)) for handle in (8, 24, 16)}
    driver.waits = [(8, 24), (8, 16)]
    nodes.count()
    assert nodes.edges() == [(0, 1), (0, 2)]


def test_an_error_of_the_driver_is_one():
    driver, nodes = graph()
    driver.cuGraphGetNodes = lambda *_: 1  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cuGraphGetNodes returned 1"):
        nodes.count()


def test_names_are_as_profilers_write_them():
    assert demangled("_ZN2at6native6kernelEi") == "at::native::kernel(int)"
    assert demangled("_Z") == "_Z"

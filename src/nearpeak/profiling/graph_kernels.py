"""`match_graph_kernels`: the ops of the kernels that CUDA graphs launched in the profiled step.

Of each graph, the nodes are known in the order in which they were added, each with its op and with the nodes that it
waits for (`trace/graphs.py`). A kernel is that of a node only if its name, its grid and its block are the same.
Among nodes that look the same, the order of time tells where it must be that of the nodes; elsewhere nothing does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from nearpeak.ops.graph import GraphNode, GraphReplay
from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.profiling.align import align
from nearpeak.trace.kineto.kernels import KernelRun


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKernels:
    """What is known about the kernels that graphs launched."""

    ops: Mapping[int, int]
    """The op of each kernel that has one, by the index of the kernel."""
    lost: int
    """The number of nodes without a kernel in the recording, although their graph was launched."""
    note: str
    """A sentence about kernels in graphs that have no op; "" if there are none."""


def match_graph_kernels(kernels: Sequence[KernelRun], replays: Sequence[GraphReplay]) -> GraphKernels:
    """Finds the ops of kernels in graphs.

    Args:
        kernels: What ran in the profiled step.
        replays: The graphs that were launched in the traced step.
    """
    launches: dict[tuple[float, int], list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.replay is not None:
            launches.setdefault((kernel.replay.start_s, kernel.replay.graph), []).append(index)
    ordered = sorted(launches)
    ops: dict[int, int] = {}
    lost = 0
    counterparts = align([graph for _, graph in ordered], [replay.graph for replay in replays])
    for launch, replayed in zip(ordered, counterparts, strict=True):
        if replayed is None:
            continue
        nodes = replays[replayed].nodes
        indices, in_order = _in_node_order(kernels, launches[launch])
        lost += max(0, len(nodes) - len(indices))
        for place, node in _match_nodes([kernels[index] for index in indices], nodes, in_order=in_order):
            op = nodes[node].op
            if op is not None:
                ops[indices[place]] = op
    return GraphKernels(ops=ops, lost=lost, note=_note(kernels, ops, replays))


def add_graph_loss(completeness: Completeness, kernels: GraphKernels) -> Completeness:
    """What a recording lacks, with the kernels that graphs have and the recording does not."""
    counted = sum(loss.count or 0 for loss in completeness.of_step if loss.kind == "kernels")
    if kernels.lost <= counted:  # by the other replays of the graph
        return completeness
    text = f"{kernels.lost} kernels that CUDA graphs were seen to run at their capture are not in the recording."
    loss = Loss(kind="kernels", count=kernels.lost - counted, in_step=True, text=text)
    return replace(completeness, losses=(*completeness.losses, loss))


def _in_node_order(kernels: Sequence[KernelRun], indices: Sequence[int]) -> tuple[list[int], bool]:
    """The kernels of one launch, and whether that is the order of their nodes; else it is that of time."""
    node_ids = {index: replay.node for index in indices if (replay := kernels[index].replay) is not None}
    if None in node_ids.values() or len(set(node_ids.values())) < len(indices):
        return sorted(indices, key=lambda index: kernels[index].start_s), False
    return sorted(indices, key=lambda index: node_ids[index] or 0), True


def _kernel_key(kernel: KernelRun, *, named: bool) -> Hashable:
    replay = kernel.replay
    if kernel.kind != "kernel" or replay is None:
        return kernel.kind
    return kernel.name if named else "", replay.grid, replay.block


def _match_nodes(runs: Sequence[KernelRun], nodes: Sequence[GraphNode], *, in_order: bool) -> list[tuple[int, int]]:
    """Places of kernels, and of nodes that have their op."""
    named = all(node.name for node in nodes if node.kind == "kernel")  # an older driver does not tell
    kernels = [_kernel_key(run, named=named) for run in runs]
    keys = [node.kind if node.kind != "kernel" else (node.name * named, node.grid, node.block) for node in nodes]
    if in_order and kernels == keys:
        return [(place, place) for place in range(len(keys))]
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(kernels):
        places.setdefault(key, []).append(place)
    alike: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        alike.setdefault(key, []).append(number)
    matched = []
    for key, found in places.items():
        numbers = alike.get(key, [])
        if len({nodes[number].op for number in numbers}) == 1:
            matched += [(place, numbers[0]) for place in found]
        elif len(found) == len(numbers) and _runs_in_order(numbers, nodes):
            matched += list(zip(found, numbers, strict=True))
    return matched


def _runs_in_order(numbers: Sequence[int], nodes: Sequence[GraphNode]) -> bool:
    """Whether nodes of different ops begin in the order of their numbers."""
    groups = [list(group) for _, group in groupby(numbers, key=lambda number: nodes[number].op)]
    for earlier, later in pairwise(groups):
        bits = sum(1 << number for number in earlier)
        if any((before := nodes[number].earlier) is None or before & bits != bits for number in later):
            return False
    return True


def _note(kernels: Sequence[KernelRun], ops: Mapping[int, int], replays: Sequence[GraphReplay]) -> str:
    inside = [kernel for index, kernel in enumerate(kernels) if kernel.in_graph and index not in ops]
    if not inside:
        return ""
    total = sum(kernel.seconds for kernel in inside)
    traced = {replay.graph for replay in replays}
    reasons = {
        "their graphs were captured before nearpeak watched, or by other means than torch's; let what is profiled "
        "capture them": sum(kernel.replay is None for kernel in inside),
        "their graphs were not launched in the step that was traced": sum(
            kernel.replay is not None and kernel.replay.graph not in traced for kernel in inside
        ),
        "no op was seen to add them at the capture, or ops that run side by side have the same kernels": sum(
            kernel.replay is not None and kernel.replay.graph in traced for kernel in inside
        ),
    }
    why = "; or ".join(reason for reason, count in reasons.items() if count)
    return (
        f"{len(inside)} kernels of {total * 1e3:.3f} ms were launched by CUDA graphs and have no ops, so they are "
        f"measured without bounds: {why}."
    )

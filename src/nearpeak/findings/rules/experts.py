"""Experts run one after the other.

expert-loop: A Python loop runs experts one after the other, and looks for the rows of each anew.
skewed-experts: Experts run one after the other, some with few rows: their small GEMMs leave most of a GPU idle.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.experts import MIN_EXPERTS, ROW_SELECTIONS, ExpertLoop, expert_loops, expert_weight
from nearpeak.findings.loops import Loop, batched_seconds, line_range, replacement_claims
from nearpeak.findings.regions import launch_wait_seconds, launches_removed, proportional_gains
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_UNEVEN = 1.5
"""The least ratio of the largest number of rows to the mean."""
_GROUPED = {"compute": 1.7, "memory": 1.2}
"""The time of a grouped GEMM over that of a dense one with the same work. On an H200, 128 experts with 4096
tokens, 8 experts each: 461 TFLOP/s with even groups and 405 with uneven ones, against 780 of a dense product."""

_SORTING_OPS = 6
"""A sort, a search for the end of each expert's rows, and what computes their arguments."""
_REMEDY = (
    "of_row, order = expert_of_row.sort()  # once for all experts; nothing is read by the host\n"
    "ends = torch.searchsorted(of_row, torch.arange(experts, device=x.device), right=True, out_int32=True)\n"
    "out = torch._grouped_mm(x[order], weights, offs=ends)  # weights: experts x inputs x outputs"
)


@rule("expert-loop", needs=["storages", "lines"])
def expert_loop(step: Step) -> Iterator[Waste]:
    """Loops over experts, compared with rows sorted by expert once, and grouped GEMMs."""
    for experts in expert_loops(step):
        members, places = experts.members, experts.places(step)
        waits = [cause for cause in step.profile.idle if cause.cause == "synchronization" and cause.where in places]
        waited_s = sum(cause.seconds for cause in waits)
        remaining_s = _sorted_seconds(step, experts)
        took = step.seconds(members)
        gains, gone = replacement_claims(step, members, remaining_s, launches=_launches(step, experts))
        turns = len(experts.loop.turns)
        rows = [(product_sizes(step.ops[index]) or (1, 0, 0, 0))[1] for index in experts.products]
        launched = sum(step.costs[index].family != "view" for index in members)
        lines = line_range([step.ops[index].source for index in experts.loop.members])
        count = sum(cause.count for cause in waits)
        yield Waste(
            title=f"{len(experts.loop.runs[0])} experts run one after the other in a Python loop"
            + (", and the host waits for the rows of each." if count else "."),
            op=_line_of_selection(step, experts.loop),
            gains=gains,
            gone=gone,
            replaces=True,
            idle={"synchronization": waited_s} if waited_s else {},
            causes=waits,
            evidence=f"The loop at {lines} takes {turns} turns, {launched / turns:.0f} ops each"
            + (" with their backward pass" if experts.backward else "")
            + f": {seconds(took)} in {launched:,} ops. Each turn finds the rows of its expert, {min(rows)} to "
            f"{max(rows)}, and multiplies them with weights of its own"
            + (f"; {count} times the host waits, and for {seconds(waited_s)} nothing runs." if count else "."),
            reasoning="With the rows sorted by expert once, "
            + ("grouped products" if step.machine.kind == "gpu" else "products of consecutive rows")
            + f" and one op for what each turn does beside them take {seconds(remaining_s)}; nobody counts, so nobody "
            "waits.",
            remedy=_REMEDY + ("\n# or nearpeak.kernels.moe, for gated experts" if step.machine.kind == "gpu" else ""),
        )


def _line_of_selection(step: Step, loop: Loop) -> int:
    """The op that finds the rows of the first expert, or the first of the loop."""
    return next(
        (index for index in loop.runs[0][0] if step.ops[index].packet.rpartition(".")[2] in ROW_SELECTIONS),
        loop.runs[0][0][0],
    )


def _sorted_seconds(step: Step, experts: ExpertLoop) -> float:
    """The time of the loop's work for rows that are sorted by expert."""
    products: dict[Hashable, list[int]] = {}
    on_all_rows: dict[Hashable, list[int]] = {}
    others: list[int] = []
    rows = _rows_of_all(step, experts)
    for index in experts.members:
        op, family = step.ops[index], step.costs[index].family
        key = (op.name, op.source, op.phase)
        if family == "matrix":
            products.setdefault(key, []).append(index)
        elif _is_bookkeeping(op):
            continue
        elif family != "indexing" and op.written and op.written[0].shape[:1] == (rows,):
            on_all_rows.setdefault(key, []).append(index)
        else:
            others.append(index)
    runs = len(experts.loop.runs)
    total_s = batched_seconds(step, others) + runs * _sorting_seconds(step, experts)
    for members in products.values():
        took = step.seconds(members)
        has_grouped = step.machine.kind == "gpu" and step.machine.achievable is not None
        total_s += min(took, _grouped(step, members)) if has_grouped else took
    for members in on_all_rows.values():  # each turn has an op on all rows, where one is enough
        total_s += runs * step.seconds(members) / len(members)
    return total_s


def _launches(step: Step, experts: ExpertLoop) -> int:
    """The number of ops that remain: one for each line and operator, and those that sort."""
    kinds = {
        (op.name, op.source, op.phase)
        for index in experts.members
        if not _is_bookkeeping(op := step.ops[index]) and step.costs[index].family != "view"
    }
    return len(experts.loop.runs) * (len(kinds) + _SORTING_OPS)


def _rows_of_all(step: Step, experts: ExpertLoop) -> int:
    """The number of rows from which the turns take theirs."""
    for index in experts.loop.members:
        op = step.ops[index]
        if op.packet in ("aten.index", "aten.index_select", "aten.gather") and len(op.tensor("self").shape) > 1:
            return op.tensor("self").shape[0]
    return -1


def _is_bookkeeping(op: Op) -> bool:
    """Whether an op works on row numbers and masks alone."""
    tensors = [*op.inputs, *op.written]
    return bool(tensors) and not any(tensor.dtype.startswith(("float", "bfloat")) for tensor in tensors)


def _sorting_seconds(step: Step, experts: ExpertLoop) -> float:
    """The time to sort row numbers by expert and to count them: of a sort, and of short ops."""
    turns = len(experts.loop.turns)
    per_run = len(experts.loop.runs[0])
    rows = sum((product_sizes(step.ops[index]) or (1, 0, 0, 0))[1] for index in experts.products)
    numbers = Tensor(shape=(max(1, rows * per_run // turns),), strides=(1,), dtype="int64", storage=-1)
    sort = Op(
        name="aten.sort.stable",
        arguments={"self": numbers, "stable": False, "dim": 0, "descending": False},
        outputs=(numbers, numbers),
    )
    return (step.expected(sort) or 0.0) + (_SORTING_OPS - 1) * step.expected_for_work((), ())


@rule("skewed-experts", needs=["lines"])
def skewed_experts(step: Step) -> Iterator[Waste]:
    """GEMMs of one line with weights of one shape and uneven numbers of rows, compared with one grouped GEMM."""
    if step.machine.kind != "gpu" or step.machine.achievable is None:
        return
    in_loops = {index for experts in expert_loops(step) for index in experts.members}
    for members, rows in _loops(step, in_loops):
        took = step.seconds(members)
        grouped = _grouped(step, members)
        joined = launches_removed(step, members, grouped)
        if took + launch_wait_seconds(step, joined) <= grouped:
            continue
        ordered = sorted(rows)
        few = sum(count * 4 < sum(rows) / len(rows) for count in rows)
        m, n, k = (product_sizes(step.ops[members[0]]) or (1, 0, 0, 0))[1:]
        yield Waste(
            title=f"{len(members)} experts run one after the other, with {ordered[0]} to {ordered[-1]} rows each.",
            op=max(members, key=step.time),
            gains=proportional_gains(step, members, grouped),
            gone=joined,
            evidence=f"{len(members)} products like {m} x {k} by {k} x {n} take {seconds(took)} for {sum(rows)} rows: "
            f"{ordered[len(rows) // 2]} in the median, less than a quarter of the mean in {few} of them.",
            reasoning=f"One grouped product that reads and writes the same {quantity(step.bytes(members), 'B')} takes "
            f"{seconds(grouped)}.",
            remedy=_REMEDY + ", 16 bits\nand a loss that keeps the experts' loads even",
        )


def _loops(step: Step, without: Collection[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """GEMMs that differ only in their weights and numbers of rows, with these numbers."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(step.ops):
        sizes = product_sizes(op) if op.packet in FACTORS else None
        if (
            sizes is None
            or sizes[0] > 1
            or not op.source
            or index in without
            or op.inputs[-1].dtype not in ("bfloat16", "float16")
        ):
            continue
        _, m, n, k = sizes
        groups.setdefault((op.source, op.phase, op.packet, 0, n, k), []).append(index)
        if op.phase == "backward":  # gradients of weights
            groups.setdefault((op.source, op.phase, op.packet, 2, m, n), []).append(index)
    seen: set[int] = set()
    for (*_, place, _, _), members in groups.items():
        if len(members) < MIN_EXPERTS or seen & set(members):
            continue
        rows = [(product_sizes(step.ops[index]) or (1, 0, 0, 0))[1:][int(str(place))] for index in members]
        weights = {expert_weight(step, index, place == 2) for index in members}
        if len(weights) == len(members) and max(rows) >= _UNEVEN * sum(rows) / len(rows):
            seen |= set(members)
            yield members, rows


def _grouped(step: Step, members: Sequence[int]) -> float:
    """The time of one grouped GEMM."""
    limits = step.machine.achievable
    assert limits is not None  # else there is nothing to expect
    reads: list[Access] = []
    writes: list[Access] = []
    flops: dict[str, float] = {}
    for index in members:
        cost = step.costs[index]
        reads.extend(Access(storage=-1 - len(reads), bytes=access.bytes) for access in cost.reads)
        writes.extend(Access(storage=10**9 + len(writes), bytes=access.bytes) for access in cost.writes)
        for dtype, count in cost.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    computing = sum(count / limits.peak(dtype) for dtype, count in flops.items())
    moving = sum(access.bytes for access in (*reads, *writes)) / limits.bandwidth
    bound = "compute" if computing > moving else "memory"
    return _GROUPED[bound] * step.expected_for_work(reads, writes, flops, kind=f"matrix/{bound}")

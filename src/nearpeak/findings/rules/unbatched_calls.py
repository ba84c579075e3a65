"""A module is called several times in a row with inputs of the same shapes, where one call of all of them would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import launch_wait_seconds
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import with_rows
from nearpeak.ops.op import Op
from nearpeak.units import seconds

MIN_OPS = 4
"""Of a call. Fewer are a layer, or a loss."""
MIN_GAIN = 0.1
"""Of the time of the calls. Kernels that fill the machine gain nothing from a larger batch."""


@rule("unbatched-calls", needs=["storages", "lines"])
def unbatched_calls(step: Step) -> Iterator[Waste]:
    """Inference steps that are several runs of the same ops of one module, none of which needs a result of another.

    A guided and a free pass of a diffusion sampler are such calls, or two texts that are compared.
    """
    if step.trains:
        return
    for calls in _repeated_calls(step):
        if _are_independent(step, calls):
            waste = _as_one_batch(step, calls)
            if waste is not None:
                yield waste


def _repeated_calls(step: Step) -> Iterator[list[list[int]]]:
    """The ops of each call, for modules whose ops in the step are the same sequence several times."""
    groups: dict[str, list[int]] = {}
    for index, op in enumerate(step.ops):
        if op.module and op.origin != "host":
            groups.setdefault("", []).append(index)
            groups.setdefault(op.module.partition(".")[0], []).append(index)
    taken: set[int] = set()
    for members in groups.values():  # all modules first: paths may be relative to the only one
        keys = [_key(step.ops[index]) for index in members]
        # The module of a call is the same each time, but a layer inside of it has a path of its own.
        counts = Counter(keys)
        times = min(counts.values())
        length = len(keys) // times
        if times < 2 or length < MIN_OPS or len(keys) % times or taken & set(members):
            continue
        if all(keys[place] == keys[place % length] for place in range(len(keys))):
            taken |= set(members)
            yield [members[start : start + length] for start in range(0, len(members), length)]


def _key(op: Op) -> tuple[object, ...]:
    return (op.name, op.module, *(tensor.shape for tensor in (*op.inputs, *op.outputs)))


def _are_independent(step: Step, calls: Sequence[Sequence[int]]) -> bool:
    """Whether no call reads what another one, or an op that depends on it, wrote."""
    call_of = {index: number for number, call in enumerate(calls) for index in call}
    depends: dict[int, set[int]] = {}
    """For each op, the calls that it needs a result of."""
    for index in range(min(call_of), max(call_of) + 1):
        needed: set[int] = set()
        for producer in step.flow.producers[index].values():
            needed |= depends.get(producer, set())
        own = call_of.get(index)
        if own is not None:
            if needed - {own}:
                return False
            needed.add(own)
        depends[index] = needed
    return True


def _as_one_batch(step: Step, calls: Sequence[Sequence[int]]) -> Waste | None:
    first, *others = calls
    batch = _batch_size(step, first)
    if batch is None:
        return None
    gains: dict[int, float] = {}
    for place, index in enumerate(first):
        ratio = _slower(step, index, batch, len(calls))
        added_s = (ratio - 1.0) * step.time(index) / len(others)
        for call in others:
            gains[call[place]] = max(0.0, step.time(call[place]) - added_s)
    members = [index for call in calls for index in call]
    later = [index for call in others for index in call]
    took, waited_s = step.seconds(members), launch_wait_seconds(step, later)
    saved_s = sum(gains.values())
    if saved_s + waited_s < MIN_GAIN * took:
        return None
    module = step.ops[first[0]].module.partition(".")[0]
    lines = [line for path, line in step.trace.calls if path in ("", module)]
    return Waste(
        title=f"A module is called {len(calls)} times in a row on inputs of the same shapes.",
        op=first[0],
        source=lines[0] if len(lines) == len(calls) else "",
        gains={index: gain for index, gain in gains.items() if gain},
        gone=later,
        evidence=f"{len(calls)} calls of {len(first)} ops each"
        + (f" at {', '.join(dict.fromkeys(lines))}" if len(lines) == len(calls) else "")
        + f" take {seconds(took)}, with a batch of {batch} each; none needs a result of another.",
        reasoning=f"One call of all {len(calls) * batch} rows reads the weights once, fills the machine better and is "
        f"launched once: {seconds(took - saved_s)} in place of {seconds(took)}.",
        remedy="outputs = model(torch.cat([first, second]), ...).chunk(2)  # all inputs with a batch, concatenated",
    )


def _batch_size(step: Step, call: Sequence[int]) -> int | None:
    """The first size that most results of a call have."""
    sizes = Counter(tensor.shape[0] for index in call for tensor in step.ops[index].outputs if len(tensor.shape) > 1)
    return sizes.most_common(1)[0][0] if sizes else None


def _slower(step: Step, index: int, batch: int, times: int) -> float:
    """How many times as long an op takes with so many times the batch."""
    op = step.ops[index]
    larger = with_rows(step, op, times, lambda tensor: bool(tensor.shape) and tensor.shape[0] % batch == 0)
    before, after = step.expected(op), step.expected(larger)
    if not before or after is None:
        return float(times)
    return min(max(after / before, 1.0), float(times))

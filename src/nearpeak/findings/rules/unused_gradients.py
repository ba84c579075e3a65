"""Backward passes compute gradients that nobody reads: of frozen models, past a missing `detach`, or dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.liveness import DeadWork, dead_work, without_results
from nearpeak.findings.step import Step
from nearpeak.units import percent, seconds

_LIVE_SHARE = 0.02
"""Of the time of the backward ops behind a line: with more of them alive, gradients do pass through the line."""

Path = tuple[str, ...]
"""Lines of the user's own that led to an op, the outermost first."""


@rule("unused-gradients", needs=["storages", "lines"])
def unused_gradients(step: Step) -> Iterator[Waste]:
    """Ops of a backward pass that lead only to gradients which are dropped unread, or which no optimizer ever reads."""
    dead = dead_work(step)
    if not dead.ops and not dead.parts:
        return
    gains = {index: step.time(index) for index in dead.ops} | {
        index: gain for index, storages in dead.parts.items() if (gain := _partial_gain(step, index, storages))
    }
    paths = [step.stack(index) for index in range(len(step.ops))]
    places = _Places(step, dead, paths, gains)
    groups: dict[tuple[str, str], list[int]] = {}
    for members in _components(step, dead, gains):
        groups.setdefault(places.of(members), []).extend(members)
    for line, members in places.of_parameters(groups.pop(("parameters", ""), [])):
        groups.setdefault(("parameters", line), []).extend(members)
    backward_s = step.seconds(index for index, op in enumerate(step.ops) if op.phase == "backward")
    for (kind, line), members in groups.items():
        largest = max(members, key=gains.__getitem__)
        gone = [index for index in members if index in dead.ops]
        took = sum(gains[index] for index in members)
        yield Waste(
            title=_TITLES[kind],
            op=largest,
            gains={index: gains[index] for index in members},
            gone=gone,
            source=line,
            evidence=f"{len(members)} ops of the backward pass take {seconds(took)}, "
            f"{percent(took / backward_s if backward_s else 0.0, 0)} of it, for {_reasons(dead)}.",
            reasoning=_REASONS[kind],
            remedy=_REMEDIES[kind],
        )


_TITLES = {
    "call": "A backward pass goes through a call whose gradients nobody reads.",
    "border": "A backward pass goes on into a graph whose gradients are dropped unread.",
    "parameters": "Gradients of parameters are computed that nobody reads.",
}
_REASONS = {
    "call": "Without a graph of this call, the backward pass ends before it; the call keeps no activations either.",
    "border": "With a detached tensor, the backward pass ends here.",
    "parameters": "Gradients of what does not require any are not computed; those that are passed on still are.",
}
_REMEDIES = {
    "call": "with torch.no_grad():  # around this call; or once: model.requires_grad_(False)\n    ...",
    "border": "x.detach()  # in place of the tensor that enters this call from another graph",
    "parameters": "model.requires_grad_(False)  # for the parameters that this pass shall not train; True again before "
    "one that does\n# or, for the gradient of an input alone: torch.autograd.grad(loss, [x])",
}


def _partial_gain(step: Step, index: int, storages: frozenset[int]) -> float:
    """The time of an op that goes if some of its results are not computed."""
    op = step.ops[index]
    rest = without_results(op, storages)
    whole_s, rest_s = step.expected(op), None if rest is None else step.expected(rest)
    return step.time(index) * max(0.0, 1 - rest_s / whole_s) if whole_s and rest_s is not None else 0.0


def _components(step: Step, dead: DeadWork, gains: Iterable[int]) -> list[list[int]]:
    """Dead ops that feed each other, and each partly dead op with the ones that it feeds."""
    parent = {index: index for index in gains}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index in parent:
        for storage, producer in step.flow.producers[index].items():
            if producer in parent and (producer in dead.ops or storage in dead.parts[producer]):
                parent[root(index)] = root(producer)
    groups: dict[int, list[int]] = {}
    for index in sorted(parent):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


class _Places:
    """Finds the line to change for dead ops that belong together."""

    def __init__(self, step: Step, dead: DeadWork, paths: Sequence[Path], gains: dict[int, float]) -> None:
        self._step = step
        self._dead = dead
        self._paths = paths
        self._gains = gains
        self._live_s: defaultdict[Path, float] = defaultdict(float)
        self._dead_s: defaultdict[Path, float] = defaultdict(float)
        self._live_modules: defaultdict[str, float] = defaultdict(float)
        self._dead_modules: defaultdict[str, float] = defaultdict(float)
        backward = [index for index, op in enumerate(step.ops) if op.phase == "backward" and step.touches[index].writes]
        for index in backward:
            gain = gains.get(index, 0.0)
            live_s = step.time(index) - gain
            for depth in range(1, len(paths[index]) + 1):
                self._live_s[paths[index][:depth]] += live_s
                self._dead_s[paths[index][:depth]] += gain
            names = step.ops[index].module.split(".")
            for depth in range(1, len(names) + 1):
                self._live_modules[".".join(names[:depth])] += live_s
                self._dead_modules[".".join(names[:depth])] += gain
        self._shared = _common_prefix([path for path in paths if path])

    def of(self, members: Sequence[int]) -> tuple[str, str]:
        """What is to be done, "call", "border" or "parameters", and the line."""
        calls: defaultdict[Path, float] = defaultdict(float)
        for index in members:
            call = self._dead_call(self._paths[index])
            if call is not None:
                calls[call] += self._gains[index]
        total_s = sum(self._gains[index] for index in members)
        if self._trains_elsewhere(members):
            entry = self._entry(members)
            return ("parameters", "") if entry is None else ("border", entry)
        call = max(calls, key=calls.__getitem__) if sum(calls.values()) >= 0.5 * total_s else None
        inside = self._in_dead_module(members)
        if 2 * sum(self._gains[index] for index in inside) >= total_s:
            own = _common_prefix([self._paths[index] for index in inside if self._paths[index]])
            if own and (call is None or len(own) < len(call)):
                return "call", own[-1]  # of one of two models that one line calls, from several of its own lines
        if call is not None:
            return "call", call[-1]
        entry = self._entry(members)
        if entry is not None:
            return "border", entry
        return "parameters", ""

    def _trains_elsewhere(self, members: Sequence[int]) -> bool:
        """Whether most of the parameters have other gradients in this step that are read.

        A backward pass may go through a graph of the step before, whose lines are not known.
        """
        written = {storage for index in members for storage in self._results_of(index)}
        leaves = {gradient.leaf for gradient in self._dead.gradients if gradient.storage in written}
        live = {gradient.leaf for gradient in self._step.trace.gradients if gradient not in self._dead.gradients}
        return 2 * len(leaves & live) > len(leaves)

    def of_parameters(self, members: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """The lines of ops that compute gradients of parameters alone, by the outermost calls that differ."""
        optimizer = self._optimizer_line(members) if members else ""
        if optimizer:
            yield optimizer, list(members)
            return
        calls: dict[Path, list[int]] = {}
        for index in members:
            calls.setdefault(self._paths[index][: len(self._shared) + 1], []).append(index)
        for call, own in calls.items():
            lines = _common_prefix([self._paths[index] for index in own]) or call
            while len(lines) > len(call) and self._is_called_elsewhere(lines):
                lines = lines[:-1]
            yield lines[-1] if lines else self._step.ops[own[0]].place, own

    def _is_called_elsewhere(self, lines: Path) -> bool:
        """Whether the innermost of some lines also runs for other calls: of a function that several lines call."""
        return any(lines[-1] in path and path[: len(lines)] != lines for path in self._live_s)

    def _optimizer_line(self, members: Sequence[int]) -> str:
        """Where an optimizer is made that does not get the parameters; "" if one gets most of them."""
        unowned = {gradient.storage for gradient in self._dead.gradients if gradient.optimizer_steps is None}
        unowned_s = sum(self._gains[index] for index in members if not unowned.isdisjoint(self._results_of(index)))
        names = {seen.name.rpartition(".")[2] for seen in self._step.trace.optimizers}
        if len(names) > 1 or unowned_s < 0.5 * sum(self._gains[index] for index in members):
            return ""
        return self._step.line_that_writes(*names) if names else ""

    def _results_of(self, index: int) -> Iterator[int]:
        """The storages that an op writes, and those to which autograd adds these."""
        yield from self._step.touches[index].writes
        for reader in self._step.flow.consumers[index]:
            yield from self._step.touches[reader].writes

    def _dead_call(self, path: Path) -> Path | None:
        """The outermost call on a path whose backward ops are all dead."""
        for depth in range(1, len(path) + 1):
            prefix = path[:depth]
            if self._live_s[prefix] <= _LIVE_SHARE * self._dead_s[prefix]:
                return prefix
        return None

    def _in_dead_module(self, members: Sequence[int]) -> list[int]:
        """Those members that are in one of the outermost modules whose backward ops are all dead, the longest one."""
        modules: defaultdict[str, list[int]] = defaultdict(list)
        for index in members:
            names = self._step.ops[index].module.split(".")
            for depth in range(1, len(names) + 1):
                module = ".".join(names[:depth])
                if module and self._live_modules[module] <= _LIVE_SHARE * self._dead_modules[module]:
                    modules[module].append(index)
                    break
        return max(modules.values(), key=lambda each: sum(self._gains[index] for index in each), default=[])

    def _entry(self, members: Sequence[int]) -> str | None:
        """The line at which gradients pass from one call into the dead ops of another; None if they pass nowhere.

        Of several lines it is the one in the outermost function.
        """
        inside = set(members)
        borders: list[tuple[int, int, str]] = []
        for index in members:
            for producer in self._step.flow.producers[index].values():
                if producer not in inside or self._is_same_place(index, producer) or not self._paths[producer]:
                    continue
                other = self._paths[producer]
                shared = len(_common_prefix([self._paths[index], other]))
                borders.append((shared, producer, other[min(shared, len(other) - 1)]))
        return min(borders)[2] if borders else None

    def _is_same_place(self, index: int, producer: int) -> bool:
        first, second = self._step.ops[index], self._step.ops[producer]
        return self._paths[index] == self._paths[producer] and first.module == second.module


def _common_prefix(paths: Sequence[Path]) -> Path:
    shared: list[str] = []
    for lines in zip(*paths, strict=False):
        if len(set(lines)) > 1:
            break
        shared.append(lines[0])
    return tuple(shared)


def _reasons(dead: DeadWork) -> str:
    """What the gradients are of, and why nobody reads them."""
    unowned = sum(gradient.optimizer_steps is None for gradient in dead.gradients)
    texts = []
    if unowned:
        texts.append(f"gradients of {unowned} parameters that no optimizer has")
    if len(dead.gradients) > unowned:
        texts.append(f"{len(dead.gradients) - unowned} gradients that are dropped before an optimizer reads them")
    return " and ".join(texts)

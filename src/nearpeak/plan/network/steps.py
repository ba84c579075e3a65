"""What a collective does to the data, step by step, as plain data for a picture.

The buffer is cut into parts. A `Piece` is one part and the ranks whose values are summed in it. A rank holds a set of
pieces; a step is a set of sends that happen at once. `SWITCH` is the switch, where it adds and multicasts.

>>> steps = collective_steps("all_reduce", 4)
>>> len(steps.steps), steps.sent_share(0)
(6, 1.5)
>>> steps.states[-1][0][0]
Piece(part=0, ranks=(0, 1, 2, 3))
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from nearpeak.errors import UsageError, did_you_mean

SWITCH = -1
_MOST_RANKS = 64
"""A picture of more shows nothing, and the number of sends grows with the square."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Part `part` of the buffer, the sum of what `ranks` had there."""

    part: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One piece on its way; `adds` where the receiver adds it to its own piece of that part."""

    source: int
    target: int
    piece: Piece
    adds: bool


Step = tuple[Send, ...]
State = tuple[tuple[Piece, ...], ...]
"""The pieces of each rank, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSteps:
    """A collective from beginning to end: `states[0]` is before, `states[i + 1]` after `steps[i]`."""

    op: str
    algorithm: str
    ranks: int
    parts: int
    """Parts that the buffer is cut into."""
    steps: tuple[Step, ...]
    states: tuple[State, ...]
    result: State
    """What each rank has as the result; other pieces that it still holds are scratch."""

    def sent_share(self, rank: int) -> float:
        """How many times the whole buffer `rank` sends (n parts for those ops whose bytes count n parts)."""
        return float(Fraction(sum(send.source == rank for step in self.steps for send in step), self.parts))


_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "tree", "in-switch"),
    "all_gather": ("ring", "in-switch"),
    "reduce_scatter": ("ring", "in-switch"),
    "broadcast": ("ring", "tree"),
    "reduce": ("ring", "tree"),
    "all_to_all": ("direct",),
    "send_recv": ("direct",),
}


def algorithms(op: str) -> tuple[str, ...]:
    """The algorithms whose steps are known for `op`, the usual one first."""
    if op not in _ALGORITHMS:
        raise UsageError(f"op={op!r} is not a collective. {did_you_mean(op, _ALGORITHMS)}")
    return _ALGORITHMS[op]


def collective_steps(op: str, ranks: int, algorithm: str | None = None) -> CollectiveSteps:
    """The steps of `op` over `ranks`, by `algorithm` or the usual one."""
    known = algorithms(op)
    algorithm = known[0] if algorithm is None else algorithm
    if algorithm not in known:
        raise UsageError(f"algorithm={algorithm!r} is not one of {op}. {did_you_mean(algorithm, known)}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= _MOST_RANKS:
        nearest = 2 if ranks < 2 else _MOST_RANKS
        raise UsageError(f"ranks={ranks!r} must be between 2 and {_MOST_RANKS}. Nearest: ranks={nearest}.")
    if op == "send_recv" and ranks != 2:
        raise UsageError(f"ranks={ranks}: send_recv is between two. Nearest: ranks=2.")
    parts = 1 if op == "send_recv" or (algorithm == "tree") else ranks
    plan = _moves(op, ranks, algorithm, parts)
    before = _before(op, ranks, parts)
    steps, states = _play(before, plan)
    return CollectiveSteps(
        op=op,
        algorithm=algorithm,
        ranks=ranks,
        parts=parts,
        steps=steps,
        states=states,
        result=_result(op, ranks, parts),
    )


Move = tuple[int, int, int, bool]
"""Source, target, part, adds."""


def _moves(op: str, ranks: int, algorithm: str, parts: int) -> list[list[Move]]:
    if op == "send_recv":
        return [[(0, 1, 0, False)]]
    if op == "all_to_all":  # in round k every rank sends to the k-th after it, so that no receiver gets two at once
        return [
            [(rank, (rank + k) % ranks, (rank + k) % ranks, False) for rank in range(ranks)] for k in range(1, ranks)
        ]
    if algorithm == "in-switch":
        return _in_switch(op, ranks)
    if algorithm == "tree":
        up = op in ("reduce", "all_reduce")
        down = op in ("broadcast", "all_reduce")
        return (_tree_up(ranks) if up else []) + (_tree_down(ranks) if down else [])
    if op == "broadcast":  # a chain: part p leaves rank r in step p + r
        last = ranks - 1
        return [
            [(rank, rank + 1, step - rank, False) for rank in range(last) if 0 <= step - rank < parts]
            for step in range(last + parts - 1)
        ]
    if op == "reduce":  # the chain backwards, to rank 0
        last = ranks - 1
        return [
            [
                (rank, rank - 1, step - (last - rank), True)
                for rank in range(last, 0, -1)
                if 0 <= step - (last - rank) < parts
            ]
            for step in range(last + parts - 1)
        ]
    scatter = [
        [(rank, (rank + 1) % ranks, (rank - 1 - k) % ranks, True) for rank in range(ranks)] for k in range(ranks - 1)
    ]
    gather = [
        [(rank, (rank + 1) % ranks, (rank - k) % ranks, False) for rank in range(ranks)] for k in range(ranks - 1)
    ]
    return {"reduce_scatter": scatter, "all_gather": gather}.get(op, scatter + gather)


def _in_switch(op: str, ranks: int) -> list[list[Move]]:
    everyone = range(ranks)
    if op == "all_gather":
        up = [(rank, SWITCH, rank, False) for rank in everyone]
    else:
        up = [(rank, SWITCH, part, True) for part in everyone for rank in everyone]
    if op == "reduce_scatter":
        return [up, [(SWITCH, rank, rank, False) for rank in everyone]]
    return [up, [(SWITCH, rank, part, False) for part in everyone for rank in everyone]]


def _tree_down(ranks: int) -> list[list[Move]]:
    found, reach = [], 1
    while reach < ranks:
        found.append([(rank, rank + reach, 0, False) for rank in range(min(reach, ranks - reach))])
        reach *= 2
    return found


def _tree_up(ranks: int) -> list[list[Move]]:
    return [[(target, source, part, True) for source, target, part, _ in step] for step in reversed(_tree_down(ranks))]


def _before(op: str, ranks: int, parts: int) -> State:
    if op == "all_gather":
        return tuple((Piece(rank, (rank,)),) for rank in range(ranks))
    if op in ("broadcast", "send_recv"):
        return tuple(tuple(Piece(part, (0,)) for part in range(parts)) if rank == 0 else () for rank in range(ranks))
    return tuple(tuple(Piece(part, (rank,)) for part in range(parts)) for rank in range(ranks))


def _result(op: str, ranks: int, parts: int) -> State:
    everyone = tuple(range(ranks))
    if op == "all_reduce":
        return tuple(tuple(Piece(part, everyone) for part in range(parts)) for _ in everyone)
    if op == "reduce":
        return tuple(tuple(Piece(part, everyone) for part in range(parts)) if rank == 0 else () for rank in everyone)
    if op == "reduce_scatter":
        return tuple((Piece(rank, everyone),) for rank in everyone)
    if op == "all_gather":
        return tuple(tuple(Piece(part, (part,)) for part in everyone) for _ in everyone)
    if op == "all_to_all":
        return tuple(tuple(Piece(rank, (source,)) for source in everyone) for rank in everyone)
    if op == "send_recv":
        return ((), (Piece(0, (0,)),))
    return tuple(tuple(Piece(part, (0,)) for part in range(parts)) for _ in everyone)


def _play(before: State, plan: list[list[Move]]) -> tuple[tuple[Step, ...], tuple[State, ...]]:
    """The moves carried out: each send has the piece that its source really held when the step began."""
    held: dict[int, set[Piece]] = {rank: set(pieces) for rank, pieces in enumerate(before)}
    held[SWITCH] = set()
    steps, states = [], [before]
    for moves in plan:
        sends = []
        for source, target, part, adds in moves:
            piece = next(piece for piece in sorted(held[source]) if piece.part == part)
            sends.append(Send(source=source, target=target, piece=piece, adds=adds))
        for send in sends:
            _receive(held[send.target], send)
        steps.append(tuple(sends))
        states.append(tuple(tuple(sorted(held[rank])) for rank in range(len(before))))
    return tuple(steps), tuple(states)


def _receive(pieces: set[Piece], send: Send) -> None:
    own = next((piece for piece in pieces if piece.part == send.piece.part), None)
    if not send.adds or own is None:
        if own is not None and len(own.ranks) < len(send.piece.ranks):
            pieces.discard(own)  # a partial sum makes way for the whole one
        pieces.add(send.piece)
        return
    assert not set(own.ranks) & set(send.piece.ranks), "a value would be added twice"
    pieces.discard(own)
    pieces.add(Piece(own.part, tuple(sorted((*own.ranks, *send.piece.ranks)))))

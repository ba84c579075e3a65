"""Made-up ranks: a step of ops, Python and one all-reduce, with faults in some of them."""

from nearpeak.profiles.job import RankReport
from nearpeak.profiles.rank_timeline import (
    OpTotal,
    RankCollective,
    RankStep,
    RankTimeline,
    cut_segments,
    label_activities,
)

TRANSFER_S = 2e-3


def made_ranks(count=3, steps=12, *, own=None, ops=None, jitter=0.0, host="a", numbered=True, preempted=None):
    """Reports of ranks whose steps are work, an all-reduce that joins them, and an optimizer.

    `own(rank, step)` gives the seconds of each activity before the collective; `ops(rank, step)` the totals of ops.
    """
    own = own or (lambda rank, step: {})
    clocks = [0.0] * count
    recorded = [[] for _ in range(count)]
    sent = [[] for _ in range(count)]
    for step in range(steps):
        begun, arrived, pieces = list(clocks), [], []
        for rank in range(count):
            wobble = jitter * ((7 * rank + 3 * step) % 5 - 2)
            seconds = {"ops": 10e-3 + wobble, "python": 1e-3, **own(rank, step)}
            parts, time = [], clocks[rank]
            for activity, length in seconds.items():
                parts.append((activity, [(time, time + length)]))
                time += length
            pieces.append(parts)
            arrived.append(time)
        end = max(arrived) + TRANSFER_S
        for rank in range(count):
            parts = [*pieces[rank], ("communication", [(arrived[rank], end)]), ("ops", [(end, end + 1e-3)])]
            clocks[rank] = end + 1e-3
            index = len(sent[rank])
            call = RankCollective(
                kind="all_reduce",
                group="0" if numbered else "",
                sequence=step if numbered else None,
                step=step,
                called_s=arrived[rank],
                end_s=end,
                bytes=4e6,
            )
            sent[rank].append(call)
            totals = ops(rank, step) if ops else {"aten::mm": OpTotal(count=4, seconds=11e-3, elements=1e6)}
            recorded[rank].append(
                RankStep(
                    number=step,
                    start_s=begun[rank],
                    end_s=clocks[rank],
                    segments=cut_segments(label_activities((begun[rank], clocks[rank]), parts), {index: call}),
                    ops=totals,
                    preempted_s=None if preempted is None else preempted(rank, step),
                )
            )
    return [
        RankReport(
            timeline=RankTimeline(
                rank=rank,
                world_size=count,
                host=host if isinstance(host, str) else host(rank),
                steps=tuple(recorded[rank]),
                collectives=tuple(sent[rank]),
                groups={"0": tuple(range(count))} if numbered else {},
            ),
            device="cpu",
        )
        for rank in range(count)
    ]

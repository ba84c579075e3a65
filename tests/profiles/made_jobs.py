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


def made_bucket_ranks(count=4, steps=12, *, buckets=4, transfer_s=2e-3, delays=None, jitter=0.0):
    """Reports of ranks that reduce their gradients in buckets during the backward pass, one bucket after the other.

    `delays(rank)` gives seconds of Python by bucket: 0 is the forward pass, before all of them.
    """
    delays = delays or (lambda rank: {})
    clocks, channel_free = [0.0] * count, 0.0
    recorded, sent = [[] for _ in range(count)], [[] for _ in range(count)]
    for step in range(steps):
        begun, parts, called = list(clocks), [[] for _ in range(count)], []
        for rank in range(count):
            time, calls = clocks[rank], []
            for bucket in range(buckets + 1):
                if delay_s := delays(rank).get(bucket, 0.0):
                    parts[rank].append(("python", [(time, time + delay_s)]))
                    time += delay_s
                work_s = (6e-3 if bucket == 0 else 3e-3) + jitter * ((5 * rank + 3 * step + bucket) % 7 - 3)
                parts[rank].append(("ops", [(time, time + work_s)]))
                time += work_s
                if bucket:
                    calls.append(time)
            called.append(calls)
            clocks[rank] = time
        ends = []
        for bucket in range(buckets):
            channel_free = max(channel_free, *(calls[bucket] for calls in called)) + transfer_s
            ends.append(channel_free)
        for rank in range(count):
            first, end = clocks[rank], max(clocks[rank], ends[-1])
            if end > first:
                parts[rank].append(("communication", [(first, end)]))
            parts[rank].append(("ops", [(end, end + 1.5e-3)]))
            clocks[rank] = end + 1.5e-3
            near = {}
            for bucket in range(buckets):
                near[len(sent[rank])] = RankCollective(
                    kind="all_reduce",
                    group="0",
                    sequence=step * buckets + bucket,
                    step=step,
                    called_s=called[rank][bucket],
                    end_s=ends[bucket],
                    bytes=4e6,
                )
                sent[rank].append(near[len(sent[rank])])
            recorded[rank].append(
                RankStep(
                    number=step,
                    start_s=begun[rank],
                    end_s=clocks[rank],
                    segments=cut_segments(label_activities((begun[rank], clocks[rank]), parts[rank]), near),
                    ops={"aten::mm": OpTotal(count=4, seconds=11e-3, elements=1e6)},
                )
            )
    timelines = (
        RankTimeline(
            rank=rank,
            world_size=count,
            host="a",
            steps=tuple(recorded[rank]),
            collectives=tuple(sent[rank]),
            groups={"0": tuple(range(count))},
        )
        for rank in range(count)
    )
    return [RankReport(timeline=timeline, device="cpu") for timeline in timelines]

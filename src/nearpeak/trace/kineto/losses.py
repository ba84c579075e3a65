"""`find_losses`: what a recording is known to lack, from what it has.

The ids of calls do not tell: calls that the profiler does not write, such as queries of events, have ids too, so that
a complete recording has gaps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.trace.kineto.calls import OpCall, OpCalls, ProfilerStep
from nearpeak.trace.kineto.kernels import LaunchedSpan
from nearpeak.trace.kineto.recording import Recording

_DROPPED = re.compile(
    r"\b(?:dropp\w+|lost)\b[^\d]{0,20}(\d{1,15})|(\d{1,15})[^\d.;,]{0,40}\b(?:dropped|lost)\b", re.IGNORECASE
)
_STOPPED_EARLY = re.compile(
    r"stopped early\W*(?:1|true|yes)\b|out of (?:trace )?buffer|buffer\w* (?:is )?exceeded", re.I
)
"""What the profiler writes into the messages of a file when its buffers are full."""
_NUMBER = re.compile(r"\d{1,15}")
_LONGEST_MESSAGES = 10_000


def find_losses(
    recording: Recording,
    calls: OpCalls,
    spans: Sequence[LaunchedSpan],
    step: ProfilerStep | None,
    *,
    cut: bool,
    without_launch: Sequence[OpCall],
    elsewhere: int = 0,
    live: bool = False,
) -> Completeness:
    """What is missing, of the step and of the rest of the recording.

    Args:
        recording: All of the file.
        calls: Its ops and launches.
        spans: What ran on the device in the step.
        step: The step that is read; None for all of the file.
        cut: Whether the file ends before everything of the step is written.
        without_launch: Ops of the step without a launch, although equal ops have one.
        elsewhere: The number of such ops in other steps.
        live: Whether it was recorded here: then every kernel must have a launch. Other files may have none by choice.
    """
    losses: list[Loss] = []

    def add(kind: Any, count: int | None, in_step: bool, text: str) -> None:
        losses.append(Loss(kind=kind, count=count, in_step=in_step, text=text))

    if recording.truncated:
        add("cut", None, cut, "The file is truncated; what follows its end is not in the trace.")
    if recording.damaged:
        add("damaged", recording.damaged, True, f"{_count(recording.damaged, 'event')} damaged and left out.")
    dropped = _dropped_events(recording.metadata)
    if dropped is not None:
        how_many = f"dropped {dropped:,} events" if dropped else "stopped before the end"
        add("dropped", dropped or None, True, f"The profiler says that it {how_many}: what they were is not known.")
    missing = [launch.start for launch, _ in calls.missing_kernels]
    inside = sum(step is None or step.start <= start < step.end for start in missing)
    short, short_elsewhere = _missing_in_graphs(recording, calls, spans)
    inside += short
    if inside:
        graphs = f", {short} of them of CUDA graphs that have more in other replays" if short else ""
        add(
            "kernels",
            inside,
            True,
            f"{_count(inside, 'kernel')} launched and not in the file{graphs}: their time is missing.",
        )
    if outside := len(missing) - (inside - short) + short_elsewhere:
        add("kernels", outside, False, f"{_count(outside, 'kernel')} launched outside of the step and not in the file.")
    if without_launch:
        names = ", ".join(f"{name} ({n})" for name, n in Counter(c.span.name for c in without_launch).most_common(3))
        text = f"{_count(len(without_launch), 'op')} without a kernel although equal ops have some: {names}."
        add("ops", len(without_launch), True, text)
    if elsewhere:
        text = f"{_count(elsewhere, 'op')} without a kernel in other steps although the same ops have some in this one."
        add("ops", elsewhere, False, text)
    unlaunched = sum((live or owner is None) and span.correlation not in calls.launches for span, owner in spans)
    if unlaunched:
        text = f"{_count(unlaunched, 'kernel')} in the file without a launch, so that ops may be missing too."
        add("launches", unlaunched, True, text)
    # The profiler names streams of earlier recordings too: an empty one tells something if launches lack their kernel.
    if recording.empty_streams and missing and not live:  # live, markers tell of streams
        text = f"{_count(recording.empty_streams, 'stream')} named in the file without anything that ran on it."
        add("streams", recording.empty_streams, True, text)
    launched = {span.correlation for span, _ in spans if span.correlation in calls.launches}
    return Completeness(launches=len(launched) + inside, losses=tuple(losses))


def _count(number: int, what: str) -> str:
    return f"1 {what} is" if number == 1 else f"{number:,} {what}s are"


def _dropped_events(metadata: Mapping[str, Any]) -> int | None:
    """The number of events that the profiler says it dropped; 0 if it says that it stopped early; None if neither."""
    dropped, early = 0, False
    for key, text in _messages(metadata):
        if "drop" in key.lower() and _NUMBER.fullmatch(text.strip()):
            dropped += int(text)
            continue
        for match in _DROPPED.finditer(text):
            dropped += int(match[1] or match[2])
        early = early or _STOPPED_EARLY.search(text) is not None
    return dropped if dropped or early else None


def _messages(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of the file, and the lists of messages that the profiler writes by level: INFO, WARNING, ERROR."""
    for key, value in metadata.items():
        for item in value[:_LONGEST_MESSAGES] if isinstance(value, list) else [value]:
            if isinstance(item, (str, int)) and not isinstance(item, bool):
                yield str(key), str(item)[:_LONGEST_MESSAGES]


def _missing_in_graphs(recording: Recording, calls: OpCalls, spans: Sequence[LaunchedSpan]) -> tuple[int, int]:
    """Kernels that replays lack, of the step and of others: all replays of one graph run the same kernels.

    Which graph it is tells the file, or the range that nearpeak adds around a replay.
    """
    sizes: dict[tuple[str, int], Counter[int]] = {}
    for span in recording.device_spans:
        launch = calls.by_correlation.get(span.correlation) if span.correlation is not None else None
        if span.correlation is None or launch is None:
            continue
        if launch.graph is not None:
            sizes.setdefault(("captured", launch.graph), Counter())[span.correlation] += 1
        elif span.graph is not None:
            sizes.setdefault(("in the file", span.graph), Counter())[span.correlation] += 1
    in_step: Collection[int | None] = {span.correlation for span, _ in spans}
    missing = [
        (max(replays.values()) - size, correlation in in_step)
        for replays in sizes.values()
        for correlation, size in replays.items()
    ]
    return sum(count for count, inside in missing if inside), sum(count for count, inside in missing if not inside)

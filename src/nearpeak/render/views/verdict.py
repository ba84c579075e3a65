"""Verdict, why and next of a profile, in one or two sentences each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nearpeak.bound.expected import is_like_measured
from nearpeak.bound.tiles import tiling_of_shapes
from nearpeak.ops.custom_schemas import custom_schemas
from nearpeak.ops.op import is_graph_launch, name_without_origin
from nearpeak.profiles.conditions import clock_loss_s, clock_share
from nearpeak.profiles.finding import Finding, likely_shares, saved_together
from nearpeak.profiles.grade import LEAST_TRUSTED, grade_profile
from nearpeak.profiles.idle import CAUSE_MEANINGS as CAUSES
from nearpeak.profiles.idle import CauseName
from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiles.waterfall import PART_MEANINGS, Part, PartName
from nearpeak.render.text import count, elide, elide_start, plain, short_name
from nearpeak.render.views.profile_roofs import catalogue_machine
from nearpeak.units import percent, seconds, significant

SMALL_LOSS = 0.05
"""A loss below this share of the step is not worth a change."""
SMALL_CLOCK_LOSS = 0.002
"""Of the step. Less is not told apart from the scatter of the clock."""
TYPICAL_RATIO = 1.25
"""Kernels that take at most this multiple of the expected time are not called slow."""
ANSWER_SHARE = 0.25
"""Findings that save less than this share of the largest loss are no answer to it."""
MOST_OF_SAVING = 0.8
"""The parts of the wall time that have this share of a saving are what it is of."""
LEAST_GROUPS = 3
"""So many kinds of ops tell how fast the machine was."""
SHORT_KERNEL = 5e-6
"""Seconds. Much of a shorter kernel on a GPU is its start and its end."""
SHORT_CPU_OP = 1e-5
"""Seconds. Much of a shorter op on a CPU is its call."""


def sentences(profile: Profile, findings: Sequence[Finding] = ()) -> dict[str, str]:
    """Verdict, why, and what to do next about the loss that "Why" names."""
    grade = grade_profile(profile)
    loss = profile.waterfall.largest_loss
    why, advice = _ADVICE[loss.name](profile)
    share = loss.seconds / profile.wall_s if profile.wall_s else 0.0
    lost = f"{loss.name}: {seconds(loss.seconds)}, {percent(share)} of the step ({PART_MEANINGS[loss.name]})."
    if share < SMALL_LOSS:
        advice = "Little is left to gain with the same work: do less of it, in a lower precision or on another machine."
    answer = next_finding(profile, findings)
    if answer is not None:
        group = next(each for each in findings_by_library(findings) if answer in each)
        next_ = _finding_sentence(group, with_saving=grade.is_trusted)
        ops = [profile.ops[index] for index in answer.ops]
        if loss.name == "slow kernels" and (lost_s := sum(op.lost_s for op in ops)) > _largest_group_loss(profile):
            why = f"{seconds(lost_s)} of it are in {_those_ops(answer, ops)}."
        if grade.is_trusted and answer.saving_s > 0.0 and not _answers(profile, answer, loss):
            parts = _parts_saved(profile, answer)
            if loss.name not in parts:
                others = f"another part, {parts[0]}" if len(parts) == 1 else f"other parts, {' and '.join(parts)}"
                why = f"{why} Most can be saved of {others}: {seconds(answer.saving_s)}.".strip()
    else:
        next_ = advice
        in_long_run = [finding for finding in findings if not finding.once_s]
        if in_long_run and grade.is_trusted:
            best = findings_by_library(in_long_run)[0]
            saved = percent(min(1.0, saved_together(best) / profile.long_run_s))
            next_ += f" The largest saving known is {saved}: {group_name(best)}{_at(best[0])}."
    if grade.is_trusted:
        return {"Verdict": verdict_sentence(profile), "Why": f"Most is lost to {lost} {why}".strip(), "Next": next_}
    untold = f"Below grade {LEAST_TRUSTED}, neither a multiple of the ideal nor savings are given."
    why = why if grade.letter != "F" else ""
    return {
        "Verdict": verdict_sentence(profile),
        "Why": f"{untold} As measured, most is lost to {lost} {why}".strip(),
        "Next": grade.remedy or next_,
    }


def next_finding(profile: Profile, findings: Sequence[Finding]) -> Finding | None:
    """The finding to begin with; None where findings are no answer to the largest loss.

    It is the largest of those that save time of the largest loss, if these save a good part of it together, or if it is
    about the ops that lose most. Otherwise it is the largest of all, if it saves as much.
    """
    loss = profile.waterfall.largest_loss
    enough_s = ANSWER_SHARE * loss.seconds
    answers = [finding for finding in findings if _answers(profile, finding, loss)]
    if answers and sum(_saved_of(profile, finding, loss.name) for finding in answers) >= enough_s:
        return answers[0]
    if loss.name == "slow kernels" and (about := _about_worst_group(profile, answers)) is not None:
        return about
    return findings[0] if findings and findings[0].found_s >= enough_s else None


def _about_worst_group(profile: Profile, findings: Sequence[Finding]) -> Finding | None:
    """The largest finding with a good part of the loss of the ops that lose most, if it is worth a change."""
    groups = _op_groups(profile)
    if not groups:
        return None
    members = {id(op) for op in groups[0].ops}
    for finding in findings:
        own = [op for index in finding.ops if id(op := profile.ops[index]) in members]
        if finding.share >= SMALL_LOSS and sum(op.lost_s for op in own) >= ANSWER_SHARE * groups[0].lost_s:
            return finding
    return None


def findings_by_library(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one library that one line calls, and that one compilation removes, are one. The largest first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        is_compiled = bool(finding.library) and finding.remedy.startswith("model.compile()")
        groups.setdefault((finding.source, finding.library) if is_compiled else (number,), []).append(finding)
    return sorted(groups.values(), key=lambda group: -saved_together(group) - group[0].once_s)


def group_name(group: Sequence[Finding]) -> str:
    """The rule of one finding, or how many there are."""
    return plain(group[0].rule, 40) if len(group) == 1 else f"{len(group)} findings"


def saving_text(group: Sequence[Finding]) -> str:
    """What the findings of a group save at once."""
    saved_s, first = saved_together(group), group[0]
    if first.once_s:
        return first.saving_text
    share = first.share * saved_s / first.saving_s if first.saving_s else 0.0
    return f"{seconds(saved_s)}, {percent(share)} {range_text(min(1.0, share))}"


def range_text(share: float) -> str:
    """The likely range of a predicted share: "(24 to 46 %)"."""
    low, high = (percent(end, 0) for end in likely_shares(share))
    return f"({low.removesuffix(' %')} to {high})"


def _answers(profile: Profile, finding: Finding, loss: Part) -> bool:
    """Whether most of what a finding saves is time of this part."""
    return finding.found_s > 0.0 and 2.0 * _saved_of(profile, finding, loss.name) >= finding.found_s


def _saved_of(profile: Profile, finding: Finding, part: PartName) -> float:
    """What a finding saves of one part of the wall time, at most."""
    ops = [profile.ops[index] for index in finding.ops]
    idle_s = (
        finding.once_s or max(finding.idle_s, finding.saving_s - sum(op.measured_s for op in ops))
        if ops
        else finding.idle_s
    )
    if not ops and not idle_s and not profile.communication_s:  # saved before findings had their idle time
        idle_s = finding.saving_s
    if part == "idle":
        return idle_s
    if part == "communication":
        return 0.0 if ops else finding.saving_s - idle_s
    lost_of: Mapping[str, Callable[[ProfiledOp], float]] = {
        "ideal": lambda op: 0.0,
        "slow kernels": lambda op: max(0.0, op.lost_s),
        "fusion": _fusion_saving,
        "traffic": lambda op: op.bound_s if op.fused_s is None else op.fused_s,
        "not modeled": lambda op: 0.0 if op.modeled else op.measured_s,
    }
    return max(0.0, min(finding.found_s - idle_s, sum(map(lost_of[part], ops))))


def _parts_saved(profile: Profile, finding: Finding) -> list[PartName]:
    """The parts of the wall time that most of a finding's saving is of, the largest first: none has more than it is."""
    saved = {name: min(_saved_of(profile, finding, name), profile.waterfall.seconds(name)) for name in PART_MEANINGS}
    parts: list[PartName] = []
    for name in sorted(saved, key=lambda name: -saved[name]):
        parts.append(name)
        if sum(saved[part] for part in parts) >= MOST_OF_SAVING * finding.saving_s:
            break
    return parts


def _finding_sentence(group: Sequence[Finding], *, with_saving: bool) -> str:
    first = group[0]
    saves = f" saves {saving_text(group)}" if with_saving else ""
    more = f" and {count(len(group) - 1, 'more finding')}" if len(group) > 1 else ""
    changing = f"Changing that{more}{_at(first)}{saves}" if saves else f"See{_at(first)}"
    return f"{plain(first.title)} {changing}: {group_name(group)} below."


def _those_ops(finding: Finding, ops: Sequence[ProfiledOp]) -> str:
    """The ops of a finding, at its line if most of them are of this line: those of a batch are all over the model."""
    if 2 * sum(op.source == finding.source for op in ops) >= len(ops):
        return f"{count(len(ops), 'op')}{_at(finding)}"
    return f"the {count(len(ops), 'op')} of {plain(finding.rule, 40)}{_at(finding)}"


def _at(finding: Finding) -> str:
    inside = f" (in {plain(finding.library, 30)})" if finding.library else ""
    return f" at {elide_start(finding.source)}{inside}" if finding.source else inside


def verdict_sentence(profile: Profile) -> str:
    """The step time against the ideal time, with the grade; the reason first where the grade is too low for that."""
    grade = grade_profile(profile)
    machine = plain(profile.machine, 30)
    step = f"{seconds(profile.wall_s)} a step"
    reasons = "; ".join(plain(reason, 120) for reason in grade.reasons)
    if not grade.is_trusted:
        return f"Grade {grade.letter}: {reasons}. {step} on {machine}."
    graded = f"Grade {grade.letter}{f': {reasons}' if reasons else ''}."
    if profile.ideal_s <= 0.0:
        return f"{step} on {machine}, of which nothing has a bound. {graded}"
    times = significant(ratio) if (ratio := profile.wall_s / profile.ideal_s) < 1e4 else "over 10,000"
    return f"{step}, {times} x the ideal {seconds(profile.ideal_s)} on {machine}. {graded}"


def clock_sentence(profile: Profile) -> str:
    """At which clock a GPU ran, and what of the slow kernels that explains; "" if it is not known."""
    conditions, lost_s = profile.conditions, clock_loss_s(profile)
    if conditions is None or conditions.clock_hz is None:
        return ""
    full = None if profile.ceilings is None else profile.ceilings.clock_hz
    of = "" if full is None else f" of the {full / 1e6:,.0f} MHz at which its ceilings were measured"
    reasons = f" ({', '.join(plain(reason, 30) for reason in conditions.throttle)})" if conditions.throttle else ""
    power = "" if conditions.power_watts is None else f", drawing {conditions.power_watts:,.0f} W"
    said = f"The GPU ran at {conditions.clock_hz / 1e6:,.0f} MHz{of}{power}{reasons}"
    if lost_s is None or lost_s < SMALL_CLOCK_LOSS * profile.wall_s:
        return f"{said}."
    return (
        f"{said}: {seconds(lost_s)}, {percent(lost_s / profile.wall_s)} of the step, are slow kernels for that reason."
    )


def _slow_kernels(profile: Profile) -> tuple[str, str]:
    """The ops with the largest loss; and those that are slower than good kernels are, or why nothing is known to do."""
    groups = [group for group in _op_groups(profile) if group.lost_s > 0.0]
    if not groups:
        return "", "Look at the top of the ranking: --by op."
    pace = _pace(profile, groups)
    worst = groups[0]
    times = f", {significant(worst.measured_s / worst.bound_s, 2)} x the bound" if worst.bound_s > 0.0 else ""
    why = f"{worst.name} loses most: {seconds(worst.lost_s)} in {count(len(worst.ops), 'op')}{times}."
    if (lost_s := clock_loss_s(profile)) is not None and lost_s >= SMALL_CLOCK_LOSS * profile.wall_s:
        why = f"{seconds(lost_s)} of it are a lower clock. {why}"
    slow = max(groups, key=lambda group: group.seconds_beyond(pace))
    if worst.seconds_beyond(pace):
        slow = worst
    elif slow.seconds_beyond(pace) < SMALL_LOSS * profile.wall_s:
        return why, f"No remedy is known for {worst.name}{worst.place}: {_no_remedy(profile, worst, pace)}"
    expected_s = slow.expected_s or 0.0
    other = "" if slow is worst else f"No faster kernel is known for {worst.name}. "
    return why, (
        f"{other}Begin with {slow.name}{slow.place}: good kernels take {seconds(expected_s)} for "
        f"{'it' if len(slow.ops) == 1 else f'all {len(slow.ops):,}'}, these took {seconds(slow.measured_s)}. "
        f"{_FAMILY_ADVICE.get(slow.ops[0].family, 'Try another backend, dtype, layout or shape.')}"
    )


_FAMILY_ADVICE: Mapping[str, str] = {
    "convolution": "Try another layout (channels-last), dtype or shape.",
    "attention": "Try another backend of scaled_dot_product_attention, or another size of the heads.",
}


def _pace(profile: Profile, groups: Sequence[_OpGroup]) -> float:
    """By what factor all kernels take longer than good ones, at least 1: of a machine that is busy, or was calibrated
    when it was faster, no single op is to blame. The median over the groups that take a hundredth of the step."""
    ratios = [
        group.measured_s / group.expected_s
        for group in groups
        if group.expected_s and group.measured_s >= 0.01 * profile.wall_s
    ]
    return max(1.0, median(ratios)) if len(ratios) >= LEAST_GROUPS else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpGroup:
    """All ops of one operator and phase."""

    name: str
    place: str
    """The line or module with most of the loss, after " at "; "" if none is known."""
    ops: Sequence[ProfiledOp]
    measured_s: float
    bound_s: float
    expected_s: float | None
    """What good kernels take; None where none like them were measured."""

    @property
    def lost_s(self) -> float:
        return self.measured_s - self.bound_s

    def seconds_beyond(self, pace: float) -> float:
        """What they take longer than good kernels at this pace; 0 for kernels that are as fast, or without a figure."""
        good_s = math.inf if self.expected_s is None else pace * self.expected_s
        return self.measured_s - good_s if self.measured_s > TYPICAL_RATIO * good_s else 0.0


def _op_groups(profile: Profile) -> list[_OpGroup]:
    """The ops with a bound, grouped, the largest loss first."""
    members: dict[tuple[str, str], list[ProfiledOp]] = {}
    for op in profile.ops:
        if op.modeled and (op.kernels or op.bound_s > 0.0):
            members.setdefault((op.name, op.phase), []).append(op)
    groups = [_op_group(profile, ops) for ops in members.values()]
    return sorted(groups, key=lambda group: -group.lost_s)


def _largest_group_loss(profile: Profile) -> float:
    return max((group.lost_s for group in _op_groups(profile)), default=0.0)


def _op_group(profile: Profile, ops: Sequence[ProfiledOp]) -> _OpGroup:
    where = _costliest(ops, lambda op: _own_line(profile, op.source), lambda op: op.lost_s)
    where = where or _costliest(ops, lambda op: op.module, lambda op: op.lost_s)
    expected = [op.expected_s for op in ops if op.expected_s is not None]
    is_known = len(expected) == len(ops) and (profile.device != "cpu" or is_like_measured(ops[0].name, ops[0].family))
    return _OpGroup(
        name=f"{elide(short_name(ops[0].name), 48)} ({plain(ops[0].phase, 12)})",
        place=f" at {elide_start(where)}" if where else "",
        ops=ops,
        measured_s=sum(op.measured_s for op in ops),
        bound_s=sum(op.bound_s for op in ops),
        expected_s=sum(expected) if is_known else None,
    )


def _no_remedy(profile: Profile, group: _OpGroup, pace: float) -> str:
    """Why nothing is known to do about a group of ops: how near good kernels are, and what the loss consists of."""
    limiter = max(group.ops, key=lambda op: op.bound_s).limiter
    rate = {"compute": "the compute rate", "memory": "the memory bandwidth", "cache": "the cache's bandwidth"}
    reached = percent(group.bound_s / group.measured_s if group.measured_s else 0.0, 0)
    own = "it is a kernel of nearpeak's; " if group.ops[0].name.startswith("nearpeak.") else ""
    if group.expected_s is None:
        near = "no kernel like it was measured on this machine, so how near it is to the best is not known"
    else:
        near = f"good kernels take {seconds(group.expected_s)}, these {seconds(group.measured_s)}"
        if pace > TYPICAL_RATIO:
            near += f"; most kernels of the step take {significant(pace, 2)} x what good ones do, as on a busy machine"
    parts = [f"{seconds(value)} {name}" for name, value in _loss_parts(profile, group).items() if value > 0.0]
    consists = f"; of the loss {' and '.join(parts)}" if parts else ""
    return f"{own}{near}. They reach {reached} of {rate.get(limiter, 'their bound')}{consists}."


def _loss_parts(profile: Profile, group: _OpGroup) -> dict[str, float]:
    """What a loss is seen to consist of, or follows from shapes; in seconds, each of at least a twentieth of it."""
    clock_s = waves_s = short_s = 0.0
    slower = clock_share(profile) or 0.0
    machine = catalogue_machine(profile)
    shortest = SHORT_CPU_OP if profile.device == "cpu" else SHORT_KERNEL
    for op in group.ops:
        left = max(0.0, op.lost_s)
        if op.measured_s < shortest * max(op.kernels, 1):
            short_s += left
            continue
        if op.limiter == "compute":
            clock_s += (part := min(left, slower * op.measured_s))
            left -= part
            tiles = None if machine is None else tiling_of_shapes(op.name, op.shapes, machine)
            waves_s += 0.0 if tiles is None else min(left, op.measured_s * (1.0 - tiles.efficiency))
    short = (
        "in calls of a few us each" if profile.device == "cpu" else "in kernels of a few us each, mostly their start"
    )
    parts = {"at a lower clock": clock_s, "in tiles and waves that are not full": waves_s, short: short_s}
    return {name: value for name, value in parts.items() if value >= 0.05 * group.lost_s}


def _own_line(profile: Profile, line: str) -> str:
    """The line of the user's own that calls an installed package, for a line in that package."""
    return profile.callers.get(line, line)


def _fusion(profile: Profile) -> tuple[str, str]:
    """The line with the largest saving from fusion, or the module where lines are not known."""
    advice = "torch.compile fuses them, or fused kernels for norms, activations and the loss do."
    known = [op for op in profile.ops if op.fused_s is not None]
    line = _costliest(known, lambda op: _own_line(profile, op.source), _fusion_saving)
    module = _costliest(known, lambda op: op.module, _fusion_saving)
    if not line and not module:
        return "", f"Fuse the ops in between: {advice}"
    same = [op for op in known if (_own_line(profile, op.source) == line if line else op.module == module)]
    where = elide_start(line) if line else plain(module, 40)
    saving_s = sum(map(_fusion_saving, same))
    why = f"{where} has most of it: {seconds(saving_s)} in {count(len(same), 'op')}."
    fused_s = sum(_fusion_saving(op) for op in same if op.origin == "inductor" or op.name.startswith("nearpeak."))
    if 2.0 * fused_s > saving_s:
        return why, f"No remedy is known: the kernels at {where} are fused ones already, of torch.compile or nearpeak."
    return why, f"Fuse the ops at {where}: {advice}"


def _fusion_saving(op: ProfiledOp) -> float:
    return op.bound_s - op.fused_s if op.fused_s is not None else 0.0


_IDLE_ADVICE: Mapping[CauseName, str] = {
    "synchronization": "Keep results on the device there, and read them once in many steps.",
    "input": "Load the next batch while this one runs: more workers, pinned memory, less work per sample.",
    "host ops": "Compute that on the device, or in the data loader's workers.",
    "allocator": "Keep shapes the same from step to step, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    "garbage collection": "Call gc.freeze() after the first steps, or collect between steps with gc.collect().",
    "compilation": "Keep shapes and dtypes the same from step to step, and let more steps pass before measuring.",
    "profiler": "This is the profiler's own time: a script that nearpeak runs itself has clean steps without it.",
    "launching": "Launch less: torch.compile, CUDA graphs (mode='reduce-overhead'), fused optimizers, larger batches.",
    "python": "Take that work out of the step, or compile the step with torch.compile.",
    "unknown": "What it is was not seen: clean steps took longer than all that the profiler shows of one. Measure "
    "again while nothing else runs, with more steps.",
}


def _idle(profile: Profile) -> tuple[str, str]:
    """The largest cause of idle time over all its places, and its largest place."""
    totals: dict[CauseName, float] = {}
    for entry in profile.idle:
        totals[entry.cause] = totals.get(entry.cause, 0.0) + entry.seconds
    if not totals:
        return "", "What the host did meanwhile was not recorded: profile the code itself with nearpeak."
    cause = max(totals, key=lambda name: totals[name])
    worst = max((entry for entry in profile.idle if entry.cause == cause), key=lambda entry: entry.seconds)
    what = f" ({plain(worst.what, 40)})" if worst.what else ""
    line = elide_start(_own_line(profile, worst.where))
    where = f", most at {line}" if line else ""
    why = f"Its largest cause is {cause}{what}, {seconds(totals[cause])}: {CAUSES[cause]}{where}."
    return why, (_GRAPH_ADVICE if _is_in_graphs(profile) else _IDLE_ADVICE).get(cause, _IDLE_ADVICE[cause])


_GRAPH_ADVICE: Mapping[CauseName, str] = {
    "launching": "CUDA graphs launch its kernels already. Put more of the step into one graph, or more work into each "
    "kernel.",
    "python": "Take that work out of the step: graphs are launched late because of it.",
}
"""Where CUDA graphs launch the kernels."""


def _is_in_graphs(profile: Profile) -> bool:
    """Whether CUDA graphs launch what the device waits for; a step of graphs alone may have no ops."""
    waits_s = sum(op.launch_wait_s for op in profile.ops)
    before_graphs_s = sum(profile.ops[index].launch_wait_s for index in profile.ops_in_graphs)
    return _is_all_in_graphs(profile) or 2 * before_graphs_s > waits_s


def _is_all_in_graphs(profile: Profile) -> bool:
    return bool(profile.timeline) and all(kernel.in_graph for kernel in profile.timeline)


def _not_modeled(profile: Profile) -> tuple[str, str]:
    unknown = [op for op in profile.ops if not op.modeled]
    name = _costliest(unknown, lambda op: op.name, lambda op: op.measured_s)
    if is_graph_launch(name) or (not name and _is_all_in_graphs(profile)):
        return (
            "The kernels that CUDA graphs launch have no ops.",
            "Profile the code itself with nearpeak, or record a step without graphs: its ops have bounds.",
        )
    if not name:
        return "", "Kernels without an op: nothing can be said about them."
    took = sum(op.measured_s for op in unknown if op.name == name)
    plain_name = name_without_origin(name)
    short = elide(short_name(plain_name), 48)
    why = f"{short} takes most of it: {seconds(took)}."
    if all(op.origin != "unknown" for op in unknown if op.name == name):
        return why, f"Tell what {short} costs with nearpeak.declare_cost, and profile again."
    if "::" not in plain_name or plain_name.startswith("aten::") or custom_schemas(plain_name):
        return why, f"The recording does not show all that {short} works on: profile the code itself with nearpeak."
    return (
        why,
        f"Import the library of {short}, tell what it costs with nearpeak.declare_cost, and load the file again.",
    )


def _traffic(profile: Profile) -> tuple[str, str]:
    return "", "The traffic itself is needed: larger batches reuse more of it, a lower precision makes it less."


def _communication(profile: Profile) -> tuple[str, str]:
    return "", "Overlap communication with computation, or send less."


def _ideal(profile: Profile) -> tuple[str, str]:
    return "", ""


_ADVICE: Mapping[PartName, Callable[[Profile], tuple[str, str]]] = {
    "ideal": _ideal,
    "traffic": _traffic,
    "fusion": _fusion,
    "slow kernels": _slow_kernels,
    "not modeled": _not_modeled,
    "communication": _communication,
    "idle": _idle,
}
"""The reason and the advice for each part of the wall time."""


def _costliest(ops: Iterable[ProfiledOp], key: Callable[[ProfiledOp], str], cost: Callable[[ProfiledOp], float]) -> str:
    """The key with the largest total cost; "" if no key is known or all costs are zero."""
    totals: dict[str, float] = {}
    for op in ops:
        totals[key(op)] = totals.get(key(op), 0.0) + cost(op)
    best = max((name for name in totals if name), key=lambda name: totals[name], default="")
    return best if best and totals[best] > 0.0 else ""

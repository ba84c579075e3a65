"""Verdict, why and next of a profile, in one or two sentences each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from nearpeak.ops.custom_schemas import custom_schemas
from nearpeak.ops.op import is_graph_launch, name_without_origin
from nearpeak.profiles.conditions import clock_loss_s
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import LEAST_TRUSTED, grade_profile
from nearpeak.profiles.idle import CAUSE_MEANINGS as CAUSES
from nearpeak.profiles.idle import CauseName
from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiles.ranking import RankedOps, ranking
from nearpeak.profiles.waterfall import PART_MEANINGS, PartName
from nearpeak.render.text import count, elide, elide_start, plain, short_name
from nearpeak.units import percent, seconds, significant

SMALL_LOSS = 0.05
"""A loss below this share of the step is not worth a change."""
SMALL_CLOCK_LOSS = 0.002
"""Of the step. Less is not told apart from the scatter of the clock."""
TYPICAL_RATIO = 1.25
"""Kernels that take at most this multiple of the expected time are not called slow."""


def sentences(profile: Profile, findings: Sequence[Finding] = ()) -> dict[str, str]:
    """Verdict, why, and what to do next: the finding that saves most, if there is one and the profile is trusted."""
    grade = grade_profile(profile)
    loss = profile.waterfall.largest_loss
    why, next_ = _ADVICE[loss.name](profile)
    share = loss.seconds / profile.wall_s if profile.wall_s else 0.0
    lost = f"{loss.name}: {seconds(loss.seconds)}, {percent(share)} of the step ({PART_MEANINGS[loss.name]})."
    if share < SMALL_LOSS:
        next_ = "Little is left to gain with the same work: do less of it, in a lower precision or on another machine."
    if findings:
        first = findings[0]
        where = f" at {elide_start(first.source)}" if first.source else ""
        saves = f" saves {seconds(first.saving_s)}, {percent(first.share)}" if grade.is_trusted else ""
        changing = f"Changing that{where}{saves}" if saves else f"See{where}"
        next_ = f"{plain(first.title)} {changing}: {plain(first.rule, 40)} below."
    if grade.is_trusted:
        return {"Verdict": verdict_sentence(profile), "Why": f"Most is lost to {lost} {why}".strip(), "Next": next_}
    untold = f"Below grade {LEAST_TRUSTED}, no multiple of the ideal and no savings are told."
    why = why if grade.letter != "F" else ""
    return {
        "Verdict": verdict_sentence(profile),
        "Why": f"{untold} As measured, most is lost to {lost} {why}".strip(),
        "Next": grade.remedy or next_,
    }


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
    times = significant(profile.wall_s / profile.ideal_s)
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
    ranks = [rank for rank in ranking(profile, "op") if rank.modeled and rank.lost_s > 0.0]
    if not ranks:
        return "", "Look at the top of the ranking."
    worst = ranks[0]
    ops = [op for op in profile.ops if f"{op.name} {op.phase}" == worst.key]
    name = elide(short_name(ops[0].name), 48)
    where = _costliest(ops, lambda op: op.source, lambda op: op.lost_s)
    where = where or _costliest(ops, lambda op: op.module, lambda op: op.lost_s)
    times = f", {significant(worst.measured_s / worst.bound_s, 2)} x the bound" if worst.bound_s > 0.0 else ""
    why = f"{name} ({plain(ops[0].phase, 12)}) loses most: {seconds(worst.lost_s)} in {count(worst.ops, 'op')}{times}."
    if (lost_s := clock_loss_s(profile)) is not None and lost_s >= SMALL_CLOCK_LOSS * profile.wall_s:
        why = f"{seconds(lost_s)} of it are a lower clock. {why}"
    place = f" at {elide_start(where)}" if where else ""
    return why, f"Begin with {name}{place}: {_slow_kernel_remedy(worst)}"


def _slow_kernel_remedy(worst: RankedOps) -> str:
    if worst.expected_s is None:
        return "try another backend, layout or shape for it."
    if worst.measured_s <= TYPICAL_RATIO * worst.expected_s:
        return (
            f"its kernels are as fast as such kernels are ({seconds(worst.expected_s)} expected). Fuse it with its "
            "neighbors, or change its shape or dtype."
        )
    return (
        f"good kernels take {seconds(worst.expected_s)} for {'it' if worst.ops == 1 else f'all {worst.ops:,}'}, these "
        f"took {seconds(worst.measured_s)}. Try another backend, layout or shape."
    )


def _fusion(profile: Profile) -> tuple[str, str]:
    """The line with the largest saving from fusion, or the module where lines are not known."""
    advice = "torch.compile fuses them, or fused kernels for norms, activations and the loss do."
    known = [op for op in profile.ops if op.fused_s is not None]
    line = _costliest(known, lambda op: op.source, _fusion_saving)
    module = _costliest(known, lambda op: op.module, _fusion_saving)
    if not line and not module:
        return "", f"Fuse the ops in between: {advice}"
    same = [op for op in known if (op.source == line if line else op.module == module)]
    where = elide_start(line) if line else plain(module, 40)
    why = f"{where} has most of it: {seconds(sum(map(_fusion_saving, same)))} in {count(len(same), 'op')}."
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
    "unknown": "Keep the device busy: CUDA graphs or torch.compile, no synchronization, faster input.",
}


def _idle(profile: Profile) -> tuple[str, str]:
    """The largest cause of idle time over all its places, and its largest place."""
    totals: dict[CauseName, float] = {}
    for entry in profile.idle:
        totals[entry.cause] = totals.get(entry.cause, 0.0) + entry.seconds
    if not totals:
        return "", _IDLE_ADVICE["unknown"]
    cause = max(totals, key=lambda name: totals[name])
    worst = max((entry for entry in profile.idle if entry.cause == cause), key=lambda entry: entry.seconds)
    what = f" ({plain(worst.what, 40)})" if worst.what else ""
    where = f", most at {elide_start(worst.where)}" if worst.where else ""
    why = f"Its largest cause is {cause}{what}, {seconds(totals[cause])}: {CAUSES[cause]}{where}."
    return why, (_GRAPH_ADVICE if _is_in_graphs(profile) else _IDLE_ADVICE).get(cause, _IDLE_ADVICE[cause])


_GRAPH_ADVICE: Mapping[CauseName, str] = {
    "launching": "CUDA graphs launch its kernels already. Put more of the step into one graph, or more work into each "
    "kernel.",
    "python": "Take that work out of the step: graphs are launched late because of it.",
    "unknown": "Keep the device busy between the graphs: no synchronization, faster input.",
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

"""A serving plan as a document: both phases and why they differ, latency and throughput, room, other ways to serve."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.plan.serving.plan import Phase, ServingPlan
from nearpeak.plan.serving.step import StepTime
from nearpeak.render.document import Document, Paragraph, Picture, Table
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.views.plan.training import gigabytes, weakest_sentence
from nearpeak.units import percent, quantity, seconds

MOST_CHOICES = 8
MOST_FRONT = 14
PARTS = ("gemm", "experts", "attention", "elementwise", "communication", "layers", "host")
MEANINGS = {
    "gemm": "projections, dense layers, output layer",
    "experts": "routed experts",
    "attention": "reading the KV cache, scores of prompts",
    "elementwise": "norms, activations",
    "communication": "between GPUs",
    "layers": "gaps between kernels",
    "host": "the device waits for the host",
}


def document(plan: ServingPlan) -> Document:
    """The report."""
    simulated, load = plan.simulation, plan.load
    replicas = f"{plan.replicas} replica{'s' if plan.replicas > 1 else ''} of {plan.layout.gpus}"
    return Document(
        title=f"Serving {plan.model.name} on {plan.cluster.gpus} x {plan.cluster.machine.name}: "
        f"TTFT {seconds(simulated.ttft.mean)}, TPOT {seconds(simulated.tpot.mean)}, "
        f"{simulated.tokens_per_second:,.0f} tokens/s",
        facts=(
            f"{replicas} GPU{'s' if plan.layout.gpus > 1 else ''} ({plan.layout}), {plan.precision.name}, "
            f"{plan.engine}; {load.prompt} tokens in, {load.output} out, {load.concurrency:g} requests in flight.",
            f"Simulated: {simulated.workload}.",
            *(
                [f"${plan.dollars_per_million_tokens:.3g} per million output tokens at ${plan.price:g} per GPU hour."]
                if plan.dollars_per_million_tokens is not None
                else []
            ),
        ),
        parts=tuple(_parts(plan)),
    )


def _parts(plan: ServingPlan) -> Iterator[Paragraph | Table | Picture]:
    yield _clients(plan)
    yield _error_ranges(plan)
    yield _steps(plan)
    yield _phase_limits(plan)
    yield Paragraph(text=f"The batch at which decode stops being limited by memory: {plan.critical_batch}.")
    yield _curve(plan)
    yield _memory_table(plan)
    if len(plan.choices) > 1:
        yield _choices(plan)
    if plan.front:
        yield _front(plan)
    yield from _modes(plan)
    if plan.front:
        yield Picture(title="Throughput against speed per user", svg=front_picture(plan))
    yield Picture(title="Throughput against concurrency", svg=throughput_picture(plan))
    yield Picture(title="Latency against concurrency", svg=latency_picture(plan))


def _clients(plan: ServingPlan) -> Table:
    simulated = plan.simulation
    rows = tuple(
        (name, *(seconds(value) for value in (item.mean, item.median, item.p90, item.p99)), meaning)
        for name, item, meaning in (
            ("TTFT", simulated.ttft, "to the first token"),
            ("of it queue", simulated.queue, "before its prompt starts"),
            ("TPOT", simulated.tpot, "per further token"),
            ("latency", simulated.latency, "to the last token"),
        )
    )
    preempted = f"{simulated.preemptions} preemptions; " if simulated.preemptions else ""
    return Table(
        title="What clients see",
        headers=("", "mean", "median", "p90", "p99", "seconds of a request"),
        rows=rows,
        align="lrrrrl",
        note=f"{simulated.requests} requests in {seconds(simulated.seconds)}; {preempted}at most "
        f"{percent(simulated.cache_peak)} of the KV cache in use; GPUs busy {percent(simulated.busy)} of the time.",
    )


def _steps(plan: ServingPlan) -> Table:
    decode, prefill = plan.replica.decode, plan.replica.prefill
    rows = [
        (name, seconds(_part(prefill, name)), seconds(_part(decode, name)), MEANINGS[name])
        for name in PARTS
        if _part(decode, name) or _part(prefill, name)
    ]
    rows.append(("step", seconds(prefill.seconds), seconds(decode.seconds), ""))
    return Table(
        title=f"One prompt alone, and one step in which {plan.phases.decode.tokens:.3g} sequences decode",
        headers=("part", "prefill", "decode", "what"),
        rows=tuple(rows),
        align="lrrl",
        totals=1,
    )


def _error_ranges(plan: ServingPlan) -> Paragraph:
    """Ranges from validation, and the weakest source."""
    text = weakest_sentence(plan.replica.provenance)
    if plan.replica.spread:
        (first_low, first_high), (low, high) = plan.ttft_range, plan.tpot_range
        text = (
            f"Ranges: TTFT {seconds(first_low)} to {seconds(first_high)}, TPOT {seconds(low)} to {seconds(high)}, "
            f"where eight of ten published runs lay, each source left out of the fit in turn. {text}"
        )
    return Paragraph(text=text, kind="small")


def _part(step: StepTime, name: str) -> float:
    value: float = getattr(step, name)
    return value


def _phase_limits(plan: ServingPlan) -> Table:
    def row(phase: Phase) -> tuple[str, ...]:
        return (
            phase.name,
            f"{phase.tokens:.4g}" if phase.tokens < 1000 else f"{phase.tokens:.0f}",
            quantity(phase.flops, "FLOP"),
            quantity(phase.bytes_moved, "B"),
            f"{phase.intensity:.0f}",
            f"{phase.ridge:.0f}",
            phase.limiter,
        )

    return Table(
        title="Why one is limited by compute and the other by memory, per GPU",
        headers=("phase", "tokens", "work", "moves", "FLOP/B", "needed", "limit"),
        rows=(row(plan.phases.prefill), row(plan.phases.decode)),
        align="lrrrrrl",
        note="All tokens of a pass share one reading of the weights. needed: FLOP per byte at which the GPU computes "
        "for as long as it reads.",
    )


def _curve(plan: ServingPlan) -> Table:
    rows = [
        (
            f"{point.concurrency:g}",
            f"{point.running:.0f}",
            seconds(point.ttft),
            seconds(point.tpot),
            f"{point.tokens_per_second_per_user:.1f}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.tokens_per_second_per_gpu:,.0f}",
            point.limiter,
        )
        for point in plan.curve
    ]
    return Table(
        title="One replica against concurrency",
        headers=("in flight", "running", "TTFT", "TPOT", "tok/s user", "tok/s", "tok/s GPU", "limit"),
        rows=tuple(rows),
        align="rrrrrrrl",
        note="running: requests that the KV cache has room for; the others wait, which is part of TTFT. By "
        "formulas for a steady load, as are the tables below.",
    )


def _memory_table(plan: ServingPlan) -> Table:
    room = plan.memory
    rows = [
        ("weights", gigabytes(room.weights), f"{room.weights / room.memory:.1%}"),
        ("context, graphs, buffers", gigabytes(room.reserved), f"{room.reserved / room.memory:.1%}"),
        ("KV cache", gigabytes(room.cache), f"{room.cache / room.memory:.1%}"),
        ("GPU", gigabytes(room.memory), "100.0%"),
    ]
    return Table(
        title="Memory of one GPU",
        headers=("part", "GB", "share"),
        rows=tuple(rows),
        bars=tuple(value / room.memory for value in (room.weights, room.reserved, room.cache)),
        totals=1,
        note=f"The cache holds {room.tokens:,} tokens ({quantity(room.bytes_per_token, 'B')} each on a GPU), or "
        f"{room.sequences:,.0f} sequences of {plan.load.prompt + plan.load.output}"
        + (" in each attention group." if plan.layout.dp > 1 else "."),
    )


def _choices(plan: ServingPlan) -> Table:
    fitting = [choice for choice in plan.choices if choice.serving is not None]
    rows = [
        (
            str(choice.layout),
            str(choice.replicas),
            seconds(choice.serving.ttft),
            seconds(choice.serving.tpot),
            f"{choice.tokens_per_second:,.0f}",
            choice.serving.limiter,
        )
        for choice in fitting[:MOST_CHOICES]
        if choice.serving is not None
    ]
    missing = len(plan.choices) - len(fitting)
    return Table(
        title="Layouts under this load, the most tokens per second first",
        headers=("replica", "replicas", "TTFT", "TPOT", "tok/s", "limit"),
        rows=tuple(rows),
        align="lrrrrl",
        note=f"{missing} others do not fit." if missing else "",
    )


def _front(plan: ServingPlan) -> Table:
    step = max(1, -(-len(plan.front) // MOST_FRONT))
    rows = [
        (
            str(option.layout),
            f"{option.serving.concurrency:g}",
            f"{option.per_user:.1f}",
            f"{option.per_gpu:,.0f}",
            seconds(option.serving.ttft),
            seconds(option.serving.tpot),
        )
        for option in plan.front[::step]
    ]
    return Table(
        title="The front: none is faster for a user and has more throughput per GPU",
        headers=("replica", "in flight", "tok/s user", "tok/s GPU", "TTFT", "TPOT"),
        rows=tuple(rows),
        align="lrrrrr",
        note=f"Every {step}. of {len(plan.front)}." if step > 1 else "",
    )


def _modes(plan: ServingPlan) -> Iterator[Table]:
    apart, guessed = plan.disaggregated, plan.speculative
    if apart is not None:
        yield Table(
            title="Prefill and decode on machines of their own",
            headers=("what", "value"),
            rows=(
                ("TTFT", f"{seconds(apart.ttft)}, of it {seconds(apart.transfer_seconds)} to move the cache"),
                ("TPOT", seconds(apart.tpot)),
                ("tokens/s", f"{apart.tokens_per_second:,.0f} ({apart.tokens_per_second_per_gpu:,.0f} per GPU)"),
                ("requests/s", f"prefill takes {apart.prefill_limit:.2f}, decode {apart.decode_limit:.2f}"),
                ("limit", apart.limiter),
                ("balance", f"{apart.balance:.2f} prefill replicas per decode replica"),
            ),
            align="ll",
            note=weakest_sentence(apart.provenance),
        )
    if guessed is not None:
        pays = "never" if guessed.break_even is None else f"above an acceptance of {percent(guessed.break_even, 0)}"
        yield Table(
            title="With guesses that the model verifies",
            headers=("what", "value"),
            rows=(
                ("TPOT", f"{seconds(guessed.tpot)} instead of {seconds(guessed.plain_tpot)}"),
                ("speedup", f"{guessed.speedup:.2f}"),
                ("tokens per step", f"{guessed.tokens_per_step:.2f}"),
                ("verifying", seconds(guessed.verify_seconds)),
                ("guessing", seconds(guessed.draft_seconds)),
                ("pays", pays),
            ),
            align="ll",
            note=weakest_sentence(guessed.provenance),
        )


def front_picture(plan: ServingPlan) -> str:
    """Tokens per second per GPU against those that one user sees."""
    points = tuple((option.per_user, option.per_gpu) for option in plan.front)
    labels = tuple(f"{option.layout}, {option.serving.concurrency:g} in flight" for option in plan.front)
    return line_plot(
        [Series(name="none is better in both", points=points, labels=labels)],
        title=f"{plan.model.name} in {plan.precision.name} on {plan.cluster.gpus} x {plan.cluster.machine.name}",
        x_label="tokens/s that one user sees",
        y_label="tokens/s per GPU",
        log_x=True,
        log_y=True,
        y_format=lambda value: f"{value:,.0f}",
    )


def throughput_picture(plan: ServingPlan) -> str:
    """Tokens per second per GPU against concurrency."""
    points = tuple((point.concurrency, point.tokens_per_second_per_gpu) for point in plan.curve)
    labels = tuple(
        f"{point.concurrency:g} in flight: {point.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        for point in plan.curve
    )
    return line_plot(
        [Series(name="tokens/s per GPU", points=points, labels=labels)],
        title=_title(plan),
        x_label="requests in flight on a replica",
        y_label="tokens/s per GPU",
        log_x=True,
        log_y=True,
        x_ticks=[(point.concurrency, f"{point.concurrency:g}") for point in plan.curve],
        y_format=lambda value: f"{value:,.0f}",
    )


def latency_picture(plan: ServingPlan) -> str:
    """TTFT and TPOT against concurrency."""
    series = [
        Series(
            name=name.upper(),
            points=tuple((point.concurrency, getattr(point, name)) for point in plan.curve),
            color=number,
        )
        for number, name in enumerate(("ttft", "tpot"))
    ]
    return line_plot(
        series,
        title=_title(plan),
        x_label="requests in flight on a replica",
        y_label="seconds",
        log_x=True,
        log_y=True,
        x_ticks=[(point.concurrency, f"{point.concurrency:g}") for point in plan.curve],
        y_format=seconds,
    )


def _title(plan: ServingPlan) -> str:
    return f"{plan.model.name} in {plan.precision.name} on {plan.layout.gpus} x {plan.cluster.machine.name}"

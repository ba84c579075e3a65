"""A whole optimization: from a verdict to a proof.

A small Llama is written the way that papers write formulas: one operation after the other. A profile says where the
time of a training step goes and names wastes with what each would save; the fixes that it names are put in; and the
two steps are timed against each other in turns. The table compares what the profile predicted with what was gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import nearpeak
from nearpeak import kernels
from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.profiles.finding import saved_together
from nearpeak.profiles.grade import grade_profile
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, seconds

FIXES = {
    "unfused-norm": "RMSNorm in one kernel",
    "attention-written-out": "scaled_dot_product_attention",
    "unfused-gated-activation": "SwiGLU in one kernel",
    "logits-upcast": "the loss without logits in memory",
    "logits-kept": "the loss without logits in memory",
    "unfused-optimizer": "a fused AdamW",
}
"""What is done about a rule's finding; others are left as they are."""
WITHOUT_GPU = ("attention-written-out", "unfused-optimizer")
"""Rules whose fixes are torch's own; nearpeak's kernels are for GPUs, and elsewhere the same plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model and its batch."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    tokens: int
    dtype: torch.dtype


class Layer(nn.Module):
    """Attention and SwiGLU; `fixed` has the rules whose fixes are in."""

    def __init__(self, sizes: Sizes, fixed: frozenset[str]) -> None:
        super().__init__()
        self.heads, self.fixed = sizes.heads, fixed
        self.norms = nn.ParameterList(torch.ones(sizes.hidden) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        x = x + self.out(self.attention(norm(x, self.norms[0], self.fixed)))
        y = norm(x, self.norms[1], self.fixed)
        gate, up = self.gate(y), self.up(y)
        fused = "unfused-gated-activation" in self.fixed
        out: torch.Tensor = self.down(kernels.swiglu(gate, up) if fused else gate * torch.sigmoid(gate) * up)
        return x + out

    def attention(self, y: torch.Tensor) -> torch.Tensor:
        """Softmax of the scores under a mask, or the same in one op."""
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if "attention-written-out" in self.fixed:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            tokens = y.shape[1]
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=y.device).tril()
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            mixed = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        return mixed.transpose(1, 2).flatten(2)


def norm(x: torch.Tensor, weight: torch.Tensor, fixed: frozenset[str]) -> torch.Tensor:
    """RMSNorm."""
    if "unfused-norm" in fixed:
        return kernels.rms_norm(x, weight)
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


class Llama(nn.Module):
    """Gives the loss of a batch."""

    def __init__(self, sizes: Sizes, fixed: frozenset[str]) -> None:
        super().__init__()
        self.fixed = fixed
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.Sequential(*(Layer(sizes, fixed) for _ in range(sizes.layers)))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        x = norm(self.layers(self.embedding(tokens[:, :-1])), self.norm, self.fixed).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        if self.fixed & {"logits-upcast", "logits-kept"}:
            loss: torch.Tensor = kernels.linear_cross_entropy(x, self.head.weight, targets)
            return loss
        return functional.cross_entropy(self.head(x).float(), targets)


def training_step(context: Context, sizes: Sizes, fixed: frozenset[str] = frozenset()) -> Callable[[], None]:
    """One step of a model with these fixes in."""
    torch.manual_seed(0)
    with context.building():
        model = Llama(sizes, fixed).to(context.device, sizes.dtype)
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=context.device)
        how: dict[str, Any] = {"fused": True} if "unfused-optimizer" in fixed else {"foreach": False}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def example(context: Context) -> Iterator[Part]:
    """Profile, findings, fixes, proof; where nothing runs, what the fixes are expected to save."""
    sizes = context.pick(
        gpu=Sizes(
            layers=4,
            hidden=2048,
            heads=16,
            intermediate=5632,
            vocabulary=32000,
            batch=2,
            tokens=2048,
            dtype=context.half,
        ),
        cpu=Sizes(
            layers=2,
            hidden=128,
            heads=4,
            intermediate=344,
            vocabulary=1024,
            batch=1,
            tokens=256,
            dtype=torch.float32,
        ),
    )
    if context.measures:
        yield from _measured(context, sizes)
    else:
        yield from _predicted(context, sizes)


def _measured(context: Context, sizes: Sizes) -> Iterator[Part]:
    slow = training_step(context, sizes)
    context.progress("a profile of the step as it is written")
    before = nearpeak.profile(slow, on=context.machine)
    lost = max((part for part in before.waterfall.parts if part.name != "ideal"), key=lambda part: part.seconds)
    grade = grade_profile(before)
    yield from prose(
        f"The verdict: a step takes {seconds(before.wall_s)}, and the hardware could do the same work in"
        f" {seconds(before.ideal_s)}. Most is lost to {lost.name}: {seconds(lost.seconds)}."
        if grade.is_trusted
        else f"Grade {grade.letter}: {'; '.join(grade.reasons)}. A step takes {seconds(before.wall_s)}."
    )
    known = {rule: fix for rule, fix in FIXES.items() if context.gpu or rule in WITHOUT_GPU}
    done = [finding for finding in before.findings if finding.rule in known]
    yield Table(
        title="What the profile found",
        headers=("rule", "saves", "share", "what is done"),
        rows=tuple(
            (
                finding.rule,
                seconds(finding.saving_s) if grade.is_trusted else "-",
                percent(finding.share) if grade.is_trusted else "-",
                known.get(finding.rule, "left as it is"),
            )
            for finding in before.findings
        ),
        align="lrrl",
    )
    if not done:
        yield from prose("Nothing was found that this example knows how to fix, so it ends here.")
        return
    quick = training_step(context, sizes, frozenset(finding.rule for finding in done))
    context.progress("a profile of the step with the fixes in")
    after = nearpeak.profile(quick, on=context.machine)
    waterfalls: dict[str, dict[str, float]] = {
        name: {part.name: part.seconds for part in profile.waterfall.parts}
        for name, profile in (("as written", before), ("with the fixes", after))
    }
    yield stacked_waterfalls(waterfalls, "The step before and after, by parts of its wall time")
    context.progress("both in turns")
    kind = "pipelined" if context.gpu else "auto"  # the wall time with steps in flight, as in training
    proof = nearpeak.compare(slow, quick, names=("as written", "with the fixes"), max_seconds=2.0, kind=kind)
    context.flags.extend((proof.a.flags, proof.b.flags))
    # each finding is right within a fifth where nothing else runs; these are several
    row = Prediction(
        what="share of the step saved",
        predicted=saved_together(done) / before.wall_s,
        measured=1 - proof.ratio,
        low=0.5,
        high=1.5,
    )
    yield prediction_table("Predicted and measured", [row], unit="%")
    yield from prose(
        f"The proof: in {proof.pairs} pairs of runs in random order the step with the fixes takes {proof.ratio:.2f}"
        f" times as long as the one without, between {proof.low:.2f} and {proof.high:.2f} with {proof.confidence:.0%}"
        f" confidence: {proof.verdict.lower()}."
    )
    if after.findings and grade_profile(after).is_trusted:
        left = after.findings[0]
        yield from prose(
            f"What is left: the next profile's largest finding is {left.rule}, {seconds(left.saving_s)} of a step of"
            f" {seconds(after.wall_s)}."
        )


def stacked_waterfalls(waterfalls: Mapping[str, Mapping[str, float]], title: str) -> StackedBars:
    """Seconds by part of the wall time, a bar for each waterfall; parts of less than a hundredth are one."""
    least = 0.01 * max(sum(parts.values()) for parts in waterfalls.values())
    large = list(dict.fromkeys(name for parts in waterfalls.values() for name in parts if parts[name] >= least))
    bars = []
    for name, parts in waterfalls.items():
        rest = sum(value for part, value in parts.items() if part not in large)
        pieces = (*((part, parts.get(part, 0.0)) for part in large), ("rest", rest))
        bars.append(Bar(name=name, pieces=pieces))
    return StackedBars(title=title, bars=tuple(bars))


def _predicted(context: Context, sizes: Sizes) -> Iterator[Part]:
    everything = frozenset(FIXES)
    written = context.predict(training_step(context, sizes))
    rows = [Prediction(what="as written", predicted=written, measured=None)]
    bars = []
    for rules, what in _grouped():
        alone = context.predict(training_step(context, sizes, rules))
        rows.append(Prediction(what=f"with {what}", predicted=alone, measured=None))
        bars.append(Bar(name=min(rules), pieces=(("saved", max(written - alone, 0.0)),)))
    together = context.predict(training_step(context, sizes, everything))
    rows.append(Prediction(what="with all of them", predicted=together, measured=None))
    yield prediction_table("A training step, with each fix alone and with all", rows)
    yield StackedBars(title="What each fix alone is expected to save", bars=tuple(bars))
    yield from prose(
        f"With all of them the step is expected to take {together / written:.2f} times as long. On the machine itself"
        " this example profiles the step, and puts in what the profile names."
    )


def _grouped() -> Iterator[tuple[frozenset[str], str]]:
    """Rules that have the same fix, together."""
    for what in dict.fromkeys(FIXES.values()):
        yield frozenset(rule for rule, fix in FIXES.items() if fix == what), what

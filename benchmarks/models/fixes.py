"""Predicted against realized savings of real models: each fix that `nearpeak profile` proposes, made by hand and timed.

    PYTHONPATH=src python -m benchmarks.models.fixes --profiles FOLDER --json benchmarks/results/model_fixes.json
    python -m benchmarks.models.fixes --show benchmarks/results/model_fixes_h200.json

The models are those of `benchmarks/models/steps.py`, training eager, as `transformers` has them. A fix is switched on
and off on one model, so that both ways are measured in turns on the same weights; what is realized is the median of
what the rounds saved. FOLDER has the profiles of the plain steps, MODEL_train.json.gz, as `benchmarks.models.profiles
--folder FOLDER` keeps them. `benchmarks.pages.model_fixes` prints the table without transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import inspect
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import activations
from transformers.integrations import moe
from transformers.loss import loss_utils
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.vit import modeling_vit

import nearpeak
from benchmarks.models.steps import Steps, make_steps, pad_vocabulary
from benchmarks.pages.model_fixes import table
from benchmarks.profiles.findings import block_seconds
from nearpeak.findings.rules.unfused_norm import SHORT_ROW
from nearpeak.measure.statistics import median

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what that is with the fix."""
compiled = torch.compile(dynamic=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What to change for a finding, and which findings it answers: those of its rules at lines of `lines`."""

    rules: tuple[str, ...]
    lines: tuple[Callable[..., Any], ...]
    patches: Callable[[Steps], list[Patch]]

    def answers(self, finding: nearpeak.Finding) -> bool:
        file, _, line = finding.source.rpartition(":")
        if finding.rule not in self.rules or not line.isdigit():
            return False
        for function in self.lines:
            source, first = inspect.getsourcelines(function)
            name = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").name
            if name == Path(file).name and first <= int(line) < first + len(source):
                return True
        return False


@contextlib.contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Has the patches in force inside, and nothing left of them after."""
    before = [vars(owner).get(name, patched) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(patches, before, strict=True):
            if value is patched:  # it was inherited, or not there
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


def fused_optimizer(steps: Steps) -> list[Patch]:
    return [(steps, "optimizer", torch.optim.AdamW(steps.model.parameters(), lr=1e-4, fused=True))]


def padded_vocabulary(steps: Steps) -> list[Patch]:
    model = copy.deepcopy(steps.model)
    pad_vocabulary(model)
    return [(steps, "model", model), (steps, "optimizer", torch.optim.AdamW(model.parameters(), lr=1e-4))]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """On logits as they are: autocast would cast them to float32."""
    with torch.autocast(logits.device.type, enabled=False):
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return cross_entropy(logits, functional.pad(labels, (0, 1), value=-100)[..., 1:])


def tanh_gelu(self: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    return functional.gelu(input, approximate="tanh")


@compiled
def compiled_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden_states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(hidden_states.dtype)


def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if self.weight.numel() < SHORT_ROW:
        return compiled_rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@compiled
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def llama_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


@compiled
def gated_halves(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    return gated_halves(gate_up)


@compiled
def weigh(projected: torch.Tensor, absent: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return projected.masked_fill(absent, 0.0) * weights.unsqueeze(-1)


def experts(self: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`grouped_mm_experts_forward` of transformers 5.17 for experts without biases, with `weigh` as one function."""
    (tokens, width), choices = hidden_states.shape, chosen.size(-1)
    expert, order = torch.sort(chosen.reshape(-1))
    selected = hidden_states[order // choices]
    counted = expert.int() if expert.is_cuda else expert.float()
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    absent = (expert >= self.num_experts).unsqueeze(-1)
    expert.clamp_(max=self.num_experts - 1)
    selected.masked_fill_(absent, 0.0)
    projected = moe._grouped_linear(selected, self.gate_up_proj, offsets, is_transposed=self.is_transposed)
    projected = self._apply_gate(projected.masked_fill(absent, 0.0))
    projected = moe._grouped_linear(projected, self.down_proj, offsets, is_transposed=self.is_transposed)
    weighted = weigh(projected, absent, weights.reshape(-1)[order])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return weighted[inverse].view(tokens, choices, width).sum(dim=1).to(hidden_states.dtype)


def cast_once(kind: Any) -> list[Patch]:
    """An attention's input in bfloat16 before its projections, each of which would cast it."""
    original = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        return original(self, hidden_states.to(torch.bfloat16), *args, **options)

    return [(kind, "forward", forward)]


def patch(owner: Any, name: str, value: Any, *rules: str) -> Fix:
    """A fix that replaces one function wherever it is called."""
    return Fix(rules=rules, lines=(getattr(owner, name),), patches=lambda _: [(owner, name, value)])


def rotary(modeling: Any) -> Fix:
    return patch(modeling, "apply_rotary_pos_emb", compiled(modeling.apply_rotary_pos_emb), "unfused-rotary")


OPTIMIZER = Fix(rules=("unfused-optimizer",), lines=(Steps.train,), patches=fused_optimizer)
CAUSAL_LOSS = Fix(
    rules=("logits-upcast",),
    lines=(loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy),
    patches=lambda steps: [(steps.model, "_loss_function", causal_loss)],
)
FIXES: dict[str, tuple[Fix, ...]] = {
    "gpt2": (
        patch(activations.NewGELUActivation, "forward", tanh_gelu, "unfused-pointwise"),
        Fix(rules=("ragged-product",), lines=(modeling_gpt2.GPT2LMHeadModel.forward,), patches=padded_vocabulary),
        CAUSAL_LOSS,
        OPTIMIZER,
    ),
    "llama": (
        patch(modeling_llama.LlamaRMSNorm, "forward", rms_norm, "unfused-norm"),
        CAUSAL_LOSS,
        rotary(modeling_llama),
        OPTIMIZER,
        patch(modeling_llama.LlamaMLP, "forward", llama_mlp, "unfused-gated-activation"),
    ),
    "qwen3_moe": (
        patch(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", rms_norm, "unfused-norm"),
        Fix(
            rules=("unfused-pointwise",),
            lines=(moe.grouped_mm_experts_forward,),
            patches=lambda _: [(moe.ALL_EXPERTS_FUNCTIONS, "_local_mapping", {"grouped_mm": experts})],
        ),
        rotary(modeling_qwen3_moe),
        OPTIMIZER,
        patch(modeling_qwen3_moe.Qwen3MoeExperts, "_apply_gate", apply_gate, "unfused-gated-activation"),
        CAUSAL_LOSS,
    ),
    "vit": (
        OPTIMIZER,
        Fix(
            rules=("repeated-cast",),
            lines=(modeling_vit.ViTAttention.forward,),
            patches=lambda _: cast_once(modeling_vit.ViTAttention),
        ),
    ),
    "bert": (
        Fix(
            rules=("ragged-product",),
            lines=(modeling_bert.BertLMPredictionHead.forward,),
            patches=padded_vocabulary,
        ),
        OPTIMIZER,
        Fix(
            rules=("repeated-cast",),
            lines=(modeling_bert.BertSelfAttention.forward,),
            patches=lambda _: cast_once(modeling_bert.BertSelfAttention),
        ),
        Fix(
            rules=("logits-upcast",),
            lines=(modeling_bert.BertForMaskedLM.forward,),
            patches=lambda _: [(modeling_bert, "CrossEntropyLoss", lambda: cross_entropy)],
        ),
    ),
}
"""In the order of what they save on an H200. BERT's GELU is one kernel as it is."""

SECONDS = 0.3
ROUNDS = 5
CHECKED_STEPS = 3
SAME_LOSS = 0.03
"""Losses that differ by less than this share are the same: a fix may round in another place."""


def losses(steps: Steps) -> list[float]:
    """Of the first steps: those after the first also say whether gradients and updates are right."""
    torch.manual_seed(0)
    steps.optimizer.state.clear()
    values = []
    for _ in range(CHECKED_STEPS):
        loss = steps.loss()
        values.append(loss.item())
        loss.backward()
        steps.optimizer.step()
        steps.optimizer.zero_grad()
    return values


def in_turns(steps: Steps, patches: Sequence[Patch], small: bool) -> list[tuple[float, float]]:
    """The wall times of the plain step and of the fixed one, a pair of each round, so that a drift meets both."""
    ways: tuple[Sequence[Patch], ...] = ((), patches)
    calls = []
    for way in ways:
        with patched(way):
            calls.append(1 if small else max(1, round(SECONDS / block_seconds(steps.train, 2))))
    rounds = []
    for _ in range(1 if small else ROUNDS):
        times = []
        for way, count in zip(ways, calls, strict=True):
            with patched(way):
                times.append(block_seconds(steps.train, count))
        rounds.append((times[0], times[1]))
    return rounds


@torch.no_grad()
def restore(steps: Steps, weights: Sequence[torch.Tensor]) -> None:
    for parameter, weight in zip(steps.model.parameters(), weights, strict=True):
        parameter.copy_(weight)


def rows_of(model: str, device: str, small: bool, profile: nearpeak.Profile | None) -> Iterator[dict[str, Any]]:
    """A row for each fix of a model."""
    steps = make_steps(model, "train", device, small)
    weights = [parameter.detach().clone() for parameter in steps.model.parameters()]
    plain_losses = losses(steps)
    for fix in FIXES[model]:
        restore(steps, weights)
        try:
            patches = fix.patches(steps)
            with patched(patches):
                fixed_losses = losses(steps)
            rounds = in_turns(steps, patches, small)
        except Exception as error:  # one that fails must not end the others
            print(f"{model}, {fix.rules[0]}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            continue
        step_s, fixed_s = (median(list(times)) for times in zip(*rounds, strict=True))
        realized_s = median([plain - fixed for plain, fixed in rounds])
        answered = [] if profile is None else [finding for finding in profile.findings if fix.answers(finding)]
        predicted = None if profile is None else sum(finding.saving_s for finding in answered)
        yield {
            "model": model,
            "rule": fix.rules[0],
            "answered": [f"{finding.rule}@{finding.source}" for finding in answered],
            "step_s": step_s,
            "fixed_s": fixed_s,
            "realized_s": realized_s,
            "predicted_s": predicted,
            "ratio": predicted / realized_s if predicted and realized_s > 0.0 else None,
            "rounds_s": rounds,
            "losses": plain_losses,
            "fixed_losses": fixed_losses,
            "same_losses": all(
                abs(one - other) <= SAME_LOSS * abs(one) for one, other in zip(plain_losses, fixed_losses, strict=True)
            ),
        }
        del patches
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(FIXES))
    parser.add_argument("--profiles", type=Path, help="a folder with MODEL_train.json.gz: what was predicted")
    parser.add_argument("--small", action="store_true", help="tiny configurations, to try this on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = nearpeak.machine()
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        saved = arguments.profiles and arguments.profiles / f"{model}_train.json.gz"
        profile = nearpeak.load(saved) if saved and saved.exists() else None
        for row in rows_of(model, device, arguments.small, profile):
            rows.append(row)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if arguments.json:
                result = {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "machine": machine.name,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "rows": rows,
                }
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()

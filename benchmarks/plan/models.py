"""Every model of the planner's catalogue against the one that `transformers` builds from the same config.

    python -m benchmarks.plan.models [--flops] [--only NAME]

Parameters: all of them, on the meta device. FLOPs (`--flops`): a forward pass of a copy with few layers on fake
tensors, counted by nearpeak's own formulas, against the planner's; matrix products and attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from typing import Any

import torch
import transformers

import nearpeak
from nearpeak.plan.models.catalogue import catalogue_entries
from nearpeak.plan.models.config import from_config
from nearpeak.plan.models.model import Model, forward_flops

# under fake tensors transformers cannot see that no sequences are packed, and builds masks in place of the causal flag
transformers.masking_utils.find_packed_sequence_indices = lambda *_: None
BATCH, TOKENS = 2, 100
"""Fewer tokens than the shortest window: a window is a mask for transformers, of which a trace sees no values."""
ABSENT = ("grok-1",)
"""Types that transformers cannot build."""
UNTRACEABLE = {
    "dbrx": "asks which experts are hit, which fake tensors cannot say",
    "nemotron_h": "writes its scan out in plain operators, which have other FLOPs than the kernel",
}
"""Types whose FLOPs a trace cannot give."""
EAGER = ("gemma2", "mpt", "gpt_oss")
"""Types whose attention transformers writes out: it computes the scores that the mask hides, too."""


def built(config: dict[str, Any]) -> Any:
    """The model that transformers builds, on the current device."""
    config = dict(config)
    kind = config.pop("model_type")
    if kind == "gemma3_text":
        config.pop("sliding_window_pattern", None)
    settings = transformers.AutoConfig.for_model(kind, **config)
    if kind == "vit":
        return transformers.ViTForImageClassification(settings)
    return transformers.AutoModelForCausalLM.from_config(settings)


def parameters_of(config: dict[str, Any]) -> int:
    """How many weights transformers builds."""
    with torch.device("meta"):
        model = built(config)
    return sum(parameter.numel() for parameter in model.parameters())


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """The config with few layers of each kind, so that tracing is quick."""
    config = dict(config)
    for field in ("num_hidden_layers", "n_layer", "n_layers"):
        if field in config:
            config[field] = min(config[field], 6)
    if "hybrid_override_pattern" in config:
        config["hybrid_override_pattern"] = config["hybrid_override_pattern"][:8]
        config["num_hidden_layers"] = 8
    return config


def traced_flops(config: dict[str, Any]) -> float:
    """FLOPs of matrix products and attention in a forward pass on fake tensors."""
    with nearpeak.fake():
        model = built(config).to(torch.bfloat16).eval()
        if config["model_type"] == "vit":
            size = config["image_size"]
            inputs = {"pixel_values": torch.zeros(BATCH, 3, size, size, dtype=torch.bfloat16)}
        else:
            inputs = {"input_ids": torch.zeros(BATCH, TOKENS, dtype=torch.long), "use_cache": False}

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    estimate = nearpeak.estimate(forward, on="h200-sxm")
    return float(sum(op.flops for op in estimate.ops if op.family in ("matrix", "attention", "convolution")))


def planned_flops(model: Model, kind: str) -> float:
    """The same by the planner."""
    tokens = model.image_tokens or TOKENS
    if kind == "llama4_text":  # transformers sends every token through every expert, with zeros
        model = dataclasses.replace(model, active_experts=model.experts)
    if kind in EAGER:
        model = dataclasses.replace(model, causal=False)
    flops = forward_flops(model, tokens)
    return BATCH * tokens * (flops.total - flops.scan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flops", action="store_true", help="count FLOPs of a reduced copy too")
    parser.add_argument("--only", help="one model")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    wrong = 0
    for name, entry in catalogue_entries().items():
        if arguments.only and name != arguments.only:
            continue
        if entry.config["model_type"] in ABSENT:
            print(f"{name:22} is not in transformers")
            continue
        config = dict(entry.config)
        model = from_config(config)
        planned, there = model.parameters, parameters_of(config)
        if config["model_type"] == "mpt":  # transformers has it with ALiBi alone
            planned -= model.positions * model.hidden
        line = f"{name:22}{there:18,}{planned - there:+14,}"
        wrong += planned != there
        if arguments.flops:
            config = reduced(config)
            planned_work = planned_flops(from_config(config), config["model_type"])
            if config["model_type"] in UNTRACEABLE:
                line += f"  {UNTRACEABLE[config['model_type']]}"
            else:
                there_work = traced_flops(config)
                line += f"{there_work:14.4e}{planned_work / there_work - 1:+10.3%}"
                wrong += abs(planned_work / there_work - 1) > 1e-3
        print(line, flush=True)
    print("all equal" if not wrong else f"{wrong} differ")
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()

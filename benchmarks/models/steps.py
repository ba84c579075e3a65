"""A plain script to profile: steps of a `transformers` model with random weights, training or inference.

    python benchmarks/models/steps.py llama train --steps 30
    nearpeak profile benchmarks/models/steps.py llama compiled --steps 30

It knows nothing of nearpeak, and prints the seconds of a step by its own clock: the last steps as a whole, with the
device waited for before and after them. `benchmarks.models.profiles` runs it alone and under nearpeak.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

MODES = ("train", "compiled", "tuned", "inference")
SMALL_ENCODER = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def gpt2(small: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    # A processor without bfloat16 takes minutes for the whole vocabulary; the small one is no multiple of 8 either.
    config = transformers.GPT2Config(**({"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1009} if small else {}))
    return transformers.GPT2LMHeadModel(config), {"input_ids": (2, 64) if small else (16, 1024)}


def llama(small: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    shape = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    if small:
        shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**shape, **heads)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": (2, 64) if small else (4, 4096)}


def qwen3_moe(small: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    shape = {"hidden_size": 1024, "num_hidden_layers": 12, "moe_intermediate_size": 512, "num_experts": 32}
    if small:
        shape = {"hidden_size": 128, "num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    config = transformers.Qwen3MoeConfig(
        **shape, **heads, vocab_size=512 if small else 32000, num_experts_per_tok=4, intermediate_size=2048
    )
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16), {"input_ids": (2, 16) if small else (8, 2048)}


def vit(small: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    config = transformers.ViTConfig(**(SMALL_ENCODER if small else {}), num_labels=1000)
    return transformers.ViTForImageClassification(config), {"pixel_values": (2 if small else 128, 3, 224, 224)}


def bert(small: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    config = transformers.BertConfig(**(SMALL_ENCODER | {"vocab_size": 1018} if small else {}))
    return transformers.BertForMaskedLM(config), {"input_ids": (2, 64) if small else (32, 512)}


MODELS = {"gpt2": gpt2, "llama": llama, "qwen3_moe": qwen3_moe, "vit": vit, "bert": bert}
"""Of these, Llama and Qwen3 have weights in bfloat16; the others have float32 and run in bfloat16 by autocast, unless
they are tuned."""


@dataclass
class Steps:
    """A model with its optimizer and one batch: what a step needs."""

    model: Any
    optimizer: torch.optim.Optimizer
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    mixed: bool
    """Whether it runs in bfloat16 by autocast."""

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.labels.device.type, torch.bfloat16, enabled=self.mixed):
            return self.model(**self.inputs, labels=self.labels).loss

    def train(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def infer(self) -> torch.Tensor:
        with torch.autocast(self.labels.device.type, torch.bfloat16, enabled=self.mixed):
            return self.model(**self.inputs).logits


def pad_vocabulary(model: Any) -> None:
    """Grows the embedding and the head to a multiple of 64 tokens; none of the new ones is ever an input or a label."""
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)


def causal_by_position(model: Any) -> None:
    """Leaves the causal mask out: compiled code would make a tensor of it, and attention would compute all scores."""
    transformers.AttentionInterface.register("causal", transformers.AttentionInterface()["sdpa"])
    transformers.AttentionMaskInterface.register("causal", lambda *args, **kwargs: None)
    model.set_attn_implementation("causal")


def make_steps(name: str, mode: str, device: str, small: bool = False) -> Steps:
    """A model in a mode: all but "tuned" are as one writes them first, that one is as fast as settings make it."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tuned = mode == "tuned"
    with torch.device(device):
        model, shapes = MODELS[name](small)
        vocabulary = getattr(model.config, "vocab_size", 1000)
        if tuned:
            model.to(torch.bfloat16)
        inputs = {
            key: torch.randint(vocabulary, shape) if key == "input_ids" else torch.randn(shape, dtype=model.dtype)
            for key, shape in shapes.items()
        }
        labels = inputs.get("input_ids", torch.zeros(shapes.get("pixel_values", (1,))[0], dtype=torch.long))
        if tuned and "input_ids" in inputs:
            pad_vocabulary(model)
        if tuned and name in ("gpt2", "llama", "qwen3_moe"):
            causal_by_position(model)
    if mode == "inference":
        model.eval()
    if mode in ("compiled", "tuned"):
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if tuned else None)
    return Steps(model, optimizer, inputs, labels, mixed=model.dtype == torch.float32)


def make_step(name: str, mode: str, device: str, small: bool = False) -> Callable[[], Any]:
    steps = make_steps(name, mode, device, small)
    return steps.infer if mode == "inference" else steps.train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timed", type=int, default=10, help="how many of the last steps are timed")
    parser.add_argument("--small", action="store_true", help="a tiny configuration, for a CPU")
    parser.add_argument("--json", type=Path, help="write the seconds of a step here as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = make_step(arguments.model, arguments.mode, device, arguments.small)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    started = 0.0
    for number in range(arguments.steps):
        if number == arguments.steps - arguments.timed:
            synchronize()
            started = time.perf_counter()
        step()
    synchronize()
    result = {
        "model": arguments.model,
        "mode": arguments.mode,
        "step_s": (time.perf_counter() - started) / arguments.timed,
    }
    print(json.dumps(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()

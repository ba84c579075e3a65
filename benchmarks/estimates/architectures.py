"""Fifteen architectures, each one training step (forward, backward, AdamW), estimated on a machine of the catalogue.

    python -m benchmarks.estimates.architectures --on h200-sxm --json benchmarks/results/architectures.json

Needs `pip install transformers`, no GPU and no weights: models are built from small configurations on fake tensors.
What is asked: how much of the as-written time has a cost formula, and are the FLOPs of the matrix products those that
the weights and tokens imply.

On a machine with a GPU, `--device cuda` builds the models as fake CUDA tensors, whose ops torch itself chooses, and
`--compare` holds the floors against those of another machine, which had to know that choice:

    python -m benchmarks.estimates.architectures --device cuda --compare benchmarks/results/architectures.json
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import nearpeak

TEXT = {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
LLAMA = {**TEXT, "intermediate_size": 2816, "num_key_value_heads": 4}
BATCH, TOKENS = 4, 1024


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def image(size: int = 224, channels: int = 3) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(BATCH, channels, size, size), "labels": torch.zeros(BATCH, dtype=torch.long)}


def causal(config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    return transformers.AutoModelForCausalLM.from_config(config), tokens()


def clip() -> tuple[Any, dict[str, Any]]:
    model = transformers.CLIPModel(transformers.CLIPConfig())
    ids = torch.zeros(BATCH, 77, dtype=torch.long)
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(BATCH, 3, 224, 224), "return_loss": True}
    return model, inputs


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.T5Config(d_model=512, num_layers=4, num_heads=8, d_ff=2048, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), tokens()


def whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.WhisperConfig(d_model=384, encoder_layers=4, decoder_layers=4)
    labels = torch.zeros(BATCH, 128, dtype=torch.long)
    features = torch.zeros(BATCH, config.num_mel_bins, 3000)
    model = transformers.WhisperForConditionalGeneration(config).eval()  # in training it draws which layers to skip
    return model, {"input_features": features, "labels": labels}


def architectures() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    t = transformers
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
    return {
        "BERT": lambda: (t.BertForMaskedLM(t.BertConfig(max_position_embeddings=TOKENS)), tokens()),
        "GPT-2": lambda: causal(t.GPT2Config(n_layer=4)),
        "Llama": lambda: causal(t.LlamaConfig(**LLAMA)),
        "Qwen3": lambda: causal(t.Qwen3Config(**LLAMA, head_dim=64)),
        "Qwen3-MoE": lambda: causal(t.Qwen3MoeConfig(**LLAMA, **moe)),
        "Mixtral": lambda: causal(t.MixtralConfig(**LLAMA)),
        "Gemma-3": lambda: causal(t.Gemma3TextConfig(**LLAMA, head_dim=64)),
        "Phi": lambda: causal(t.PhiConfig(**TEXT, intermediate_size=4096)),
        "T5": t5,
        "ViT": lambda: (t.ViTForImageClassification(t.ViTConfig()), image()),
        "CLIP": clip,
        "Whisper": whisper,
        "Mamba-2": lambda: causal(
            t.Mamba2Config(
                vocab_size=32000, hidden_size=1024, num_hidden_layers=4, num_heads=32, head_dim=64, state_size=64
            )
        ),
        "DeepSeek-V3": lambda: causal(
            t.DeepseekV3Config(
                **{**LLAMA, "num_key_value_heads": 16},
                moe_intermediate_size=512,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=256,
                kv_lora_rank=128,
            )
        ),
        "ConvNeXt": lambda: (t.ConvNextForImageClassification(t.ConvNextConfig()), image()),
    }


def closed_form(name: str, model: Any) -> float | None:
    """FLOPs of the matrix products and of attention in a training step, for models of linear layers and attention.

    Six per weight and token (two forward, four backward), and fourteen per head, unmasked pair and channel.
    """
    if name not in ("Llama", "Qwen3", "Phi"):
        return None
    config = model.config
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = TOKENS * (TOKENS + 1) / 2
    attention = 14 * BATCH * config.num_attention_heads * pairs * width * config.num_hidden_layers
    return 6 * weights * BATCH * TOKENS + attention


def step_of(build: Callable[[], tuple[Any, dict[str, Any]]], device: str) -> tuple[Callable[[], None], Any]:
    """A training step and its model."""
    with nearpeak.fake():
        with torch.device(device):
            model, inputs = build()
        model = model.to(torch.bfloat16)
        inputs = {
            key: value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in inputs.items()
        }
        optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


FLOORS = ("as_written_s", "fused_s", "ideal_s")


def compare(rows: list[dict[str, Any]], other: Path) -> None:
    """The floors against those of another run, and which operators differ in number."""
    theirs = {row["name"]: row for row in json.loads(other.read_text())["rows"]}
    print(f"\n{'architecture':14}{'as written':>12}{'fused':>9}{'ideal':>9}   operators here and there")
    for row in rows:
        known = theirs.get(row["name"], {"error": "is not in it"})
        if "error" in row or "error" in known:
            print(f"{row['name']:14}{row.get('error') or known.get('error')}")
            continue
        deviations = "".join(
            f"{row[key] / known[key] - 1:+{width}.2%}" for key, width in zip(FLOORS, (12, 9, 9), strict=True)
        )
        names = sorted({*row["operators"], *known["operators"]})
        counts = [(name, row["operators"].get(name, 0), known["operators"].get(name, 0)) for name in names]
        different = [f"{name.removeprefix('aten.')} {here} {there}" for name, here, there in counts if here != there]
        print(f"{row['name']:14}{deviations}   {', '.join(different) or 'the same'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="h200-sxm", help="a machine of the catalogue")
    parser.add_argument("--only", help="one architecture")
    parser.add_argument("--device", default="cpu", help="where the fake models are built (cpu)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="hold the floors against those of another run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    columns = {"params": 9, "ops": 8, "as written": 12, "fused": 9, "ideal, ms": 11, "modeled": 10, "took": 8}
    print(f"{'architecture':14}" + "".join(f"{title:>{width}}" for title, width in columns.items()))
    rows = []
    for name, build in architectures().items():
        if arguments.only and name != arguments.only:
            continue
        start = time.perf_counter()
        try:
            step, model = step_of(build, arguments.device)
            estimate = nearpeak.estimate(step, on=arguments.on)
        except Exception as error:
            print(f"{name:14}{type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            continue
        parameters = sum(parameter.numel() for parameter in model.parameters())
        matrix = sum(sum(op.flops for op in estimate.ops if op.family == family) for family in ("matrix", "attention"))
        expected = closed_form(name, model)
        row = {
            "name": name,
            "parameters": parameters,
            "matrix_flops": matrix,
            "closed_form_flops": expected,
            "ops": len(estimate.ops),
            "operators": dict(collections.Counter(op.name for op in estimate.ops if op.family != "view")),
            "as_written_s": estimate.as_written_s,
            "fused_s": estimate.fused_s,
            "ideal_s": estimate.ideal_s,
            "modeled": estimate.coverage.seconds_share,
            "unmodeled": dict(estimate.coverage.unmodeled),
            "took_s": time.perf_counter() - start,
        }
        rows.append(row)
        times = "".join(f"{row[key] * 1e3:9.2f}" for key in ("fused_s", "ideal_s"))
        print(
            f"{name:14}{parameters / 1e6:8.0f}M{row['ops']:8}{row['as_written_s'] * 1e3:12.2f}{times}"
            f"{100 * row['modeled']:9.2f}%{row['took_s']:7.1f}s"
            + (f"  {matrix / expected - 1:+.4%} of the closed form" if expected else "")
            + (f"  {row['unmodeled']}" if row["unmodeled"] else ""),
            flush=True,
        )
    if arguments.compare:
        compare(rows, arguments.compare)
    if arguments.json:
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "on": arguments.on,
            "device": arguments.device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

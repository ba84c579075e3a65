"""Expected and measured kernel times of a Llama-1B training step, eager, on this GPU.

    PYTHONPATH=src python -m benchmarks.estimates.expected --json benchmarks/results/expected.json

Needs `pip install transformers` and a GPU. The step has forward, backward and AdamW with 4 x 4096 tokens.
Measured is the kernel time of the profiler, expected the sum of `expected_s` over the ops.
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import nearpeak
from nearpeak.measure.kernel_times import busy_seconds, profile_calls
from nearpeak.measure.statistics import median

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""


def training_step(batch: int, tokens: int) -> Callable[[], None]:
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=tokens)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(SHAPE["vocab_size"], (batch, tokens), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kernel_seconds(step: Callable[[], None], steps: int) -> list[float]:
    """The time that kernels run, of each of some steps."""
    profiled = profile_calls(step, steps, synchronize=torch.cuda.synchronize)
    return [busy_seconds(kernels) for kernels in profiled]


def by_operator(step: Callable[[], None]) -> dict[str, float]:
    """The device time of one step by operator, for the table."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    rows = [row for row in profiled.key_averages() if row.key.startswith("aten::") and row.self_device_time_total]
    return {row.key.replace("::", "."): row.self_device_time_total * 1e-6 for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    step = training_step(arguments.batch, arguments.tokens)
    for _ in range(3):
        step()
    totals, measured = kernel_seconds(step, arguments.steps), by_operator(step)
    machine = nearpeak.machine()
    estimate = nearpeak.estimate(step, on=machine)
    expected: dict[str, list[float]] = {}
    for op in estimate.ops:
        entry = expected.setdefault(op.name.rpartition(".")[0], [0.0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += op.seconds
        entry[2] += op.expected_seconds or 0.0
    kernels = median(totals)
    print(f"{'operator':58}{'ops':>6}{'bound':>9}{'expected':>9}{'measured, ms':>13}")
    names = sorted({*measured, *(name for name, entry in expected.items() if entry[1] > 0)})
    for name in sorted(names, key=lambda name: -max(measured.get(name, 0.0), expected.get(name, [0, 0, 0])[2])):
        count, bound, guess = expected.get(name, (0.0, 0.0, 0.0))
        if max(bound, guess, measured.get(name, 0.0)) > 5e-5:
            print(f"{name:58}{count:6.0f}{bound * 1e3:9.2f}{guess * 1e3:9.2f}{measured.get(name, 0.0) * 1e3:13.2f}")
    print(
        f"as written {estimate.as_written_s * 1e3:.1f} ms, expected {estimate.expected_device_s * 1e3:.1f} ms, kernels "
        f"{kernels * 1e3:.1f} ms: expected is {estimate.expected_device_s / kernels - 1:+.1%} off"
    )
    if arguments.json:
        result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.name,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "batch": arguments.batch,
            "tokens": arguments.tokens,
            "kernel_s": totals,
            "as_written_s": estimate.as_written_s,
            "fused_s": estimate.fused_s,
            "ideal_s": estimate.ideal_s,
            "expected_s": estimate.expected_device_s,
            "relative_error": estimate.expected_device_s / kernels - 1,
            "measured_by_operator": measured,
            "estimated_by_operator": expected,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

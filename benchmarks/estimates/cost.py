"""The cost of an estimate itself: microseconds per op of a training step, and a step of 70 billion parameters.

    python -m benchmarks.estimates.cost --json benchmarks/results/estimate_cost.json

Needs `pip install transformers`, no GPU and no weights. Each part of the training step of a small Llama is measured
several times; the result is the minimum CPU time, since other processes may use the machine. The large case runs once
in its own process, with wall time and peak memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.trace.trace import trace

SMALL = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
LARGE = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def step_of(settings: dict[str, int], batch: int, tokens: int) -> Callable[[], None]:
    """A training step of a Llama in bfloat16."""
    with nearpeak.fake():
        config = transformers.LlamaConfig(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.zeros(batch, tokens, dtype=torch.long)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_op(machine: nearpeak.Machine, rounds: int) -> dict[str, float]:
    """Microseconds per op: the first trace of a process, a later one, and the bounds."""
    step = step_of(SMALL, 4, 1024)
    traces, bounds = [], []
    for _ in range(rounds):
        start = time.process_time()
        recorded = trace(step)
        traced = time.process_time()
        estimate_trace(recorded, machine)
        bounds.append(time.process_time() - traced)
        traces.append(traced - start)
    ops = len(recorded.ops)
    return {
        "ops": ops,
        "first_trace_us": traces[0] / ops * 1e6,
        "trace_us": min(traces) / ops * 1e6,
        "bounds_us": min(bounds) / ops * 1e6,
    }


def large(machine: nearpeak.Machine, tokens: int) -> dict[str, float]:
    """The step of 70 billion parameters, from nothing to its bounds."""
    start, busy = time.perf_counter(), time.process_time()
    step = step_of(LARGE, 1, tokens)
    built = time.perf_counter()
    recorded = trace(step)
    traced = time.perf_counter()
    estimate = estimate_trace(recorded, machine)
    done = time.perf_counter()
    return {
        "ops": len(recorded.ops),
        "build_s": built - start,
        "trace_s": traced - built,
        "bounds_s": done - traced,
        "total_s": done - start,
        "processor_s": time.process_time() - busy,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "as_written_s": estimate.as_written_s,
    }


def in_own_process(on: str, tokens: int) -> dict[str, float]:
    """`large` where nothing was imported or remembered before."""
    command = [sys.executable, "-m", "benchmarks.estimates.cost", "--on", on, "--tokens", str(tokens), "--large"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="h200-sxm", help="a machine of the catalogue")
    parser.add_argument("--tokens", type=int, default=8192, help="of the large case")
    parser.add_argument("--rounds", type=int, default=6, help="of which the least counts")
    parser.add_argument("--large", action="store_true", help="only the large case, in this process, as JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    machine = nearpeak.machine(arguments.on)
    if arguments.large:
        print(json.dumps(large(machine, arguments.tokens)))
        return
    small = per_op(machine, arguments.rounds)
    print(f"{'per op':24}{'us':>8}")
    for name, key in (("trace, first", "first_trace_us"), ("trace, later", "trace_us"), ("bounds", "bounds_us")):
        print(f"{name:24}{small[key]:8.1f}")
    print(f"{'trace, later + bounds':24}{small['trace_us'] + small['bounds_us']:8.1f}   {small['ops']} ops")
    step = in_own_process(arguments.on, arguments.tokens)
    print(f"\n{'70B, ' + str(arguments.tokens) + ' tokens':24}{'s':>8}")
    for name in ("build", "trace", "bounds", "total", "processor"):
        print(f"{name:24}{step[name + '_s']:8.1f}")
    print(f"{step['peak_memory_gib']:.2f} GiB at most, {step['ops']} ops")
    if arguments.json:
        result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {
                "architecture": platform.machine(),
                "processor": _processor(),
                "python": sys.version.split()[0],
            },
            "on": arguments.on,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "per_op": small,
            "large": {"tokens": arguments.tokens, **step},
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _processor() -> str:
    """As Linux names it."""
    done = subprocess.run(["lscpu"], check=False, capture_output=True, text=True)
    names = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if line.startswith("Model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()

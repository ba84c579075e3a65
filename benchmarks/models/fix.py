"""Training steps of Hugging Face models: eager, compiled, with Liger's kernels, fixed by `nearpeak.fix`, and by hand.

    PYTHONPATH=src python -m benchmarks.models.fix --models llama-1b --json OUT/fix.json
    PYTHONPATH=src python -m benchmarks.models.fix --ways eager,hand --profiles OUT --json OUT/hand.json
    PYTHONPATH=src python -m benchmarks.models.fix --decode --json OUT/decode.json
    PYTHONPATH=src python -m benchmarks.models.fix --train 300 --models llama-1b --json OUT/train.json
    python -m benchmarks.models.fix --show OUT/fix.json

Each model has random weights in bfloat16 and a step of forward, backward and AdamW, as `transformers` has them. Liger
replaces functions of `transformers` for the whole process, so that its steps run in a process of their own; the others
run in turns on one model. Peak memory is that of torch's allocator over two steps. `liger_kernel` is left out where it
is not installed. `by_hand` has the steps by hand, with all kernels that fit; `--profiles` saves what nearpeak says of
them and of the fixed steps. `--decode` generates tokens with a model of 28 layers, in bfloat16 for the time and in
float32 for the tokens, which must be the same. `--train` compares the losses of training steps with those under other
orders of the same batches, and steps after `undo` with those of a model that was never fixed.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib.util
import json
import os
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
from benchmarks.models.by_hand import Decoder
from nearpeak import kernels
from nearpeak._records import to_json
from nearpeak.measure.statistics import median

ROUNDS = 5
CALLS = 3


def llama_1b(small: bool) -> tuple[Any, tuple[int, int]]:
    sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)), (2, 64) if small else (4, 4096)


def llama_8b_width(small: bool) -> tuple[Any, tuple[int, int]]:
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)), (2, 64) if small else (2, 8192)


def qwen3(small: bool) -> tuple[Any, tuple[int, int]]:
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 14}
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16 if small else 128}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)), (2, 64) if small else (4, 4096)


MODELS = {"llama-1b": llama_1b, "llama-8b-width": llama_8b_width, "qwen3": qwen3}
LIGER = {"llama-1b": "llama", "llama-8b-width": "llama", "qwen3": "qwen3"}
"""The end of the name of Liger's function for each model."""


class Program:
    """A model with its optimizer and a batch."""

    def __init__(self, name: str, device: str, small: bool) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            self.model, shape = MODELS[name](small)
            torch.set_default_dtype(torch.float32)
            self.model.train()
            self.tokens = torch.randint(self.model.config.vocab_size, shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fix(self, without: list[str]) -> Any:
        """Fixes the model, with what it does on standard output; leaves the caching allocator empty."""
        fixed = nearpeak.fix(
            self.model,
            input_ids=self.tokens,
            labels=self.tokens,
            use_cache=False,
            optimizer=self.optimizer,
            without=without,
            progress=lambda line: print(f"  {line}", flush=True),
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return fixed


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], object], calls: int = CALLS) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize()
    return (time.perf_counter() - start) / calls


def peak_bytes(step: Callable[[], object], beyond: int = 0) -> int | None:
    """What two steps have in memory beyond so many bytes; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    return torch.cuda.max_memory_allocated() - beyond


def measure(step: Callable[[], None], rounds: int = ROUNDS) -> dict[str, Any]:
    started = time.perf_counter()
    step()
    synchronize()
    first_s = time.perf_counter() - started
    step()
    memory = peak_bytes(step)
    times = [seconds_of(step) for _ in range(rounds)]
    return {"step_s": median(times), "rounds_s": times, "first_s": first_s, "peak_bytes": memory}


def run_liger(name: str, device: str, small: bool) -> dict[str, Any]:
    from liger_kernel import transformers as liger  # type: ignore[import-not-found]

    getattr(liger, f"apply_liger_kernel_to_{LIGER[name]}")()
    return measure(Program(name, device, small).step)


def run_by_hand(program: Program, profile: Path | None) -> dict[str, Any]:
    """The step by hand, whose loss is that of the model as far as rounding goes; both are in the result."""
    with torch.no_grad():
        right = float(program.model(input_ids=program.tokens, labels=program.tokens, use_cache=False).loss)
    decoder = Decoder(program.model)
    optimizer = kernels.AdamW(decoder.parameters(), lr=1e-5)
    with torch.no_grad():
        loss = float(decoder(program.tokens))

    def step() -> None:
        decoder(program.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    row = {**measure(step), "loss": loss, "loss_of_model": right}
    if profile is not None:
        nearpeak.profile(step).save(profile)
    return row


def run_model(
    name: str, device: str, small: bool, ways: list[str], without: list[str], profiles: Path | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    program = Program(name, device, small)
    if "hand" in ways:  # first: the optimizer of the model has no states yet
        row["hand"] = run_by_hand(program, None if profiles is None else profiles / f"hand_{name}.json.gz")
        gc.collect()
    if "eager" in ways:
        row["eager"] = measure(program.step)
    if "fixed" in ways:
        started = time.perf_counter()
        fixed = program.fix(without)
        row["fix_s"] = time.perf_counter() - started
        row["report"] = to_json(fixed.report)
        print(fixed.report.report(), flush=True)
        row["fixed"] = measure(program.step)
        if profiles is not None:
            nearpeak.profile(program.step).save(profiles / f"fixed_{name}.json.gz")
        fixed.undo()
        row["undone"] = measure(program.step, 1)
    if "compiled" in ways:
        program.model.compile()
        row["compiled"] = measure(program.step)
    return row


def run_decode(device: str, small: bool, new_tokens: int, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Seconds per token of `generate` as it is and fixed, and whether the tokens are the same in float32."""
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16 if small else 128}
    row: dict[str, Any] = {"model": "qwen3-decode", "batch": 4, "new_tokens": new_tokens}
    kept: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):  # the tokens of float32 with the fixes that bfloat16 has kept
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).to(dtype).eval()
            prompt = torch.randint(sizes["vocab_size"], (4, 64))

        def generate(tokens: int = new_tokens, model: Any = model, prompt: torch.Tensor = prompt) -> torch.Tensor:
            generated: torch.Tensor = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
            return generated

        calls: list[dict[str, Any]] = []
        handle = model.register_forward_pre_hook(
            lambda _m, _a, given, calls=calls: calls.append(given), with_kwargs=True
        )
        generate(8)
        handle.remove()
        name = str(dtype).removeprefix("torch.")
        eager = generate()
        row[f"eager_{name}_s"] = seconds_of(generate, 1) / new_tokens
        started = time.perf_counter()
        with torch.no_grad():
            fixed = nearpeak.fix(
                model,
                trains=False,
                only=kept,
                without=["torch-compile"],
                progress=lambda line: print(f"  {line}", flush=True),
                **calls[-1],
            )
        row[f"fix_{name}_s"] = time.perf_counter() - started
        row[f"report_{name}"] = to_json(fixed.report)
        kept = [each.id for each in fixed.report.fixes if each.status == "kept"]
        print(fixed.report.report(), flush=True)
        first = generate()
        row[f"fixed_{name}_s"] = min(seconds_of(generate, 1) for _ in range(3)) / new_tokens
        row[f"same_tokens_{name}"] = bool(torch.equal(generate(), eager) and torch.equal(first, eager))
        write(row)
        fixed.undo()
        del model, fixed, calls
        if not kept:
            break
    return row


def train(name: str, device: str, small: bool, steps: int, seed: int, fixes: str) -> dict[str, Any]:
    """The losses of training steps on the same batches in an order that `seed` draws, as they are or fixed; and whether
    steps after `undo` are bitwise those of a model that was never fixed."""
    program = Program(name, device, small)
    rows, tokens = (2, 64) if small else (4, 512)
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(program.model.config.vocab_size, (steps, rows, 1), generator=generator)
    batches = (starts + torch.arange(tokens) * 3) % program.model.config.vocab_size  # sequences that can be learned
    order = torch.randperm(steps, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(steps)

    def step(batch: torch.Tensor) -> torch.Tensor:
        program.tokens = batch.to(device)
        loss: torch.Tensor = program.model(input_ids=program.tokens, labels=program.tokens, use_cache=False).loss
        loss.backward()
        program.optimizer.step()
        program.optimizer.zero_grad()
        return loss.detach()

    program.tokens = batches[0].to(device)
    result: dict[str, Any] = {"seed": seed, "fixed": bool(fixes)}
    if fixes:
        options = {"input_ids": program.tokens, "labels": program.tokens, "use_cache": False}
        ids = [] if fixes == "all" else fixes.split(",")
        before = copy.deepcopy(program.model.state_dict())
        fixed = nearpeak.fix(program.model, optimizer=program.optimizer, only=ids, without=["torch-compile"], **options)
        fixed.undo()
        result["undone"] = [float(step(batch)) for batch in batches[:3]]
        program.model.load_state_dict(before)
        program.optimizer.state.clear()
        with nearpeak.fix_from(fixed.report, program.model, optimizer=program.optimizer, trains=True, **options):
            result["kept"] = [each.id for each in fixed.report.fixes if each.status == "kept"]
            result["losses"] = torch.stack([step(batches[place]) for place in order.tolist()]).tolist()
        return result
    result["losses"] = torch.stack([step(batches[place]) for place in order.tolist()]).tolist()
    return result


def run_training(name: str, device: str, small: bool, steps: int, seeds: int, fixes: str) -> dict[str, Any]:
    """Whether the loss of the fixed model stays within the spread of the original under orders of the same batches."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # else eager steps are not bitwise the same themselves
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    eager = [train(name, device, small, steps, seed, "") for seed in range(seeds)]
    fixed = train(name, device, small, steps, 0, fixes)
    tail = max(1, steps // 10)
    ends = [sum(each["losses"][-tail:]) / tail for each in (*eager, fixed)]
    spread = max(ends[:-1]) - min(ends[:-1])
    return {
        "model": name,
        "steps": steps,
        "eager": eager,
        "fixed": fixed,
        "ends": ends,
        "is_within_spread": min(ends[:-1]) - spread / 2 <= ends[-1] <= max(ends[:-1]) + spread / 2,
        "distance_of_curves": max(abs(a - b) for a, b in zip(eager[0]["losses"], fixed["losses"], strict=True)),
        "same_after_undo": fixed["undone"] == eager[0]["losses"][:3],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'model':16s} {'way':9s} {'ms':>8s} {'GB':>7s} {'of eager':>9s}"]
    for row in rows:
        eager = row.get("eager", {}).get("step_s")
        for way in ("eager", "liger", "compiled", "fixed", "undone", "hand"):
            if way in row and "step_s" in row[way]:
                result = row[way]
                memory = "-" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 1e9:.1f}"
                share = "-" if eager is None else f"{result['step_s'] / eager:.3f}"
                lines.append(f"{row['model']:16s} {way:9s} {1e3 * result['step_s']:8.1f} {memory:>7s} {share:>9s}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default="eager,liger,fixed,compiled")
    parser.add_argument("--without", default="torch-compile", help="ids of fixes to leave out")
    parser.add_argument("--small", action="store_true", help="tiny configurations, to try this on a CPU")
    parser.add_argument("--decode", action="store_true", help="time the generation of tokens instead")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that --decode generates")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train a model instead, as it is and fixed")
    parser.add_argument("--seeds", type=int, default=4, help="orders of the batches for --train as it is")
    parser.add_argument("--only", default="all", help="ids of the fixes for --train")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profiles", type=Path, help="a folder for profiles of fixed steps and of those by hand")
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    parser.add_argument("--liger", choices=MODELS, help="run this model with Liger alone, and print JSON")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.liger:
        print(json.dumps(run_liger(arguments.liger, device, arguments.small)))
        return

    def write(result: dict[str, Any]) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    if arguments.decode:
        decoded = run_decode(device, arguments.small, arguments.tokens, write)
        print(json.dumps({name: value for name, value in decoded.items() if "report" not in name}, indent=1))
        return
    if arguments.train:
        name = arguments.models.partition(",")[0]
        trained = run_training(name, device, arguments.small, arguments.train, arguments.seeds, arguments.only)
        write(trained)
        print(json.dumps({name: value for name, value in trained.items() if name not in ("eager", "fixed")}, indent=1))
        print("kept:", ", ".join(trained["fixed"]["kept"]))
        return
    ways = arguments.ways.split(",")
    rows = []
    for name in arguments.models.split(","):
        liger: dict[str, Any] | None = None
        if "liger" in ways and importlib.util.find_spec("liger_kernel") is not None:
            command = [sys.executable, "-m", "benchmarks.models.fix", "--liger", name]
            ran = subprocess.run(command + ["--small"] * arguments.small, capture_output=True, text=True)
            lines = ran.stdout.strip().splitlines()
            liger = json.loads(lines[-1]) if ran.returncode == 0 and lines else {"problem": ran.stderr[-2000:]}
        without = [id for id in arguments.without.split(",") if id]
        row = run_model(name, device, arguments.small, ways, without, arguments.profiles)
        if liger is not None:
            row["liger"] = liger
        rows.append(row)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if arguments.json:
            result = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": nearpeak.machine().name,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "rows": rows,
            }
            write(result)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()

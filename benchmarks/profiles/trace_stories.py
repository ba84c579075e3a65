"""Are the stories that profiles of trace files tell true? Files whose story is known, recorded here.

    PYTHONPATH=src python -m benchmarks.profiles.trace_stories --json trace_stories.json [--keep FOLDER] [--device cpu]

A case records a step with torch's profiler in a way that once misled: while the device is behind with the step before,
around the capture of a graph, with graph launches alone, with ops on the host, with attention written out. It says what
must hold of the profile. For attention the fused form is timed too, so that the predicted saving has a truth.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule

from nearpeak.profiles.profile import Profile
from nearpeak.profiling.load import profile_trace
from nearpeak.render.views.verdict import sentences

Facts = dict[str, Any]
Case = Callable[[Path, str], Facts]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Registers a case."""
    CASES[function.__name__] = function
    return function


def record(path: Path, run: Callable[[], Any], **options: Any) -> Path:
    """A file of what `run` does."""
    with profile(activities=activities(), record_shapes=True, **options) as profiler:
        run()
        synchronize()
    profiler.export_chrome_trace(str(path))
    return path


def activities() -> list[ProfilerActivity]:
    """What can be recorded here."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def facts(found: Profile) -> Facts:
    """What a profile says."""
    return {
        "wall_ms": found.wall_s * 1e3,
        "kernel_ms": found.kernel_s * 1e3,
        "as_written_ms": found.as_written_s * 1e3,
        "modeled": found.modeled_share,
        "mfu": None if found.rates is None else found.rates.mfu,
        "broken": [part.name for part in found.waterfall.broken],
        "losses": [] if found.completeness is None else [loss.text for loss in found.completeness.losses],
        "findings": {finding.rule: [finding.saving_s * 1e3, finding.share] for finding in found.findings},
        "notes": list(found.notes),
        "verdict": sentences(found, found.findings),
    }


def runtime_calls(path: Path) -> dict[str, int]:
    """The calls of the runtime in a file, by name."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    return dict(Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")))


def layers(device: str, width: int = 4096, count: int = 8) -> nn.Module:
    """Large products."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(device, torch.bfloat16)


@case
def behind_the_step_before(path: Path, device: str) -> Facts:
    """The device is busy with unrecorded steps when the recording begins."""
    model, x = layers(device), torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        synchronize()
        started = time.perf_counter()
        model(x)
        synchronize()
        own_ms = (time.perf_counter() - started) * 1e3
        with profile(
            activities=activities(), record_shapes=True, schedule=schedule(wait=3, warmup=1, active=1)
        ) as profiler:
            for _ in range(5):
                for _ in range(3):
                    model(x)
                profiler.step()
            synchronize()
        profiler.export_chrome_trace(str(path))
    found = profile_trace(path, on="h200-sxm")
    return {**facts(found), "own_ms": 3 * own_ms, "holds": found.modeled_share > 0.98 and not found.waterfall.broken}


@case
def around_a_capture(path: Path, device: str) -> Facts:
    """A step that captures a graph and replays it once."""
    model, x = layers(device), torch.randn(256, 4096, device=device, dtype=torch.bfloat16)

    def run() -> None:
        with torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            model(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    model(x)
            graph.replay()

    run()
    found = profile_trace(record(path, run), on="h200-sxm")
    complete = found.completeness is not None and found.completeness.complete
    return {**facts(found), "calls": runtime_calls(path), "holds": complete and not found.waterfall.broken}


@case
def graph_launches_alone(path: Path, device: str) -> Facts:
    """Replays of small kernels, late."""
    model, x = layers(device, 256), torch.randn(16, 256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)

    def run() -> None:
        for _ in range(20):
            graph.replay()
            time.sleep(0.0001)

    run()
    found = profile_trace(record(path, run), on="h200-sxm")
    said = " ".join(sentences(found, found.findings).values())
    holds = "launch-bound" not in {finding.rule for finding in found.findings} and "declare_cost" not in said
    return {**facts(found), "calls": runtime_calls(path), "holds": holds and "reduce-overhead" not in said}


@case
def ops_on_the_host(path: Path, device: str) -> Facts:
    """Large ops on host tensors beside a step on the device."""
    model, x = layers(device), torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    batch = torch.randn(4096, 4096)

    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                model(x)
                (batch * 2.0).add_(1.0)

    run()
    found = profile_trace(record(path, run), on="h200-sxm")
    on_host = [op.name for op in found.ops if op.origin == "host"]
    return {**facts(found), "on_host": on_host, "holds": len(on_host) >= 6 and not found.waterfall.broken}


class Attention(nn.Module):
    """Attention written out, or fused."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # (batch, length, width), (length, length)
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + mask
            mixed = torch.softmax(scores, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def attention_case(path: Path, device: str, *, backward: bool, compiled: bool) -> Facts:
    small = device == "cpu"
    batch, length, width, heads = (1, 64, 64, 2) if small else (8, 2048, 1024, 16)
    dtype = torch.float32 if small else torch.bfloat16
    times = {}
    for fused in (True, False):
        torch.manual_seed(0)
        model: Any = nn.ModuleList(Attention(width, heads, fused=fused) for _ in range(4)).to(device, dtype)
        x = torch.randn(batch, length, width, device=device, dtype=dtype)
        mask = torch.full((length, length), float("-inf"), device=device, dtype=dtype).triu(1)

        def forward(x: torch.Tensor, mask: torch.Tensor, model: Any = model) -> torch.Tensor:
            for layer in model:
                x = x + layer(x, mask)
            return x

        call = torch.compile(forward) if compiled else forward

        def run(call: Any = call, x: torch.Tensor = x, mask: torch.Tensor = mask) -> None:
            with torch.set_grad_enabled(backward):
                out = call(x, mask)
                if backward:
                    out.sum().backward()

        for _ in range(3):
            run()
        synchronize()
        started = time.perf_counter()
        for _ in range(5):
            run()
        synchronize()
        times[fused] = (time.perf_counter() - started) / 5
    found = profile_trace(record(path, run), on="h200-sxm")
    finding = next((one for one in found.findings if one.rule == "attention-written-out"), None)
    saved = times[False] - times[True]
    return {
        **facts(found),
        "saved_ms": saved * 1e3,
        "predicted_ms": None if finding is None else finding.saving_s * 1e3,
        "places": None if finding is None else finding.places,
        "holds": finding is not None and finding.places == 4 and found.findings[0] is finding,
    }


@case
def attention_written_out(path: Path, device: str) -> Facts:
    """In inference."""
    return attention_case(path, device, backward=False, compiled=False)


@case
def attention_written_out_and_trained(path: Path, device: str) -> Facts:
    """With its backward pass."""
    return attention_case(path, device, backward=True, compiled=False)


@case
def attention_written_out_and_compiled(path: Path, device: str) -> Facts:
    """With its softmax in a kernel of Inductor's."""
    return attention_case(path, device, backward=False, compiled=True)


def main() -> None:
    """Runs the cases, each on its own, and writes what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="the folder for the trace files")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Facts] = {}
    for name in arguments.only:
        started = time.perf_counter()
        try:
            results[name] = CASES[name](folder / f"{name}.json.gz", arguments.device)
        except Exception as error:  # one case that fails must not cost the others
            results[name] = {
                "holds": False,
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        results[name]["took_s"] = time.perf_counter() - started
        arguments.json.write_text(json.dumps(results, indent=1))
        print(
            name, "holds" if results[name]["holds"] else "DOES NOT HOLD", f"{results[name]['took_s']:.1f} s", flush=True
        )


if __name__ == "__main__":
    main()

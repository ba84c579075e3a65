"""Do the kernels that CUDA graphs replay get their ops, shapes, lines and bounds, and the right ones?

    PYTHONPATH=src python -m benchmarks.profiles.graph_kernels --on h200-sxm --json graph_kernels.json [--raw FOLDER]
    python -m benchmarks.profiles.graph_kernels --show benchmarks/results/graph_kernels_h200.json

Profiles models whose steps replay graphs: compiled with mode="reduce-overhead", captured by hand, and made by
`make_graphed_callables`. The second way of telling, which knows nothing of graphs: the same step runs without any, as
ordinary launches, under torch's profiler, whose correlation ids say which op launched which kernel. Kernel by kernel,
the op of the graph's kernel must be that op, on tensors of the same shapes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import nearpeak
from nearpeak.ops.op import Op, name_without_origin
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.assemble import StepRecords
from nearpeak.profiling.session import Session
from nearpeak.trace.graphs import remember_graphs
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.trace import trace

DEVICE = "cuda"


class Attention(nn.Module):
    """Attention with a causal mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width)
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 512, vocabulary: int = 8192, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def convolutions() -> nn.Module:
    """An image classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


@dataclass
class Model:
    """A step that replays graphs, and the same step as ordinary launches."""

    step: Callable[[], Any]
    plain: Callable[[], Any]


def compiled_inference() -> Model:
    model = Language().to(DEVICE, torch.bfloat16).eval()
    tokens = torch.randint(8192, (4, 256), device=DEVICE)
    graphed, plain = torch.compile(model, mode="reduce-overhead"), torch.compile(model)

    def step(call: Callable[..., Any]) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> Any:
            return call(tokens).sum()

        return run

    return Model(step(graphed), step(plain))


def compiled_images() -> Model:
    model = convolutions().to(DEVICE).eval()
    images = torch.randn(32, 3, 128, 128, device=DEVICE)
    graphed, plain = torch.compile(model, mode="reduce-overhead"), torch.compile(model)

    def step(call: Callable[..., Any]) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> Any:
            return call(images).argmax(1)

        return run

    return Model(step(graphed), step(plain))


def compiled_training() -> Model:
    model = Language(layers=2).to(DEVICE, torch.bfloat16)
    tokens = torch.randint(8192, (4, 256), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    graphed, plain = torch.compile(model, mode="reduce-overhead"), torch.compile(model)

    def step(call: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> None:
            loss = functional.cross_entropy(call(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    return Model(step(graphed), step(plain))


def capture_step(plain: Callable[[], Any], *, warm_up: int) -> Callable[[], None]:
    """A step that replays a graph of `plain`, captured by hand in the first step, after so many calls of it."""
    graph = torch.cuda.CUDAGraph()
    captured = False

    def step() -> None:
        nonlocal captured
        if not captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(warm_up):
                    plain()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                plain()
            captured = True
        graph.replay()

    return step


def captured_training() -> Model:
    """Forward, backward and optimizer in one graph; gradients stay where they are."""
    model = convolutions().to(DEVICE)
    images, labels = torch.randn(32, 3, 128, 128, device=DEVICE), torch.randint(1000, (32,), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True, fused=True)

    def plain() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return Model(capture_step(plain, warm_up=3), plain)


def graphed_callables() -> Model:
    model = nn.TransformerEncoderLayer(512, 8, 1024, dropout=0.1, batch_first=True).to(DEVICE)
    x = torch.randn(16, 128, 512, device=DEVICE, requires_grad=True)
    graphed: list[Any] = []

    def run(call: Callable[..., Any]) -> None:
        loss = call(x).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    def step() -> None:
        if not graphed:
            graphed.append(torch.cuda.make_graphed_callables(model, (x,)))
        run(graphed[0])

    original = model.forward
    return Model(step, lambda: run(original))


def captured_recurrent() -> Model:
    model = nn.LSTM(256, 256, num_layers=2, batch_first=True).to(DEVICE).eval()
    head = nn.Linear(256, 4096).to(DEVICE)
    x = torch.randn(16, 64, 256, device=DEVICE)

    @torch.no_grad()
    def plain() -> torch.Tensor:
        hidden, _ = model(x)
        side = torch.softmax(head(hidden), -1)
        return torch.topk(side, 4).values.cumsum(-1)

    return Model(capture_step(plain, warm_up=1), plain)


MODELS: dict[str, Callable[[], Model]] = {
    "compiled inference": compiled_inference,
    "compiled images": compiled_images,
    "compiled training": compiled_training,
    "captured training": captured_training,
    "graphed callables": graphed_callables,
    "captured recurrent": captured_recurrent,
}


def record(name: str, step: Callable[[], Any]) -> StepRecords:
    """The records of a step, as `nearpeak.profile(step)` makes them."""
    session = Session(lambda line: None, traces=False)
    try:
        with remember_graphs():
            while session.schedule.phase != "traced" and not session.problem:
                step()
                session.step_ends()
            if session.problem:
                raise RuntimeError(session.problem)
            session.add_trace(trace(step, live=True, keep_compiled=True))
    finally:
        session.abandon()
    records = session.records(name)
    assert records is not None
    return records


def plain_launches(step: Callable[[], Any], folder: Path) -> list[tuple[str, Op | None]]:
    """The kernels of a step without graphs, each with the op that launched it by torch's correlation ids."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    path = folder / "plain.json"
    profiler.export_chrome_trace(str(path))
    found = read_trace(path, step="all")
    return [
        (kernel.name, None if kernel.op is None else found.trace.ops[kernel.op])
        for kernel in sorted(found.kernels, key=lambda kernel: kernel.start_s)
    ]


def shapes_of(op: Op) -> set[tuple[int, ...]]:
    return {tensor.shape for value in op.arguments.values() for tensor in _tensors(value)}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def same_op(op: Op, other: Op) -> bool:
    """Whether two ops are the same operator on tensors of the same shapes, in place or not."""
    first, second = (name_without_origin(item.name).replace("::", ".").split(".") for item in (op, other))
    if first[1 if len(first) > 1 else 0].rstrip("_") != second[1 if len(second) > 1 else 0].rstrip("_"):
        return False
    if op.origin in ("inductor", "triton") or other.origin in ("partial", "unknown"):
        return True  # named after their code; of the others the file does not show all shapes
    return shapes_of(op) >= shapes_of(other) or shapes_of(other) >= shapes_of(op)


def summary(records: StepRecords, profile: Profile, plain: Sequence[tuple[str, Op | None]]) -> dict[str, Any]:
    """How much of the kernel time in graphs has an op, a shape, a line and a bound; and what the plain step says."""
    assert records.traced is not None
    kernels = [
        (run, span, None if span.op is None else profile.ops[span.op])
        for run, span in zip(
            sorted(records.recorded.kernels, key=lambda kernel: kernel.start_s), profile.timeline, strict=True
        )
        if run.in_graph
    ]
    total = sum(run.seconds for run, _, _ in kernels)
    known = sum(run.seconds for run, _, op in kernels if op is not None and op.modeled and op.source and op.shapes)
    blocks = SequenceMatcher(
        None, [run.name for run, _, _ in kernels], [name for name, _ in plain], autojunk=False
    ).get_matching_blocks()
    checked, wrong = 0, []
    for block in blocks:
        for place in range(block.size):
            run, span, _ = kernels[block.a + place]
            other = plain[block.b + place][1]
            if span.op is None or other is None:
                continue
            checked += 1
            op = records.traced.ops[span.op]
            if not same_op(op, other):
                wrong.append({"kernel": run.name[:120], "graph": str(op.name), "plain": other.name})
    without = [
        {
            "kernel": run.name[:200],
            "us": run.seconds * 1e6,
            "op": None if op is None else op.name,
            "source": None if op is None else op.source,
            "modeled": None if op is None else op.modeled,
        }
        for run, _, op in kernels
        if op is None or not (op.modeled and op.source and op.shapes)
    ]
    return {
        "kernels": len(kernels),
        "kernel_s": total,
        "known_share": known / total if total else None,
        "with_op_share": sum(run.seconds for run, _, op in kernels if op is not None) / total if total else None,
        "checked": checked,
        "wrong": wrong,
        "without": without[:40],
        "bounds_broken": [
            {"op": op.name, "kernel_s": op.measured_s, "bound_s": op.bound_s}
            for op in profile.ops
            if op.modeled and op.kernels and op.measured_s < 0.95 * op.bound_s
        ],
        "modeled_share": profile.modeled_share,
        "notes": profile.notes,
        "table": [
            {
                "kernel": run.name[:80],
                "us": round(run.seconds * 1e6, 2),
                "op": op and op.name,
                "shapes": op and op.shapes,
                "source": op and op.source,
                "module": op and op.module,
                "phase": op and op.phase,
                "bound_us": op and op.bound_s * 1e6,
            }
            for run, _, op in kernels[:400]
        ],
    }


def floors(profile: Profile) -> dict[str, Any]:
    """The floors of a step and its kernel time; those of the plain step are nearly the same."""
    return {
        "ideal_us": profile.ideal_s * 1e6,
        "fused_us": profile.fused_s * 1e6,
        "as_written_us": profile.as_written_s * 1e6,
        "kernels_us": profile.kernel_s * 1e6,
        "ops": len(profile.ops),
        "complete": None if profile.completeness is None else profile.completeness.notes,
        "findings": [finding.rule for finding in profile.findings],
    }


def dump_raw(name: str, step: Callable[[], Any], records: StepRecords, folder: Path) -> None:
    """The events of a step as the profiler writes them, and the nodes of its graphs."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "raw.json"
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            step()
            torch.cuda._sleep(1)
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(1)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        file = name.replace(" ", "_")
        (folder / f"{file}.trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert records.traced is not None
    nodes = [
        {
            "graph": replay.graph,
            "ops": [replay.ops.start, replay.ops.stop],
            "nodes": [[node.kind, node.name, node.grid, node.block, node.op] for node in replay.nodes],
        }
        for replay in records.traced.replays
    ]
    kernels = [
        [
            kernel.name,
            kernel.kind,
            kernel.start_s,
            kernel.seconds,
            kernel.stream,
            kernel.in_graph,
            None
            if kernel.replay is None
            else [
                kernel.replay.graph,
                kernel.replay.start_s,
                kernel.replay.node,
                kernel.replay.grid,
                kernel.replay.block,
            ],
        ]
        for kernel in records.recorded.kernels
    ]
    ops = [[op.name, op.phase, op.module, op.source, sorted(shapes_of(op))] for op in records.traced.ops]
    (folder / f"{file}.nodes.json.gz").write_bytes(
        gzip.compress(json.dumps({"replays": nodes, "kernels": kernels, "ops": ops}).encode())
    )


def table(results: dict[str, Any]) -> str:
    rows = [
        "| model | kernels in graphs | their time, us | with op, shape, line and bound | checked | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, model in results["models"].items():
        rows.append(
            f"| {name} | {model['kernels']} | {model['kernel_s'] * 1e6:.0f} | {model['known_share']:.1%} | "
            f"{model['checked']} | {len(model['wrong'])} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h200-sxm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    machine = nearpeak.machine(options.on)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": {}}
    for name in options.only:
        begun = time.monotonic()
        torch.manual_seed(0)
        try:
            model = MODELS[name]()
            records = record(name, model.step)
            if options.raw:
                dump_raw(name, model.step, records, options.raw)
            profile = records.profile(machine)
            with tempfile.TemporaryDirectory() as folder:
                plain = plain_launches(model.plain, Path(folder))
            result = summary(records, profile, plain)
            result["floors"] = floors(profile)
            result["plain_floors"] = floors(record(name, model.plain).profile(machine))
        except Exception:
            result = {"error": traceback.format_exc()}
        result["seconds"] = time.monotonic() - begun
        results["models"][name] = result
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
        shown = {key: value for key, value in result.items() if key not in ("table", "notes")}
        print(name, json.dumps(shown)[:3000], flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule

import nearpeak
from nearpeak.bound.estimate import Estimate, estimate_trace
from nearpeak.errors import UsageError
from nearpeak.ops.op import Op, Trace
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.trace import trace

DATA = Path(__file__).parents[2] / "data"
Record = Callable[..., Path]
Write = Callable[..., Path]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def training_step(**options: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), Block(), Block(), torch.nn.Linear(16, 50))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    tokens = torch.randint(0, 50, (4, 8))

    def step() -> None:
        logits = model(tokens)
        both = torch.cat([torch.softmax(logits * 2.0, -1), logits.square()], -1)
        loss = functional.cross_entropy(logits.view(-1, 50), tokens.view(-1)) + both.bfloat16().float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def facts(ops: tuple[Op, ...]) -> list[object]:
    """Names, phases and shapes.

    A dispatch mode makes autograd add out of place and detach what it saves, and does not see what `torch.tensor` does.
    """
    found = []
    for op in ops:
        name = op.name.replace("aten.add_.", "aten.add.") if op.phase == "backward" else op.name
        if not name.startswith(("aten.detach", "aten.empty")):
            found.append((name, op.phase, [item.shape for item in op.inputs], [item.shape for item in op.outputs]))
    return found


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_the_ops_are_those_of_a_live_trace(record: Record, options: dict[str, bool]):
    step = training_step(**options)
    found = read_trace(record(step))
    live = trace(step, live=True)
    assert facts(found.trace.ops) == facts(live.ops)
    assert {op.phase for op in found.trace.ops} == {"forward", "backward", "optimizer"}
    assert (found.device, found.kernels, found.step) == ("cpu", (), None)
    assert found.wall_s > 0
    assert len(found.notes) == 1  # there is nothing that it does not know, but for addresses


def test_dtypes_strides_and_arguments_too(record: Record):
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x.to(torch.bfloat16), w)
        return y.transpose(0, 1).contiguous().sum(dim=-1, keepdim=True) + torch.zeros(3, 1, dtype=torch.bfloat16)

    x, w = torch.randn(4, 8), torch.randn(3, 8, dtype=torch.bfloat16)
    found = read_trace(record(run, x, w)).trace
    live = trace(run, x, w, live=True)

    def plain(op: Op) -> object:
        tensors = [(item.shape, item.strides, item.dtype, item.offset) for item in (*op.inputs, *op.outputs)]
        values = {name: value for name, value in op.arguments.items() if isinstance(value, (int, float, str))}
        return op.name, op.mutated, tensors, {name: v for name, v in values.items() if name not in ("device", "layout")}

    assert [plain(op) for op in found.ops] == [plain(op) for op in live.ops]


def programs() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    wide, weight, small = torch.randn(512, 512), torch.randn(512, 512), torch.randn(4, 512)

    def recurrent(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            state = torch.tanh(state @ weight)
        return state

    def residual(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y + x.sigmoid()).mul_(2.0).t().contiguous().softmax(-1)

    return {
        "square": (lambda x: x * x, (wide,)),
        "product": (lambda x, y: x * y, (wide, weight)),
        "gram": (lambda x: x @ x.T, (wide,)),
        "cat": (lambda x: torch.cat([x.exp()] * 2, -1), (wide,)),
        "addcmul": (lambda x, g: x.mul_(0.9).addcmul_(g, g), (wide.clone(), weight)),
        "recurrent": (recurrent, (small, weight)),
        "residual": (residual, (wide, weight)),
        "halves": (lambda x: torch.cat([-x[:, 256:], x[:, :256]], -1) * x, (wide,)),
    }


def as_written(found: Trace, cache_bytes: float = 50e6) -> Estimate:
    machine = replace(nearpeak.machine("h100-sxm"), cache_bytes=cache_bytes)
    return estimate_trace(found, machine, ceilings="theoretical")


@pytest.mark.parametrize("program", programs())
@pytest.mark.parametrize("cache_bytes", [0.0, 1.5e6, 50e6])
def test_the_bound_is_at_or_below_that_of_the_live_trace(record: Record, program: str, cache_bytes: float):
    fn, args = programs()[program]
    from_file = as_written(read_trace(record(fn, *args)).trace, cache_bytes)
    live = as_written(trace(fn, *args, live=True), cache_bytes)
    assert from_file.as_written_s <= live.as_written_s * (1 + 1e-9)
    assert from_file.ideal_s <= live.ideal_s * (1 + 1e-9)
    assert from_file.ideal_s <= from_file.fused_s * (1 + 1e-9) <= from_file.as_written_s * (1 + 2e-9)
    assert from_file.flops == live.flops
    assert cache_bytes > 0 or from_file.as_written_s > 0


@pytest.mark.parametrize("cache_bytes", [0.0, 1e3, 2e4, 50e6])
def test_a_training_step_is_bounded_too_and_likely_is_above(record: Record, cache_bytes: float):
    step = training_step(fused=True)
    path = record(step)
    live = as_written(trace(step, live=True), cache_bytes)
    least, likely = (as_written(read_trace(path, storages=choice).trace, cache_bytes) for choice in ("least", "likely"))
    assert 0 < least.as_written_s <= min(likely.as_written_s, live.as_written_s)
    assert least.ideal_s <= min(live.ideal_s, least.fused_s) * (1 + 1e-9)
    assert least.fused_s <= least.as_written_s * (1 + 1e-9)
    assert least.flops == likely.flops == live.flops
    assert "estimates, not bounds" in likely.notes[0]


def test_modules_and_lines_of_the_forward_pass_reach_the_backward_pass(record: Record):
    found = read_trace(record(training_step(), with_stack=True)).trace
    products = [op for op in found.ops if op.name in ("aten.addmm.default", "aten.mm.default")]
    forward = {op.module for op in products if op.phase == "forward"}
    assert {"Sequential_0.Block_0.Linear_0", "Sequential_0.Block_1.Linear_2"} <= forward
    assert {op.module for op in products if op.phase == "backward"} == forward
    assert {op.source.partition(":")[0] for op in products} == {"test_read.py"}


def test_steps(tmp_path: Path):
    path = tmp_path / "steps.json"
    x = torch.randn(8, 8)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for number in range(5):
            for _ in range(number):
                x @ x
            profiler.step()
    everything = read_trace(path, step="all")
    assert everything.steps == (1, 2, 3)
    assert len(everything.trace.ops) == 1 + 2 + 3
    last, second = read_trace(path), read_trace(path, step=2)
    assert (last.step, len(last.trace.ops), second.step, len(second.trace.ops)) == (3, 3, 2, 2)
    assert 0 < second.wall_s < everything.wall_s
    with pytest.raises(UsageError, match=r"no step 9\..*1, 2, 3"):
        read_trace(path, step=9)


def test_a_file_without_shapes_says_what_to_do(record: Record, write_trace: Write):
    with pytest.raises(UsageError, match="record_shapes=True"):
        read_trace(record(lambda: torch.ones(2) + 1, record_shapes=False))
    with pytest.raises(UsageError, match="no ops of the CPU"):
        read_trace(write_trace())
    with pytest.raises(UsageError, match="Did you mean 'likely'"):
        read_trace(write_trace(), storages="likly")  # type: ignore[arg-type]


def test_what_a_file_does_not_show_has_no_cost_and_is_named(record: Record):
    found = read_trace(record(lambda x: x[x > 0].exp() @ x[:0], torch.zeros(4)))
    assert [op.name for op in found.trace.ops if op.name.startswith("unknown.")] == ["unknown.aten::index"]
    assert any("aten::index (1)" in note for note in found.notes)
    coverage = as_written(found.trace).coverage
    assert coverage.unmodeled == {"unknown.aten::index": 1}


def test_an_eager_step_on_a_gpu():
    found = read_trace(DATA / "kineto_eager.json.gz")
    assert found.device == "NVIDIA H200"
    assert len(found.kernels) == 170
    assert all(kernel.op is not None for kernel in found.kernels)
    assert sum(found.device_seconds.values()) == pytest.approx(13.892e-3, rel=1e-4)
    by_name: dict[str, set[str]] = {}
    for kernel in found.kernels:
        assert kernel.op is not None
        by_name.setdefault(found.trace.ops[kernel.op].name, set()).add(kernel.kind)
    assert by_name["aten.mm.default"] == {"kernel", "memset"}
    assert by_name["aten.embedding.default"] == {"kernel"}
    assert {op.phase for op in found.trace.ops} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(("name", "formula", "floor"), [("kineto_eager", 0.999, 1.0), ("kineto_compiled", 0.88, 0.98)])
def test_no_kernel_is_faster_than_its_bound(name: str, formula: float, floor: float):
    found = read_trace(DATA / f"{name}.json.gz")
    bound = estimate_trace(found.trace, nearpeak.machine("h200-sxm"), ceilings="theoretical")
    measured = found.device_seconds
    assert [op.name for index, op in enumerate(bound.ops) if op.seconds > measured.get(index, 0.0)] == []
    modeled = {model: 0.0 for model in ("formula", "operands", "none")}
    for index, op in enumerate(bound.ops):
        modeled[op.model] += measured.get(index, 0.0) / sum(measured.values())
    assert modeled["formula"] >= formula
    assert 1 - modeled["none"] >= floor - 1e-9
    assert 0.3 * sum(measured.values()) < bound.as_written_s < found.wall_s
    assert found.partial == frozenset()


def test_an_optimizer_over_a_long_list_has_the_tensors_of_the_gradients():
    found = read_trace(DATA / "kineto_eager.json.gz")
    (op,) = [op for op in found.trace.ops if op.name == "aten._fused_adamw_.default"]
    for name in ("self", "grads", "exp_avgs", "exp_avg_sqs"):
        assert len(op.tensors(name)) == 39
        squares, others = 8 * 2048**2 + 9 * 2048, (2 * 32000 + 12 * 8192 + 8 * 512) * 2048
        assert sum(tensor.elements for tensor in op.tensors(name)) == squares + others
    assert any("as many chunks" in note for note in found.notes)


def test_compiled_kernels_count_what_they_must_write():
    found = read_trace(DATA / "kineto_compiled.json.gz")
    ops = [op for op in found.trace.ops if op.name == "inductor.triton_poi_fused__unsafe_view_mul_silu_8"]
    assert len(ops) == 4
    assert {(op.outputs[0].elements, op.outputs[0].dtype) for op in ops} == {(67108864, "bfloat16")}
    assert any("67 compiled kernels" in note for note in found.notes)
    assert "aten.mm.out" in {op.name for op in found.trace.ops}


def test_nothing_in_a_file_makes_it_fail(tmp_path: Path):
    document = json.loads(gzip.decompress((DATA / "kineto_eager.json.gz").read_bytes()))
    whole = read_trace(DATA / "kineto_eager.json.gz")
    for index, event in enumerate(document["traceEvents"]):
        if index % 5 == 0:
            event["args"] = None
        elif index % 7 == 0:
            event["args"] = {"Input Dims": "x", "Input type": [7, None, "c10::Odd"], "External id": "y"}
        elif index % 11 == 0:
            del event["dur"]
        elif index % 13 == 0:
            event["ts"] = "NaN"
    document["traceEvents"] = [None, 5, {}, *reversed(document["traceEvents"])]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(document))
    found = read_trace(path)
    assert found.trace.ops
    assert len(found.kernels) < len(whole.kernels)
    assert as_written(found.trace).as_written_s < as_written(whole.trace).as_written_s

"""The sections of the kernels' benchmark on gemm, experts and linear attention: ways, tables, bars and plots."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from nearpeak import kernels
from nearpeak.kernels._runtime.policy import using
from nearpeak.render.picture.scene import Circle, Polygon, Text
from nearpeak.render.picture.svg import svg

pytest.importorskip("triton")


cases: Any = importlib.import_module("benchmarks.kernels.cases")
flops_cases: Any = importlib.import_module("benchmarks.kernels.flops_cases")
gemm: Any = importlib.import_module("benchmarks.kernels.gemm")
jobs: Any = importlib.import_module("benchmarks.kernels.jobs")
linear_attention: Any = importlib.import_module("benchmarks.kernels.linear_attention")
moe: Any = importlib.import_module("benchmarks.kernels.moe")
run: Any = importlib.import_module("benchmarks.kernels.run")
tables: Any = importlib.import_module("benchmarks.kernels.tables")
timing: Any = importlib.import_module("benchmarks.kernels.timing")
page: Any = importlib.import_module("benchmarks.pages.kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST_ERROR = 0.02
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of bfloat16, on some CPUs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cases, "BACKEND", "aot_eager")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    with using("require"):
        yield
    torch.compiler.reset()


def product_case(operation: str, step: str = "forward", kind: str = "") -> Any:
    sizes = gemm.ProductSizes(cubes=(24,), gradients=24, tokens=9, features=16, hidden=24, eight=128)
    cases = gemm.product_cases(sizes, DEVICE)
    return next(case for case in cases if (case.operation, case.step) == (operation, step) and kind in case.kinds[0])


SMALL = {"experts": 3, "tokens": 9, "choices": 2, "columns": 16, "inner": 8, "routings": ("uniform",)}


def expert_case(operation: str, step: str = "forward", **more: Any) -> Any:
    sizes = moe.ExpertSizes(**{**SMALL, "layers": ("beta",), **more})
    found = moe.expert_cases(sizes, DEVICE)
    return next(case for case in found if (case.operation, case.step) == (operation, step))


def rows_of(case: Any) -> list[dict[str, Any]]:
    found = case.rows(run.Setting(DEVICE), "none-0")
    json.dumps(found)
    for row in found:
        assert all(error < LARGEST_ERROR for error in row["errors"].values()), row
        assert set(row["errors"]) == set(row["seconds"])
    return found  # type: ignore[no-any-return]


# what is measured


def test_the_sizes_are_those_of_the_bars():
    cases = list(gemm.product_cases(device=DEVICE))
    assert [case.size for case in cases if case.name.startswith("gemm forward")] == ["4096", "8192", "16384"]
    assert {case.step for case in cases if case.operation == "gemm" and case.size == "8192"} == {
        "forward",
        "by x",
        "by weight",
    }
    gated = next(case for case in cases if case.operation == "swiglu")
    assert gated.flops == 2 * 8192 * 4096 * 2 * 14336
    assert [case.kinds[0] for case in cases if case.operation == "fp8"] == [
        "tensor, fast",
        "tensor, exact",
        "row, fast",
        "row, exact",
        "128, exact",
    ]
    grouped = next(case for case in moe.expert_cases(device=DEVICE) if case.operation == "grouped_gemm")
    assert grouped.size == "128 x 4096 x 1536, 32768 rows"
    assert grouped.flops == 2 * 32768 * 4096 * 1536
    assert grouped.kinds == ("even", "uniform", "beta")
    lengths = {case.tokens: case.batch for case in linear_attention.linear_cases(device=DEVICE)}
    assert lengths[1024] == 16
    assert lengths[131072] == 1
    assert all(tokens * batch >= 16384 for tokens, batch in lengths.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "step", "ways"),
    [
        ("swiglu", "forward", {"nearpeak", "cublas + nearpeak", "compile", "max-autotune"}),
        ("swiglu", "both", {"nearpeak", "cublas + nearpeak", "compile"}),
        ("bias gelu", "forward", {"nearpeak", "cublas + nearpeak", "cublas fused", "compile"}),
        ("residual", "forward", {"nearpeak", "cublas + torch", "cublas fused", "compile"}),
        ("gemm", "forward", {"nearpeak", "cublas"}),
        ("gemm", "by x", {"nearpeak", "cublas"}),
        ("gemm", "by weight", {"nearpeak", "cublas"}),
    ],
)
def test_all_ways_of_products_compute_the_same(operation, step, ways):
    (row,) = rows_of(product_case(operation, step))
    assert set(row["seconds"]) - {"cublas + liger"} == ways
    assert not row["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor, fast", "row, exact", "128, exact"])
def test_products_of_eight_bits(kind):
    (row,) = rows_of(product_case("fp8", kind=kind))
    assert "scaled_mm" in row["seconds"] or (DEVICE == "cpu" and kind.startswith("128"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "step", "ways"),
    [
        ("grouped_gemm", "forward", {"nearpeak", "torch", "max-autotune"}),
        ("grouped_gemm gated", "forward", {"nearpeak", "torch + nearpeak"}),
        ("grouped_gemm", "by rows", {"nearpeak", "torch"}),
        ("grouped_gemm", "by matrices", {"nearpeak", "torch"}),
        ("grouped_gemm fp8, row", "forward", {"nearpeak", "scaled_grouped_mm"}),
        ("grouped_gemm fp8, 128", "forward", {"nearpeak"}),
        ("experts layer", "forward", {"nearpeak", "torch", "compile"}),
    ],
)
def test_all_ways_of_experts_compute_the_same(operation, step, ways):
    (row,) = rows_of(expert_case(operation, step))
    not_here = {"scaled_grouped_mm"} if DEVICE == "cpu" else set()
    assert set(row["seconds"]) - {"liger"} == ways - not_here


def test_gradients_of_layers_are_the_same():
    """All of them: the row of results has an error of those by tokens alone."""
    case = expert_case("experts layer", "both")
    made = case.make("uniform")
    own, of_torch = made.ways["nearpeak"](), made.ways["torch"]()
    for one, other in zip(own, of_torch, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.05, rtol=0.05)
    assert flops_cases.errors(made, {"nearpeak": lambda: own})["nearpeak"] < LARGEST_ERROR


def test_rows_of_experts_are_the_same_in_every_run():
    counts = {kind: moe.counts_of(kind, 128, 32768, "cpu") for kind in ("even", "uniform", "beta")}
    assert {int(one.sum()) for one in counts.values()} == {32768}
    assert counts["even"].unique().tolist() == [256]
    assert counts["uniform"].equal(moe.counts_of("uniform", 128, 32768, "cpu"))
    spread = {kind: float(one.float().std() / one.float().mean()) for kind, one in counts.items()}
    assert spread["uniform"] < 0.1 < 0.6 < spread["beta"]
    with pytest.raises(ValueError, match="10 rows are not the same for each of 3"):
        moe.counts_of("even", 3, 10, "cpu")


@pytest.mark.slow
def test_linear_attention_is_measured_beside_attention():
    (case,) = linear_attention.linear_cases(
        linear_attention.LinearSizes(together=18, tokens=(9,), heads=1, dim=16), DEVICE
    )
    assert case.batch == 2
    forward, both = case.rows(run.Setting(DEVICE), "none-0")
    assert set(forward["seconds"]) == set(both["seconds"]) == {"nearpeak", "naive", "quadratic", "attention", "sdpa"}
    assert max(forward["errors"].values()) < LARGEST_ERROR
    assert set(forward["errors"]) == {"nearpeak", "naive", "quadratic"}
    json.dumps([forward, both])


def test_what_does_not_fit_is_left_out(monkeypatch):
    case = next(case for case in linear_attention.linear_cases(device="cpu") if case.tokens == 131072)
    assert case.left_out("forward") == {
        "naive": int(3.5 * 2 * 16 * 131072 * 128 * 128),
        "quadratic": int(3.5 * 2 * 16 * 131072 * 131072),
    }
    small = linear_attention.LinearCase(batch=1, heads=1, tokens=4, dim=8, device=DEVICE)
    monkeypatch.setattr(linear_attention.LinearCase, "left_out", lambda case, step: {"naive": 2**50})
    assert "naive" not in small.calls("forward")
    assert {"nearpeak", "quadratic"} < set(small.calls("both"))


def test_calls_that_take_long_are_timed_alone(monkeypatch):
    seen = []

    def in_turns(ways: Any, rounds: Any = None, **rest: Any) -> dict[str, float]:
        seen.append(list(ways))
        return dict.fromkeys(ways, 0.5)

    monkeypatch.setattr(timing, "in_turns", in_turns)
    monkeypatch.setattr(linear_attention, "_once", lambda way: way())
    slow = iter([1.0, 3.0, 2.0])
    found = linear_attention.timed({"slow": lambda: next(slow), "fast": lambda: 0.001}, [])
    assert seen == [["fast"]]
    assert found == {"slow": 2.0, "fast": 0.5}
    assert list(found) == ["slow", "fast"]
    assert linear_attention.timed({"slow": lambda: 2.0}, []) == {"slow": 2.0}


# what is compiled before


@pytest.mark.slow
def test_what_takes_long_is_compiled_apart(tmp_path):
    given = run.Setting(DEVICE, experts=moe.ExpertSizes(**SMALL))
    given.operations = {"grouped_gemm"}
    found = jobs.Jobs(tmp_path)
    jobs.work_through(found, run.compile_jobs(["experts"], given), run.clean)
    names = {file.name for file in tmp_path.iterdir() if not file.name.endswith(".taken")}
    assert {"experts-0.nearpeak", "experts-grouped_gemm-max-autotune-all.one"} <= names
    given.jobs = found
    case = next(given.cases("experts"))
    assert case.late(given, "experts-0") == {}
    (tmp_path / "experts-grouped_gemm-max-autotune-all.one").write_text("SomeError: why")
    (row,) = case.rows(given, "experts-0")
    assert row["failed"] == {"max-autotune": "SomeError: why"}
    assert set(row["seconds"]) == {"nearpeak", "torch"}
    (tmp_path / "experts-grouped_gemm-max-autotune-all.one").unlink()
    assert case.late(given, "experts-0") == {"max-autotune": "was not compiled in time"}


def test_configurations_of_liger_are_shared_out(monkeypatch):
    """Each process has some, all together all of them, and none is lost to the process afterwards."""

    class Kernel:
        fn = None

        def __init__(self, configs: list[int]) -> None:
            self.configs, self.cache, self.seen = configs, {"key": 1}, []  # type: ignore[var-annotated]

    tuned = [Kernel(list(range(32))), Kernel([7])]

    def layer(x: Any, weights: Any, chosen: Any, gate_up: Any, down: Any) -> Any:
        for kernel in tuned:
            kernel.seen += kernel.configs
        return x * weights.sum() * gate_up.sum() * down.sum()

    monkeypatch.setattr(moe, "_tuned_by_liger", lambda: tuned)
    monkeypatch.setattr(moe, "liger_layer", lambda quick=False: layer)
    sizes = moe.ExpertSizes(**SMALL)
    for steps in moe._liger_jobs(sizes, DEVICE).values():
        steps["some"]()
    assert sorted(tuned[0].seen) == list(range(32))
    assert set(tuned[1].seen) == {7}
    assert tuned[0].configs == list(range(32))
    assert not tuned[0].cache


# tables, bars and plots


def row(operation: str, step: str = "forward", kind: str = "", size: str = "8192", **rates: float) -> dict[str, Any]:
    """A row of results with these TFLOP/s."""
    seconds = {name.replace("_and_", " + "): 1.0 / rate for name, rate in rates.items()}
    return {
        "operation": operation,
        "pass": step,
        "size": size,
        "kind": kind,
        "flops": 1e12,
        "seconds": seconds,
        "errors": {"nearpeak": 0.002, "other": 0.002},
        "waiting": [],
        "failed": {},
    }


def good_products() -> list[dict[str, Any]]:
    return [
        row("gemm", nearpeak=790.0, cublas=800.0),
        row("gemm", "by x", nearpeak=810.0, cublas=800.0),
        row("swiglu", size="8192 x 4096", nearpeak=800.0, cublas_and_nearpeak=760.0, compile=750.0),
        row("fp8", kind="row, fast", nearpeak=1550.0, scaled_mm=1580.0),
    ]


def good_experts() -> list[dict[str, Any]]:
    return [
        row("grouped_gemm", kind="uniform", nearpeak=620.0, torch=505.0),
        row("grouped_gemm", kind="beta", nearpeak=600.0, torch=480.0),
        row("grouped_gemm fp8, 128", kind="beta", nearpeak=900.0),
        row("experts layer", kind="uniform", nearpeak=400.0, torch=300.0, compile=310.0),
        row("experts layer", "both", kind="uniform", nearpeak=480.0, torch=310.0, compile=320.0),
    ]


def linear_row(tokens: int, step: str = "forward", **seconds: float) -> dict[str, Any]:
    return {
        "operation": "linear_attention",
        "pass": step,
        "batch": 1,
        "heads": 16,
        "tokens": tokens,
        "dim": 128,
        "seconds": seconds,
        "errors": {},
        "waiting": [],
        "left_out": {},
        "failed": {},
    }


def good_linear(step: str = "forward") -> list[dict[str, Any]]:
    """Linear attention of a constant time, and attention whose time grows with tokens: both take 1 ms at 2,000."""
    return [
        linear_row(tokens, step, nearpeak=1e-3, attention=tokens / 2e6, sdpa=tokens / 1e6, naive=0.1)
        for tokens in (1000, 4000, 16000)
    ]


def test_bars_of_products():
    content = {"products": good_products()}
    assert tables.products_short(content) == []
    content["products"][0]["seconds"]["nearpeak"] *= 1.1
    content["products"][2]["seconds"]["compile"] = 1 / 900
    content["products"][3]["seconds"]["nearpeak"] = 1 / 1400
    content["products"][1]["errors"]["nearpeak"] = 0.005
    assert tables.products_short(content) == [
        "gemm forward 8192: 1.114 times as long as cuBLAS",
        "gemm by x 8192: an error of 5.0e-03, and the others' is 2.0e-03",
        "swiglu forward 8192 x 4096: 1.125 times as long as compile",
        "fp8 forward 8192, row, fast: 1.129 times as long as _scaled_mm",
    ]
    del content["products"][0]["seconds"]["cublas"]
    assert tables.products_short(content)[0].endswith("cuBLAS did not run, and nothing is known of this bar")


def test_bars_of_experts():
    content = {"experts": good_experts()}
    assert tables.products_short(content) == []
    content["experts"][0]["seconds"]["nearpeak"] = 1 / 590
    content["experts"][1]["seconds"]["nearpeak"] = 1 / 550
    content["experts"][4]["seconds"]["compile"] = 1 / 400
    assert tables.products_short(content) == [
        "experts layer both 8192, uniform: 1.20 times the rate of compile, and not 1.4",
        "grouped_gemm, uniform: 590 TFLOP/s, and not 600",
        "grouped_gemm, beta: 93 % of the rate with uniform choices",
    ]
    content["experts"][4]["seconds"] = {"nearpeak": 1.0}
    assert "experts layer both 8192, uniform: nothing else ran" in tables.products_short(content)[0]


def test_the_crossover_lies_between_sizes():
    rows = good_linear()
    assert tables.crossover(rows, "forward") == pytest.approx(2000.0)
    assert "faster from 2000 tokens on" in tables.linear_table(rows + good_linear("both"))
    assert tables.products_short({"linear_attention": rows}) == []
    assert tables.crossover(rows[1:], "forward") == 4000
    assert "at every size" in tables.crossover_text(rows[1:], "forward")
    assert tables.crossover(rows[:1], "forward") is None
    rows[0]["seconds"]["naive"] = 0.0001
    assert tables.products_short({"linear_attention": rows}) == [
        "linear_attention forward 1000: the naive form is faster than attention"
    ]
    rows[2]["seconds"]["nearpeak"] = 1.0
    assert tables.crossover(rows, "forward") is None
    assert tables.products_short({"linear_attention": rows})[0] == (
        "linear_attention forward: not faster than attention at the largest size"
    )


def test_tables_and_failures_are_shown():
    content = {
        "machine": "GPU",
        "versions": {},
        "date": "2026-01-01",
        "copy_bytes_per_second": 1e12,
        "failed": {},
        "products": good_products(),
        "experts": good_experts(),
        "linear_attention": good_linear() + good_linear("both"),
    }
    content["products"][0]["failed"] = {"max-autotune": "was not compiled in time"}
    text = tables.shown(content)
    assert "| swiglu | forward | 8192 x 4096 | - | nearpeak | 1.250 | 800 | 1.053 | 2.0e-03 |" in text
    assert "| forward | 1 x 1000 | 1.000 | 100.000 | - | 0.500 | 1.000 | 0.50 |" in text
    assert "- gemm forward 8192, max-autotune: was not compiled in time" in text
    assert "No bar is missed." in text


def test_plots_have_a_bar_for_each_way():
    content = {"machine": "GPU", "products": good_products(), "experts": good_experts()}
    plots = page.product_plots(content)
    assert list(plots) == [
        *(f"kernels_products{end}" for end in ("", "_fused", "_float8")),
        *(f"kernels_experts{end}" for end in ("", "_float8")),
    ]
    for name, rows in (("kernels_products", good_products()[:2]), ("kernels_experts_float8", good_experts()[2:3])):
        bars = sum(len(one["seconds"]) for one in rows)
        ways = len({way for one in rows for way in one["seconds"]})
        assert sum(isinstance(shape, Polygon) for shape in plots[name].shapes) == bars + ways
    everything = row("swiglu", **{way.replace(" + ", "_and_"): 500.0 for way in page.PRODUCT_COLORS})
    wide = page.product_plots({"machine": "GPU", "products": [everything]})["kernels_products_fused"]
    names = [shape for shape in wide.shapes if isinstance(shape, Text) and shape.text in page.PRODUCT_COLORS]
    assert len(names) == len(page.PRODUCT_COLORS)
    assert len({shape.y for shape in names}) == 2  # more than one line of them
    for scene in (*plots.values(), wide):
        assert svg(scene).startswith("<svg")


def test_curves_have_a_point_for_each_time():
    content = {"machine": "GPU", "linear_attention": good_linear() + good_linear("both")}
    scene = page.product_plots(content)["kernels_linear_attention"]
    points = sum(len(one["seconds"]) for one in content["linear_attention"])
    assert sum(isinstance(shape, Circle) for shape in scene.shapes) == points + len(page.LINEAR_COLORS)
    assert svg(scene).startswith("<svg")
    parts = "\n".join(page.product_parts({**content, "products": good_products(), "experts": good_experts()}))
    for name in ("kernels_products_fused.svg", "kernels_experts_float8.svg", "kernels_linear_attention.svg"):
        assert parts.count(name) == 1
    assert "**Linear attention**, causal, 16 heads of 128" in parts
    assert page.product_parts({}) == []


def test_colors_are_of_all_ways():
    """A way without one would have no bar."""
    sizes = gemm.ProductSizes(cubes=(8,), gradients=8, tokens=8, features=8, hidden=8, eight=128)
    for case in gemm.product_cases(sizes, DEVICE):
        assert set(case.make(case.kinds[0]).ways) <= set(page.PRODUCT_COLORS)
    for case in moe.expert_cases(moe.ExpertSizes(**SMALL), DEVICE):
        assert set(case.make("uniform").ways) <= set(page.EXPERT_COLORS)
    assert set(linear_attention.WAYS) == set(page.LINEAR_COLORS)
    assert linear_attention.WAYS["quadratic"] is kernels.linear_attention.reference  # type: ignore[attr-defined]

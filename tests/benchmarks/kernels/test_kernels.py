"""The benchmark of kernels, their tuner and the calls for compute-sanitizer, at tiny sizes; and what the page shows."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nearpeak.kernels
from nearpeak.kernels._runtime import tuning as _runtime_tuning
from nearpeak.kernels._runtime.policy import using
from nearpeak.render.picture.scene import Polygon
from nearpeak.render.picture.svg import svg

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]

cases: Any = importlib.import_module("benchmarks.kernels.cases")
copies: Any = importlib.import_module("benchmarks.kernels.copies")
drawn_tunables: Any = importlib.import_module("benchmarks.kernels.drawn_tunables")
fit_rows: Any = importlib.import_module("benchmarks.kernels.fit_rows")
jobs: Any = importlib.import_module("benchmarks.kernels.jobs")
run: Any = importlib.import_module("benchmarks.kernels.run")
sanitize: Any = importlib.import_module("benchmarks.kernels.sanitize")
tables: Any = importlib.import_module("benchmarks.kernels.tables")
timing: Any = importlib.import_module("benchmarks.kernels.timing")
tune: Any = importlib.import_module("benchmarks.kernels.tune")
loss_parts: Any = importlib.import_module("benchmarks.kernels.loss_parts")
page: Any = importlib.import_module("benchmarks.pages.kernels")
gluon: Any = importlib.import_module("nearpeak.kernels._runtime.gluon")

Jobs, DONE, work, CopySizes = jobs.Jobs, jobs.DONE, jobs.work_through, copies.CopySizes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [
    module.name
    for module in pkgutil.walk_packages(nearpeak.kernels.__path__, "nearpeak.kernels.")
    if not module.name.startswith(("nearpeak.kernels._runtime.", "nearpeak.kernels.ladder"))
]
"""All modules of kernels and their launchers."""

NOT_ON_A_CPU = ("cudnn", "flex", "scaled_mm", "scaled_grouped_mm")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cases, "BACKEND", "aot_eager")
    for name, value in {"ROUNDS": 1, "CALLS": 2, "IN_A_ROW": 1}.items():
        monkeypatch.setattr(timing, name, value)
    torch.manual_seed(0)
    with using("require"):
        yield
    torch.compiler.reset()


def setting(**more: Any) -> Any:
    return run.Setting(DEVICE, **{**run.rehearsal(), **more})


def content_of(sections: list[str], given: Any) -> dict[str, Any]:
    content = run.new_content(1e9)
    run.measure(sections, given, content, lambda: json.dumps(content))
    return content


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """All sections, measured once; where it is asked for, as it takes half a minute."""
    if "NEARPEAK_REHEARSAL" not in os.environ:
        pytest.skip("NEARPEAK_REHEARSAL=1 runs the whole benchmark at tiny sizes")
    with pytest.MonkeyPatch.context() as patch, using("require"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # of bfloat16, on some CPUs
        patch.setattr(cases, "BACKEND", "aot_eager")
        for name, value in {"ROUNDS": 1, "CALLS": 2, "IN_A_ROW": 1}.items():
            patch.setattr(timing, name, value)
        return content_of(list(run.SECTIONS), setting())


def test_nothing_fails(results):
    assert not results["failed"]
    for row in (*results["rows"], *results["copies"], *results["losses"]):
        assert not [way for way in row["failed"] if way != "liger"], row
    for section in run.SELF_MEASURED:
        assert results[section]
        for row in results[section]:
            assert not [way for way in row["failed"] if DEVICE == "cuda" or way not in NOT_ON_A_CPU], row


def test_every_operation_has_its_ways(results):
    seen = {(row["operation"], row["pass"]): set(row["seconds"]) for row in results["rows"]}
    operations = ("softmax", "rms_norm", "layer_norm", "add_rms_norm", "swiglu", "dropout_add", "rotary")
    assert set(seen) == {(name, one) for name in operations for one in ("forward", "backward")}
    assert all({"nearpeak", "eager", "compile"} <= ways for ways in seen.values())
    copies = {row["operation"] for row in results["copies"]}
    blocks = {f"quantize {name}" for name in ("tensor", "row", "1x128", "128x128")}
    assert copies >= blocks | {"transpose_copy", "permute_tokens", "unpermute_tokens", "adamw bfloat16"}
    losses = {row["operation"]: set(row["seconds"]) for row in results["losses"]}
    assert losses["cross_entropy"] >= {"nearpeak", "eager", "compile"}
    assert losses["linear_cross_entropy"] >= {"nearpeak", "eager", "three products"}
    assert [row["operation"] for row in results["launch"]] == ["add", "softmax", "rms_norm", "layer_norm", "swiglu"]
    cells = [(row["pass"], row["causal"]) for row in results["attention"]]
    assert cells == [(name, causal) for causal in (False, True) for name in ("forward", "backward")]
    assert all({"nearpeak", "portable", "flash"} <= set(row["seconds"]) for row in results["attention"])
    assert all(len(row["seconds"]) == 9 for row in results["decoding"])
    products = {row["operation"] for row in results["products"]}
    assert products == {"gemm", "swiglu", "bias gelu", "residual", "fp8"}
    assert {"experts layer", "grouped_gemm", "grouped_gemm gated"} < {row["operation"] for row in results["experts"]}
    for section in ("products", "experts", "linear_attention"):
        assert all(len(row["seconds"]) > 1 or "fp8" in row["operation"] for row in results[section])


def test_all_ways_compute_the_same(results):
    """An error beside those of the others would be that of a way that does something else."""
    for row in (*results["rows"], *results["copies"]):
        for way, error in row["errors"].items():
            assert error < 0.02, (row["operation"], way)
    for section in run.SELF_MEASURED:
        for row in results[section]:
            for way, error in row["errors"].items():
                assert error < (0.1 if way.startswith("float8") else 0.02), (section, way)


def test_liger_is_called_as_it_wants_to_be():
    """Its own signatures, where it is installed."""
    if not cases.HAS_LIGER:
        assert all(cases.liger(name) is None for name in cases.LIGER)
    else:
        assert all(cases.liger(name) is not None for name in cases.LIGER)
    assert set(cases.LIGER) == set(cases.LIGER_CALLS)


def test_liger_has_inputs_of_its_own():
    given = [torch.ones(3, requires_grad=True), torch.ones(2)]
    own = run._given("liger", given)
    assert [one.requires_grad for one in own] == [True, False]
    assert own[0] is not given[0]
    assert run._given("eager", given) is given


def test_the_parameters_are_300_tensors_of_a_gigabyte():
    shapes = copies.parameter_shapes(CopySizes())
    assert len(shapes) == 300
    assert 0.95e9 < 2 * sum(torch.Size(shape).numel() for shape in shapes) < 1.1e9


@pytest.mark.slow
def test_compiled_code_is_kept_apart_from_what_failed(tmp_path):
    """Ways that were not compiled in time, or failed, are not tried by the process that measures."""
    jobs = Jobs(tmp_path)
    given = setting(rows=[(4, 256)])
    given.operations = {"swiglu"}
    work(jobs, run.compile_jobs(["rows"], given), run.clean)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"rows-4-forward.nearpeak", "rows-4-forward.compile", "rows-4-backward.compile"} <= names
    jobs.write("rows-4-backward", "compile", "SomeError: why")
    given.jobs = jobs
    forward, backward = content_of(["rows"], given)["rows"]
    assert "compile" in forward["seconds"]
    assert backward["failed"]["compile"] == "SomeError: why"
    assert not jobs.take("rows-4-forward")
    (tmp_path / "rows-4-forward.compile").unlink()
    jobs.write("rows-4-backward", "nearpeak", "SomeError: other")
    content = content_of(["rows"], given)
    assert "SomeError: other" in content["failed"]["rows: swiglu 4 x 256"]
    ways, failed = given.allowed({"nearpeak": len, "compile": len, "eager": len}, "rows-4-forward")  # type: ignore[dict-item]
    assert list(ways) == ["nearpeak", "eager"]
    assert failed == {"compile": "was not compiled in time"}


def test_a_job_that_cannot_begin_is_said(tmp_path):
    jobs = Jobs(tmp_path)

    def broken() -> Any:
        raise ValueError("no inputs")

    work(jobs, [("one", broken), ("two", lambda: {"step": lambda: None})], lambda: None)
    assert jobs.outcome("one", "all") == "ValueError: no inputs"
    assert jobs.outcome("two", "step") == DONE


def test_processes_that_take_too_long_are_ended():
    assert jobs.run_workers([sys.executable, "-c", "import time; time.sleep(60)"], 2, 0.3) < 20


def test_sections_that_are_not_measured_stay(tmp_path, results):
    file = tmp_path / "results.json"
    fresh = run.new_content(2.0)
    assert run.started(file, fresh, ["rows"]) is fresh
    file.write_text(json.dumps(results))
    merged = run.started(file, fresh, ["rows"])
    assert merged["losses"] == results["losses"]
    assert "rows" not in merged
    assert merged["copy_bytes_per_second"] == 2.0
    file.write_text(json.dumps({**results, "machine": "another"}))
    assert run.started(file, fresh, ["rows"]) is fresh


def test_results_are_shown(tmp_path, results):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    command = [sys.executable, "-m", "benchmarks.kernels", "--show", str(file)]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert text.strip() == tables.shown(results)
    for name in ("three products", "quantize 1x128", "| add |", "| rotary | backward |"):
        assert name in text
    assert "| rotary |" not in tables.shown(results, ["losses"])
    assert tables.short_of_bars({}) == []


def test_unknown_sections_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.parsed(["--only", "rowss"])
    assert "there is no section rowss" in capsys.readouterr().err
    assert run.parsed(["--only", "rows,losses"]).sections == ["losses", "rows"]


@pytest.mark.slow
def test_a_cuda_way_is_timed_by_events(monkeypatch):
    """The path that a CPU does not take, with a device that only counts."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def elapsed_time(self, other: Any) -> float:
            return 2.0

        def query(self) -> bool:
            return False

    class Device:
        index, sweep_bytes = 0, 8

        def events(self, count: int) -> list[Event]:
            return [Event() for _ in range(count)]

        def spin(self, seconds: float) -> None:
            calls.append("spin")

        def evict(self) -> None:
            calls.append("evict")

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Zero:
        events = 0.0005

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(timing, "gpu_instrument", lambda index: Device())
    monkeypatch.setattr(timing, "zero_of", lambda index, cache: Zero())
    waiting: list[str] = []
    clock = iter([0.001, 0.001, 0.5, 0.001, 0.001, 0.002])
    monkeypatch.setattr(timing, "host_seconds", lambda way: (way(), next(clock))[1])
    ways = {"waits": lambda: calls.append("a"), "plain": lambda: calls.append("b")}
    seconds = timing.in_turns(ways, resets={"plain": lambda: calls.append("reset")}, waiting=waiting)
    assert seconds == {"waits": pytest.approx(0.002), "plain": pytest.approx(0.0015)}
    assert waiting == ["waits"]
    assert calls.count("reset") >= 3


# the tuner


def computed_names() -> set[str]:
    """The names of entries of the table that kernels compute, where they are not written out."""
    both, norms = ("", "_causal"), ("", "_added", "_centered", "_centered_added")
    kinds = [f"{bits}{gated}" for bits in ("16_bits", "8_bits", "8_bits_fast") for gated in ("", "_gated")]
    kinds += ["16_bits_kept", "16_bits_gated_kept"]  # nothing is kept of 8 bits
    return {
        *(f"transpose_{size}" for size in (1, 2, 4, 8)),
        *(f"norm_forward{kind}" for kind in norms),
        *(f"norm_backward{kind}{few}" for kind in norms for few in ("", "_few")),
        *("cross_entropy", "cross_entropy_narrow"),
        *("softmax", "softmax_backward", "gated_forward", "gated_backward"),
        *(f"attention_hopper_{dim}{causal}" for dim in (64, 128) for causal in both),
        *(f"attention_{kernel}{causal}" for kernel in ("forward", "keys", "queries") for causal in both),
        *(f"gemm_sm90_{kind}" for kind in kinds),
        *(f"grouped_gemm{sm90}{gated}" for sm90 in ("", "_sm90") for gated in ("", "_gated")),
        *(f"decode{row}{paged}{more}" for row in ("", "_row") for paged in ("", "_paged") for more in ("", "_several")),
        *(f"linear_attention{name}" for name in ("", "_states", "_query", "_key", "_value")),
    }


def asked_for() -> set[str]:
    """The names of all kernels that look into the table."""
    names = computed_names()
    for path in KERNELS:
        for node in ast.walk(ast.parse(Path(importlib.import_module(path).__file__ or "").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tuned":
                names |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return names


@pytest.fixture(scope="module")
def tiny() -> Iterator[list[Any]]:
    yield tune.wanted_tunables(None, sizes=tune.REHEARSAL, device=DEVICE)
    # the tuner replaces entries of the table: other tests read it again
    _runtime_tuning._table.cache_clear()
    _runtime_tuning._tuned.cache_clear()


def test_every_kernel_that_has_a_choice_is_tuned(tiny):
    assert {one.kernel for one in tiny} == asked_for()
    assert all(one.candidates for one in tiny)


def test_a_whole_run_measures_a_bounded_number_of_candidates():
    wanted = tune.wanted_tunables(None, device=DEVICE)
    counts = [len(tune.spread(one.candidates, tune.MOST)) for one in wanted]
    assert max(counts) <= tune.MOST
    assert min(counts) > 1
    assert sum(counts) <= 1850  # 2 s each by 14 processes, and then 0.1 s each
    for one in wanted:
        assert one.where.above < one.where.size <= one.where.up_to


@pytest.mark.parametrize(
    ("size", "above", "up_to"), [(4096, 3584, 4096), (2464, 2048, 2560), (616, 512, 640), (65536, 32768, 65536)]
)
def test_an_entry_of_a_norm_holds_for_rows_of_nearly_its_length(size, above, up_to):
    assert tune.width_of(size) == (size, above, up_to)


def test_the_parts_of_a_loss_are_compared_with_its_three_products():
    products = {f"1 chunks: {name}": 1e-3 for name in ("logits", "by hidden", "by weight")}
    seconds = {"whole": 3.3e-3, **products, **{f"2 chunks: loss {number}": number * 1e-4 for number in range(1, 7)}}
    lines = loss_parts.table({"tokens": 1000, "features": 8, "vocabulary": 2100, "seconds": seconds}).splitlines()
    assert lines[0] == "1000 x 8 x 2100: three products 3.00 ms"
    assert lines[1].split() == ["3.300", "ms", "1.100", "whole"]
    assert [line.split()[-1] for line in lines if "loss" in line][:4] == ["1", "2", "3", "4"]
    assert lines[-1].endswith("0.002 ms")


def test_candidates_are_spread_from_first_to_last():
    some = [{"warps": number} for number in range(10)]
    assert tune.spread(some, 4) == [some[0], some[3], some[6], some[9]]
    assert tune.spread(some, 20) == some
    assert tune.spread(some, 1) == some[:1]


class Recorded(list[tuple[Any, ...]]):
    """What is launched, as (module, kernel, arguments that are numbers, warps)."""

    runs = True
    """Whether it is run, too."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    seen = Recorded()
    for path in KERNELS:
        module = importlib.import_module(path)
        if not hasattr(module, "launch"):
            continue
        original = module.launch

        def launch(kernel: Any, grid: Any, *args: Any, original: Any = original, **rest: Any) -> None:
            numbers = tuple(one for one in args if isinstance(one, (int, float, str)))
            seen.append((kernel.fn.__module__, kernel.__name__, grid, numbers, tuple(rest.items())))
            if seen.runs:
                original(kernel, grid, *args, **rest)

        monkeypatch.setattr(module, "launch", launch)
    return seen


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.exhaustive if part else pytest.mark.slow) for part in range(3)]
)
def test_candidates_are_what_is_launched(tiny, recorded, part):
    """The first and the last of each kernel are launched in different ways, and both are measured."""
    for tunable in tiny[part::3]:
        if re.search("_sm90|_hopper", tunable.kernel) and not gluon.runs_on(torch.device(DEVICE)):
            continue  # in the name of every kernel in Gluon for Hopper: another one runs here, with a choice of its own
        first, last = tunable.candidates[0], tunable.candidates[-1]
        launches = []
        tune.using(tunable.kernel, None)
        recorded.runs = True
        way = tunable.make()
        way()
        recorded.runs = False
        for candidate in (first, last):
            tune.using(tunable.kernel, candidate)
            recorded.clear()
            way()
            launches.append(list(recorded))
        tune.using(tunable.kernel, None)
        assert launches[0], tunable.kernel
        assert first == last or launches[0] != launches[1], tunable.kernel


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["softmax", "adamw", "cross_entropy", "quantize_pieces", "dropout_add"])
def test_a_kernel_is_tuned(tiny, kernel, tmp_path):
    wanted = [next(one for one in tiny if one.kernel == kernel)]
    jobs = Jobs(tmp_path)
    work(jobs, tune.compile_jobs(wanted, 2), tune.clean)
    (row,) = tune.tuned_rows(wanted, 3, jobs)
    assert row["failed"] == [
        {"candidate": one, "why": "was not compiled in time"}
        for place, one in enumerate(tune.spread(wanted[0].candidates, 3))
        if place > 1
    ]
    assert len(row["seconds"]) == min(len(wanted[0].candidates), 2) + 1
    assert kernel in tune.line(row)
    json.dumps(row)


def test_kernels_over_rows_are_measured_at_random_cells():
    wanted = tune.drawn_tunables([4], 60, DEVICE)
    assert len(wanted) >= 25
    assert len({one.kernel for one in wanted}) >= 12
    for one in wanted:
        assert one.candidates, one.label
        assert one.label["seed"] == 4
        assert one.where.above < one.where.size == one.where.up_to
    shown = [one.label["text"] for one in wanted]
    assert shown == [one.label["text"] for one in tune.drawn_tunables([4], 60, DEVICE)], "processes agree on the order"
    assert not [one for one in tune.drawn_tunables([4], 60, DEVICE, ["rotary"]) if one.kernel != "rotary_by_rows"]


def test_spread_cells_have_sizes_of_all_kinds():
    cells = drawn_tunables.spread_cells(4)
    assert cells == drawn_tunables.spread_cells(4) != drawn_tunables.spread_cells(5)
    norms = [cell.shape for cell in cells if cell.operation == "layer_norm"]
    assert {512, 1024, 2048, 4096, 8192, 16384} <= {1 << (shape["columns"] - 1).bit_length() for shape in norms}
    assert {rows for shape in norms for rows in (shape["rows"] <= 64, shape["rows"] > 16384)} == {False, True}
    wanted = tune.spread_tunables([4], "cpu")
    assert 300 <= len(wanted) <= 360
    assert all(len(one.candidates) > 1 for one in wanted)


def test_a_table_by_rows_is_fitted(monkeypatch):
    def cell(rows: int, default: float, **seconds: float) -> dict[str, Any]:
        by_name = {json.dumps({"warps": int(name[1:])}): one for name, one in seconds.items()}
        return {"kernel": "norm_forward_by_rows", "operation": "rms_norm", "size": 1000,
                "shape": {"rows": rows}, "seconds": {"default": default, **by_name}}  # fmt: skip

    rows = [
        cell(20, 1.0, w1=0.85, w2=0.9), cell(60, 1.0, w1=1.2, w2=0.9),  # one of the two was by chance
        cell(65, 1.0, w2=0.9), cell(256, 1.0, w2=0.94),
        cell(2**16, 1.0, w2=1.3),  # far away, where it is slow
        {**cell(8, 1.0, w4=0.5), "kernel": "gated_forward", "operation": "swiglu", "size": 5000},
    ]  # fmt: skip
    place = {"above": 512, "up_to": 1024}
    before = {"norm_forward_by_rows": [{"up_to": 9, "warps": 9}], "gated_forward": [{"above": 2**22, "up_to": 2**30}]}
    table = fit_rows.merged(before, rows)
    (fitted,) = table["norm_forward_by_rows"]
    assert fitted == {**place, "rows_above": 16, "rows_up_to": fitted["rows_up_to"], "warps": 2}
    assert 256 <= fitted["rows_up_to"] <= 4096
    assert table["gated_forward"] == [{"above": 4096, "up_to": 8192, "warps": 4}, before["gated_forward"][0]]
    assert "5 cells" in fit_rows.described("norm_forward_by_rows", rows)
    # another form of the kernel, measured once, takes what this one does there
    other = {**cell(64, 1.0, w2=0.99, w8=0.98), "kernel": "norm_forward_centered_by_rows"}
    both = fit_rows.merged(before, [*rows, other])
    assert [one["warps"] for one in both["norm_forward_centered_by_rows"]] == [2]
    monkeypatch.setattr(_runtime_tuning, "_table", lambda generation: table)
    _runtime_tuning._tuned.cache_clear()
    cpu = torch.device("cpu")
    above = fitted["rows_up_to"] + 1
    found = [_runtime_tuning.tuned_by_rows("norm_forward", 1000, rows, cpu) for rows in (1, 16, 17, 256, above)]
    assert found == [None, None, {"warps": 2}, {"warps": 2}, None]
    assert _runtime_tuning.tuned_by_rows("norm_forward", 1025, 64, cpu) is None
    assert _runtime_tuning.tuned("norm_forward", 1000, cpu) is None
    assert _runtime_tuning.tuned("gated_forward", 8192, cpu) == {"warps": 4}
    _runtime_tuning._tuned.cache_clear()


def test_a_random_cell_is_measured():
    try:
        wanted = [
            one
            for one in tune.drawn_tunables([4], 1, DEVICE, tiny=True)
            if one.kernel == "norm_forward_centered_by_rows"
        ]
        (row,) = tune.tuned_rows(wanted, 1, None, 1)
        assert list(tune.tuned_rows(wanted, 1, None, 1, limit_seconds=-1.0)) == []
    finally:
        _runtime_tuning._table.cache_clear()
        _runtime_tuning._tuned.cache_clear()
    assert (row["operation"], row["pass"], row["text"]) == ("layer_norm", "forward", "3 x 72")
    assert len(row["seconds"]) == 2
    assert row["failed"] == []
    assert "norm_forward_centered_by_rows 3 x 72" in tune.line(row)


@pytest.mark.slow
def test_a_wrong_candidate_is_left_out(tiny, monkeypatch):
    tunable = next(one for one in tiny if one.kernel == "softmax")
    monkeypatch.setattr(tune, "_alike", lambda one, other: False)
    row = tune.measured(tunable, tunable.candidates[:1])
    assert row["best"] is None
    assert row["failed"][0]["why"] == "another result than the default"


@pytest.mark.slow
def test_a_candidate_that_differs_from_run_to_run_is_left_out(tiny, monkeypatch):
    tunable = next(one for one in tiny if one.kernel == "softmax")
    monkeypatch.setattr(tune, "_repeats", lambda found, way: False)
    row = tune.measured(tunable, tunable.candidates[:1])
    assert row["best"] is None
    assert row["failed"][0]["why"] == "another result in each run"


def test_the_table_has_what_was_measured(monkeypatch):
    def row(size: int, best_s: float, best: dict[str, Any] | None) -> dict[str, Any]:
        where = {"size": size, "above": size // 2, "up_to": size}
        return {"kernel": "softmax", **where, "default_s": 1.0, "best_s": best_s, "best": best}

    before = {"softmax": [{"up_to": 64, "warps": 1}, {"up_to": 4096, "warps": 2}], "adamw": []}
    rows = [row(4096, 0.999, {"warps": 8}), row(1024, 0.9, {"warps": 4}), row(2048, 1.0, None)]
    table = tune.merged(before, rows)
    assert table == {"softmax": [{"up_to": 64, "warps": 1}, {"above": 512, "up_to": 1024, "warps": 4}]}
    monkeypatch.setattr(_runtime_tuning, "_table", lambda generation: table)
    _runtime_tuning._tuned.cache_clear()
    device = torch.device("cpu")
    found = [_runtime_tuning.tuned("softmax", size, device) for size in (64, 65, 512, 513, 1024, 1025)]
    assert found == [{"warps": 1}, None, None, {"warps": 4}, {"warps": 4}, None]
    _runtime_tuning._tuned.cache_clear()


# the calls for compute-sanitizer


def launched_somewhere() -> set[tuple[str, str]]:
    """All kernels that a launcher names, and that run here: not those for Hopper, in Gluon or beside it, on a CPU."""
    found, on_hopper = set(), gluon.runs_on(torch.device(DEVICE))
    for path in KERNELS:
        if "sm90" in path and not on_hopper:
            continue
        module = importlib.import_module(path)
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                kernel = getattr(module, getattr(node.args[0], "id", ""), None)
                if kernel is not None and (on_hopper or type(kernel).__name__ != "GluonJITFunction"):
                    found.add((kernel.fn.__module__, kernel.__name__))
    return found


@pytest.mark.skipif("NEARPEAK_REHEARSAL" not in os.environ, reason="NEARPEAK_REHEARSAL=1 makes all calls")
def test_every_kernel_is_sanitized(recorded):
    slow = (str(shape) for shape in (sanitize.LONG, sanitize.SHARED, sanitize.SHIFTED))
    slow = tuple(slow) if DEVICE == "cpu" else ()
    for name, call in sanitize.Calls(DEVICE).every():
        if not name.endswith(slow) or name == f"rms_norm {slow[0]}":  # others of its length run the same kernels
            call()
    wanted = launched_somewhere()
    assert len(wanted) > 30
    assert wanted - {(module, kernel) for module, kernel, *_ in recorded} == set()


# the page


def measured_results() -> dict[str, Any] | None:
    return json.loads(page.RESULT.read_text(encoding="utf-8")) if page.RESULT.exists() else None


def test_the_page_is_that_of_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page_with_results(text, measured_results()) == text


@pytest.mark.parametrize("name", page.PASSES)
def test_the_plots_are_those_of_the_results(name):
    content, file = measured_results(), page.IMAGES / f"kernels_{name}.svg"
    assert file.exists() == (content is not None)
    if content is not None:
        assert page.plot(content, name) == file.read_text(encoding="utf-8")


def test_the_other_plots_are_those_of_the_results():
    content = measured_results() or {}
    for file, picture in (page.attention_plots(content) | page.product_plots(content)).items():
        assert svg(picture) == (page.IMAGES / f"{file}.svg").read_text(encoding="utf-8")


def test_a_page_of_results(results):
    text = page.page_with_results(page.PAGE.read_text(encoding="utf-8"), results)
    assert page.NOT_YET not in text
    assert "| softmax | forward | 4 x 256 |" in text
    assert "images/kernels_backward.svg" in text
    assert page.page_with_results(text, None) == page.page_with_results(page.PAGE.read_text(encoding="utf-8"), None)


def test_a_plot_has_a_bar_for_each_way(results):
    ways = sum(len(row["seconds"]) for row in results["rows"] if row["pass"] == "forward")
    shapes = page.scene(results, "forward").shapes
    assert sum(isinstance(shape, Polygon) for shape in shapes) == ways + len(page.ROW_WAYS)
    assert page.plot(results, "forward").startswith("<svg")


def test_only_some_are_tuned():
    every = tune.wanted_tunables(["softmax"], device=DEVICE)
    some = tune.wanted_tunables(["softmax"], [4096], device=DEVICE)
    assert {one.where.size for one in some} == {4096} < {one.where.size for one in every}
    tiles = tune.wanted_tunables(["softmax"], [4096], "tile", device=DEVICE)
    assert [one.kernel for one in tiles] == [one.kernel for one in some]
    assert not tune.wanted_tunables(["softmax"], [4096], "no such", device=DEVICE)
    for one, all_of_it in zip(tiles, some, strict=True):
        of_tiles = [candidate for candidate in all_of_it.candidates if candidate["variant"] == "tile"]
        assert one.candidates == of_tiles + tune._present(one)

"""The sections of the kernels' benchmark on attention and decoding: ways, tables, bars and plots."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from nearpeak.kernels._runtime.policy import using
from nearpeak.render.picture.scene import Polygon
from nearpeak.render.picture.svg import svg

pytest.importorskip("triton")


attention: Any = importlib.import_module("benchmarks.kernels.attention")
cases: Any = importlib.import_module("benchmarks.kernels.cases")
run: Any = importlib.import_module("benchmarks.kernels.run")
tables: Any = importlib.import_module("benchmarks.kernels.tables")
timing: Any = importlib.import_module("benchmarks.kernels.timing")
page: Any = importlib.import_module("benchmarks.pages.kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cases, "BACKEND", "aot_eager")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    with using("require"):
        yield
    torch.compiler.reset()


def small(**more: Any) -> Any:
    given = {"batch": 1, "heads": 2, "tokens": 20, "dim": 16, "causal": True, "device": DEVICE, "repeats": 2}
    return attention.AttentionCase(**{**given, **more})


def test_the_cells_are_sixteen_of_each_pass():
    cases = list(attention.attention_cases())
    assert len(cases) == 16
    assert {case.batch * case.tokens for case in cases} == {16384}
    assert {(case.heads, case.dim) for case in cases} == {(16, 128), (32, 64)}
    whole = next(case for case in cases if case.name == "1 x 16 x 16384 x 128 full")
    assert whole.flops == 4 * 16 * 16384**2 * 128
    assert small().flops == small(causal=False).flops / 2


@pytest.mark.parametrize("causal", [False, True])
def test_the_portable_way_is_attention(causal):
    case = small(causal=causal)
    passes = case.passes()
    for name in ("forward", "backward"):
        own, portable, torch_has = (passes[name][way]() for way in ("nearpeak", "portable", "flash"))
        if name == "forward":
            own, portable, torch_has = (own,), (portable,), (torch_has,)
        for one, other, third in zip(own, portable, torch_has, strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
            torch.testing.assert_close(one, third, atol=0.03, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_flex_has_the_same_mask(causal):
    given = [torch.randn(1, 1, 20, 16, device=DEVICE) for _ in "qkv"]
    with torch.no_grad():
        found = attention.attention_ways(causal, 20, DEVICE)["flex"](*given)
        expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_errors_and_repeats_are_of_both_passes():
    case = small(tokens=17)
    errors = case.errors()
    assert set(errors) == {"forward", "backward"}
    for found in errors.values():
        assert found["nearpeak"] < 0.02
        assert {"nearpeak", "portable", "flash"} <= set(found)
    assert case.repeated() == {"runs": 2, "different": 0}


@pytest.mark.slow
def test_caches_of_all_kinds_hold_the_same():
    sizes = attention.DecodingSizes(sequences=((2, 5),), heads=2, key_heads=1, dim=16)
    (case,) = attention.decoding_cases(sizes, DEVICE)
    (row,) = case.rows(run.Setting(DEVICE), "none")
    assert set(row["seconds"]) == {*attention.OWN, "sdpa"}
    assert row["bytes"]["nearpeak"] == 2 * row["bytes"]["float8"] == 2 * 2 * 5 * 16 * 2
    for way, error in row["errors"].items():
        assert error < (0.1 if way.startswith("float8") else 0.02), way
    json.dumps(row)
    assert "float8, pages of 16" in tables.decoding_table([row])


def test_memory_is_of_both_passes():
    cases = list(attention.memory_cases(attention.MemorySizes(dim=16, beside_others=12, alone=20), DEVICE))
    assert [(case.tokens, case.backward) for case in cases] == [(12, True), (20, False), (20, True)]
    (row,) = cases[0].rows(run.Setting(DEVICE), "none")
    assert {"nearpeak", "portable", "flash", "written out"} <= set(row["seconds"])
    assert max(row["errors"].values()) < 0.02
    (row,) = cases[1].rows(run.Setting(DEVICE), "none")
    assert list(row["seconds"]) == ["nearpeak"]
    assert "| 20 | forward | nearpeak |" in tables.memory_table([row])


def made_up(**seconds: float) -> list[dict[str, Any]]:
    """All cells, each way with its rate in TFLOP/s."""
    found = []
    for case in attention.attention_cases():
        for name, times in (("forward", 1.0), ("backward", 2.5)):
            row = {key: getattr(case, key) for key in ("operation", "batch", "heads", "tokens", "dim", "causal")}
            flops = times * case.flops
            found.append(
                {
                    **row,
                    "pass": name,
                    "flops": flops,
                    "seconds": {way: flops / rate / 1e12 for way, rate in seconds.items()},
                    "errors": {"nearpeak": 0.01, "cudnn": 0.01},
                    "repeated": {"runs": 100, "different": 0},
                    "failed": {},
                }
            )
    return found


def test_bars_of_attention():
    good = made_up(nearpeak=660.0, portable=400.0, cudnn=600.0, flash=390.0, flex=380.0)
    assert tables.attention_short({"attention": good}) == []
    equal = made_up(nearpeak=600.0, portable=400.0, cudnn=600.0, flash=410.0)
    short = tables.attention_short({"attention": equal})
    assert "attention forward 128 full 16384: 600 TFLOP/s, and not 640" in short
    assert "attention forward: 0 cells at 1.05 of the rate of cuDNN, and not 10" in short
    assert not any("backward: " in one for one in short)
    assert sum("the portable kernel has 0.98" in one for one in short) == 32
    good[0]["repeated"] = {"runs": 100, "different": 3}
    good[1]["errors"]["nearpeak"] = 0.03
    assert tables.attention_short({"attention": good}) == [
        "attention forward 128 full 2048: 3 of 100 runs differ",
        "attention backward 128 full 2048: an error of 3.0e-02, and torch's is 1.0e-02",
    ]
    assert "| forward | 16 x 128 | full | 8 x 2048 | 660 | 400 | 600 | 390 | 380 | 1.10 | 1.03 |" in (
        tables.attention_table(good)
    )


def test_bars_of_decoding_and_memory():
    row = {
        "batch": 1,
        "tokens": 32768,
        "of_copy": {"nearpeak": 0.95, "pages of 1": 0.8, "float8": 0.85, "sdpa": 0.2},
        "seconds": {"nearpeak": 1.0, "pages of 1": 1.2, "float8": 0.6, "sdpa": 5.0},
    }
    assert tables.attention_short({"decoding": [row]}) == [
        "decoding 1 x 32768, pages of 1: 1.20 times one piece",
        "decoding 1 x 32768, float8: 85 % of a copy",
    ]
    many = {"tokens": 2**16, "extra_bytes": {"nearpeak": 2**30}, "pair_bytes": 2**32}
    assert tables.attention_short({"attention_memory": [many]}) == ["attention to 65536 tokens: 1024 MiB more memory"]


def test_plots_have_a_bar_for_each_way():
    content = {"machine": "GPU", "attention": made_up(nearpeak=660.0, cudnn=600.0)}
    scene = page.attention_scene(content, "forward")
    assert sum(isinstance(shape, Polygon) for shape in scene.shapes) == 2 * 16 + len(tables.ATTENTION_WAYS)
    assert list(page.attention_plots(content)) == ["kernels_attention_forward", "kernels_attention_backward"]
    assert "of 100 runs of both passes in each cell none had another" in "\n".join(page.attention_parts(content))
    shares = {"nearpeak": 0.9, "pages of 16": 0.85, "sdpa": 0.3, "float8": 0.8, "float8, pages of 1": 0.7}
    row = {"batch": 1, "tokens": 9, "of_copy": shares, "seconds": dict.fromkeys(shares, 1e-5)}
    scene = page.decoding_scene({"machine": "GPU", "decoding": [row]})
    assert sum(isinstance(shape, Polygon) for shape in scene.shapes) == len(shares) + len(page.CACHES)
    assert svg(scene).startswith("<svg")

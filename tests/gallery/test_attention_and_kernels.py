"""The examples about attention, first kernels, fills, experts, tiles, caches and asymptotics.

Their arithmetic is held against figures worked out by hand for an H100; what they do on a CPU is run with small sizes.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nearpeak
from nearpeak.gallery import pages, run
from nearpeak.gallery.examples import asymptotics, flash_attention, kv_cache, skewed_experts, tiling_ladder
from nearpeak.gallery.parts import ExampleResult, Plot, PredictionTable, StackedBars
from nearpeak.gallery.run import Context
from nearpeak.render.document import CodeBlock, Table

NAMES = (
    "flash_attention",
    "first_kernels",
    "needless_fills",
    "skewed_experts",
    "tiling_ladder",
    "kv_cache",
    "asymptotics",
    "cuda_kernel",
    "memory_hierarchy",
    "flash_triton",
    "fused_layer",
    "fewer_operations",
    "power",
)
H100 = nearpeak.machine("h100-sxm").achievable
assert H100 is not None
SMALL = {
    (8, 2, 1024, 64): (4, 2, 128, 16),
    (4096, 1024): (64, 32),
    (1024, 384): (16, 16),
    (2, 4, 512, 64): (1, 2, 32, 16),
    (1, 4, 256, 64): (1, 2, 16, 16),
    (512, 256, 256): (16, 32, 32),
    (2048, 512): (64, 16),
    1024: 64,
    512: 64,
    (16, 512, 2, 256, 256): (4, 64, 2, 16, 16),
    192: 64,
    (256, 2): (64, 1),
    (32, 64, 128, 256): (8, 16),
    (4, 32): (2, 8),
    (128, 256, 512, 1024, 2048): (64, 128),
}
"""What the CPU's sizes are made here."""


def seconds(result: ExampleResult) -> dict[str, float]:
    return {row.what: row.predicted for row in result.rows if row.predicted is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_finite(name: str, predicting: Callable[[str], ExampleResult]) -> None:
    result = predicting(name)
    assert result.rows and not result.skipped
    assert all(row.predicted is not None and math.isfinite(row.predicted) and row.predicted > 0 for row in result.rows)
    assert all(row.measured is None for row in result.rows)
    text = pages.text(result)
    assert "nan" not in text.replace("nan_to_num", "")
    assert "None" not in text.replace(", None]", "").replace("[None,", "")  # axes in the source of kernels
    assert all(len(line) <= 80 for line in text.split("\n"))
    pictures = pages.document(result).pictures
    assert all(picture.svg.startswith("<svg") for picture in pictures)
    assert pictures or name == "first_kernels"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_a_cpu(
    name: str,
    measuring: Callable[[str], ExampleResult],
    monkeypatch: pytest.MonkeyPatch,
    only: Callable[..., list[object]],
) -> None:
    monkeypatch.setattr(Context, "pick", lambda self, *, gpu, cpu: SMALL.get(cpu, cpu))
    result = measuring(name)
    assert result.rows and all(row.measured is not None and row.measured > 0 for row in result.rows)
    assert pages.text(result)
    for part in only(result, (Plot, StackedBars)):
        assert pages.picture(part).startswith("<svg")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["a100-sxm-80gb", "b200", "mi300x"])
@pytest.mark.parametrize("name", ["flash_attention", "skewed_experts", "tiling_ladder"])
def test_other_machines(name: str, machine: str) -> None:
    result = run.run_example(name, run.make_context(machine))
    assert all(row.predicted for row in result.rows)


def test_flash_attention_moves_each_score_eight_times(
    predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]
) -> None:
    # product 1/2 of float32 scores, cast 1/2 + 1, scale 1 + 1, softmax 1 + 1, cast 1 + 1/2, product 1/2
    steps, loops = only(predicting("flash_attention"), Table)
    scores = 64 * 4096 * 4096 * 4
    total = steps.rows[-1]
    small = 64 * 4096 * 128 * 2  # one of query, key, value and result, of all heads
    moved = 8 * scores + 2 * (small / 16 + small) + 2 * small + 2 * small
    found = nearpeak.estimate(flash_attention.written_out, *_heads(), on="h100-sxm")
    assert found.bytes == moved
    assert found.as_written_s == pytest.approx(moved / H100.bandwidth, rel=0.02)
    assert total[0] == "all steps" and total[3] == "10.5 ms"
    assert [row[0] for row in steps.rows].count("cast") == 2 and steps.rows[-3][3] == steps.rows[3][3]
    up, softmax, down = (steps.rows[place] for place in (3, 5, 6))  # as many bytes up as down, by another kernel
    assert float(down[4].split()[0]) < 0.8 * float(up[4].split()[0])
    assert float(softmax[4].split()[0]) < 2 * float(softmax[3].split()[0])
    head = 4096 * 128 * 2
    assert [row[4] for row in loops.rows] == [pages.shown("B")(64 * head * (2 + 32 * each)) for each in (3, 2, 2)]


def _heads() -> tuple[torch.Tensor, ...]:
    with nearpeak.fake():
        return tuple(torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16) for heads in (64, 4, 4))


def test_online_softmax_is_exact_after_the_last_block() -> None:
    (plot,) = [part for part in flash_attention.online() if isinstance(part, Plot)]
    all_keys, so_far = ([digits for _, digits in series.points] for series in plot.series)
    assert len(all_keys) == len(so_far) == 16
    assert max(all_keys[:-1]) < 1 and all_keys[-1] > 14 and min(so_far) > 14


def test_first_kernels_bytes(predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]) -> None:
    (table,) = only(predicting("first_kernels"), Table)
    assert [row[3] for row in table.rows] == ["3.0", "8.0", "2.0"]
    size = 16384 * 4096 * 2
    found = seconds(predicting("first_kernels"))
    assert found["add, nearpeak"] == pytest.approx(3 * size / H100.bandwidth)
    assert found["softmax, nearpeak"] == pytest.approx(2 * size / H100.bandwidth)
    assert found["softmax, nearpeak"] == found["softmax, torch"] < found["softmax, written out, torch"]
    assert found["add, torch"] == found["add, nearpeak"]
    floors = [row.what for row in predicting("first_kernels").rows if row.high is None]
    assert floors == ["softmax, torch"]  # limited by more than its bytes


def test_shown_kernels(
    tmp_path: Path, predicting: Callable[[str], ExampleResult], only: Callable[..., list[CodeBlock]]
) -> None:
    """The sources that are shown are run, in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    script = tmp_path / "shown.py"
    sources = [part.text for part in only(predicting("first_kernels"), CodeBlock)]
    script.write_text("\n\n\n".join(["import torch, triton", "import triton.language as tl", *sources]))
    shown = runpy.run_path(str(script))
    x, y = torch.randn(2, 3, 3001, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(shown["add"](x, y), x + y)
    torch.testing.assert_close(shown["softmax"](x), torch.softmax(x, -1))


def test_fills_of_64_layers(predicting: Callable[[str], ExampleResult], only: Callable[..., list[StackedBars]]) -> None:
    result = predicting("needless_fills")
    found = seconds(result)
    (bars,) = only(result, StackedBars)
    assert [bar.total for bar in bars.bars] == list(found.values())[:3]
    size = 64 * 8192 * 1536 * 2
    assert size == pytest.approx(1.61e9, rel=1e-3)
    assert found["torch.zeros"] > size / H100.bandwidth
    assert found["nan_to_num_"] > 2 * size / H100.bandwidth
    assert found["zero_, as float32"] < 0.9 * found["zero_ in place"]  # wider stores of the same bytes


def test_published_figures_of_attention() -> None:
    """11.8 ms were measured on an H100; FlashAttention 2 reaches about 220 TFLOP/s on an A100 (its paper, figure 5)."""
    written = nearpeak.estimate(flash_attention.written_out, *_heads(), on="h100-sxm")
    assert written.expected_device_s == pytest.approx(11.8e-3, rel=0.15)
    with nearpeak.fake():
        inputs = [torch.empty(4, 32, 4096, 128, dtype=torch.bfloat16) for _ in range(3)]
    fused = nearpeak.estimate(flash_attention.by_torch, *inputs, on="a100-sxm-80gb")
    assert fused.expected_device_s is not None
    assert fused.flops / fused.expected_device_s == pytest.approx(220e12, rel=0.2)


def test_padding_of_experts(predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]) -> None:
    assert skewed_experts.padded_rows([1, 128, 129, 0], 128) == 128 + 128 + 256
    found = seconds(predicting("skewed_experts"))
    # the same rows and weights: what is skewed costs the grouped product little, and the padded one much
    assert found["grouped, Beta(1, 5)"] < 1.1 * found["grouped, uniform"]
    assert found["padded, Beta(1, 5)"] > 2 * found["padded, uniform"]
    dense = 2 * 32768 * 4096 * 1536 / H100.peak("bfloat16")
    assert dense < found["grouped, uniform"] < 2 * dense
    (table,) = only(predicting("skewed_experts"), Table)
    assert [row[0] for row in table.rows][-1] == "as many as the busiest"


def test_one_by_one_is_padded_without_zeros() -> None:
    counts, rows, weight = [2, 0, 3], torch.randn(5, 4), torch.randn(3, 6, 4)
    blocks = torch.zeros(3, 3, 4)
    blocks[0, :2], blocks[2] = rows[:2], rows[2:]
    whole = skewed_experts.padded(blocks, weight)
    torch.testing.assert_close(
        torch.cat(skewed_experts.one_by_one(counts, rows, weight)), torch.cat((whole[0, :2], whole[2]))
    )


def test_ladder(predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]) -> None:
    (table,) = only(predicting("tiling_ladder"), Table)
    # 96 bytes for 64 operations, 160 for 128, 192 for 256; 8 + 256 numbers of 2 bytes for 2 * 8 * 256; 128 / 2;
    # 2 / 3 of 128
    assert [row[2] for row in table.rows] == ["0.667", "0.800", "1.33", "7.76", "64.0", "64.0", "64.0", "85.3", "-"]
    found = list(seconds(predicting("tiling_ladder")).values())
    assert found[3] == pytest.approx(2 * 4096**3 / H100.vector["float32"])
    assert found[0] > found[1] > found[2] > found[3] > found[5] and found[7] == found[8]


def test_ladder_on_a_cpu_multiplies() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    for multiply in (tiling_ladder.numbers, tiling_ladder.rows, tiling_ladder.blocks):
        torch.testing.assert_close(multiply(a, b), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_cache_operations(predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]) -> None:
    (table,) = only(predicting("kv_cache"), Table)
    # 8 layers of 12 width^2 weights, used twice a token; attention: 4 width operations a layer and key
    weights, width = 2 * 8 * 12 * 2048**2, 2048
    for row in table.rows:
        place = int(row[0])
        kept = weights + 8 * 4 * width * place
        assert _flops(row[1]) == pytest.approx(kept, rel=0.01)  # and a few for softmax, scale and activations
        assert _flops(row[2]) == pytest.approx(place * weights + 8 * 2 * width * place**2, rel=0.01)


def _flops(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[unit[0]]


def test_heads_fewer_than_processors_wait() -> None:
    context = run.make_context("h100-sxm")
    caches = {n: [(torch.empty(1, n, 2048, 64, dtype=torch.bfloat16, device="meta"),) * 2] for n in (32, 132, 264)}
    assert kv_cache.waiting(context, caches[132]) == kv_cache.waiting(context, caches[264]) == 0
    assert 1e-6 < kv_cache.waiting(context, caches[32]) < 32e-6
    assert kv_cache.waiting(context, caches[32] * 3) == pytest.approx(3 * kv_cache.waiting(context, caches[32]))


def test_cache_gives_the_same_token() -> None:
    context = Context(machine=nearpeak.machine("h100-sxm"), device="cpu")
    weights = kv_cache.layers(context, 2, 128, torch.float32)
    x = torch.randn(1, 5, 128)
    caches = []
    before = x
    for layer in weights:
        query, key, value = kv_cache.heads_of(torch.nn.functional.linear(before, layer["qkv"]))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        before = kv_cache.after_attention(before, found, layer)
        key[:, :, -1], value[:, :, -1] = 0, 0  # what the step is to write
        caches.append((key.clone(), value.clone()))
    torch.testing.assert_close(
        kv_cache.with_cache(x[:, -1:], weights, caches), kv_cache.without_cache(x, weights), rtol=1e-4, atol=1e-4
    )


def test_asymptotics(predicting: Callable[[str], ExampleResult], only: Callable[..., list[Table]]) -> None:
    (table,) = only(predicting("asymptotics"), Table)
    # n^2 / 2 pairs of 4 dim operations; a state of dim^2 for each token, made and used; 16 heads of 128
    assert [row[1] for row in table.rows] == ["68.7 GFLOP", "5.37 GFLOP", "4.29 GFLOP"]
    curves = [
        [row.predicted for row in part.rows]
        for part in predicting("asymptotics").parts
        if isinstance(part, PredictionTable)
    ]
    softmax, chunks, naive = curves
    assert softmax[0] < chunks[0] and softmax[-1] > 3 * chunks[-1]  # type: ignore[operator]
    assert all(slow > fast for slow, fast in zip(naive, softmax, strict=False))  # type: ignore[operator]


def test_chunks_are_linear_attention() -> None:
    query, key, value = (torch.randn(2, 3, 128, 8) for _ in range(3))
    expected = nearpeak.kernels.linear_attention(query, key, value, eps=0.0)
    torch.testing.assert_close(asymptotics.chunked(query, key, value), expected, rtol=1e-4, atol=1e-4)


def test_crossing() -> None:
    falls = [(1.0, 1.0), (4.0, 4.0), (16.0, 16.0)]
    assert asymptotics.crossing(falls, [(1.0, 2.0), (4.0, 2.0), (16.0, 2.0)]) == pytest.approx(2.0)
    assert asymptotics.crossing(falls, [(1.0, 0.5), (4.0, 2.0), (16.0, 2.0)]) == 1.0
    assert asymptotics.crossing(falls, [(1.0, 20.0), (4.0, 20.0), (16.0, 20.0)]) is None

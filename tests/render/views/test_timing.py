"""Cards from made-up timings: what they say, at most 80 columns, and plain ASCII whatever the names are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from nearpeak.measure.timing import (
    Block,
    Comparison,
    Conditions,
    Environment,
    InputStatistics,
    Kind,
    Timing,
    flag_names,
    make_flag,
)
from nearpeak.ops.work import Work
from nearpeak.render.text import text as written
from nearpeak.render.views import timing as render


def card(timing: Timing) -> str:
    return written(render.document(timing))


def comparison_card(comparison: Comparison) -> str:
    return written(render.comparison_document(comparison))


ENVIRONMENT = Environment(
    device="Made-up GPU",
    driver="570.86.15",
    torch="2.13.0",
    python="3.11.9",
    nearpeak="0.1.0",
    date="2026-01-02T03:04:05+00:00",
    threads=16,
)

GPU = Timing(
    name="softmax",
    seconds=31.41e-6,
    low=31.3e-6,
    high=31.52e-6,
    confidence=0.9586,
    kind="device",
    method="CUDA events around each call, behind a spin, less their zero of 1.20 us",
    cache="cold",
    regime="burst",
    blocks=tuple(
        Block(
            seconds=31.41e-6,
            readings=(31.41e-6,),
            conditions=Conditions(clock_hz=1.98e9, power_watts=power, temperature_celsius=41),
        )
        for power in (410.0, 480.0)
    ),
    flags=(
        make_flag("HEAVY_TAIL", "the slowest hundredth takes 2.1 times the median"),
        make_flag("CLOCK_VARIED", "10 % to 90 % of the blocks: 1755 to 1980 MHz"),
    ),
    environment=ENVIRONMENT,
    other_seconds={"enqueue": 5.2e-6, "pipelined": 31.6e-6, "latency": 44.9e-6, "graph": 31.0e-6},
    cpu_bound=False,
    kernels=("void at::native::(anonymous namespace)::softmax_warp_forward<float, 10>(float*)",),
    parameters={"rows": "4096", "columns": "4096"},
    inputs=(
        InputStatistics(
            shape=(4096, 4096),
            dtype="float32",
            device="cuda:0",
            mean=0.001,
            std=1.0,
            minimum=-5.0,
            maximum=5.0,
            zero_fraction=0.0,
            nonfinite_fraction=0.0,
            distinct=4096,
            sampled=True,
        ),
    ),
    work=Work(bytes_read=67108864.0, bytes_written=67108864.0),
    bound_seconds=28.9e-6,
    bound_limiter="memory",
)

GPU_CARD = """\
softmax  rows=4096 columns=4096
31.41 us [31.30, 31.52]  grade B
device time, cold cache, burst; median of 2 blocks, 95.9 % interval

bound     92.0 % of the roofline; memory limits: 28.9 us, 134 MB at the
          machine's 4.64 TB/s
reached   4.27 TB/s

time       per call  meaning
---------  --------  ----------------------------------------------------
device      31.4 us  the device is occupied, launch hidden (the headline)
graph       31.0 us  one more call in a CUDA graph
pipelined   31.6 us  wall time with many calls in flight, as in training
latency     44.9 us  wall time, idle device to idle device
enqueue     5.20 us  host time until the call returns

Not CPU-bound: the host enqueues a call in 5.20 us, the device needs 31.4 us.

kernels   1: softmax_warp_forward
inputs    float32 4096x4096 mean 0.001, std 1
method    CUDA events around each call, behind a spin, less their zero of 1.20
          us; 1.98 GHz, 410 W to 480 W, 41 C
measured  2026-01-02T03:04:05+00:00 on Made-up GPU, driver 570.86.15, torch
          2.13.0, 16 threads, nearpeak 0.1.0

doubt  CLOCK_VARIED: 10 % to 90 % of the blocks: 1755 to 1980 MHz
       -> Use regime='burst', or lock the clocks if you may.
note   HEAVY_TAIL: the slowest hundredth takes 2.1 times the median
       -> Rare calls take much longer: look at the raw series before promising a
          latency."""

CPU = dataclasses.replace(
    GPU,
    name="add",
    kind="cpu",
    method="host clock around each of 3 calls",
    regime="sustained",
    blocks=(Block(seconds=31.41e-6, readings=(31.41e-6,)),),
    flags=(),
    environment=dataclasses.replace(ENVIRONMENT, device="aarch64", driver=None, threads=1),
    other_seconds={},
    cpu_bound=None,
    kernels=(),
    parameters={},
    inputs=(),
    work=None,
    bound_seconds=None,
    bound_limiter=None,
)

CPU_CARD = """\
add
31.41 us [31.30, 31.52]  grade A
cpu time, cold cache; median of 1 block, 95.9 % interval

method    host clock around each of 3 calls
measured  2026-01-02T03:04:05+00:00 on aarch64, torch 2.13.0, 1 thread, nearpeak
          0.1.0"""

COMPARISON = Comparison(
    a=dataclasses.replace(CPU, name="plain"),
    b=dataclasses.replace(CPU, name="fused", seconds=20e-6, low=19.9e-6, high=20.1e-6),
    ratio=0.6367,
    low=0.6331,
    high=0.6402,
    confidence=0.952,
    verdict="FASTER",
    margin=0.01,
    detectable=0.0081,
    pairs=40,
)

COMPARISON_CARD = """\
fused is FASTER than plain.

ratio     0.6367 of the time [0.6331, 0.6402], 1.57 x as fast; 95.2 % interval
seen      40 interleaved pairs of blocks; a difference of 0.81 % would have been
          seen four times out of five

   name   cpu time, cold cache     grade
-  -----  -----------------------  -----
a  plain  31.41 us [31.30, 31.52]      A
b  fused  20.00 us [19.90, 20.10]      A

method    host clock around each of 3 calls
measured  2026-01-02T03:04:05+00:00 on aarch64, torch 2.13.0, 1 thread, nearpeak
          0.1.0"""


def fits(text: str) -> bool:
    return text.isascii() and all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())


def test_a_gpu_card():
    assert card(GPU) == GPU_CARD


def test_a_cpu_card():
    assert card(CPU) == CPU_CARD


def test_a_comparison_card():
    assert comparison_card(COMPARISON) == COMPARISON_CARD


@pytest.mark.parametrize(
    ("verdict", "begins"),
    [
        ("SLOWER", "fused is SLOWER than plain."),
        ("EQUIVALENT", "fused is EQUIVALENT to plain within 1.0 %."),
        ("INCONCLUSIVE", "INCONCLUSIVE: cannot tell whether fused or plain is faster."),
    ],
)
def test_the_verdict_comes_first(verdict, begins):
    text = comparison_card(dataclasses.replace(COMPARISON, verdict=verdict))
    assert text.startswith(begins)
    assert ("max_seconds" in text) == (verdict == "INCONCLUSIVE")


def test_cpu_bound_in_words_with_the_remedy():
    text = card(
        dataclasses.replace(GPU, cpu_bound=True, other_seconds={"enqueue": 2e-3, "pipelined": 2e-3, "latency": 2e-3})
    )
    assert "CPU-bound: the host needs 2.00 ms to enqueue what the device does in 31.4 us." in text
    assert "CUDA graph" in text.partition("CPU-bound")[2]


def test_an_interrupted_run_says_so():
    assert "grade B  PARTIAL: interrupted\n" in card(dataclasses.replace(GPU, partial=True))
    assert "PARTIAL: the run was interrupted." in comparison_card(dataclasses.replace(COMPARISON, partial=True))


def test_work_without_a_bound_says_how_to_get_one():
    text = card(dataclasses.replace(GPU, bound_seconds=None, bound_limiter=None))
    assert "nearpeak machine" in text
    assert "reached   4.27 TB/s" in text


@pytest.mark.parametrize(
    ("work", "limiter", "expected"),
    [
        (Work(flops={"bfloat16": 2e9}, bytes_read=1.0), "compute", "2.00 GFLOP at the machine's 69.2 TFLOP/s"),
        (Work(vector_flops={"float32": 2e9}), "compute", "2.00 GFLOP at the machine's 69.2 TFLOP/s"),
        (Work(), "launch", "the machine's cost of one launch"),
    ],
)
def test_the_bound_names_the_figure_it_was_computed_with(work, limiter, expected):
    text = card(dataclasses.replace(GPU, work=work, bound_limiter=limiter))
    assert expected in " ".join(text.split())


def test_all_flags_fit():
    flags = tuple(make_flag(name, "evidence of it " * 12 + "x" * 100) for name in flag_names())
    text = card(dataclasses.replace(GPU, flags=flags))
    assert fits(text)
    assert all(name in text for name in flag_names())
    order = [line.split()[0] for line in text.splitlines() if line.startswith(("wrong", "doubt", "note"))]
    assert order == sorted(order, key=["wrong", "doubt", "note"].index)


@pytest.mark.parametrize(
    "name", ["</script>", "n" * 300, "gr\u00f6\u00dfe \U0001f600", "a\x1b[31mred\r\nb", "", "{rows} %s"]
)
def test_names_from_outside_are_shown_as_plain_text(name):
    hostile = dataclasses.replace(
        GPU,
        name=name,
        parameters={name: name, "rows": name},
        kernels=(name,) * 3 + tuple(f"{name}_{i}" for i in range(20)),
        method=name,
        environment=dataclasses.replace(ENVIRONMENT, device=name, driver=name),
        flags=(make_flag("DRIFT", name),),
        inputs=GPU.inputs * 9,
    )
    assert fits(card(hostile))
    both = dataclasses.replace(COMPARISON, a=hostile, b=hostile)
    assert fits(comparison_card(both))


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void at::native::elementwise_kernel<128, 4, at::native::add<float> >(int)", "elementwise_kernel"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("<<>>", "<<>>"),
    ],
)
def test_kernel_names(signature, name):
    assert render.kernel_name(signature) == name


def test_a_time_of_zero_is_shown():
    assert fits(card(dataclasses.replace(GPU, seconds=0.0, low=0.0, high=0.0)))


def test_the_documentation_lists_every_flag_as_it_is():
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    flags = [make_flag(name, "") for name in flag_names()]
    listed = [line for line in page.splitlines() if re.match(r"\| `[A-Z_]+` \| (wrong|doubt|note) \|", line)]
    assert sorted(listed) == sorted(f"| `{flag.name}` | {flag.severity} | {flag.remedy} |" for flag in flags)


def test_the_documentation_has_every_kind_of_time():
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    assert set(render.MEANINGS) == set(get_args(Kind))
    assert all(f"| `{kind}` |" in page for kind in render.MEANINGS)

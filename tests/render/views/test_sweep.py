"""Tables and plots of made-up sweeps."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree

from nearpeak.measure.results import compare_to_baseline
from nearpeak.measure.timing import Block, Environment, Sweep, Timing, make_flag
from nearpeak.ops.work import Work
from nearpeak.render.text import text as written
from nearpeak.render.views import sweep as render

ENVIRONMENT = Environment(
    device="Made-up GPU", driver="570", torch="2.13.0", python="3.11", nearpeak="0.1.0", date="2026-01-02", threads=2
)


def timing(seconds: float, **parameters: str) -> Timing:
    return Timing(
        name="copy",
        seconds=seconds,
        low=0.99 * seconds,
        high=1.01 * seconds,
        confidence=0.95,
        kind="device",
        method="m",
        cache="cold",
        regime="burst",
        blocks=(Block(seconds=seconds, readings=(seconds,)),),
        flags=(),
        environment=ENVIRONMENT,
        parameters=parameters,
        work=Work(bytes_read=1e6),
        bound_seconds=0.5 * seconds,
        bound_limiter="memory",
    )


ROWS = ("64", "128", "1024")
SWEEP = Sweep(
    name="copy",
    parameters={"rows": ROWS, "dtype": ("float32", "int8"), "pad": ("0",)},
    timings=tuple(
        timing(int(rows) * (1e-6 if dtype == "int8" else 2e-6), rows=rows, dtype=dtype, pad="0")
        for rows in ROWS
        for dtype in ("float32", "int8")
        if (rows, dtype) != ("1024", "float32")
    ),
    failures={"rows=1024, dtype=float32, pad=0": "copy ran out of memory"},
)

TABLE = """\
copy  pad=0
device time, cold cache; on Made-up GPU

rows    dtype      time      +-     B/s  of bound  limit   grade
----  -------  --------  ------  ------  --------  ------  -----
  64  float32  128.0 us  1.00 %  7.81 G    50.0 %  memory      A
  64     int8  64.00 us  1.00 %  15.6 G    50.0 %  memory      A
 128  float32  256.0 us  1.00 %  3.91 G    50.0 %  memory      A
 128     int8  128.0 us  1.00 %  7.81 G    50.0 %  memory      A
1024     int8  1.024 ms  1.00 %   977 M    50.0 %  memory      A

Not measured:
  rows=1024, dtype=float32, pad=0: copy ran out of memory"""


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_table():
    assert written(render.document(SWEEP)) == TABLE


def test_doubts_are_told_once_with_the_remedy():
    noisy = tuple(dataclasses.replace(one, flags=(make_flag("DRIFT", "3 %"),)) for one in SWEEP.timings)
    text = written(render.document(dataclasses.replace(SWEEP, timings=noisy, partial=True)))
    assert text.count("DRIFT at 5 of 5 points -> ") == 1
    assert "PARTIAL" in text


def test_a_sweep_without_any_timing():
    empty = Sweep(name="copy", parameters={"rows": ROWS}, timings=(), failures={"rows=64": "no"})
    assert written(render.document(empty)) == "copy\n\nNot measured:\n  rows=64: no"
    assert "nothing to show" in texts(render.svg(empty))


def test_the_plot_has_a_line_and_a_bound_for_every_other_combination():
    found = texts(render.svg(SWEEP))
    assert {"dtype=float32", "dtype=float32 bound (memory)", "dtype=int8", "rows", "64", "1024"} <= set(found)
    assert "device time per call" in found
    assert "copy pad=0" in " ".join(found[0].split())


def test_a_plot_over_words():
    words = dataclasses.replace(
        SWEEP,
        parameters={"dtype": ("float32", "int8")},
        timings=(timing(1e-6, dtype="float32"), timing(2e-6, dtype="int8")),
    )
    assert {"float32", "int8", "measured", "bound (memory)"} <= set(texts(render.svg(words)))


def test_a_plot_of_one_point():
    one = Sweep(name="copy", parameters={"rows": ("64",)}, timings=(timing(1e-6, rows="64"),))
    assert {"rows", "64", "measured"} <= set(texts(render.svg(one)))


def test_hostile_names():
    hostile = "</script><&\x1b"
    one = Sweep(
        name=hostile,
        parameters={hostile: (hostile, "b")},
        timings=(dataclasses.replace(timing(1e-6), parameters={hostile: hostile}),),
        failures={hostile: hostile},
    )
    assert texts(render.svg(one))
    assert "\x1b" not in written(render.document(one))


def test_beside_a_saved_run():
    old = dataclasses.replace(
        SWEEP, timings=(*(dataclasses.replace(one, seconds=1.5 * one.seconds) for one in SWEEP.timings[:1]),)
    )
    changed = dataclasses.replace(ENVIRONMENT, torch="2.14.0")
    new = dataclasses.replace(SWEEP, timings=tuple(dataclasses.replace(o, environment=changed) for o in SWEEP.timings))
    text = written(render.baseline_document(compare_to_baseline(new, old)))
    assert text.startswith("NOT INTERLEAVED")
    assert "DIFFERENT ENVIRONMENT: torch: 2.13.0 then, 2.14.0 now." in text
    assert "0.667" in text
    assert "Only in this run" in text
    assert "FASTER" not in text
    assert "SLOWER" not in text
    assert all(len(line) <= 80 for line in text.splitlines())

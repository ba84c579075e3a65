import dataclasses
from pathlib import Path

from made_up import profile  # type: ignore[import-not-found]

from nearpeak.profiles.history import PastRun
from nearpeak.render.text import text
from nearpeak.render.views.history import document

GOLDEN = """\
run  when (UTC)        what                    step  verdict
---  ----------------  --------------------  ------  -------------------------
@1   2026-01-02 03:04  train.py              10.0 s  10 x, idle 40 %
@2   2026-01-02 03:04  ...ong/path/train.py  10.0 s  grade C, idle 40 %
@3   2026-01-01 10:20  -                          -  cannot be read: it is ..."""


def test_each_run_is_one_line_of_80_columns():
    first = dataclasses.replace(profile(), date="2026-01-02T03:04:05+00:00", modeled_share=1.0)
    second = dataclasses.replace(first, source="/some/very/long/path/train.py", modeled_share=0.8)
    path = Path("2026-01-01T10-20-30.123456Z.json.gz")
    runs = [
        PastRun(number=1, path=path, profile=first),
        PastRun(number=2, path=path, profile=second),
        PastRun(number=3, path=path, profile=None, problem="cannot be read: it is not a gzip file at all"),
    ]
    assert text(document(runs)) == GOLDEN
    assert max(map(len, text(document(runs)).splitlines())) <= 80

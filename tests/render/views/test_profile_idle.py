"""Causes of idle time in the text of a profile."""

import dataclasses

from made_up import profile  # type: ignore[import-not-found]

from nearpeak.profiles.idle import IdleCause
from nearpeak.render.text import text as written
from nearpeak.render.views.profile import document


def text(profile):
    return written(document(profile))


GOLDEN = """\
idle because of    time   share  times  where
---------------  ------  ------  -----  ----------------
synchronization  2.50 s  25.0 %      4  train.py:52 item
launching        1.49 s  14.9 %    230  launched late
"""


def idle(cause, seconds, count=1, where="", what=""):
    return IdleCause(cause=cause, seconds=seconds, count=count, where=where, what=what)


def test_causes_stand_below_the_waterfall():
    causes = (
        idle("synchronization", 2.5, 4, "train.py:52", "item"),
        idle("launching", 1.49, 230, what="launched late"),
        idle("python", 0.001),
    )
    found = text(dataclasses.replace(profile(), idle=causes))
    assert GOLDEN in found
    assert found.index("wall") < found.index("idle because of") < found.index("op, in")


def test_long_and_strange_places_stay_in_80_columns():
    strange = idle("garbage collection", 4.0, 123456, "a/" * 60 + "train.py:52", "x\x1b[31m" * 20)
    found = text(dataclasses.replace(profile(), idle=(strange,)))
    line = next(line for line in found.splitlines() if line.startswith("garbage collection"))
    assert "\x1b" not in line
    assert len(line) <= 80

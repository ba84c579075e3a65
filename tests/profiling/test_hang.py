import threading

from nearpeak.profiling import hang
from nearpeak.profiling.hang import HangWatch, RankState, hang_lines

WAITING = RankState(kind="all_reduce", group="0", sequence=7, called={"0": 7}, line="train.py:9", seconds=13.0)


def test_a_rank_that_has_not_come_is_named_with_its_line():
    lines = hang_lines({0: WAITING, 1: RankState(called={"0": 6}, line="data.py:4"), 2: WAITING}, 3)
    assert lines == [
        "all_reduce 7 of group 0 has not ended: ranks 0, 2 have called it, at train.py:9.",
        "Rank 1 has not called it: it is at data.py:4, after number 6.",
    ]


def test_a_rank_that_calls_another_collective():
    other = RankState(kind="all_gather", group="0", sequence=7, called={"0": 7}, line="eval.py:2")
    assert hang_lines({0: WAITING, 1: other}, 2)[1] == "Rank 1 has called all_gather in its place: it is at eval.py:2."


def test_a_rank_that_has_skipped_one_is_past_it_or_behind():
    past = RankState(kind="all_reduce", group="0", sequence=9, called={"0": 9}, line="train.py:9")
    assert "Rank 1 is past it" in hang_lines({0: WAITING, 1: past}, 2)[1]


def test_dead_ranks_do_not_answer():
    failed = RankState(line="train.py:9", failed=True, called={"0": 26})
    assert hang_lines({0: failed, 2: failed}, 4) == [
        "Rank 0 has failed at train.py:9, after collective number 26 of group 0.",
        "Rank 2 has failed at train.py:9, after collective number 26 of group 0.",
        "Ranks 1, 3 do not answer: their processes have ended, or they are stopped.",
    ]


class SlowStore:
    """A team whose store takes a while, as torch's does, which ends a process that ends meanwhile."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), 0
        self._pause = threading.Event()

    def has(self, key: str) -> bool:
        self.asked.set()
        self._pause.wait(0.2)
        self.answers += 1
        return False


def test_nothing_watches_when_the_program_has_ended(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hang, "TICK_S", 0.0)
    store = SlowStore()
    monkeypatch.setattr(HangWatch, "_join", lambda self: store)
    with HangWatch(print):
        assert store.asked.wait(30.0)
        before = store.answers
    assert store.answers > before  # the call that was under way has ended

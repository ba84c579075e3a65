from __future__ import annotations

import ast
import copy
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.robustness import endings
from benchmarks.robustness.programs import NARRATION, WAYS, Bench, Outcome, Zygote, corpus, differences, draw, judge
from nearpeak.profiling import session


def outcome(**changed: Any) -> Outcome:
    state = {"results": {"losses": ["0.1"]}, "interpreter": {"threads": ["MainThread"]}, "notes": {"calls": 3}}
    fields: dict[str, Any] = {
        "codes": [0],
        "outputs": ["the end 45\n"],
        "errors": [""],
        "states": {"rank 0 main end": state, "rank 0 main exit": copy.deepcopy(state)},
        "files": {"work/log.txt": "1234"},
    }
    return Outcome(**{**fields, **changed})


def test_the_corpus_has_every_kind_and_all_texts_are_python_in_every_way() -> None:
    kinds = Counter(program.parts[0].kind for program in corpus())
    assert kinds.total() >= 200
    assert min(kinds.values()) >= 10
    for program in corpus():
        ast.parse(program.text("alone", Path("probe")))
    for way in WAYS:
        for program in draw(1, 5):
            ast.parse(program.text(way, Path("probe")))


def test_all_ways_have_the_same_lines() -> None:
    for program in corpus():
        assert len({program.text(way, Path("probe")).count("\n") for way in ("alone", "block", "estimate")}) == 1


def test_a_seed_draws_the_same_programs() -> None:
    assert [program.name for program in draw(5, 9)] == [program.name for program in draw(5, 9)]
    assert draw(5, 9) != draw(6, 9)


SAYING = ("say", "_say", "_restart", "period_begins")


def test_every_line_that_a_profile_of_a_script_writes_is_known() -> None:
    said = list(session.PHASE_MESSAGES.values())
    for path in Path(session.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SAYING:
                parts = node.args[0].values if node.args and isinstance(node.args[0], ast.JoinedStr) else node.args
                texts = [part.value if isinstance(part, ast.Constant) else "no step" for part in parts[:2]]
                said.append("".join(str(text) for text in texts))
    assert len(said) > 12
    assert [line for line in said if not NARRATION.match(line)] == []


def test_equal_runs_have_no_differences() -> None:
    for way in ("again", "script", "block", "callable", "estimate"):
        assert differences(outcome(), outcome(), way) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"codes": [1]}, "ends with 1 instead of 0"),
        ({"codes": [-11]}, "ends with -11 instead of 0"),
        ({"codes": [None]}, "hangs"),
        ({"outputs": [""]}, "stdout lacks ['the end 45']"),
        ({"outputs": ["the end 45\nTraceback (most recent call last):\n"]}, "stdout has"),
        ({"errors": ["Traceback (most recent call last):\n"]}, "stderr has"),
        ({"files": {}}, "file work/log.txt: None instead of 1234"),
        ({"files": {"work/log.txt": "1234", "work/new": "1"}}, "file work/new"),
        ({"left": ["python"]}, "processes left: ['python'] instead of []"),
        ({"states": {}}, "rank 0 main end: was not reached"),
    ],
)
def test_what_differs_is_told(changed: dict[str, Any], told: str) -> None:
    found = differences(outcome(), outcome(**changed), "script")
    assert any(told in line for line in found), found


def test_what_a_program_saw_is_compared_by_place() -> None:
    other = outcome()
    other.states["rank 0 main end"]["interpreter"]["threads"].append("another")
    other.states["rank 0 main exit"]["results"]["losses"] = ["0.2"]
    other.states["rank 0 main exit"]["notes"] = {}
    assert differences(outcome(), other, "block") == [
        'rank 0 main end: interpreter / threads: ["another"] instead of []',
        'rank 0 main exit: results / losses: ["0.2"] instead of ["0.1"]',
    ]


def test_lines_and_the_report_of_nearpeak_are_its_own_under_profile_alone() -> None:
    other = outcome(
        outputs=["the end 45\nprog.py: 3 ms per step\n"], errors=["warming up\nkept as @last; `nearpeak report`\n"]
    )
    assert differences(outcome(), other, "script") == []
    assert len(differences(outcome(), other, "block")) == 2


def test_the_command_has_its_own_exit_code_where_it_says_why_there_is_no_profile() -> None:
    other = outcome(codes=[2], errors=["nearpeak: prog.py took 3 steps. A profile needs more.\n"])
    assert differences(outcome(), other, "script") == []
    assert differences(outcome(codes=[5]), other, "script") == ["rank 0: ends with 2 instead of 5"]


def test_what_is_replaced_while_steps_are_looked_for_is_meant_and_not_afterwards() -> None:
    alone, other = outcome(), outcome()
    for each, name in ((alone, "torch"), (other, "nearpeak")):
        each.states["rank 0 main end"]["torch"] = {"nn.Module.__call__": name}
    assert differences(alone, other, "script") == []
    other.errors = ["everything needed has been recorded\n"]
    assert len(differences(alone, other, "script")) == 1
    assert any("nn.Module.__call__" in line for line in differences(alone, other, "block"))


def test_times_and_ids_in_logs_are_no_differences() -> None:
    alone = outcome(errors=["W1117 21:22:49.949000 32124 torch/_logging/_internal.py:1] ignored at 0x7f00aa11bb\n"])
    other = outcome(errors=["W1118 01:02:03.000001 99 torch/_logging/_internal.py:1] ignored at 0x7f00aa11cc\n"])
    assert differences(alone, other, "block") == []


def test_endings_are_python_and_are_drawn_by_a_seed() -> None:
    drawn = list(endings.draw(3))
    assert drawn == list(endings.draw(3)) != list(endings.draw(4))
    assert len(endings.ENDINGS) >= 90
    for ending, moment in drawn:
        ast.parse(endings.script(ending, 60, moment))
        assert endings.MOMENTS["before the first step"][0] <= moment <= endings.MOMENTS["afterwards"][1]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


SEED = 27
PROGRAMS = 2
ENDINGS = 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PROGRAMS))
def test_a_drawn_program_is_the_same_under_nearpeak(number: int, zygote: Zygote, tmp_path: Path) -> None:
    drawn = [program for program in draw(SEED, 4 * PROGRAMS) if not any(part.compiled for part in program.parts)]
    program = drawn[number]
    rows = list(judge(Bench(tmp_path, None, zygote), program, WAYS))
    assert len(rows) == len(WAYS)
    assert {row.way: row.differences for row in rows if row.differences} == {}, program.name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ENDINGS))
def test_a_drawn_ending_loses_nothing(number: int, zygote: Zygote, tmp_path: Path) -> None:
    known = [(ending, moment) for ending, moment in endings.draw(SEED) if ending.status and ending.shell == "{run}"]
    ending, moment = random.Random(SEED).sample(known, ENDINGS)[number]
    assert endings.Bench(tmp_path, None, zygote, forked=True).judge(ending, moment).faults == (), ending.name

"""The marks of whole programs, how findings are attributed to them, and how variants are timed."""

import io
import json
import textwrap
from pathlib import Path

import pytest

from benchmarks.profiles import step_clock
from benchmarks.profiles.programs import (
    PROGRAMS,
    BadProgram,
    ProfileResult,
    Result,
    Row,
    Saving,
    SavingsJob,
    Seen,
    attribute,
    cells,
    joined,
    read_program,
    report,
    result_from_json,
    rows_of,
    write_results,
)

SCRIPT = """\
# cpu: --width 8 --name "a b"
# cuda: --width 64
# block: 12


def sample(logits):
    ordered = sort(logits)  # waste: sorted
    # instead: ordered = top(logits)
    a = 1
    b = 2
    c = 3
    d = 4
    return ordered


def main(loss):
    for _ in range(3):
        # mend: read
        # instead: loss = keep(loss)
        x = sample(loss)
        # mend: read
        total = 0.0
        total += read(x)  # waste: read
        # instead: total = add(x)
        # instead: if total:
        # instead:     pass
        if x:  # waste: asked
            # instead: if x is None:
            break
        # step
"""


def written(folder, text=SCRIPT, name="train.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def seen(source, share=0.1, rule="some-rule", added=None):
    added_share = share if added is None else added
    return Seen(rule=rule, source=source, share=share, added_share=added_share, title="something is slow")


def test_marks_are_read(tmp_path):
    program = read_program(written(tmp_path))
    assert program.arguments == {"cpu": ("--width", "8", "--name", "a b"), "cuda": ("--width", "64")}
    assert program.block == 12
    assert program.marks == {"sorted": (7,), "read": (23,), "asked": (27,)}
    assert [(region.waste, region.first, region.last) for region in program.regions] == [
        ("sorted", 7, 8),
        ("read", 18, 19),
        ("read", 21, 26),
        ("asked", 27, 28),
    ]


def test_a_variant_has_what_is_mended_and_ticks(tmp_path):
    program = read_program(written(tmp_path))
    tick = "        from benchmarks.profiles.step_clock import tick; tick()"
    as_it_stands = program.variant(()).splitlines()
    assert as_it_stands == [*program.lines[:-1], tick]
    mended = program.variant({"read"}).splitlines()
    assert mended[6] == program.lines[6]
    assert mended[17:] == [
        "        loss = keep(loss)",
        "        x = sample(loss)",
        "        total = add(x)",
        "        if total:",
        "            pass",
        *program.lines[26:-1],
        tick,
    ]
    both = program.variant({"sorted", "asked"}).splitlines()
    assert "    ordered = top(logits)" in both
    assert "        if x is None:" in both


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("    # instead: ordered = top(logits)\n", "", "mended"),
        ("    ordered = sort(logits)  # waste: sorted\n", "    ordered = sort(logits)\n", "of no waste"),
        ("        # step\n", "", "# step"),
        ("# block: 12\n", "# rules: sold some-rule\n", "which no line has"),
        ("# cuda: --width 64\n", "", "# cuda:"),
        ("        # instead: loss = keep(loss)\n", "", "has no"),
    ],
)
def test_marks_that_do_not_fit_are_refused(tmp_path, old, new, complaint):
    assert old in SCRIPT
    with pytest.raises(BadProgram, match=complaint):
        read_program(written(tmp_path, SCRIPT.replace(old, new)))


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("train.py:7", "line"),
        ("/home/me/train.py:10", "beside"),
        ("train.py:11", "function"),
        ("train.py:20", "elsewhere"),
        ("other.py:7", "elsewhere"),
        ("", "elsewhere"),
    ],
)
def test_a_place_is_the_line_or_beside_it_or_in_its_function(tmp_path, source, place):
    assert read_program(written(tmp_path)).place_of(seen(source), "sorted")[0] == place


def test_findings_of_other_rules_are_not_about_a_waste_that_names_its_rules(tmp_path):
    program = read_program(written(tmp_path, SCRIPT.replace("# block: 12", "# rules: sorted sort-rule top-rule")))
    assert program.place_of(seen("train.py:7", rule="top-rule"), "sorted")[0] == "line"
    assert program.place_of(seen("train.py:7"), "sorted")[0] == "elsewhere"
    assert program.place_of(seen("train.py:23"), "read")[0] == "line"


def test_a_finding_belongs_to_the_nearest_waste_and_those_in_the_function_only_where_no_other_is_near(tmp_path):
    program = read_program(written(tmp_path))
    at_sort, in_sort, in_main, nowhere = (seen(f"train.py:{line}") for line in (7, 12, 17, 3))
    attributed, others = attribute(program, [at_sort, in_sort, in_main, nowhere])
    assert attributed == {"sorted": ("line", [at_sort]), "read": ("function", [in_main])}
    assert others == [nowhere, in_sort]


def test_rows_predict_each_waste_and_all_together(tmp_path):
    program = read_program(written(tmp_path))
    profile = ProfileResult(
        findings=(seen("train.py:7", 0.25), seen("train.py:8", 0.05), seen("train.py:23", 0.2, added=0.3)),
        wall_s=0.1,
        grade="A",
        seconds=3.0,
    )
    half = Saving(share=0.5, low=0.4, high=0.6, step_s=0.1)
    tiny = Saving(share=0.01, low=-0.01, high=0.02, step_s=0.1)
    by_waste = {row.waste: row for row in rows_of(program, profile, {"sorted": half, "read": tiny, "all": half})}
    assert by_waste["sorted"].predicted == pytest.approx(0.3)
    assert by_waste["sorted"].error == pytest.approx(0.4)
    assert by_waste["sorted"].place == "line"
    assert not by_waste["read"].is_waste
    assert by_waste["read"].error is None
    assert by_waste["asked"].place == "missed"
    assert by_waste["all"].predicted == pytest.approx(0.6)
    assert by_waste["all"].error == pytest.approx(0.2)


def test_the_report_names_what_was_missed_and_what_is_false():
    half = Saving(share=0.5, low=0.4, high=0.6, step_s=0.1)
    none = Saving(share=0.0, low=-0.01, high=0.01, step_s=0.1)
    missed = Row(program="a", waste="slow", measured=half, predicted=0.0, place="missed", findings=())
    false = Row(program="a", waste="fine", measured=none, predicted=0.2, place="line", findings=(seen("a.py:1"),))
    text = report(
        [Result(program="a", rows=[missed, false]), Result(program="b", others=(seen("b.py:2", 0.04),))], "cpu"
    )
    assert "missed: a, slow" in text
    assert "false: a, fine: 20.0% predicted, nothing to save" in text
    assert "CLEAN PROGRAM: b: some-rule at b.py:2 4.0%" in text
    assert "1 wastes, 0 found at the line" in text
    assert "1 clean programs: 1 with" in text
    assert cells(false)[2] == "none here"


def test_results_of_two_runs_keep_their_dates_and_the_later_one_of_a_program(tmp_path):
    for name, date, result in [
        ("old", "monday", Result(program="b", error="no steps")),
        ("new", "tuesday", Result(program="b", profile=ProfileResult(findings=(), wall_s=1, grade="A", seconds=1))),
        ("other", "tuesday", Result(program="a")),
    ]:
        write_results(tmp_path / name, [result], {"date": date, "device": "cpu", "torch": "2.13"})
    saved = [json.loads((tmp_path / name).read_text()) for name in ("old", "new", "other")]
    results = joined([result_from_json(item, one["date"]) for one in saved for item in one["results"]])
    assert [(one.program, one.date, one.error) for one in results] == [("a", "tuesday", ""), ("b", "tuesday", "")]
    old = result_from_json(saved[0]["results"][0], "monday")
    assert "run at monday: b\nrun at tuesday: a" in report([old, results[0]], "cpu")


def test_a_clock_answers_with_the_seconds_of_the_steps_after_the_lead(monkeypatch):
    now = iter([10.0, 12.5])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(now))
    exits = []

    def leave(code):
        exits.append(code)
        raise SystemExit

    monkeypatch.setattr(step_clock.os, "_exit", leave)
    answers = io.StringIO()
    clock = step_clock.StepClock(io.StringIO("2 3\n"), answers)
    for _ in range(step_clock.WARM_STEPS + 2 + 2):
        clock.tick()
    assert answers.getvalue() == "ready\n"
    with pytest.raises(SystemExit):
        clock.tick()
    assert answers.getvalue() == "ready\n2.5\n"
    assert exits == [0]


@pytest.mark.parametrize("path", sorted(PROGRAMS.parent.glob("programs*/*.py")), ids=lambda path: path.stem)
def test_programs_and_their_variants_are_valid(path):
    program = read_program(path)
    for mended in [(), *((waste,) for waste in program.marks), tuple(program.marks)]:
        compile(program.variant(mended), path.name, "exec")
    assert 50 <= len(program.lines) <= 200
    assert bool(program.marks) != path.stem.startswith("clean_")


@pytest.mark.slow
def test_mending_a_waste_is_measured(tmp_path):
    """A step that sleeps, and its mended variant that sleeps less: three quarters are saved on an idle machine."""
    text = """\
        # cpu:
        # cuda:
        import sys, time
        assert sys.argv[1] == "--steps" and 3 <= int(sys.argv[2]) < 1000
        while True:
            time.sleep(0.02)  # waste: sleeps
            # instead: time.sleep(0.005)
            # step
        """
    program = read_program(written(tmp_path, text))
    job = SavingsJob(program, "cpu", tmp_path / "variants", turns=3)
    try:
        saving = job.run()["sleeps"]
    finally:
        for process in job.processes:
            process.close()
    assert 0.3 < saving.share < 0.9
    assert saving.low <= saving.share <= saving.high
    assert saving.step_s >= 0.02
    assert Path(tmp_path / "variants" / "mended_sleeps" / "train.py").exists()

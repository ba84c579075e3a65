"""`nearpeak gallery`: what it lists, writes and refuses. Examples themselves are tested in tests/gallery."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nearpeak._records import from_json, to_json
from nearpeak.cli.main import main
from nearpeak.gallery import NAMES, pages
from nearpeak.gallery.parts import ExampleResult, Prediction, PredictionTable, prose


def test_lists_all_and_runs_none(capsys):
    assert main(["gallery", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(NAMES)
    assert all(len(line) <= 80 for line in lines)


def test_source_is_a_script(capsys):
    assert main(["gallery", "ridge", "--source"]) == 0
    assert "def example(context: Context)" in capsys.readouterr().out


def test_a_wrong_name_is_said_before_anything_runs(capsys):
    assert main(["gallery", "ridge", "no_such_thing"]) == 2
    found = capsys.readouterr()
    assert "no example 'no_such_thing'" in found.err
    assert not found.out


@pytest.mark.parametrize(
    ("names", "output", "said"),
    [
        (["ridge", "timing"], "page.html", "several examples are written to a folder"),
        (["ridge"], "page.pdf", "one of .html, .md, .svg, .txt"),
        (["first_kernels"], "page.svg", "has no picture"),
    ],
)
def test_what_cannot_be_written(names, output, said, capsys, tmp_path):
    assert main(["gallery", *names, "--on", "h100-sxm", "-o", str(tmp_path / output)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pages_with_pictures(capsys, tmp_path):
    for ending, found in (
        (".html", "<svg"),
        (".md", "![Under the roof](ridge-1.svg)"),
        (".svg", "<svg"),
        (".txt", "o roof"),
    ):
        path = tmp_path / f"page{ending}"
        assert main(["gallery", "ridge", "--on", "h100-sxm", "-o", str(path)]) == 0
        assert found in path.read_text()
    assert (tmp_path / "ridge-1.svg").read_text().startswith("<svg")
    assert main(["gallery", "ridge", "toy_processor", "--on", "h100-sxm", "-o", str(tmp_path / "new" / "folder")]) == 0
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"ridge.html", "toy_processor.html"}
    assert "toy_processor" in capsys.readouterr().out.splitlines()[-2]


def test_json_is_all_of_it(capsys):
    assert main(["gallery", "ridge", "--on", "h100-sxm", "--json", "-"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    result = from_json(ExampleResult, data)
    assert to_json(result) == data
    assert not result.measured
    assert all(row.measured is None and row.holds is None for row in result.rows)
    assert result.rows[0].predicted == pytest.approx(48e-6, rel=0.2)  # 128 MiB at 2.8 TB/s


def made(*rows: Prediction) -> ExampleResult:
    return ExampleResult(
        name="ridge", number=5, title="Of a test", lesson="None.", machine="none", measured=True, date="2026-01-01",
        versions=(("torch", "2"),), seconds=1.0, parts=(PredictionTable(title="Times", rows=rows),),
    )  # fmt: skip


def test_what_is_outside_of_its_band_is_marked(monkeypatch, capsys):
    good = Prediction(what="good", predicted=1.0, measured=1.2, low=0.8, high=1.25)
    bad = Prediction(what="bad", predicted=1.0, measured=1.3, low=0.8, high=1.25)
    free = Prediction(what="free", predicted=1.0, measured=9.0)
    assert pages.verdict(made(good)) == "The prediction is within its band."
    assert pages.verdict(made(good, free, good)) == "Both predictions are within their bands."
    assert pages.verdict(made(good, bad)) == "1 of 2 predictions are within their bands."
    assert pages.verdict(made(free)) == ""
    assert "1.30 !" in pages.text(made(bad))
    monkeypatch.setattr("nearpeak.gallery.run.run_example", lambda name, context: made(bad))
    assert main(["gallery", "ridge", "--on", "h100-sxm"]) == 0
    assert main(["gallery", "ridge", "--on", "h100-sxm", "--check"]) == 1
    assert "1.30 !" in capsys.readouterr().out


def test_names_in_prose_are_code_on_the_site():
    result = dataclasses.replace(made(), parts=tuple(prose("Run `nearpeak.kernels.add` on a_b.", "None *here*.")))
    found = pages.markdown(result, lambda name, svg: name)
    assert "Run `nearpeak.kernels.add` on a\\_b.\n\nNone \\*here\\*." in found

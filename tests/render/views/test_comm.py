import dataclasses

import pytest
from comm_runs import WRONG, point, run

from nearpeak.comm.result import CommRun, as_json, fit_points, load_run, save
from nearpeak.errors import FileProblem
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.render.csv import csv_text
from nearpeak.render.html.document import document_page
from nearpeak.render.markdown import markdown
from nearpeak.render.text import text
from nearpeak.render.views.comm import document, model_seconds


def test_report_of_a_run() -> None:
    report = text(document(run()))
    assert all(len(line) <= 80 for line in report.splitlines())
    assert "Collectives over 8 ranks with nccl 2.27.3" in report
    assert "450 GB/s in one direction: NVLink 4 of h100-sxm" in report
    # 175 of the 450 GB/s: a fitted bandwidth of 100 GB/s times 2 x 7 / 8
    (row,) = [line.split() for line in report.splitlines() if line.startswith("all_reduce  ") and "20.0 us" in line][:1]
    assert row[1:] == ["1", "KiB", "20.0", "us", "175", "GB/s", "39", "%", "0.0", "%"]
    assert "data parallel  12.0 ms  10.0 ms  5.00 ms  2.00 ms    60 %    11.0 ms  right" in report
    assert "not offered by nccl" in report and "2(n-1)/n" in report


def test_wrong_results_come_first() -> None:
    report = text(document(run(points=(WRONG,), fits=fit_points([WRONG]))))
    assert report.splitlines()[4].startswith("WRONG RESULTS at 1 point: all_reduce of 1 MiB (ranks 1).")


def test_every_format_has_the_figures() -> None:
    made = document(run())
    assert len(made.pictures) == 2
    assert all("</svg>" in picture.svg for picture in made.pictures)
    assert "| all\\_reduce | 1 KiB |" in markdown(made)
    assert csv_text(made).count("all_gather") == 9 + 1
    assert "Bus bandwidth by size" in document_page(made)


def test_hostile_names_are_text() -> None:
    hostile = "</script>\x1b[31m"
    made = run(
        points=(dataclasses.replace(point(), group=hostile),),
        fits=(),
        links=(),
        missing={hostile: hostile},
        notes=(hostile,),
    )
    assert "\x1b" not in text(document(made))
    assert "</script>\\x1b" not in document_page(document(made))


def test_a_run_of_one_barrier_has_a_report() -> None:
    alone = point("barrier", 0, 1e-4, wire_bytes=0.0)
    made = document(run(points=(alone,), fits=(), links=(), patterns=()))
    assert "barrier" in text(made) and not made.pictures


def test_a_file_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "comm.json"
    save(run(), path)
    assert load_run(path) == run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nearpeak": "timing"}, "it holds no measured collectives"),
        ({"schema": 99}, "it has schema 99"),
        ({"points": [{}]}, "it is damaged"),
        ({"ranks": -1}, "it is damaged"),
    ],
)
def test_another_file_is_refused(change, message, tmp_path) -> None:
    import json

    path = tmp_path / "comm.json"
    path.write_text(json.dumps({**as_json(run()), **change}))
    with pytest.raises(FileProblem, match=message):
        load_run(path)


def test_the_planner_stands_beside_nccl() -> None:
    made = run()
    node = Cluster.of("h100-sxm x 8")
    last = made.points[8]
    assert model_seconds(made, last) == collective_seconds("all_reduce", last.bytes, 8, node).seconds
    assert "model" in text(document(made)) and "planner's model" in text(document(made))
    for other in (run(backend="gloo"), run(environment=dataclasses.replace(made.environment, device="a CPU"))):
        assert model_seconds(other, last) is None
        assert "model" not in text(document(other))
    assert model_seconds(made, dataclasses.replace(last, op="all_to_all_v")) is None


def test_shares_of_the_link() -> None:
    made: CommRun = run()
    last = made.points[8]
    assert made.share_of_link(last) == pytest.approx(last.wire_bytes / last.seconds / 450e9)
    assert made.share_of_link(dataclasses.replace(last, group="mesh[0]")) is None
    assert made.patterns[0].exposed_s == pytest.approx(2e-3) and made.patterns[0].hidden_s == pytest.approx(3e-3)

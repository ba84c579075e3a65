"""`nearpeak plan`: every question answers, in 80 columns, as JSON, and as files; mistakes name what is near."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from comm_runs import run as comm_run  # type: ignore[import-not-found]

from nearpeak.cli.main import main
from nearpeak.comm.result import save

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "benchmarks" / "measurements"
QUESTIONS = {
    "memory": ["memory", "llama-2-7b"],
    "memory on": ["memory", "llama-3-70b", "--on", "h100-sxm x 8"],
    "train": ["train", "llama-3-70b", "--on", "h100-sxm x 64", "--tp", "4", "--pp", "4", "--price", "2.5"],
    "search": ["train", "llama-3-8b", "--on", "h100-sxm x 8"],
    "serve": ["serve", "llama-3-70b", "--on", "h100-sxm x 8", "--precision", "fp8", "--speculate", "3:0.7"],
    "collectives": ["collectives", "--on", "h100-sxm x 16"],
    "moe": ["moe", "mixtral-8x7b", "--on", "h100-sxm x 8"],
    "validate": ["validate", str(MEASUREMENTS / "collectives_between_nodes.csv")],
    "models": ["models"],
    "one model": ["models", "deepseek-v3"],
    "clusters": ["clusters"],
    "one cluster": ["clusters", "gb200 x 144"],
}


def plan(capsys, *arguments):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_fits_a_terminal_of_80_columns(capsys, name):
    code, out, _ = plan(capsys, *QUESTIONS[name])
    assert code == 0 and out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert out.isascii() and "\x1b" not in out


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_is_json_alone_where_that_is_asked(capsys, name):
    code, out, _ = plan(capsys, *QUESTIONS[name], "--json", "-")
    assert code == 0
    assert json.loads(out)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_is_written_by_the_end_of_a_name(capsys, tmp_path, name):
    forms = ["html", "md", "csv", "json", "txt"]
    files = [tmp_path / f"plan.{form}" for form in forms]
    code, out, err = plan(capsys, *QUESTIONS[name], *(part for file in files for part in ("-o", str(file))))
    assert code == 0 and out == ""
    assert all(f"wrote {file}" in err for file in files)
    assert files[0].read_text().startswith("<!DOCTYPE html>")
    assert files[1].read_text().startswith("# ")
    assert "," in files[2].read_text()
    assert json.loads(files[3].read_text())


@pytest.mark.parametrize("name", ["memory", "train", "search", "serve", "collectives", "moe", "validate"])
def test_answers_with_a_picture_are_one(capsys, tmp_path, name):
    file = tmp_path / "plan.svg"
    assert plan(capsys, *QUESTIONS[name], "-o", str(file))[0] == 0
    assert file.read_text().startswith("<svg ")


def test_seven_billion_weights_take_84_gigabytes(capsys):
    _, out, _ = plan(capsys, "memory", "llama-2-7b")
    said = " ".join(out.split())
    assert "13.5 + 13.5 + 53.9 = 80.9 GB before activations" in said
    assert "By the size in its name, 7 B: 14 + 14 + 56 = 84 GB." in said


def test_what_does_not_fit_comes_with_changes(capsys):
    _, out, _ = plan(capsys, *QUESTIONS["memory on"])
    assert "which does not fit" in out[: out.index("Parameters")]
    assert "Does not fit: " in out
    assert "The cheapest changes that make it fit" in out
    _, out, _ = plan(capsys, "train", "llama-3-70b", "--on", "h100-sxm x 8", "--tp", "8")
    assert "MFU" in out and "but does not fit" in " ".join(out.splitlines()[:2])


def test_memory_has_a_row_for_every_pipeline_stage(capsys):
    _, out, _ = plan(capsys, "memory", "llama-3-8b", "--pp", "4", "--gpus", "4")
    table = out.split("By pipeline stage")[1]
    assert [line.split()[0] for line in table.splitlines()[4:8]] == ["1", "2", "3", "4"]


def test_the_parts_of_a_step_sum_to_it(capsys):
    _, out, _ = plan(capsys, *QUESTIONS["train"], "--json", "-")
    time = json.loads(out)["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"])


def test_a_search_says_how_many_layouts_it_tried_and_why_one_wins(capsys):
    code, out, err = plan(capsys, *QUESTIONS["search"])
    assert code == 0
    assert "legal layouts" in err
    assert "Why it wins" in out and "The fastest layout" in out


def test_a_search_without_a_fit_is_an_answer(capsys):
    code, out, _ = plan(capsys, "train", "llama-3.1-405b", "--on", "h100-sxm x 8")
    assert code == 0
    assert "No layout fits" in out


def test_limits_of_latency_choose_layout_and_load(capsys):
    serve = ["serve", "llama-3-8b", "--on", "h100-sxm x 2"]
    code, out, err = plan(capsys, *serve, "--most-tpot", "0.015", "--most-ttft", "0.5", "--json", "-")
    replica = json.loads(out)["replica"]
    assert code == 0 and replica["tpot"] <= 0.015 and replica["ttft"] <= 0.5 and "legal layouts" in err
    code, out, err = plan(capsys, *serve, "--most-tpot", "0.0001")
    assert code == 1 and out == "" and "the smallest TPOT is" in err


def test_a_gate_on_errors(capsys):
    file = str(MEASUREMENTS / "collectives_between_nodes.csv")
    assert plan(capsys, "validate", file, "--fail-over", "50%")[0] == 0
    code, _, err = plan(capsys, "validate", file, "--fail-over", "1%")
    assert code == 1 and "is above 1.0%" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["memory", "lama-2-7b"], "Did you mean 'llama-2-7b'"),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--tp", "3"], "Nearest: "),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--tp", "16"], "larger than gpus=8. Nearest: gpus=16"),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--tp", "2", "--sharding", "zero4"], "Did you mean 'zero"),
        (["train", "llama-3-8b", "--on", "a100-sxm-80gb x 8", "--tp", "2", "--precision", "fp8"], "Nearest: bfloat16"),
        (["train", "llama-3-8b", "--on", "h100-sxn x 8"], "h100-sxm"),
        (["train", "mixtral-8x7b", "--on", "h100-sxm x 8", "--ep", "3"], "gpus=9, or ep x etp x pp = 2"),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--tp", "2", "--overlap", "gradient"], "'gradients'"),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--year", "2024"], "--year needs a layout"),
        (["train", "llama-3-8b", "--on", "h100-sxm x 8", "--gpus", "16"], "Give one of them"),
        (["memory", "llama-3-8b", "--precision", "bf61"], "Did you mean 'bf16'"),
        (["memory", "llama-3-8b", "-o", "plan.pdf"], "a plan is written as one of .html"),
        (["serve", "llama-3-70b", "--on", "h100-sxm x 8", "--tp", "3"], "Nearest: tp=2"),
        (["serve", "llama-3-70b", "--on", "h100-sxm x 1"], "What would fit"),
        (["serve", "llama-3-8b", "--on", "h100-sxm x 1", "--concurrency", "0"], "nearpeak: concurrency=0.0 must be"),
        (["serve", "llama-3-8b", "--on", "h100-sxm x 1", "--batching", "statc"], "Did you mean 'static'"),
        (["memory", "llama-3-8b", "--pp", "-1"], "pp=-1 must be"),
        (["memory", "llama-3-8b", "--gpus", "0"], "gpus=0 must be"),
        (["collectives", "--on", "h100-sxm x 8", "--stride", "0"], "Nearest: --stride 1"),
        (["collectives", "--on", "h100-sxm x 8", "--op", "all_reduc"], "Did you mean 'all_reduce'"),
        (["collectives", "--on", "h100-sxm x 8", "--ranks", "16"], "Nearest: ranks=8"),
        (["moe", "llama-3-8b", "--on", "h100-sxm x 8"], "has no experts"),
        (["moe", "mixtral-8x7b", "--on", "h100-sxm x 8", "--degrees", "3"], "Nearest: degree=2"),
        (["validate", "missing.csv"], "there is no such file"),
        (["models", "-o", "models.svg"], "has no picture"),
    ],
)
def test_mistakes_name_what_is_near_and_end_with_2(capsys, arguments, said):
    code, out, err = plan(capsys, *arguments)
    assert code == 2 and out == ""
    assert said in err and "Traceback" not in err


def test_without_a_question_the_help_is_shown(capsys):
    code, out, err = plan(capsys)
    assert code == 2 and out == "" and "nearpeak plan memory llama-2-7b" in err


@pytest.mark.slow
def test_a_plan_imports_no_torch():
    code = (
        "import sys; from nearpeak.cli.main import main; "
        "main(['plan', 'train', 'llama-3-8b', '--on', 'h100-sxm x 8']); "
        "print('torch' in sys.modules or 'numpy' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "False"


def test_measured_collectives_are_planned_with(capsys, tmp_path):
    path = tmp_path / "comm.json"
    save(comm_run(), path)
    command = ["collectives", "--on", "h100-sxm x 8", "--op", "all_reduce", "--bytes", "64m"]
    assert "in-switch" in plan(capsys, *command)[1]
    code, out, _ = plan(capsys, *command, "--comm", str(path))
    assert code == 0
    assert "691 us" in out and " measured " in out  # 20 us and 64 MiB at 100 GB/s
    assert plan(capsys, *QUESTIONS["train"], "--comm", str(path))[0] == 0


def test_collectives_of_another_gpu_are_refused(capsys, tmp_path):
    path = tmp_path / "comm.json"
    save(comm_run(), path)
    code, _, err = plan(capsys, "collectives", "--on", "b200 x 8", "--comm", str(path))
    assert code == 2
    assert "it was measured on 8 ranks of NVIDIA H100 80GB HBM3, and the plan is for" in err


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp"])
def test_a_plan_of_each_kind_of_sharding_is_shown(sharding: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train", "llama-3-8b", "--on", "h100-sxm x 8", "--sharding", sharding]) == 0
    assert "Training llama-3-8b" in capsys.readouterr().out

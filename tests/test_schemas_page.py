"""docs/schemas.md: the fields and types on the page are those of the results, and those that commands write."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import nearpeak
from nearpeak.bound.estimate import Estimate
from nearpeak.cli.main import main
from nearpeak.cli.verbs.doctor import Report as Doctor
from nearpeak.comm.result import CommRun
from nearpeak.diffs.difference import Difference
from nearpeak.gallery.parts import ExampleResult
from nearpeak.judging.judgement import Judgement
from nearpeak.machines.catalogue import Network
from nearpeak.machines.machine import Machine
from nearpeak.measure.results import SelfTestReport
from nearpeak.measure.timing import SCHEMA, Comparison, Sweep, Timing
from nearpeak.plan.cluster.cluster import Cluster, System
from nearpeak.plan.cluster.collectives import Collective
from nearpeak.plan.models.model import Model
from nearpeak.plan.moe_degrees import MoeDegree
from nearpeak.plan.serving.plan import ServingPlan
from nearpeak.plan.training.fit import FitPlan
from nearpeak.plan.training.plan import MemoryPlan, TrainingPlan
from nearpeak.plan.training.search import SearchPlan
from nearpeak.plan.validation.errors import Validation

PAGE = (Path(__file__).parents[1] / "docs" / "schemas.md").read_text(encoding="utf-8")
SECTIONS: dict[str, tuple[Any, ...]] = {
    "A timing": (Timing,),
    "A comparison": (Comparison,),
    "A sweep": (Sweep,),
    "The self-test": (SelfTestReport,),
    "judge": (Judgement,),
    "estimate": (Estimate,),
    "diff": (Difference,),
    "machine": (Machine, Network),
    "comm": (CommRun,),
    "plan memory": (MemoryPlan,),
    "plan fit": (FitPlan,),
    "plan train, with a layout": (TrainingPlan,),
    "plan train, without a layout": (SearchPlan,),
    "plan serve": (ServingPlan,),
    "plan collectives": (Collective,),
    "plan moe": (MoeDegree,),
    "plan clusters": (System, Cluster),
    "plan validate": (Validation,),
    "gallery": (ExampleResult,),
    "doctor": (Doctor,),
}
"""What the tables of a section are of, in order."""
NAMED = ("A timing", "A comparison", "A sweep", "The self-test", "comm")
"""Sections of objects that say what they are, in a field that no dataclass has."""


def section(name: str) -> str:
    found = re.search(rf"^##+ {name}\n(.*?)(?=^##+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {name}"
    return found[1]


def tables(name: str) -> list[dict[str, str]]:
    """The fields and types of each table of a section."""
    found = re.findall(r"^\| field \|[^\n]*\n\|[ |-]+\n((?:\|[^\n]*\n)+)", section(name), re.MULTILINE)
    return [dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", rows, re.MULTILINE)) for rows in found]


def json_type(hint: Any) -> str:
    """What a field of this type is in JSON, in the words of the page."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [json_type(one) for one in arguments if one is not type(None)]
        return " or ".join([*dict.fromkeys(kinds), *(["null"] if type(None) in arguments else [])])
    if origin is typing.Literal:
        return "string"
    if origin is tuple:
        return "list"
    if dataclasses.is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, collections.abc.Mapping)):
        return "object"
    return {str: "string", bool: "boolean", int: "integer", float: "number"}[hint]


def fields_of(cls: Any) -> dict[str, str]:
    hints = typing.get_type_hints(cls)
    return {field.name: json_type(hints[field.name]) for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_the_fields_of_the_result(name: str) -> None:
    expected = [fields_of(cls) for cls in SECTIONS[name]]
    if name in NAMED:
        expected[0]["nearpeak"] = "string"
    assert tables(name) == expected


def test_every_table_was_looked_at() -> None:
    assert PAGE.count("| field | type |") == sum(len(classes) for classes in SECTIONS.values())


def test_models_have_the_fields_of_the_page() -> None:
    text = section("plan models").split("`plan/models/model.py`:")[1]
    assert re.findall(r"`(\w+)`", text) == [field.name for field in dataclasses.fields(Model)]


def test_the_schema_of_the_page_is_that_of_the_code() -> None:
    assert f"`schema` is {SCHEMA}." in PAGE


def written(command: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Any:
    # 3: a grade of a busy machine; 4: `doctor` alone, where the environment misses something
    assert main([*command, "--json", "-"]) in ((0, 3, 4) if command[0] == "doctor" else (0, 3))
    return json.loads(capsys.readouterr().out)


CASES = """
import torch

def add(size: int = 1024):
    x = torch.randn(size)
    return torch.add, x, x
"""

BENCH = ("--max-seconds", "0.05")
H100 = ("--on", "h100-sxm x 64")
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "timing": ("A timing", ("bench", "cases.py:add", *BENCH)),
    "comparison": ("A comparison", ("bench", "cases.py:add", "cases.py:add", *BENCH)),
    "sweep": ("A sweep", ("bench", "cases.py:add", "--sweep", "size=1k,2k", *BENCH)),
    "estimate": ("estimate", ("estimate", "cases.py:add", "--on", "h100-sxm")),
    "machine": ("machine", ("machine", "h100-sxm")),
    "machines": ("machine", ("machine", "--list")),
    "plan memory": ("plan memory", ("plan", "memory", "llama-2-7b")),
    "plan train": ("plan train, with a layout", ("plan", "train", "llama-3-70b", *H100, "--tp", "4", "--pp", "4")),
    "plan serve": ("plan serve", ("plan", "serve", "llama-3-70b", "--on", "h100-sxm x 8", "--tp", "8")),
    "plan collectives": ("plan collectives", ("plan", "collectives", *H100, "--op", "all_reduce", "--bytes", "1m")),
    "plan moe": ("plan moe", ("plan", "moe", "deepseek-v3", *H100)),
    "plan clusters": ("plan clusters", ("plan", "clusters")),
    "gallery": ("gallery", ("gallery", "ridge", "--on", "h100-sxm")),
    "doctor": ("doctor", ("doctor",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_the_fields_of_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.py").write_text(CASES, encoding="utf-8")
    where, command = COMMANDS[name]
    found = written(command, capsys)
    for one in found if isinstance(found, list) else [found]:
        assert set(one) == set(tables(where)[0])
    if where in NAMED:
        assert (found["nearpeak"], found["schema"]) == (where.split()[-1], SCHEMA)


def test_other_tables_of_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(written(("machine", "--networks"), capsys)[0]) == set(tables("machine")[1])
    assert set(written(("plan", "clusters", "h100-sxm x 8"), capsys)) == set(tables("plan clusters")[1])


def test_diff_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    profile = nearpeak.profile(torch.nn.Linear(32, 32), torch.randn(8, 32), on="h200-sxm")
    profile.save("a.json")
    assert set(written(("diff", "a.json", "a.json"), capsys)) == set(tables("diff")[0])
    found = written(("profile", "--trace", "a.json"), capsys)
    assert written(("report", "a.json"), capsys) == found
    assert set(found) == {field.name for field in dataclasses.fields(nearpeak.Profile)}
    assert isinstance(found["ops"], list)
    assert isinstance(json.loads(Path("a.json").read_text(encoding="utf-8"))["profile"]["ops"], dict)

"""docs/extending: what each page promises happens, beyond that its examples run (`test_docs.py`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import nearpeak
from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.findings import engine
from nearpeak.findings.engine import Waste
from nearpeak.findings.step import Step
from nearpeak.machines import catalogue
from nearpeak.ops.cost import registered

PAGES = Path(__file__).parents[1] / "docs" / "extending"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def run(page: str, *, until: str = "") -> dict[str, Any]:
    """The names that the Python blocks of a page define, up to the one that has the words `until`."""
    text = text_of(page)
    names: dict[str, Any] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        code = match["code"]
        if until and until in code:
            break
        if not code.startswith("# not run"):
            line = text.count("\n", 0, match.start("code"))
            exec(compile("\n" * line + code, str(PAGES / f"{page}.md"), "exec"), names)
    return names


def cells(page: str, header: str) -> list[str]:
    """The names in the first column of a table."""
    table = re.search(rf"^\| {header} \|[^\n]*\n\|[ |:-]+\n(?P<rows>(\|[^\n]*\n)+)", text_of(page), re.MULTILINE)
    assert table, f"{page}: no table of {header}"
    return [name for row in table["rows"].splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a page registers is taken back, also where it failed."""
    monkeypatch.chdir(tmp_path)
    rules, costs = set(engine.rules()), set(registered())
    yield
    for name in set(engine.rules()) - rules:
        engine.forget_rule(name)
    for name in set(registered()) - costs:
        nearpeak.forget_cost(name)


def test_a_declared_cost_shows_in_an_estimate() -> None:
    names = run("cost", until="forget_cost")
    gate, up = names["gate"], names["up"]
    (op,) = nearpeak.estimate(names["swiglu"], gate, up, on="h100-sxm").ops
    assert (op.bytes_read, op.bytes_written, op.flops) == (2 * gate.nbytes, gate.nbytes, 2 * gate.numel())
    assert (op.family, op.model, op.limiter) == ("pointwise", "formula", "memory")
    with pytest.raises(UsageError, match="has a cost already"):
        nearpeak.declare_cost("extending::swiglu", reads=("gate", "up"))
    nearpeak.forget_cost("extending::swiglu")
    (op,) = nearpeak.estimate(names["swiglu"], gate, up, on="h100-sxm").ops
    assert (op.bytes_read, op.model) == (0, "operands")


def test_the_arguments_of_declare_cost_are_all_on_the_page() -> None:
    assert cells("cost", "argument") == list(inspect.signature(nearpeak.declare_cost).parameters)


def test_the_rule_finds_the_planted_waste_and_nothing_else() -> None:
    names = run("finding", until="logits =")
    logits = torch.randn(512, 2048)
    kept: list[torch.Tensor] = []

    def found(step: Any) -> list[str]:
        profile = nearpeak.profile(step, on="h200-sxm")
        return [finding.rule for finding in profile.findings if finding.rule == "log-of-softmax"]

    def used_elsewhere() -> torch.Tensor:
        probabilities = torch.softmax(logits, -1)
        kept[:] = [probabilities.sum()]
        return probabilities.log()

    assert names["log_of_softmax"]
    assert found(lambda: torch.softmax(logits, -1).log()) == ["log-of-softmax"]
    assert found(lambda: torch.log_softmax(logits, -1)) == []
    assert found(used_elsewhere) == []


def test_the_rule_works_in_a_file_of_its_own(tmp_path: Path) -> None:
    rule = next(match["code"] for match in BLOCK.finditer(text_of("finding")) if "@nearpeak.rule" in match["code"])
    (tmp_path / "my_rules.py").write_text(rule, encoding="utf-8")
    engine.add_rules(tmp_path / "my_rules.py")
    assert "log-of-softmax" in engine.rules()


def test_the_page_of_findings_has_the_fields_of_a_waste() -> None:
    fields = {field.name for field in dataclasses.fields(Waste)}
    assert set(cells("finding", "field")) == fields - {"source"}
    for name in cells("finding", "name"):
        member = name.removeprefix("step.").partition("(")[0]
        assert hasattr(Step, member) or member in Step.__dataclass_fields__, name


def test_the_kernel_of_the_page_gives_what_its_reference_gives() -> None:
    names = run("kernel", until="left, right")
    axpy, reference = names["axpy"], names["reference"]
    for shape in ((1,), (1023,), (3, 1025)):
        x, y = torch.randn(*shape), torch.randn(*shape)
        torch.testing.assert_close(axpy(x, y, -2.0), reference(x, y, -2.0))
    assert "contiguous" in kernels.supports(axpy, torch.ones(4, 4).T, torch.ones(4, 4).T, 1.0).reason
    x = torch.randn(64, requires_grad=True)
    axpy(x, torch.randn(64), 3.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((64,), 3.0))


def test_the_kernel_of_the_page_has_a_bound_in_a_graph_of_ops() -> None:
    names = run("kernel", until="left, right")
    x = torch.empty(1 << 20, dtype=torch.bfloat16)
    result = nearpeak.estimate(lambda a, b: names["axpy_operator"](a, b, 2.0).relu(), x, x.clone(), on="h200-sxm")
    assert [op.name for op in result.ops] == ["extending.axpy.default", "aten.relu.default"]
    assert result.coverage.formula == 2
    assert len(result.groups) == 1, "a pointwise op is fused with its neighbor"


def test_files_of_the_pattern_exist() -> None:
    root = PAGES.parents[1]
    for name in cells("kernel", "file"):
        start = root if name.startswith("tests/") else root / "src" / "nearpeak"
        assert list(start.glob(name)), name


def test_a_machine_of_your_own_gives_other_bounds() -> None:
    names = run("machine")
    assert names["slow"].machine == "h100-sxm-capped"
    assert names["on_paper"].machine == "paper-gpu"
    assert names["slow"].as_written_s > names["fast"].as_written_s > names["on_paper"].as_written_s


def test_the_page_of_machines_has_the_fields_of_the_catalogue() -> None:
    listed = set(cells("machine", "field"))
    file = resources.files("nearpeak.machines").joinpath("catalogue.toml").read_text(encoding="utf-8")
    used: set[str] = set()
    for device in tomllib.loads(file)["device"].values():
        for field, value in device.items():
            if field in ("matrix", "vector"):
                used.add(f"{field}.DTYPE")
            elif field != "sources":
                used |= {f"{field}.{inner}" for inner in value} if isinstance(value, dict) else {field}
    assert used <= listed, "fields that entries have"
    assert listed <= used, "fields that no entry has"


def test_needed_fields_are_needed() -> None:
    entry = run("machine")["entry"]
    for field in ("name", "vendor", "architecture", "compute_capability", "driver_names", "memory_bytes"):
        with pytest.raises(ValueError, match=field):
            catalogue.parse(re.sub(rf"^{field} = .*\n", "", entry, flags=re.MULTILINE))

"""Every rule has a planted waste and a page, and is in the table of docs/findings.md."""

import importlib
import re
from pathlib import Path

import pytest

from nearpeak.findings.engine import rules

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "findings.md"
RULES = sorted(rules())


def planted():
    found = set()
    for path in (ROOT / "tests" / "corpus").glob("*.py"):
        found |= set(re.findall(r'^RULE = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE))
    return found


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_one_file_with_a_page_and_a_row_in_the_table(name):
    module = importlib.import_module(rules()[name].look.__module__)
    assert Path(module.__file__).parent.name == "rules"
    page = ROOT / "docs" / "rules" / f"{name}.md"
    assert page.is_file(), f"write docs/rules/{name}.md"
    of_several = re.search(rf"^{name}: (.*)$", module.__doc__, re.MULTILINE)  # rules in one file
    summary = of_several[1] if of_several else " ".join(module.__doc__.split("\n\n")[0].split())
    assert f"| [{name}](rules/{name}.md) | {summary} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_a_planted_waste(name):
    assert name in planted() or name == "exposed-communication"  # which needs several GPUs


def test_there_are_enough_of_them():
    assert len(list((ROOT / "tests" / "corpus").glob("*.py"))) >= 30

"""The table of the page beside a constant utilization."""

from __future__ import annotations

import pytest

from benchmarks.plan.baselines import BLOCK, PAGE, table


@pytest.mark.slow
def test_the_table_of_the_page_is_that_of_today() -> None:
    match = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None and match[0] == table(), "run `python -m benchmarks.plan.baselines`"

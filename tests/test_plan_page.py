"""The outputs in docs/plan.md are what the commands beside them print."""

import pytest

from benchmarks.pages.plan import DRAWN, PAGE, PICTURE, blocks, output, picture

FOUND = blocks(PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), FOUND, ids=[command for command, _ in FOUND])
def test_the_output_is_that_of_the_command(command, shown):
    assert shown == output(command), "run `python -m benchmarks.pages.plan`"


def test_the_picture_is_that_of_the_command():
    assert DRAWN in PAGE.read_text(encoding="utf-8")
    assert picture() == PICTURE.read_text(encoding="utf-8"), "run `python -m benchmarks.pages.plan`"


def test_the_page_has_outputs():
    assert len(FOUND) >= 8 and all(shown for _, shown in FOUND)

"""Tests of kernels run this package's kernels, also on a GPU where torch's own are faster.

Without a GPU they run in Triton's interpreter or an emulator. There, a third of the cases of each sweep run, drawn by
their names, and the others with `pytest -m exhaustive`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
import torch

SWEEP = 6
"""The least number of cases of a sweep."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    tests = {item: item.nodeid.partition("[")[0] for item in here}
    cases = Counter(tests.values())
    drawn: set[str] = set()
    for item, test in tests.items():
        if cases[test] >= SWEEP and crc32(item.name.encode()) % 3 and test in drawn:
            item.add_marker(pytest.mark.exhaustive)
        drawn.add(test)  # the first case runs whatever its name is


@pytest.fixture(autouse=True, scope="session")
def _no_backends_of_torch():
    if not torch.cuda.is_available():
        yield  # there are none elsewhere
        return
    from nearpeak.kernels._runtime.choice import own_backends

    with own_backends():
        yield

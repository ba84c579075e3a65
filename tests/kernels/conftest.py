"""Tests of kernels run this package's kernels, also on a GPU where torch's own are faster."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _no_backends_of_torch():
    if not torch.cuda.is_available():
        yield  # there are none elsewhere
        return
    from nearpeak.kernels._runtime.choice import own_backends

    with own_backends():
        yield

"""What decides on the variant of a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nearpeak.kernels.jit.launch import _decides


def test_constants_decide_by_their_value():
    assert _decides(4096, True) != _decides(2048, True)
    assert _decides(0.5, True) != _decides(0.25, True)


def test_arguments_decide_by_what_triton_specialises_on():
    assert _decides(4096, False) == _decides(2048, False) != _decides(2049, False)
    assert _decides(1, False) != _decides(3, False)
    assert _decides(2**31, False) != _decides(2**20, False)
    assert _decides(0.5, False) == _decides(0.25, False) != _decides(2, False)
    x = torch.empty(64)
    assert _decides(x, False) == _decides(x[4:], False) != _decides(x[1:], False)
    assert _decides(x, False) != _decides(x.half(), False)

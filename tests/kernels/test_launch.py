"""What decides on the variant of a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from types import SimpleNamespace

from nearpeak.kernels.jit import launch as launching
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


class Recorder:
    """Stands for a kernel of Triton's, and for what it compiles."""

    def __init__(self, log, name="asked", constants=()):
        self.log, self.name = log, name
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in constants]

    def __getitem__(self, grid):
        def call(*args, **settings):
            self.log.append(self.name)
            return Recorder(self.log, "remembered")

        return call


def test_a_variant_is_asked_for_once(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    log, x = [], torch.empty(64)
    kernel = Recorder(log, constants=(False, False, True))
    for elements, block in ((32, 16), (48, 16), (32, 32), (33, 16), (64, 32)):
        launching.launch(kernel, (1, 1, 1), x, elements, block)
    assert log == ["asked", "remembered", "asked", "asked", "remembered"]

"""What decides on the variant of a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from types import SimpleNamespace

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime import launch as launching
from nearpeak.kernels._runtime.launch import _specialization_key


def test_constants_decide_by_their_value():
    assert _specialization_key(4096, True) != _specialization_key(2048, True)
    assert _specialization_key(0.5, True) != _specialization_key(0.25, True)


def test_arguments_decide_by_what_triton_specializes_on():
    assert _specialization_key(4096, False) == _specialization_key(2048, False) != _specialization_key(2049, False)
    assert _specialization_key(1, False) != _specialization_key(3, False)
    assert _specialization_key(2**31, False) != _specialization_key(2**20, False)
    assert _specialization_key(0.5, False) == _specialization_key(0.25, False) != _specialization_key(2, False)
    x = torch.empty(64)
    assert _specialization_key(x, False) == _specialization_key(x[4:], False) != _specialization_key(x[1:], False)
    assert _specialization_key(x, False) != _specialization_key(x.half(), False)


class Recorder:
    """Stands for a kernel of Triton's, and for what it compiles."""

    def __init__(self, log, name="asked", constants=()):
        self.log, self.name = log, name
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in constants]

    function = packed_metadata = None

    def __getitem__(self, grid):
        def call(*args, **settings):
            self.log.append(self.name)
            return Recorder(self.log, "remembered")

        return call

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        self.log.append("directly")


def test_a_variant_is_asked_for_once(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    log, x = [], torch.empty(64)
    kernel = Recorder(log, constants=(False, False, True))
    for elements, block in ((32, 16), (48, 16), (32, 32), (33, 16), (64, 32)):
        launching.launch(kernel, (1, 1, 1), x, elements, block)
    assert log == ["asked", "directly", "asked", "asked", "directly"]


def test_the_device_of_the_tensor_is_made_the_current_one(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    current, log = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: log.append(device), raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)

    class Tensor:
        def __init__(self, index):
            self.device = SimpleNamespace(index=index)

    tensors = [Tensor(0), Tensor(1)]
    kernel = Recorder(log, constants=(True,))
    for _ in range(2):
        for tensor in tensors:
            launching.launch(kernel, (1, 1, 1), tensor)
    assert log == ["asked", "asked", 0, "directly", 1, "directly"]
    assert current == [0]


def test_a_tensor_of_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    with pytest.raises(KernelUnavailable, match="on cpu"):
        launching.launch(Recorder([]), (1, 1, 1), torch.empty(64))


def test_who_hooks_into_launches_is_told_of_them(monkeypatch):
    log = []
    variant = launching.Specialization(Recorder(log, "by Triton"))
    variant.start((1, 1, 1), 0, ())
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(launching._runtime, hook)
        chain.add(log.append)
        variant.start((1, 1, 1), 0, ())
        chain.remove(log.append)
    variant.start((1, 1, 1), 0, ())
    assert log == ["directly", "by Triton", "by Triton", "directly"]


def test_a_version_of_triton_that_is_not_known_starts_its_kernels_itself(monkeypatch):
    monkeypatch.setattr(launching, "_LAUNCHES_DIRECTLY", False)
    log = []
    launching.Specialization(Recorder(log, "by Triton")).start((1, 1, 1), 0, ())
    assert log == ["by Triton"]


def test_a_kernel_that_waits_for_the_one_before_is_launched_early(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    seen = []

    class Kernel(Recorder):
        def __getitem__(self, grid):
            return lambda *args, **settings: seen.append(settings) or Recorder([])

    kernel = Kernel([], constants=(False,))
    for early in (False, True, True):
        launching.launch(kernel, (1, 1, 1), torch.empty(1), early=early)
    assert [settings.get("launch_pdl", False) for settings in seen] == [False, True]


@pytest.mark.parametrize(
    ("capability", "able"), [((9, 0), True), ((10, 0), True), ((8, 0), False), (None, False)], ids=str
)
def test_kernels_start_early_from_hopper_on(capability, able, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "cuda_capability", lambda index: capability)
    assert launching.can_start_early(torch.device("cuda", 0)) == (able and launching.gdc_wait is not None)
    assert not launching.can_start_early(torch.device("cpu"))
    monkeypatch.setattr(launching, "INTERPRETED", True)
    assert not launching.can_start_early(torch.device("cuda", 0))

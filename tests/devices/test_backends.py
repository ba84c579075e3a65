import os

import pytest
import torch

from nearpeak.devices import backends
from nearpeak.devices.amd import Amd
from nearpeak.devices.backends import CPU, backend_of, find_backend, gpu_backend, gpu_in_use, is_gpu
from nearpeak.devices.nvidia import Nvidia
from nearpeak.errors import EnvironmentProblem


@pytest.fixture
def build(monkeypatch):
    """Sets whether torch is a ROCm build, and whether it can use a GPU."""

    def install(*, rocm, available=True):
        monkeypatch.setattr(torch.version, "hip", "6.4" if rocm else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    return install


def test_a_cuda_build_has_gpus_of_nvidia(build):
    build(rocm=False)
    assert type(gpu_backend()) is Nvidia


def test_a_rocm_build_has_gpus_of_amd(build):
    build(rocm=True)
    backend = gpu_backend()
    assert type(backend) is Amd
    assert backend.vendor == "amd"
    assert backend.conditions(0).read().clock_hz is None
    properties = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4})
    assert backend.architecture(properties) == "gfx942"  # and not a compute capability, which 9.0 is NVIDIA's Hopper


def test_without_a_gpu_there_is_no_backend_of_one(build):
    build(rocm=False, available=False)
    assert gpu_backend() is None
    assert gpu_in_use() is None
    assert not backends.gpu_visible()
    with pytest.raises(EnvironmentProblem, match="needs a GPU"):
        backends.require_gpu_backend()


def test_a_device_is_found_by_its_type(build):
    build(rocm=False)
    assert backend_of(torch.device("cpu")) is CPU
    assert backend_of(torch.device("cuda", 1)).vendor == "nvidia"
    assert is_gpu(torch.device("cuda"))
    assert not is_gpu(torch.device("cpu"))


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0"])
def test_an_unknown_kind_of_device_is_an_error(build, device):
    build(rocm=False)
    assert find_backend(torch.device(device)) is None
    with pytest.raises(EnvironmentProblem, match=r"cannot measure the device .*'cpu' and 'cuda'"):
        backend_of(torch.device(device))


def test_looking_for_a_gpu_leaves_the_environment_as_it_was(build, monkeypatch):
    build(rocm=False)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    assert backends.gpu_visible()
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ

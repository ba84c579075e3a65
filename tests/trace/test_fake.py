import copy
import resource

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.trace.fake import fake
from nearpeak.trace.patches.cuda_on_cpu import cuda_on_cpu

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="devices are redirected only where torch has no CUDA"
)


def test_tensors_of_any_size_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake():
        weights = torch.empty(70_000_000_000)
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(16)))
        (model(torch.randn(8, 32768)) * weights[:32768]).sum().backward()
    assert weights.untyped_storage().nbytes() == 280_000_000_000
    assert model[0].weight.grad.shape == (32768, 32768)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_tensors_of_two_blocks_work_together():
    with fake():
        weight = torch.empty(8, 4)
    with fake():
        product = torch.empty(2, 8) @ weight
    assert isinstance(product, FakeTensor)
    assert product.shape == (2, 4)


@without_cuda
def test_cuda_is_redirected_in_all_its_spellings():
    with fake(), cuda_on_cpu() as redirection:
        assert not redirection.happened
        tensors = [
            torch.empty(3, device="cuda"),
            torch.empty(3, device="cuda:1"),
            torch.empty(3, device=torch.device("cuda", 0)),
            torch.tensor([1.0], device="cuda"),
            torch.empty(3).cuda(),
            torch.empty(3).cuda(1),
            torch.empty(3).to("cuda"),
            torch.empty(3).to("cuda", torch.float64),
            torch.empty(3).to(torch.device("cuda")),
            torch.empty(3).to(device="cuda"),
            torch.empty(3).to(0),
            nn.Linear(3, 3, device="cuda").weight,
            nn.Linear(3, 3).cuda().weight,
            nn.Linear(3, 3).to("cuda").weight,
            nn.Linear(3, 3).to("cuda", torch.bfloat16).weight,
        ]
        with torch.device("cuda"):
            tensors.append(torch.zeros(3))
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert tensors[7].dtype is torch.float64
    assert tensors[14].dtype is torch.bfloat16
    assert redirection.happened


@without_cuda
def test_backward_of_code_for_cuda_does_not_abort():
    with fake():
        model = nn.Linear(4, 4, device="cuda")
        model(torch.randn(2, 4, device="cuda")).sum().backward()
    assert model.weight.grad.shape == (4, 4)


@without_cuda
def test_autocast_for_cuda_casts():
    with fake():
        model = nn.Linear(4, 4)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert model(torch.randn(2, 4)).dtype is torch.bfloat16
        with torch.autocast("cuda"):
            assert model(torch.randn(2, 4)).dtype is torch.float16
    with torch.autocast("cpu"):
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype is torch.bfloat16


@without_cuda
def test_code_around_cuda_runs():
    with fake(), cuda_on_cpu() as redirection:
        assert torch.empty(3).pin_memory().to("cuda", non_blocking=True).shape == (3,)
        assert torch.empty(3, pin_memory=True).shape == (3,)
        torch.cuda.synchronize()
        assert redirection.happened
        assert not torch.cuda.is_available()
        assert torch.amp.GradScaler("cuda").is_enabled()
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):  # a build without CUDA, or without a GPU
        torch.cuda.synchronize()


def test_an_equation_that_spells_cuda_is_no_device():
    with fake():
        assert torch.einsum("cuda->cu", torch.empty(2, 3, 4, 5)).shape == (2, 3)


def test_modules_convert_after_the_block_and_stay_tied():
    with fake():
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("scale", torch.tensor([1.0, 2.0]))
    model.to(torch.bfloat16)
    assert model[0].weight is model[1].weight
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


def test_modules_can_be_copied():
    with fake():
        layer = nn.TransformerEncoderLayer(16, 2)
        layer.tied = layer.linear1.weight
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    first, second = model.layers
    assert isinstance(first.linear1.weight, nn.Parameter)
    assert first.tied is first.linear1.weight
    assert first.linear1.weight is not second.linear1.weight
    assert first.linear1.weight.fake_mode is second.linear1.weight.fake_mode
    with fake():
        assert copy.deepcopy(model)(torch.empty(5, 3, 16)).shape == (5, 3, 16)


def test_nothing_stays_fake_outside():
    with fake():
        pass
    assert not isinstance(torch.empty(2), FakeTensor)

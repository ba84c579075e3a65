import importlib

import pytest
import torch
from torch import nn

from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace

H200 = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))
CPU = Target(kind="cpu")


def optimizer_ops(kind, *, built_fake, target=H200, **options):
    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model, kind(model.parameters(), **options)

    if built_fake:
        with fake():
            model, optimizer = build()
    else:
        model, optimizer = build()

    def step():
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()

    recorded = trace(step, target=target)
    return [op.name.removeprefix("aten.") for op in recorded.ops if op.phase == "optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("built_fake", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_default_on_a_gpu_is_multi_tensor(kind, built_fake):
    found = optimizer_ops(kind, built_fake=built_fake)
    assert any(name.startswith("_foreach_addcdiv_") for name in found)
    assert not any(name.startswith("addcdiv_") for name in found)
    assert not any("_foreach_" in name for name in optimizer_ops(kind, built_fake=built_fake, target=CPU))


def test_what_the_user_chooses_is_kept():
    assert any(name.startswith("addcdiv_") for name in optimizer_ops(torch.optim.Adam, built_fake=True, foreach=False))
    assert "_fused_adamw_.default" in optimizer_ops(torch.optim.AdamW, built_fake=True, fused=True)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam])
def test_capturable_optimizers_run(kind):
    found = optimizer_ops(kind, built_fake=True, capturable=True)
    assert any(name.startswith("_foreach_") for name in found)
    assert "_local_scalar_dense.default" not in found


def test_clipping_is_multi_tensor():
    with fake():
        model = nn.Linear(4, 4)

    def step():
        model(torch.zeros(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    found = [op.name for op in trace(step, target=H200).ops]
    assert found.count("aten._foreach_norm.Scalar") == 1
    assert found.count("aten._foreach_mul_.Tensor") == 1


def test_optimizers_are_afterwards_as_before():
    optimizer_ops(torch.optim.AdamW, built_fake=True)
    base, adam = (importlib.import_module(f"torch.optim.{name}") for name in ("optimizer", "adam"))
    assert "cpu" not in base._get_foreach_kernels_supported_devices()
    assert type(base._foreach_supported_types) is list
    assert "cpu" not in adam._get_capturable_supported_devices()

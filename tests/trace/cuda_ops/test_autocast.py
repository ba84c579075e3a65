import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from nearpeak.trace.cuda_ops import autocast
from nearpeak.trace.cuda_ops.autocast import registered_operators
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch's own autocast is at work where it has CUDA")

H200 = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))


def dtypes(function, *args, target=H200, dtype=torch.float16, **options):
    """The name of every op with the dtype of its result."""

    def inside(*args):
        with torch.autocast("cuda", dtype=dtype):
            return function(*args)

    recorded = trace(inside, *args, target=target, **options)
    return [(op.name.removeprefix("aten.").removesuffix(".default"), op.outputs[0].dtype) for op in recorded.ops]


def test_the_lists_are_those_of_torch():
    ours = [
        *autocast.LOWER_PRECISION,
        *autocast.FLOAT32,
        *autocast.FLOAT32_RESULT,
        *autocast.FLOAT32_APPENDED,
        *autocast.WIDEST_INPUT,
        *autocast.UNSAFE,
    ]
    assert len(ours) == len(set(ours))
    # overloads of named tensors in older versions of torch, and cuDNN's own operator in builds with CUDA
    elsewhere = re.compile("imname|names_|_cudnn_rnn")
    registered = {name for name in registered_operators("AutocastCUDA") if not elsewhere.search(name)}
    assert registered <= set(ours)


def test_products_run_in_the_lower_precision():
    x, weight, bias = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)
    found = dtypes(functional.linear, x, weight, bias)
    assert found == [("_to_copy", "float16")] * 3 + [("t", "float16"), ("addmm", "float16")]
    assert dtypes(torch.mm, x, x.t(), dtype=torch.bfloat16)[-1] == ("mm", "bfloat16")
    double = torch.zeros(3, 3, dtype=torch.float64)
    assert dtypes(torch.mm, double, double) == [("mm", "float64")]


def test_parameters_are_cast_once_in_a_region():
    model = nn.Linear(4, 4, bias=False)

    def twice(x):
        return model(model(x))

    casts = [op for op in dtypes(twice, torch.zeros(2, 4)) if op[0] == "_to_copy"]
    assert len(casts) == 2  # the weight and the input

    def two_regions(x):
        with torch.autocast("cuda", enabled=False):
            pass
        return model(x)

    def outside(x):
        for _ in range(2):
            with torch.autocast("cuda"):
                x = model(x)
        return x

    assert [name for name, _ in dtypes(two_regions, torch.zeros(2, 4))].count("_to_copy") == 2
    recorded = trace(outside, torch.zeros(2, 4), target=H200)
    assert [op.name for op in recorded.ops].count("aten._to_copy.default") == 3
    assert len([op for op in dtypes(twice, torch.zeros(2, 4), grad=False) if op[0] == "_to_copy"]) == 2


def test_norms_and_losses_run_in_float32():
    half = torch.zeros(2, 4, dtype=torch.float16)
    assert dtypes(nn.LayerNorm(4), half) == [("_to_copy", "float32"), ("native_layer_norm", "float32")]
    assert dtypes(lambda x: x.pow(2), half) == [("_to_copy", "float32"), ("pow.Tensor_Scalar", "float32")]
    assert dtypes(functional.mse_loss, half, half)[-1] == ("mse_loss", "float32")


def test_reductions_give_float32_without_a_cast():
    half = torch.zeros(2, 4, dtype=torch.float16)
    assert dtypes(lambda x: x.softmax(-1), half) == [("_softmax", "float32")]
    assert dtypes(lambda x: x.sum(-1), half) == [("sum.dim_IntList", "float32")]
    assert dtypes(lambda x: x.sum(-1, dtype=torch.float16), half) == [("sum.dim_IntList", "float16")]
    assert dtypes(lambda x: torch.cumsum(x, 0), half)[-1] == ("cumsum", "float32")
    assert dtypes(lambda x: torch.ops.aten.norm(x, 2), half)[-1][1] == "float32"
    whole = torch.zeros(2, 4, dtype=torch.int64)
    assert dtypes(lambda x: x.sum(-1), whole) == [("sum.dim_IntList", "int64")]


def test_several_inputs_take_the_widest_dtype():
    half, full = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    assert dtypes(torch.dot, half, half) == [("dot", "float16")]
    assert dtypes(torch.dot, half, full) == [("_to_copy", "float32"), ("dot", "float32")]


def test_rules_of_the_cpu_do_not_apply():
    half = torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16)
    assert dtypes(lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), half) == [("reflection_pad2d", "bfloat16")]
    assert dtypes(lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), half, target=None)[0] == (
        "_to_copy",
        "float32",
    )


def test_what_cuda_refuses_is_refused():
    half = torch.zeros(4)
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        dtypes(functional.binary_cross_entropy, half, half)


def test_torch_says_that_it_casts_for_cuda():
    def function():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.float16

    trace(function, target=H200)
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_old_spellings_work():
    def function(x):
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            assert torch.cuda.amp.GradScaler().is_enabled()
            return x @ x

    assert trace(function, torch.zeros(4, 4), target=H200).ops[-1].outputs[0].dtype == "bfloat16"


def test_rules_are_those_of_cuda_where_autocast_began_before():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded = trace(lambda x: x.softmax(-1), torch.zeros(2, 4, dtype=torch.bfloat16), target=H200)
    assert [(op.name, op.outputs[0].dtype) for op in recorded.ops][-1] == ("aten._softmax.default", "float32")


def test_gradients_go_back_through_the_casts():
    model = nn.Linear(4, 4, bias=False)
    found = dtypes(model, torch.zeros(2, 4), grad=True)
    names = [name for name, _ in found]
    assert names.index("mm") < len(names) - names[::-1].index("_to_copy")
    assert found[-1][1] == "float32"


@pytest.fixture
def scaled():
    with fake():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
    return model, optimizer, scaler


def test_a_step_with_scaled_gradients(scaled):
    model, optimizer, scaler = scaled

    def step():
        with torch.autocast("cuda"):
            loss = model(torch.zeros(2, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        names = [op.name for op in trace(step, target=H200).ops]
        assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in names
        assert "aten._foreach_addcdiv_.ScalarList" in names
        assert "aten._amp_update_scale_.default" in names
        assert scaler._scale is None
        assert not scaler._per_optimizer_states
    assert scaler.is_enabled()


def test_a_scaler_with_values_keeps_them():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))

    def step():
        scaler.scale(model(torch.zeros(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    trace(step, target=H200)
    assert scaler.get_scale() == 8.0
    assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"

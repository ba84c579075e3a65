"""`adamw_step` and `AdamW`: against float64, against torch's own, with tensors of all kinds."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from nearpeak.kernels.optimizer import triton as optimizer_triton  # noqa: E402

SHAPES = [(7,), (3, 5), (1027,), (0,), (), (2, 512)]
F32, BF16, F16 = DTYPES
MIXES = [
    (F32, F32, False),
    (BF16, BF16, False),
    (BF16, F32, True),
    (BF16, F32, False),
    (F16, F32, True),
    (F32, BF16, False),
]


def problem(shapes, dtype=F32, state=F32, master=False, seed=0):
    """Parameters, gradients, both states and master parameters."""
    torch.manual_seed(seed)
    values = [torch.randn(shape, device=DEVICE) for shape in shapes]
    masters = [value.clone() for value in values] if master else None
    grads = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    first = [(torch.randn(shape, device=DEVICE) * 0.1).to(state) for shape in shapes]
    second = [(torch.rand(shape, device=DEVICE) * 0.1).to(state) for shape in shapes]
    return [value.to(dtype) for value in values], grads, first, second, masters


def copies(tensors):
    return [[one.clone() for one in part] if part is not None else None for part in tensors]


def wide(tensors):
    return [[one.double() for one in part] if part is not None else None for part in tensors]


def step(function, tensors, **options):
    *lists, masters = tensors
    options = {"step": 3, "lr": 1e-2, "weight_decay": 0.1} | options
    function(*lists, master_params=masters, **options)


def assert_steps_alike(tensors, **options):
    actual, exact, same = copies(tensors), wide(tensors), copies(tensors)
    with kernels.using("require"):
        step(kernels.adamw_step, actual, **options)
    step(kernels.adamw_step.reference, exact, **options)
    step(kernels.adamw_step.reference, same, **options)
    for index in (0, 2, 3, 4):
        if actual[index] is not None:
            for parts in zip(actual[index], exact[index], same[index], strict=True):
                assert_as_exact(*parts, f"list {index}")
    assert all(map(torch.equal, actual[1], tensors[1])), "gradients are as they were"


@pytest.mark.parametrize(("dtype", "state", "master"), MIXES, ids=str)
def test_it_takes_a_step(dtype, state, master):
    assert_steps_alike(problem(SHAPES, dtype, state, master))


@pytest.mark.parametrize("number", [1, 2, 100, 249, 250, 251, 2000, 1_000_000])
def test_steps_on_the_device_are_as_exact_as_on_the_host(number):
    tensors = problem([(64,)])
    assert_steps_alike(tensors, step=number)
    assert_steps_alike(tensors, step=torch.tensor(float(number), device=DEVICE))


def test_each_parameter_may_have_its_own_step():
    steps = [torch.tensor(float(number), device=DEVICE) for number in (1, 2, 30)]
    assert_steps_alike(problem([(5,), (6,), (7,)]), step=steps)


@settings(max_examples=15)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    mix=st.sampled_from(MIXES),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.95, 0.999])),
    decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
    lr=st.sampled_from([0.0, 1e-3, torch.tensor(0.1, device=DEVICE)]),
    scale=st.sampled_from([None, 4.0, 65536.0]),
)
def test_any_options(shapes, mix, betas, decay, maximize, lr, scale):
    scale = None if scale is None else torch.tensor([scale], device=DEVICE)
    options = {"betas": betas, "weight_decay": decay, "maximize": maximize, "lr": lr, "grad_scale": scale}
    assert_steps_alike(problem(shapes, *mix), **options)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_nothing_changes_after_an_overflow(overflow):
    tensors = problem([(5,), (2000,)], BF16, F32, True)
    before = copies(tensors)
    with kernels.using("require"):
        step(kernels.adamw_step, tensors, found_inf=torch.tensor([overflow], device=DEVICE))
    for index in (0, 2, 3, 4):
        same = [torch.equal(*pair) for pair in zip(tensors[index], before[index], strict=True)]
        assert all(same) if overflow else not any(same)


def test_a_learning_rate_on_the_host():
    actual, expected = problem([(5,)]), problem([(5,)])
    step(kernels.adamw_step, actual, lr=torch.tensor(0.25))
    step(kernels.adamw_step, expected, lr=0.25)
    assert torch.equal(actual[0][0], expected[0][0])


def test_any_layout_that_all_share():
    for move in (lambda x: x.t(), lambda x: x.flatten()[1:]):
        tensors = [[move(one) for one in part] for part in problem([(33, 40)], F32, F32, True)]
        assert not tensors[0][0].is_contiguous() or tensors[0][0].data_ptr() % 16
        actual, expected = tensors, copies(tensors)
        with kernels.using("require"):
            step(kernels.adamw_step, actual)
        step(kernels.adamw_step.reference, expected)
        torch.testing.assert_close(actual[0], expected[0])


def test_what_it_does_not_take_runs_the_reference():
    params, grads, first, second, _ = problem([(4, 6)])
    lists = (params, [grads[0].t().contiguous().t()], first, second)
    support = kernels.supports(kernels.adamw_step, *lists, step=1, lr=0.1)
    assert "strides" in support.reason
    kernels.adamw_step(*lists, step=1, lr=0.1)
    with_holes = [[torch.randn(4, 6, device=DEVICE)[:, ::2]] for _ in range(4)]
    assert "holes" in kernels.supports(kernels.adamw_step, *with_holes, step=1, lr=0.1).reason
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="no parameters"):
        kernels.adamw_step([], [], [], [], step=1, lr=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"step": 0}, "Count steps from 1"), ({"betas": (0.9, 1.0)}, "betas"), ({"lr": torch.ones(2)}, "tensor of one")],
)
def test_options_that_make_no_sense(change, said):
    params, grads, first, second, _ = problem([(3,)])
    with pytest.raises(UsageError, match=said):
        kernels.adamw_step(params, grads, first, second, **({"step": 1, "lr": 0.1} | change))


def test_lists_that_do_not_fit():
    params, grads, first, second, _ = problem([(3,), (4,)])
    with pytest.raises(UsageError, match="2 params and 1 grads"):
        kernels.adamw_step(params, grads[:1], first, second, step=1, lr=0.1)
    with pytest.raises(UsageError, match=r"exp_avgs\[0\].*\(4,\)"):
        kernels.adamw_step(params, grads, first[::-1], second, step=1, lr=0.1)


def test_elements_beyond_32_bits():
    """A tensor of 2**31 elements and some, of which the last few are there: the addresses of all are before them."""
    block, part = 256, 2**31 // 256 + 3
    params, grads, first, second, _ = problem([(5,)])
    expected = problem([(5,)])
    step(kernels.adamw_step.reference, expected, step=1, lr=0.1)
    begin = block * part * 4
    columns = [begin // 4 + 5, *(one[0].data_ptr() - begin for one in (params, first, second)), 0, 0]
    states = torch.tensor(columns, device=DEVICE)
    gradients = torch.tensor([grads[0].data_ptr() - begin], device=DEVICE)
    chunks = torch.tensor([[0, part]], dtype=torch.int32, device=DEVICE)
    floats = 0.1, 0.1, 0.9, 0.999, 1 - 0.9, 1 - 0.999, 0.0, 0.0, 1e-8, 1 - 0.9, 1 - 0.999
    types = (tl.float32,) * 4
    constants = (*types, False, False, False, False, block)
    optimizer_triton.launch(
        optimizer_triton.adamw_kernel, (1, 1, 1), states, gradients, chunks, 1, None, None, None, *floats, *constants
    )
    torch.testing.assert_close(params[0], expected[0][0])


def test_new_gradients_are_found_at_their_addresses():
    actual, expected = (list(problem([(5,), (9,)])) for _ in range(2))
    for _ in range(3):
        grads = [torch.randn_like(one) for one in actual[0]]
        actual[1], expected[1] = grads, grads
        step(kernels.adamw_step, actual)
        step(kernels.adamw_step.reference, expected)
        torch.testing.assert_close(actual[0], expected[0])


def test_tables_are_kept_until_others_need_the_room():
    cache, keys = optimizer_triton.TableCache(2), []
    device = torch.device("cpu")
    for key in (1, 2, 1, 3, 1, 2):
        assert cache.get(key, device, lambda key: keys.append(key) or -key) == -key
    assert keys == [1, 2, 3, 2]


def test_a_table_written_by_launches():
    numbers = [0, 1, 2**31, 2**47 + 5, *range(30)]
    table = torch.full((40,), -7, dtype=torch.int64, device=DEVICE)
    optimizer_triton.write_table(table, numbers)
    assert table.tolist() == [*numbers, *[-7] * 6]


def test_autograd_sees_that_parameters_changed():
    params, *others, _ = problem([(3,)])
    version = params[0]._version
    kernels.adamw_step(params, *others, step=1, lr=0.1)
    assert params[0]._version > version


def arguments(tensors, steps):
    *lists, masters = tensors
    return (*lists, masters or [], steps, None, None, None, 1.0, 1e-2, 0.9, 0.999, 1e-8, 0.1, False)


def test_the_operator_is_one_of_torch():
    opcheck(torch.ops.nearpeak.adamw_step.default, arguments(problem([(3,), (4,)]), []))
    steps = [torch.ones((), device=DEVICE)]
    opcheck(torch.ops.nearpeak.adamw_step.default, arguments(problem([(3, 2)], BF16, F32, True), steps))
    opcheck(torch.ops.nearpeak.adamw_step.default, arguments(wide(problem([(3, 2)])), []))


def test_it_compiles_without_a_graph_break():
    def train(params, grads, first, second, number):
        number += 1
        kernels.adamw_step(params, [grad * 2 for grad in grads], first, second, step=number, lr=0.1)
        return params[0].sum()

    (actual, expected) = (problem([(3,), (5,)])[:4] for _ in range(2))
    numbers = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*actual, numbers[0]), train(*expected, numbers[1]))
    torch.testing.assert_close(actual, expected)


def parameters(dtype=F32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in [(7, 3), (1100,), ()]]


def train(optimizer, params, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


@pytest.mark.parametrize("maximize", [False, True])
def test_the_optimizer_is_that_of_torch(maximize):
    mine, theirs = parameters(), parameters()
    with kernels.using("require"):
        train(kernels.AdamW(mine, lr=0.1, maximize=maximize), mine, 5)
    train(torch.optim.AdamW(theirs, lr=0.1, maximize=maximize, fused=True), theirs, 5)
    torch.testing.assert_close(mine, theirs)


def test_groups_schedules_and_parameters_without_gradient():
    mine, theirs = parameters(), parameters()
    for params, kind in ((mine, kernels.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(optimizer, params[:2])
        schedule.step()
        train(optimizer, params)
        assert optimizer.step(lambda: 5) == 5
    torch.testing.assert_close(mine, theirs)


def test_master_weights_keep_what_bfloat16_loses():
    mine, exact = parameters(BF16), [torch.nn.Parameter(param.detach().float()) for param in parameters(BF16)]
    optimizer = kernels.AdamW(mine, lr=1e-5, master_weights=True)
    with kernels.using("require"):
        train(optimizer, mine, 5)
    reference = torch.optim.AdamW(exact, lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for param in exact:
            param.grad = torch.randn(param.shape, generator=generator).to(param).bfloat16().float()
        reference.step()
    for param, wide_param in zip(mine, exact, strict=True):
        torch.testing.assert_close(optimizer.state[param]["master_param"], wide_param.detach())
        assert torch.equal(param, optimizer.state[param]["master_param"].bfloat16())
        assert optimizer.state[param]["exp_avg"].dtype == F32


@pytest.mark.slow
@pytest.mark.parametrize(("master", "state"), [(True, F32), (True, BF16), (False, None), (False, F32)], ids=str)
def test_states_survive_saving(master, state):
    options = {"lr": 0.1, "master_weights": master, "state_dtype": state}
    first, second = parameters(BF16), parameters(BF16)
    before, after = kernels.AdamW(first, **options), kernels.AdamW(second, **options)
    train(before, first)
    with torch.no_grad():
        for target, source in zip(second, first, strict=True):
            target.copy_(source)
    after.load_state_dict(before.state_dict())
    for param in second:
        assert after.state[param]["exp_avg"].dtype == (state or BF16)
    train(before, first, seed=1)
    train(after, second, seed=1)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("fused", [False, True])
def test_state_dicts_are_those_of_torch(fused):
    kinds = [kernels.AdamW, lambda params, lr: torch.optim.AdamW(params, lr, fused=fused)]
    for one, other in itertools.permutations(kinds):
        first, second = parameters(), parameters()
        before, after = one(first, lr=0.1), other(second, lr=0.3)
        train(before, first)
        with torch.no_grad():
            for target, source in zip(second, first, strict=True):
                target.copy_(source)
        after.load_state_dict(copy.deepcopy(before.state_dict()))  # torch's shares the tensors
        train(before, first, seed=1)
        train(after, second, seed=1)
        torch.testing.assert_close(first, second)


def test_a_gradient_with_other_strides_is_copied():
    mine, theirs = (torch.nn.Parameter(torch.ones(4, 5, device=DEVICE)) for _ in range(2))
    for param, kind in ((mine, kernels.AdamW), (theirs, torch.optim.AdamW)):
        torch.manual_seed(0)
        param.grad = torch.randn(5, 4, device=DEVICE).t()
        with kernels.using("require"):
            kind([param], lr=0.1).step()
    torch.testing.assert_close(mine, theirs)


def test_a_scaler_of_gradients_skips_a_step():
    (param,) = parameters()[:1]
    optimizer = kernels.AdamW([param], lr=0.1)
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor([number], device=DEVICE) for number in (8.0, 1.0))
    before = param.detach().clone()
    train(optimizer, [param], 2)
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 0
    optimizer.found_inf.zero_()
    train(optimizer, [param], 1)
    assert optimizer.state[param]["step"] == 1
    assert not torch.equal(param, before)


def test_an_optimizer_that_makes_no_sense():
    with pytest.raises(UsageError, match="lr is -1"):
        kernels.AdamW(parameters(), lr=-1)
    with pytest.raises(UsageError, match="betas"):
        kernels.AdamW(parameters(), betas=(0.9, 2.0))
    other = torch.optim.AdamW(parameters(), amsgrad=True)
    with pytest.raises(UsageError, match="AMSGrad"):
        kernels.AdamW(parameters()).load_state_dict(other.state_dict())


def test_candidates_can_all_be_launched():
    for elements in (1000, 10**9):
        assert len(optimizer_triton.candidates(elements)) >= 10
    tensors = problem([(300,)])
    lists = arguments(tensors, [])
    expected = copies(tensors)
    step(kernels.adamw_step.reference, expected, step=1)
    optimizer_triton.adamw_step(*lists, config=optimizer_triton.candidates(300)[0])
    torch.testing.assert_close(tensors[0], expected[0])


@pytest.mark.gpu
def test_a_large_model_twice_the_same():
    shapes = [(4096, 4096), (4096,), (11008, 4096), (4097, 33), (1,)] * 3
    results = []
    for _ in range(2):
        tensors = problem(shapes, BF16, F32, True)
        for number in range(1, 51):
            step(kernels.adamw_step, tensors, step=number)
        results.append(tensors)
    for index in (0, 2, 3, 4):
        assert all(map(torch.equal, results[0][index], results[1][index]))
    assert_steps_alike(problem(shapes[:5], BF16, F32, True))


@pytest.mark.gpu
@pytest.mark.parametrize("new_gradients", [False, True])
def test_a_recorded_step(new_gradients):
    mine, theirs = parameters(), parameters()
    rate = torch.tensor(0.0, device=DEVICE)
    optimizer, reference = kernels.AdamW(mine, lr=rate), torch.optim.AdamW(theirs, lr=0.1)
    for param in mine:
        param.grad = torch.zeros_like(param)
    optimizer.step()  # with a rate and gradients of 0: counts a step, and changes nothing else
    for state in optimizer.state.values():
        state["step"].zero_()
    before = [param.grad for param in mine]  # kept, so that new ones have other addresses
    if new_gradients:
        for param in mine:
            param.grad = torch.zeros_like(param)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    del before
    for number in range(3):
        rate.fill_(0.1 * (number + 1))
        reference.param_groups[0]["lr"] = 0.1 * (number + 1)
        for param, other in zip(mine, theirs, strict=True):
            other.grad = torch.randn_like(other)
            param.grad.copy_(other.grad)
        graph.replay()
        reference.step()
    torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
def test_compiled_by_inductor():
    def train(params, grads, first, second, number):
        number += 1
        kernels.adamw_step(params, [grad * 2 for grad in grads], first, second, step=number, lr=0.1)

    (actual, expected) = (problem([(3, 50), (5000,)])[:4] for _ in range(2))
    numbers = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    compiled = torch.compile(train, fullgraph=True)
    for _ in range(3):
        compiled(*actual, numbers[0])
        train(*expected, numbers[1])
    torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
def test_with_a_scaler_of_torch():
    model = torch.nn.Linear(8, 8, device=DEVICE)
    scaler = torch.amp.GradScaler(DEVICE)
    optimizer = kernels.AdamW(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(3, 8, device=DEVICE)).sum()).backward()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)

import copy
import functools
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearpeak.errors import UsageError
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace

H200 = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))


def names(recorded, phase=None):
    return [op.name for op in recorded.ops if phase is None or op.phase == phase]


def only(recorded, name):
    (op,) = (op for op in recorded.ops if op.name == name)
    return op


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    index = next(index for index, line in enumerate(lines) if text in line)
    return f"test_trace.py:{first + index}"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x)
        hidden = hidden.relu()
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_linear_forward_and_backward():
    recorded = trace(nn.Linear(4, 5), torch.empty(3, 4), grad=True)
    assert names(recorded, "forward") == ["aten.t.default", "aten.addmm.default"]
    assert names(recorded, "backward") == [
        "aten.t.default",
        "aten.mm.default",
        "aten.t.default",
        "aten.sum.dim_IntList",
        "aten.view.default",
        "aten.detach.default",
        "aten.t.default",
        "aten.detach.default",
    ]
    product = only(recorded, "aten.addmm.default")
    assert list(product.arguments) == ["self", "mat1", "mat2", "beta", "alpha"]
    assert (product.arguments["beta"], product.arguments["alpha"]) == (1, 1)
    assert product.tensor("mat2").shape == (4, 5)
    assert product.tensor("mat2").strides == (1, 4)
    (output,) = product.outputs
    assert (output.shape, output.dtype) == ((3, 5), "float32")
    kinds = {(storage.kind, storage.name) for storage in recorded.storages.values()}
    assert {("parameter", "weight"), ("parameter", "bias"), ("input", ""), ("intermediate", "")} == kinds


def test_results_are_returned_tensors_and_gradients():
    recorded = trace(nn.Linear(4, 5), torch.empty(3, 4), grad=True)
    sizes = sorted(recorded.storages[number].bytes for number in recorded.results)
    assert sizes == [5 * 4, 3 * 5 * 4, 4 * 5 * 4]
    assert {recorded.storages[number].kind for number in recorded.results} == {"intermediate"}


def test_results_are_found_in_containers():
    recorded = trace(lambda x: {"a": [x + 1, (x * 2,)]}, torch.empty(3))
    assert recorded.results == {op.outputs[0].storage for op in recorded.ops}


def test_views_share_their_storage():
    def function(x):
        return x[2:4].add(x.view(2, 5).t()[3])

    recorded = trace(function, torch.empty(10))
    views = [op for op in recorded.ops if op.name != "aten.add.Tensor"]
    storage = recorded.ops[0].inputs[0].storage
    assert all(op.outputs[0].storage == storage for op in views)
    assert recorded.ops[0].outputs[0].offset == 2


def test_arguments_that_share_a_storage_still_do():
    base = torch.empty(10)
    product = only(trace(torch.dot, base[:5], base[5:]), "aten.dot.default")
    first, second = product.inputs
    assert first.storage == second.storage
    assert (first.offset, second.offset) == (0, 5)


def test_strides_of_an_expanded_tensor_are_kept():
    recorded = trace(lambda row, x: row.expand(4, 8) + x, torch.empty(1, 8), torch.empty(4, 8))
    expanded = only(recorded, "aten.add.Tensor").inputs[0]
    assert expanded.strides == (0, 1)
    assert expanded.bytes == 32
    argument = trace(torch.neg, torch.empty(1, 8).expand(4, 8)).ops[0].inputs[0]
    assert argument.strides == (0, 1)


def test_numbers_of_storages_are_not_reused():
    def function(x):
        for _ in range(50):
            x = x + 1  # the memory of the old x is free for the next one
        return x

    recorded = trace(function, torch.empty(1000))
    assert len({op.outputs[0].storage for op in recorded.ops}) == 50
    live = trace(function, torch.zeros(1000), live=True)
    assert len({op.outputs[0].storage for op in live.ops}) == 50


def test_writes_are_known():
    def function(x, y):
        x.add_(1)
        torch.mul(x, 2, out=y)

    recorded = trace(function, torch.empty(4), torch.empty(4))
    added, multiplied = recorded.ops
    assert added.mutated == ("self",)
    assert added.outputs[0].storage == added.inputs[0].storage
    assert multiplied.mutated == ("out",)
    assert recorded.results == {added.inputs[0].storage, multiplied.tensor("out").storage}


def test_arguments_are_plain_data():
    op = trace(lambda x: x.to(torch.bfloat16), torch.empty(4)).ops[0]
    assert op.name == "aten._to_copy.default"
    assert op.arguments["dtype"] == "bfloat16"
    assert op.arguments["device"] is None
    assert op.arguments["non_blocking"] is False
    filled = trace(lambda: torch.zeros(2, 3, device="cpu")).ops[0]
    assert filled.arguments["size"] == (2, 3)
    assert filled.arguments["device"] == "cpu"
    joined = trace(lambda x: torch.cat([x, x]), torch.empty(4)).ops[0]
    assert len(joined.arguments["tensors"]) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"foreach": True}, "aten._foreach_addcdiv_.ScalarList"),
        ({"fused": True}, "aten._fused_adamw_.default"),
        ({"foreach": False}, "aten.addcdiv_.default"),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_step(settings, expected, steps_before):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    x = torch.randn(3, 8)

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(steps_before):
        step()
    parameters = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    state = copy.deepcopy(optimizer.state_dict())
    recorded = trace(step)

    phases = [op.phase for op in recorded.ops]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert expected in names(recorded, "optimizer")
    updated = {recorded.storages[number].name for number in recorded.results}
    assert set(parameters) <= updated
    lines = {op.source for op in recorded.ops if op.phase == "optimizer"}
    assert lines == {line_of(test_training_step, "optimizer.step()")}

    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert not any(isinstance(tensor, FakeTensor) for tensor in model.state_dict().values())
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    assert str(optimizer.state_dict()) == str(state)
    step()  # and everything still works


def test_module_paths_forward_and_backward():
    recorded = trace(Model(), torch.empty(3, 8), grad=True)
    products = {(op.phase, op.module) for op in recorded.ops if op.name in ("aten.addmm.default", "aten.mm.default")}
    paths = [f"layers.{index}.{part}" for index in (0, 1) for part in ("up", "down")]
    assert products == {(phase, path) for phase in ("forward", "backward") for path in paths}
    thresholds = [op.module for op in recorded.ops if op.name == "aten.threshold_backward.default"]
    assert thresholds == ["layers.1", "layers.0"]
    buffers = {storage.name for storage in recorded.storages.values() if storage.kind == "buffer"}
    assert buffers == {"scale"}


def test_two_roots_go_by_their_variables():
    encoder, decoder, loss = nn.Linear(8, 8), nn.Linear(8, 8), nn.MSELoss()

    def step(x):
        return loss(decoder(encoder(x)), x)

    recorded = trace(step, torch.empty(2, 8))
    assert [op.module for op in recorded.ops if "addmm" in op.name] == ["encoder", "decoder"]
    assert recorded.ops[-1].module == "loss"


def test_source_lines_forward_and_backward():
    recorded = trace(Model(), torch.empty(3, 8), grad=True)
    relu = line_of(Block, "hidden.relu()")
    assert {op.source for op in recorded.ops if op.name == "aten.relu.default"} == {relu}
    assert {op.source for op in recorded.ops if op.name == "aten.threshold_backward.default"} == {relu}
    up_and_down = {line_of(Block, "self.up(x)"), line_of(Block, "self.down(hidden)")}
    assert {op.source for op in recorded.ops if op.name == "aten.mm.default"} == up_and_down


def test_source_lines_of_a_backward_that_the_user_wrote():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.neg()

    recorded = trace(lambda x: Double.apply(x), torch.empty(3, requires_grad=True), grad=True)
    assert only(recorded, "aten.neg.default").source == line_of(
        test_source_lines_of_a_backward_that_the_user_wrote, "return gradient.neg()"
    )
    assert only(recorded, "aten.neg.default").phase == "backward"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_the_backward_phase(reentrant):
    model = Model()

    def step(x):
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        return x.sum()

    recorded = trace(step, torch.empty(3, 8, requires_grad=True), grad=True)
    products = [(op.phase, op.module) for op in recorded.ops if op.name == "aten.addmm.default"]
    forward = [f"layers.{index}.{part}" for index in (0, 1) for part in ("up", "down")]
    assert [module for phase, module in products if phase == "forward"] == forward
    again = [module for phase, module in products if phase == "backward"]
    assert again[:1] == ["layers.1.up"]
    assert {"layers.0.up", "layers.1.up"} <= set(again)
    gradients = {op.module for op in recorded.ops if op.name == "aten.mm.default"}
    assert gradients == set(forward)


def test_autocast_casts_are_recorded():
    model = nn.Linear(4, 4)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    recorded = trace(function, torch.empty(2, 4))
    casts = [op for op in recorded.ops if op.name == "aten._to_copy.default"]
    assert [op.arguments["dtype"] for op in casts] == ["bfloat16"] * 3
    assert only(recorded, "aten.addmm.default").outputs[0].dtype == "bfloat16"


def test_inference_mode_takes_composite_ops_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with torch.inference_mode():
        recorded = trace(model, torch.empty(2, 4))
    assert names(recorded)[:2] == ["aten.t.default", "aten.addmm.default"]
    assert "aten.linear.default" not in names(recorded)


def test_grad_false_keeps_nothing_for_a_backward_pass():
    assert names(trace(torch.relu, torch.empty(3, requires_grad=True), grad=False)) == ["aten.relu.default"]


def test_grad_true_without_anything_to_differentiate():
    with pytest.raises(UsageError, match="no result of the call requires gradients"):
        trace(torch.relu, torch.empty(3), grad=True)


def test_history_of_arguments_is_not_part_of_the_call():
    leaf = torch.randn(3, requires_grad=True)
    x = leaf * 2
    recorded = trace(torch.relu, x, grad=True)
    assert "aten.mul.Tensor" not in names(recorded)
    x.sum().backward()  # its graph is still there
    assert leaf.grad is not None
    assert not isinstance(leaf.grad, FakeTensor)


def test_real_tensors_in_a_closure_are_untouched():
    weight = torch.ones(4, requires_grad=True)
    counter = torch.zeros(4)

    def function(x):
        counter.add_(1)
        (x * weight * counter).sum().backward()

    recorded = trace(function, torch.ones(4))
    assert weight.grad is None
    assert counter.tolist() == [0, 0, 0, 0]
    counted = only(recorded, "aten.add_.Tensor").inputs[0].storage
    assert any(tensor.storage == counted for op in recorded.ops if op.name == "aten.mul.Tensor" for tensor in op.inputs)
    assert counted in recorded.results


def test_attributes_and_buffers_are_restored_after_an_error():
    class Careless(nn.BatchNorm1d):
        def forward(self, x):
            self.cache = super().forward(x)
            self.running_mean = self.running_mean + 1
            self.weight = nn.Parameter(self.weight * 2)
            raise ZeroDivisionError

    model = Careless(4)
    weight = model.weight
    with pytest.raises(ZeroDivisionError):
        trace(model, torch.randn(3, 4))
    assert model.weight is weight
    assert not hasattr(model, "cache")
    assert model.running_mean.tolist() == [0, 0, 0, 0]
    assert model.num_batches_tracked.item() == 0
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [(torch.optim.AdamW, "_fused_adamw_"), (torch.optim.SGD, "_fused_sgd_"), (torch.optim.Adagrad, "_fused_adagrad_")],
)
def test_a_model_too_large_for_this_machine(optimizer, update):
    with fake():
        model = nn.Sequential(*(nn.Linear(65536, 65536, device="cuda", dtype=torch.bfloat16) for _ in range(8)))
        x = torch.empty(4, 65536, device="cuda", dtype=torch.bfloat16)
        optimizer = optimizer(model.parameters(), lr=0.1, fused=True)
        state = dict(optimizer.state)

    def step():
        model(x).sum().backward()
        optimizer.step()

    for _ in range(2):
        recorded = trace(step)
        parameters = [storage for storage in recorded.storages.values() if storage.kind == "parameter"]
        assert sum(storage.bytes for storage in parameters) == 8 * (65536 + 1) * 65536 * 2
        assert {storage.name for storage in parameters} == {
            f"{i}.{part}" for i in range(8) for part in ("weight", "bias")
        }
        assert names(recorded).count(f"aten.{update}.default") == 1
        assert model[0].weight.grad is None
        assert optimizer.state == state


def test_code_for_cuda_is_traced_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("devices are redirected only where torch has no CUDA")
    recorded = trace(lambda: torch.zeros(3, device="cuda").cuda() + 1)
    assert names(recorded) == ["aten.zeros.default", "aten.add.Tensor"]
    assert any("CUDA" in note for note in recorded.notes)
    assert not trace(torch.neg, torch.zeros(3)).notes
    assert not trace(lambda: torch.zeros(3, device="cuda"), target=H200).notes
    assert any("CUDA" in note for note in trace(lambda: torch.zeros(3).cuda(), target=Target(kind="cpu")).notes)
    live = trace(torch.neg, torch.zeros(3), target=H200, live=True)
    assert any("CPU" in note for note in live.notes)


LOOKS_AT_VALUES = [
    lambda x: x.sum().item(),
    lambda x: x + 1 if x.sum() > 0 else x.cos(),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.masked_select(x > 0),
    lambda x: x * 2 if torch.equal(x, x) else x.cos(),
    lambda x: x * 2 if torch.allclose(x, x + 1e-9) else x.cos(),
    lambda x: torch.repeat_interleave(x.flatten(), x.long().flatten()),
    lambda x: x.unique(),
    lambda x: x.long().flatten().bincount(minlength=8),
]


@pytest.mark.parametrize("function", LOOKS_AT_VALUES)
def test_values_of_small_tensors_are_known(function):
    recorded = trace(function, torch.ones(4))
    assert not recorded.notes
    assert [[*op.outputs] and op.outputs[0].shape for op in recorded.ops if op.outputs] == [
        op.outputs[0].shape for op in trace(function, torch.ones(4), live=True).ops if op.outputs
    ]


@pytest.mark.parametrize("function", LOOKS_AT_VALUES)
def test_values_of_large_tensors_are_assumed_and_that_is_said(function):
    recorded = trace(function, torch.empty(400, 400))
    (note,) = recorded.notes
    assert "assumed: test_trace.py:" in note
    assert trace(function, torch.empty(400, 400)).notes == recorded.notes


@pytest.mark.parametrize("driver", ["gels", "gelsy"])
@pytest.mark.parametrize("shapes", [((6, 3), (6, 2)), ((2, 6, 3), (2, 6, 2)), ((3, 6), (3, 2))])
def test_least_squares_have_the_shapes_of_full_rank(shapes, driver):
    call = lambda a, b: torch.linalg.lstsq(a, b, driver=driver)  # noqa: E731
    alone = torch.linalg.lstsq(*map(torch.randn, shapes), driver=driver)
    (op,) = trace(call, *(torch.empty(shape, device="meta") for shape in shapes)).ops
    assert [tensor.shape for tensor in op.outputs] == [tuple(tensor.shape) for tensor in alone]


def test_live_does_everything():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    recorded = trace(step, torch.ones(2, 4), live=True)
    assert {op.phase for op in recorded.ops} == {"forward", "backward", "optimizer"}
    assert not torch.equal(model.weight, before)
    fake_names = names(trace(lambda x: model(x).sum(), torch.ones(2, 4)))
    assert names(recorded, "forward")[: len(fake_names)] == fake_names


def test_a_long_trace_stops_at_its_limit():
    def forever(x):
        while True:
            try:
                x = x + 1
            except Exception:
                continue

    recorded = trace(forever, torch.ones(2), limit=100)
    assert recorded.truncated
    assert len(recorded.ops) == 100
    assert any("100" in note for note in recorded.notes)


def test_functional_transforms():
    model = nn.Linear(4, 4)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    recorded = trace(torch.func.grad(loss), parameters, torch.ones(2, 4))
    assert "aten.mm.default" in names(recorded)
    per_sample = trace(torch.func.vmap(functools.partial(loss, parameters)), torch.ones(5, 2, 4))
    assert per_sample.ops
    assert len(list(model.parameters())) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.empty(1, 2, 128, 16)
    attention = only(trace(lambda x: flex_attention(x, x, x), x), "higher_order.flex_attention")
    assert attention.outputs[0].shape == (1, 2, 128, 16)
    assert len({tensor.storage for tensor in attention.inputs if tensor.shape == x.shape}) == 1


def test_tf32_means_nothing_on_a_cpu():
    def convolve(x):
        return nn.functional.conv2d(x, x)

    x = torch.zeros(1, 1, 3, 3)
    gpu, cpu = (trace(convolve, x, target=target).ops[0] for target in (H200, Target(kind="cpu")))
    assert (gpu.tf32_convolutions, cpu.tf32_convolutions) == (True, False)


def test_tf32_flags_are_those_of_the_moment():
    before = torch.backends.cuda.matmul.fp32_precision

    def function(x):
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        x = x @ x
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return x @ x

    try:
        first, second = trace(function, torch.empty(4, 4)).ops
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert (first.tf32_products, second.tf32_products) == (False, True)


def test_fake_tensors_of_two_modes():
    with FakeTensorMode():
        x = torch.empty(3)
    with FakeTensorMode():
        y = torch.empty(3)
    with pytest.raises(UsageError, match=r"nearpeak\.fake\(\)"):
        trace(torch.add, x, y)
    assert names(trace(torch.neg, x)) == ["aten.neg.default"]


def test_a_model_can_be_built_and_moved_inside():
    def step():
        model = torch.nn.Linear(8, 8).to(torch.bfloat16).cuda()
        return model(torch.randn(2, 8, device="cuda", dtype=torch.bfloat16))

    assert "aten.addmm.default" in [op.name for op in trace(step).ops]


def test_an_error_of_the_code_is_said_once(caplog):
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        trace(torch.mm, torch.randn(8, 8), torch.randn(7, 7))
    assert not caplog.records


class Called:
    """A closure that is an object, as some frameworks pass it."""

    def __init__(self, closure):
        self.closure = closure

    def __call__(self):
        return self.closure()


@pytest.mark.parametrize(
    "wrap", [lambda closure: closure, functools.partial, Called], ids=["function", "partial", "object"]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_ops_of_a_closure_are_not_the_optimizers(wrap, by_name):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    def step():
        return optimizer.step(closure=wrap(closure)) if by_name else optimizer.step(wrap(closure))

    phases = {op.packet: op.phase for op in trace(step).ops}
    assert phases["aten.addmm"] == "forward"
    assert phases["aten.mm"] == "backward"
    assert phases["aten.clone"] == "optimizer"  # the first momentum


class Named(torch.Tensor):
    """A class of tensors that fake ones are not of."""


def test_a_tensor_that_becomes_one_of_another_class_is_refused_with_its_line():
    with pytest.raises(UsageError, match=r"test_trace.py:\d+: fake tensors do not support this.*live=True.*Named"):
        trace(lambda x: (x + 1).as_subclass(Named), torch.ones(3))


def test_numbers_that_are_drawn_on_the_cpu_decide():
    def step(x):
        for _ in range(8):
            if torch.rand([]) < 0.5:
                x = x.cos()
        return x

    torch.manual_seed(0)
    recorded = names(trace(step, torch.empty(400, 400)))
    assert recorded == names(trace(step, torch.empty(400, 400)))
    assert recorded == names(trace(step, torch.empty(400, 400), live=True))


def test_guards_are_assumed_to_find_ordinary_values():
    def step(x):
        assert torch.isfinite(x).all()
        if torch.isnan(x).any() or torch.isinf(x).any():
            x = x.nan_to_num()
        if (x > 65504).any().item():
            x = x.clamp(max=65504)
        return x.cos()

    recorded = trace(step, torch.empty(400, 400))
    assert not {"aten.nan_to_num", "aten.clamp"}.intersection(op.packet for op in recorded.ops)
    (note,) = recorded.notes
    assert note.count("a condition is") == 3


def test_a_guard_that_refuses_what_was_assumed_is_tried_the_other_way():
    def step(x):
        if not (x > 0).any():
            raise ValueError("all are negative")
        return x.cos()

    recorded = trace(step, torch.empty(400, 400))
    assert recorded.ops[-1].packet == "aten.cos"
    assert "a condition is True" in recorded.notes[0]

    def always(x):
        if (x > 0).any() or True:
            raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        trace(always, torch.empty(400, 400))


def test_experts_are_assumed_to_get_the_same_share():
    def experts(x, router):  # x: [512, 256], router: [256, 8]
        mask = torch.nn.functional.one_hot((x @ router).topk(2, -1).indices, 8)
        return [x[torch.where(mask[..., expert].bool())[0]].relu() for expert in range(8)]

    recorded = trace(experts, torch.empty(512, 256), torch.empty(256, 8))
    assert [op.outputs[0].shape for op in recorded.ops if op.packet == "aten.relu"] == [(128, 256)] * 8


def test_sizes_that_small_tensors_hold_are_known():
    sizes = torch.tensor([[1, 4, 6], [2, 3, 5]])

    def step(x):  # as of images in patches
        lengths = [frames * height * width for frames, height, width in sizes.tolist()]
        cumulative = torch.cumsum(torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0]), 0)
        assert f"{cumulative[0]}" == "24"
        return [x[:size].cos() for size in (int(cumulative[-1]), sum(lengths), int(sizes.numpy()[0, 1]))]

    recorded = trace(step, torch.empty(100, 400))
    assert [op.outputs[0].shape for op in recorded.ops if op.packet == "aten.cos"] == [(54, 400), (54, 400), (4, 400)]
    assert not recorded.notes


def test_a_mask_selects_everything_but_what_is_not_ordinary():
    recorded = trace(lambda x: (x[x > 0].cos(), x[x.isnan()].sin()), torch.empty(400, 400))
    shapes = {op.packet: op.outputs[0].shape for op in recorded.ops}
    assert (shapes["aten.cos"], shapes["aten.sin"]) == ((160_000,), (0,))


def test_packed_sequences_of_known_lengths():
    lengths = torch.tensor([5, 3, 2])
    recorded = trace(
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data.cos(),
        torch.empty(3, 5, 600),
    )
    assert recorded.ops[-1].outputs[0].shape == (10, 600)
    assert not recorded.notes


def test_masks_built_on_fake_tensors_keep_their_values():
    with fake():
        mask = torch.ones(2, 64)
        mask[:, 48:] = 0
        mask = mask.to(torch.long)
    recorded = trace(lambda x: x[:, : int(mask.sum(-1).max())].cos(), torch.empty(2, 64, 512))
    assert recorded.ops[-1].outputs[0].shape == (2, 48, 512)
    assert not recorded.notes


def asks_for_fakes(x):
    from torch._subclasses.fake_tensor import FakeTensor as Imported

    kinds = (Imported, FakeTensor, torch._subclasses.FakeTensor)
    return x.cos() if any(isinstance(x, kind) for kind in kinds) else x.sin()


def test_code_that_asks_for_fake_tensors_runs_as_it_would():
    assert names(trace(asks_for_fakes, torch.ones(3))) == ["aten.sin.default"]
    with fake():
        x = torch.ones(3)
    assert names(trace(asks_for_fakes, x)) == ["aten.sin.default"]
    assert isinstance(x, FakeTensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_in_every_dtype(dtype):
    def step(x, weights, ends):
        torch._grouped_mm(x, weights, offs=ends).square().sum().backward()

    x = torch.ones(64, 32, dtype=dtype, requires_grad=True)
    weights = torch.ones(4, 32, 48, dtype=dtype, requires_grad=True)
    recorded = trace(step, x, weights, torch.tensor([16, 32, 48, 64], dtype=torch.int32))
    products = [op for op in recorded.ops if op.packet == "aten._grouped_mm"]
    assert [op.outputs[0].shape for op in products] == [(64, 48), (4, 32, 48), (64, 32)]
    assert {op.outputs[0].dtype for op in products} == {str(dtype).removeprefix("torch.")}


def test_a_packed_sequence_is_refused_with_the_way_out():
    network = torch.nn.LSTM(16, 8)

    def step():
        return network(torch.nn.utils.rnn.pack_sequence([torch.randn(5, 16), torch.randn(3, 16)]))[0].data

    with pytest.raises(UsageError, match=r"test_trace.py:\d+: .*packed sequences.*live=True"):
        trace(step)
    assert trace(step, live=True).ops


def test_a_scripted_function_is_the_same_ops_in_each_call():
    """torch's executor of scripted code leaves out views from some call on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scripting is deprecated

        @torch.jit.script
        def gate(a, b, n: int):
            total = a + b
            return torch.tanh(total[:, :n]) * torch.sigmoid(total[:, n:])

    def step(x):
        for _ in range(4):
            x = torch.cat((gate(x, x, 4),) * 2, 1)
        return x

    with fake():
        x = torch.empty(4, 8, requires_grad=True)
    first, *later = ([op.name for op in trace(step, x).ops] for _ in range(4))
    assert later == 3 * [first]

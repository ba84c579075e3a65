"""What is in memory during a live trace, in closed form: float32, 4 bytes an element."""

import pytest
import torch

from nearpeak.profiles.memory import peak_memory
from nearpeak.trace.trace import trace

WIDTH, BATCH, LAYERS = 8, 64, 3
WEIGHTS = WIDTH * WIDTH * 4
ACTIVATIONS = BATCH * WIDTH * 4


def stack(width=WIDTH, device="cpu"):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)))


def training(model, passes=1, fused=True):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=fused)

    def step(x):
        for _ in range(passes):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak(step, *args):
    found = trace(step, *args, live=True)
    assert found.lives is not None
    return peak_memory(found.lives, found.ops)


def test_a_training_step_of_linear_layers_to_the_byte():
    model, x = stack(), torch.ones(BATCH, WIDTH)
    step = training(model)
    step(x)
    found = peak(step, x)
    # The second layer's gradient of its weights: the input, the input and output gradients of the layer and what went
    # into it are there, two gradients of weights, the loss and its own gradient.
    assert found.parameters_bytes == LAYERS * WEIGHTS
    assert found.gradients_bytes == 2 * WEIGHTS
    assert found.optimizer_bytes == 2 * LAYERS * WEIGHTS + LAYERS * 4
    assert found.activations_bytes == 4 * ACTIVATIONS + 2 * 4
    assert found.peak_bytes == (
        found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes + found.activations_bytes
    )
    assert (found.op, found.phase, found.module) == ("aten.mm.default", "backward", "1")
    assert found.source.startswith("test_memory.py:")
    assert (found.device, found.other_bytes, found.workspace_bytes) == ("cpu", None, None)
    assert found.capacity_bytes > 1e9


def test_where_weights_are_large_the_peak_is_in_the_optimizer():
    model, x = stack(64), torch.ones(1, 64)
    step = training(model, fused=False)
    step(x)
    found = peak(step, x)
    assert (found.op, found.phase) == ("aten.div.Tensor", "optimizer")
    assert found.gradients_bytes == found.parameters_bytes == LAYERS * 64 * 64 * 4
    # The input, a root before and after a division, and the same of the parameter before, which a variable still holds.
    assert found.activations_bytes == 64 * 4 + 3 * 64 * 64 * 4


def test_the_first_step_makes_the_state_of_the_optimizer():
    model, x = stack(64), torch.ones(1, 64)
    found = peak(training(model, fused=False), x)
    assert found.phase == "optimizer"
    assert found.optimizer_bytes == 2 * LAYERS * 64 * 64 * 4 + LAYERS * 4


def test_gradients_that_accumulate_are_there_for_the_whole_second_pass():
    model, x = stack(), torch.ones(BATCH, WIDTH)
    step = training(model, passes=2)
    step(x)
    found = peak(step, x)
    assert found.gradients_bytes == LAYERS * WEIGHTS
    assert found.activations_bytes == 4 * ACTIVATIONS + 2 * 4 + WEIGHTS  # what is about to be added


def test_gradients_from_before_the_step_count_though_no_op_uses_them():
    model, x = stack(), torch.ones(BATCH, WIDTH)
    model(x).sum().backward()

    def step(x):
        with torch.no_grad():
            model(x)
        model.zero_grad()

    assert peak(step, x).gradients_bytes == LAYERS * WEIGHTS


def test_the_trace_itself_holds_nothing():
    model, x = stack(), torch.ones(BATCH, WIDTH)
    model(x).sum().backward()

    def step(x):
        y = model(x)  # the model is met here, with gradients from before
        model.zero_grad()
        y.sum().backward()

    assert peak(step, x).gradients_bytes == 2 * WEIGHTS  # as without them


def test_inference_has_no_gradients_and_lets_go_of_what_it_does_not_need():
    model, x = stack(), torch.ones(BATCH, WIDTH)
    model.register_buffer("table", torch.ones(10))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))

    def step(x):
        with torch.no_grad():
            model(x)

    found = peak(step, x)
    assert found.parameters_bytes == LAYERS * WEIGHTS + (10 + 5) * 4
    assert (found.gradients_bytes, found.optimizer_bytes) == (0, 0)
    assert found.activations_bytes == 3 * ACTIVATIONS  # the input, and input and output of the second layer
    assert (found.op, found.module) == ("aten.mm.default", "1")


def test_views_count_once_and_the_peak_is_right_to_an_op():
    def step(x):
        rows = x[:8].t()
        large = x + 1
        half = large[:32]
        del large
        (half * 2).sum()
        del half
        return rows.exp()

    found = trace(step, torch.ones(BATCH, WIDTH), live=True)
    memory = peak_memory(found.lives, found.ops)
    assert memory.op == "aten.sum.default"  # whose result is four bytes more than there was before it
    assert memory.activations_bytes == 2 * ACTIVATIONS + ACTIVATIONS // 2 + 4


def test_fake_tensors_have_no_memory():
    assert trace(torch.mm, torch.ones(4, 4), torch.ones(4, 4)).lives is None


@pytest.mark.gpu
def test_a_gpu_is_asked_for_what_no_op_shows():
    model, x = stack(1024, "cuda"), torch.ones(4096, 1024, device="cuda")
    step = training(model)
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    found = peak(step, x)
    weights = LAYERS * 1024 * 1024 * 4
    assert found.device == "cuda:0"
    assert found.parameters_bytes == weights
    assert found.gradients_bytes == 2 * weights / LAYERS
    assert found.optimizer_bytes == 2 * weights + LAYERS * 4
    assert found.activations_bytes == 4 * 4096 * 1024 * 4 + 2 * 4
    assert found.other_bytes >= 0
    assert found.workspace_bytes >= 0
    assert found.unused_bytes >= 0
    assert found.peak_bytes == pytest.approx(before, rel=0.01)
    assert torch.cuda.max_memory_allocated() >= before  # the script's own statistics are not reset
    assert found.capacity_bytes == torch.cuda.get_device_properties(0).total_memory
    assert (found.op, found.phase, found.module) == ("aten.mm.default", "backward", "1")


@pytest.mark.gpu
def test_other_tensors_on_a_gpu_are_told_apart():
    held = torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda")
    x = torch.ones(2**20, device="cuda")
    found = peak(lambda x: (x + 1).sum(), x)
    assert found.other_bytes >= held.nbytes
    assert found.activations_bytes < 16 * 2**20

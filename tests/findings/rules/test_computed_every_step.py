"""What two steps in a row compute from the same values, and what only looks like it."""

import numpy
import pytest
import torch
from gpu_steps import found_in, with_times

from nearpeak.trace.trace import trace

RULE = "computed-every-step"


def found(step, rule=RULE):
    """The findings of a step on real tensors, where each op takes a millisecond, with the names of their ops."""
    with torch.no_grad():
        seen = with_times(trace(step, live=True, next_step=True), lambda op, expected: 1e-3)
    return [(finding.source, [seen.ops[index].packet for index in finding.ops]) for finding in found_in(seen, rule)]


def packets(step, rule=RULE):
    return [packet for _, ops in found(step, rule) for packet in ops]


def line_of(function, offset):
    return f"test_computed_every_step.py:{function.__code__.co_firstlineno + offset}"


class Program:
    """Has a text that stays, and a sound that changes from step to step."""

    def __init__(self):
        self.text, self.sound = torch.randn(64, 64), torch.randn(64, 64)
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def encode(self):
        hidden = (self.text @ self.weight).relu_()
        return hidden @ self.weight

    def step(self):
        text = self.encode()
        self.sound = (self.sound @ self.weight + text).tanh()


def test_an_encoder_on_the_same_text_is_found_at_its_call_with_its_ops_in_place():
    assert found(Program().step) == [(line_of(Program.step, 1), ["aten.mm", "aten.relu_", "aten.mm"])]


class Fields:
    """Statistics of all data, of which each step draws a batch."""

    def __init__(self):
        self.data = torch.randn(64, 32)

    def statistics(self):
        mean = self.data.mean(dim=0)
        deviation = self.data.square().mean(dim=0).sqrt()
        return mean, deviation

    def encode(self, x):
        mean, deviation = self.statistics()
        return (x - mean) / deviation

    def decode(self, x):
        mean, deviation = self.statistics()
        return mean + x * deviation


@pytest.mark.parametrize("fields", [lambda: (Fields(),) * 2, lambda: (Fields(), Fields())], ids=["one", "two"])
def test_what_a_function_computes_for_several_callers_is_at_its_own_lines(fields):
    inputs, outputs = fields()

    def step():
        rows = torch.randint(64, (8,))
        return outputs.decode(inputs.encode(inputs.data[rows]).tanh())

    ((line, ops),) = found(step)
    assert line == line_of(Fields.statistics, 2)
    assert sorted(ops) == ["aten.mean"] * 4 + ["aten.pow"] * 2 + ["aten.sqrt"] * 2


class Reader(torch.nn.Module):
    """Reads the same prompt before and after."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.prompt = torch.randn(8, 64)

    def forward(self, x):
        before = self.encoder(self.prompt)
        x = x + before.sum(0)
        after = self.encoder(self.prompt.flip(0))
        return x * after.sum(0)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        x = x @ self.weight
        return x.relu()


def test_a_module_that_several_lines_call_is_at_its_calls():
    reader = Reader()
    lines = {line for line, _ in found(lambda: reader(torch.randn(4, 64)))}
    assert lines & {line_of(Reader.forward, offset) for offset in (1, 3)}
    assert not lines & {line_of(Encoder.forward, offset) for offset in (1, 2)}


def test_what_a_function_computes_for_one_caller_is_at_its_call():
    fields = Fields()
    ((line, ops),) = found(lambda: fields.encode(fields.data[torch.randint(64, (8,))]))
    assert line == line_of(Fields.encode, 1)
    assert sorted(ops) == ["aten.mean", "aten.mean", "aten.pow", "aten.sqrt"]


def test_a_program_that_runs_on_one_batch_has_nothing_to_keep():
    program = Program()
    assert packets(lambda: program.encode().sum()) == []


def test_a_batch_that_the_step_draws_is_new_data():
    program = Program()

    def step():
        return torch.randn(64, 64) @ program.encode()

    assert packets(step) == ["aten.mm", "aten.relu_", "aten.mm"]


def test_a_running_sum_is_no_new_data():
    program, total = Program(), torch.zeros(64)

    def step():
        total.add_(program.encode().sum(0))

    assert packets(step) == []


def test_a_weight_that_is_updated_computes_something_else():
    program = Program()

    def step():
        program.step()
        program.weight.data.mul_(0.5)

    assert packets(step) == []


def table(size):
    places = torch.arange(size) - size / 2
    return torch.exp(-places.square())


def numpy_table(size):
    places = torch.from_numpy(numpy.arange(size) - size / 2)
    return torch.exp(-places.square())


def listed_table(size):
    places = torch.tensor([place - size / 2 for place in range(size)])
    return torch.exp(-places.square())


@pytest.mark.parametrize("build", [table, numpy_table, listed_table])
def test_a_table_is_found_in_the_function_that_builds_it(build):
    program = Program()

    def step():
        program.sound = program.sound * build(64)

    ((line, ops),) = found(step)
    assert line in (line_of(build, 1), line_of(build, 2))
    assert {"aten.exp", "aten.pow"} <= set(ops)


def test_a_table_of_another_size_is_another_one():
    program, sizes = Program(), iter(range(10, 100))

    def step():
        program.sound = program.sound * table(next(sizes)).sum()

    assert packets(step) == []


def test_memory_that_numpy_writes_holds_something_else():
    program, array = Program(), numpy.zeros((64, 64), dtype=numpy.float32)
    program.text = torch.from_numpy(array)

    def step():
        program.step()
        array[:] += 1

    assert packets(step) == []


@pytest.mark.parametrize("noise", [torch.rand_like, torch.nn.functional.dropout, torch.bernoulli])
def test_random_numbers_are_others_in_every_step(noise):
    program = Program()
    program.text = torch.full((64, 64), 0.5)

    def step():
        program.sound = program.sound @ noise(program.text).exp()

    assert packets(step) == []


def test_a_result_that_is_written_to_must_be_computed_again():
    program = Program()

    def step():
        text = program.text.exp()
        text += program.sound
        program.sound = text.tanh()

    assert packets(step) == []


def test_an_encoder_inside_of_a_loop_of_the_step_is_found_at_its_call():
    program = Program()

    def step():
        program.text = torch.randn(64, 64)
        for _ in range(3):
            program.step()

    assert packets(step) == []
    assert found(step, "computed-twice") == [
        (line_of(Program.step, 1), ["aten.mm", "aten.relu_", "aten.mm"] * 2),
    ]


class Solver:
    """The last stage of a step is the first one of the next: both have the slope at the same state."""

    def __init__(self):
        self.state, self.weight = torch.randn(64, 64), torch.randn(64, 64)

    def slope(self, state):
        return (state @ self.weight).tanh()

    def step(self):
        slopes = [self.slope(self.state)]
        for size in (0.5, 1.0):
            proposal = self.state + size * slopes[-1]
            slopes.append(self.slope(proposal))
        self.state = proposal


def test_what_the_step_before_computed_elsewhere_is_found_where_it_is_computed_again():
    assert found(Solver().step) == [(line_of(Solver.step, 1), ["aten.mm", "aten.tanh"])]


def test_the_backward_pass_through_what_is_computed_again_goes_but_for_the_sum_of_gradients():
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)

    def step():
        total = 0.0
        for turn in range(3):
            total = total + turn * (x @ weight).tanh()
        weight.grad = None
        total.sum().backward()

    seen = with_times(trace(step, live=True), lambda op, expected: 1e-3)
    (finding,) = found_in(seen, "computed-twice")
    backward = [seen.ops[index].packet for index in finding.ops if seen.ops[index].phase == "backward"]
    assert backward.count("aten.mm") == backward.count("aten.tanh_backward") == 2 and "aten.add" in backward
    assert "sum of the gradients" in finding.reasoning

"""What padding costs, op by op."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import scaled_dot_product_attention

LENGTH, WIDTH = 128, 256


def reading(lengths, *, train=False, length=LENGTH):
    def build():
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(500, WIDTH)
        up, down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        tokens = torch.zeros(len(lengths), length, dtype=torch.int64)
        for row, size in enumerate(lengths):
            tokens[row, :size] = torch.randint(1, 500, (size,))

        def step():
            with torch.set_grad_enabled(train):
                x = embedding(tokens)
                heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
                x = x + scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
                x = x + down(up(x).relu())
            return x.square().mean().backward() if train else x

        return step

    return build


def padded(lengths, **options):
    return examined(reading(lengths, **options), live=True)


def test_rows_shorter_than_the_length_of_all_are_named_with_their_share():
    step = padded([30, 40, 50, 64] * 2)
    (found,) = found_in(step, "padded-batch")
    assert "64 by the longest row" in found.evidence
    assert 0.3 * step.profile.wall_s < found.saving_s < 0.75 * step.profile.wall_s
    assert "pad_sequence" in found.remedy


def test_backward_is_computed_for_the_padding_too():
    step = padded([30, 40, 50, 64] * 2, train=True)
    (found,) = found_in(step, "padded-batch")
    assert {step.ops[index].phase for index in found.ops} == {"forward", "backward"}


def test_batches_that_are_as_long_as_their_longest_row_are_not_named():
    assert not found_in(padded([16, 20, 24, 128, 16, 20, 24, 30]), "padded-batch")


def test_the_line_is_that_of_the_op_that_made_the_batch():
    def build():
        embedding = torch.nn.Embedding(500, WIDTH)
        rows = [torch.arange(1, size) for size in (20, 40, 60)]

        def step():
            tokens = torch.zeros(3, LENGTH, dtype=torch.int64)
            for row, ids in zip(tokens, rows, strict=True):
                row[: len(ids)] = ids
            with torch.no_grad():
                return embedding(tokens).sin().square()

        return step

    step = examined(build, live=True)
    (found,) = found_in(step, "padded-batch")
    assert found.source == next(op.source for op in step.ops if op.packet == "aten.zeros")


@pytest.mark.parametrize("lengths", [[LENGTH] * 8, [LENGTH - 2] * 8])
def test_full_batches_are_not_named(lengths):
    assert not found_in(padded(lengths), "padded-batch")

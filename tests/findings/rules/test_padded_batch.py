"""What padding costs, op by op."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import pad, scaled_dot_product_attention

from nearpeak.findings.rules.padded_batch import padded_batch
from nearpeak.ops.op import name_with_origin

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
    padding = 1 - (30 + 40 + 50 + 64) / (4 * 64)
    (found,) = found_in(step, "padded-batch")
    assert "64 by the longest row" in found.evidence
    assert 0.9 * padding < found.saving_s / step.profile.wall_s < 0.75
    assert "pad_sequence" in found.remedy


def test_backward_is_computed_for_the_padding_too():
    step = padded([30, 40, 50, 64] * 2, train=True)
    (found,) = found_in(step, "padded-batch")
    assert {step.ops[index].phase for index in found.ops} == {"forward", "backward"}


def test_rows_of_mixed_lengths_belong_into_batches_of_similar_ones():
    (found,) = found_in(padded([16, 20, 24, 128, 16, 20, 24, 30]), "padded-batch")
    assert "16 to 128" in found.reasoning and "sort(key=len)" in found.remedy


def test_batches_of_similar_lengths_are_not_named():
    assert not found_in(padded([90, 95, 100, 128, 100, 105, 110, 128]), "padded-batch")


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
    line = next(op.source for op in step.ops if op.packet == "aten.zeros")
    assert found.source == line
    # The same with a GPU, where ops on the host have no data flow.
    before = next(index for index, op in enumerate(step.ops) if op.packet == "aten.embedding")
    host = tuple(
        dataclasses.replace(op, name=name_with_origin("host", op.name), origin="host") if index < before else op
        for index, op in enumerate(step.ops)
    )
    step = dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=host))
    (found,) = found_in(step, "padded-batch")
    assert found.source == line


@pytest.mark.parametrize("lengths", [[LENGTH] * 8, [LENGTH - 2] * 8])
def test_full_batches_are_not_named(lengths):
    assert not found_in(padded(lengths), "padded-batch")


def frames(*shape, lengths):
    x = torch.zeros(len(lengths), *shape)
    for row, size in enumerate(lengths):
        x[row, ..., :size] = torch.randn(*shape[:-1], size)
    return x


LENGTHS = [20, 30, 38, 45, 25, 33, 40, 48]


def flattened_ids():
    embedding, layer = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 4 * WIDTH)
    ids = frames(96, lengths=LENGTHS).sign().long().abs() * 7
    return lambda: layer(embedding(ids.flatten())).sum().backward()


def waveforms():
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 64, 9, stride=4), torch.nn.ReLU(), torch.nn.Conv1d(64, 64, 9))
    waves = frames(1, 96 * 16, lengths=[16 * size for size in LENGTHS])
    return lambda: net(waves).sum().backward()


def frames_of_a_layer():
    layer, out = torch.nn.Linear(40, WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH)
    x = frames(40, 96, lengths=LENGTHS).transpose(1, 2).contiguous()
    return lambda: out(layer(x)).square().mean().backward()


def time_first():
    lstm = torch.nn.LSTM(40, 64)
    x = frames(40, 96, lengths=LENGTHS).permute(2, 0, 1).contiguous()

    def step():
        with torch.no_grad():
            return lstm(x)[0]

    return step


def filled_on_the_left():
    embedding, layer = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 4 * WIDTH)
    ids = (frames(96, lengths=LENGTHS).sign().long().abs() * 7).flip(1)
    return lambda: layer(embedding(ids)).sum().backward()


@pytest.mark.parametrize("build", [flattened_ids, waveforms, frames_of_a_layer, time_first, filled_on_the_left])
def test_padding_is_seen_in_the_values_without_a_mask(build):
    """A batch is 96 long where 48 would do: every op that takes longer than its launch runs along it."""
    torch.manual_seed(0)
    step = examined(build, live=True)
    (waste,) = padded_batch(step)
    assert "48 by the longest row" in waste.evidence or "768 by the longest row" in waste.evidence
    along = [index for index, op in enumerate(step.ops) if max(map(len_of, op.inputs), default=0) >= 96]
    assert set(waste.gains) <= set(along) and len(waste.gains) >= min(2, len(along))


def len_of(tensor):
    return max(tensor.shape, default=0)


def test_gradients_without_the_padding_are_no_batch_of_their_own():
    def build():
        torch.manual_seed(0)
        embedding, layer = torch.nn.Embedding(500, WIDTH), torch.nn.Linear(WIDTH, 500)
        ids = torch.zeros(8, 97, dtype=torch.int64)
        for row, size in enumerate(LENGTHS):
            ids[row, :size] = torch.randint(1, 500, (size,))

        def step():
            logits = layer(embedding(ids[:, :-1])).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0).backward()

        return step

    assert len(examined(build, live=True).trace.padding) == 1


def test_a_batch_of_a_data_loader_has_the_line_that_padded_it():
    step = padded([30, 40, 50, 64] * 2)
    written = {"collate_fn": (step.ops[0].source.rpartition(":")[0] + ":7",)}
    step = dataclasses.replace(step, trace=dataclasses.replace(step.trace, written_at=written))
    (found,) = found_in(step, "padded-batch")
    assert found.source == "test_padded_batch.py:7"


def test_memory_from_another_process_was_made_before():
    def build():
        embedding, layer = torch.nn.Embedding(500, WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH)
        model = torch.nn.Sequential(embedding, layer)
        ids = torch.zeros(4, LENGTH, dtype=torch.int64)
        ids[:, :40] = torch.randint(1, 500, (4, 40))

        def step():
            received = torch.empty(0, dtype=torch.int64).set_(ids.untyped_storage(), 0, ids.shape)
            with torch.no_grad():
                return model(received)

        return step

    step = examined(build, live=True)
    (found,) = found_in(step, "padded-batch")
    received, model = (next(op.source for op in step.ops if name in op.name) for name in ("set_", "embedding"))
    assert found.source == model != received


def test_tokens_without_a_label_are_no_padding():
    def build():
        torch.manual_seed(0)
        embedding, head = torch.nn.Embedding(500, WIDTH), torch.nn.Linear(WIDTH, 500)
        tokens = torch.randint(500, (8, LENGTH))
        labels = tokens.clone()
        labels[:, : 3 * LENGTH // 4] = -100

        def step():
            logits = head(embedding(tokens).relu())
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

        return step

    step = examined(build, live=True)
    assert step.trace.padding  # its labels look like one
    assert not found_in(step, "padded-batch")


@pytest.mark.parametrize(
    "take",
    [
        lambda data, number: data[number],
        lambda data, number: data[number, :, :LENGTH],
        lambda data, number: data.unbind()[1],
    ],
)
@pytest.mark.parametrize("shifted", [lambda x: x, lambda x: pad(x[:, :-1], (1, 0), value=1)], ids=["as is", "shifted"])
def test_a_batch_of_all_data_enters_where_it_is_taken(take, shifted):
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(500, WIDTH)

        def forward(self, tokens):
            return self.embedding(tokens.view(-1, LENGTH)).sin().square()

    def build():
        model, data = Reader(), torch.zeros(3, 8, LENGTH, dtype=torch.int64)
        data[:, :, :20] = torch.randint(1, 500, (3, 8, 20))

        def batch(number):
            return take(data, number)

        def step():
            with torch.no_grad():
                tokens = batch(1)
                return model(shifted(tokens))

        return step

    (found,) = found_in(examined(build, live=True), "padded-batch")
    assert found.source == f"test_padded_batch.py:{take.__code__.co_firstlineno}"

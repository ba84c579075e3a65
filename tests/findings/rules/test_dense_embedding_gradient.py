import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu

from nearpeak.findings.rules.dense_embedding_gradient import dense_embedding_gradient
from nearpeak.trace.cuda_ops.target import Target

ROWS, WIDTH = 200_000, 64


def training(make, *, used=512, tied=False, clip=False, rows=ROWS):
    """A table beside a product of a quarter of its size, trained by what `make` gives."""

    def build():
        table = torch.nn.Embedding(rows, WIDTH)
        layer = torch.nn.Linear(WIDTH, ROWS // 4, bias=False)
        parameters = [*table.parameters(), *layer.parameters()]
        optimizer = make(parameters)
        ids = torch.randint(rows, (used,))

        def step():
            hidden = table(ids)
            out = hidden @ table.weight.t() if tied else layer(hidden)
            out.sum().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def foreach(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("make", [foreach, fused])
def test_of_an_optimizer_that_takes_all_at_once_the_share_of_the_table_counts(make):
    step = examined(training(make))
    (waste,) = dense_embedding_gradient(step)
    optimizer = [index for index, op in enumerate(step.ops) if op.phase == "optimizer"]
    claimed = sum(gain for index, gain in waste.gains.items() if index in set(optimizer))
    # The table has four fifths of all parameters, of which a few passes over the used rows are left.
    assert 0.6 * step.seconds(optimizer) < claimed < 0.8 * step.seconds(optimizer)
    assert "SparseAdam" in waste.remedy and str(ROWS) in waste.remedy
    assert step.ops[waste.op].packet == "aten.embedding"


def test_plain_sgd_takes_sparse_gradients_itself():
    (waste,) = dense_embedding_gradient(examined(training(lambda all_of: torch.optim.SGD(all_of, lr=0.1))))
    assert "SparseAdam" not in waste.remedy and "SGD" in waste.remedy


@pytest.mark.parametrize(
    "build",
    [
        training(fused, used=ROWS // 2),
        training(fused, tied=True),
        training(fused, clip=True),
        training(lambda all_of: torch.optim.SGD(all_of, lr=0.1, momentum=0.9)),
        training(fused, rows=2048),  # so small that launches are all it costs
    ],
    ids=["many rows", "tied", "clipped", "momentum", "small"],
)
def test_silent(build):
    assert not list(dense_embedding_gradient(examined(build)))


@pytest.mark.parametrize(("make", "named"), [(fused, False), (lambda all_of: torch.optim.SGD(all_of, lr=0.1), True)])
def test_another_optimizer_must_be_worth_it(make, named):
    """A table of an ordinary language model on a CPU: SparseAdam would save less than half of Adam's time for it."""
    step = examined(training(make, rows=4096, used=256), machine=slow_cpu(), target=Target(kind="cpu"))
    assert bool(list(dense_embedding_gradient(step))) == named


def bags(make, *, tables=3, sparse=False):
    def build():
        layers = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse) for _ in range(tables)
        )
        optimizer = make(list(layers.parameters()))
        ids = torch.randint(ROWS, (64, tables, 8))

        def step():
            sum(table(ids[:, number]).sum() for number, table in enumerate(layers)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("make", [foreach, fused, lambda all_of: torch.optim.Adagrad(all_of, lr=0.1, foreach=True)])
def test_bags_of_rows_are_lookups_too_and_the_optimizer_is_their_waste(make):
    step = examined(bags(make))
    wastes = list(dense_embedding_gradient(step))
    assert len(wastes) == 3 and all("EmbeddingBag" in waste.remedy for waste in wastes)
    (found, *rest) = found_in(step)
    assert (found.rule, found.places) == ("dense-embedding-gradient", 3)
    assert found.share > 0.5 and all(item.share < 0.15 for item in rest)


def test_all_of_the_gradient_goes_with_the_sort_of_its_rows():
    """On an H200: 325 us for 131,072 ids of a million rows, of which the fill of 256 MB is 55 us."""
    step = examined(
        bags(lambda all_of: torch.optim.SGD(all_of, lr=0.1)),
        times=lambda op, expected: 325e-6 if "embedding_bag_backward" in op.name else expected,
    )
    for waste in dense_embedding_gradient(step):
        (backward,) = (index for index in waste.gains if step.ops[index].phase == "backward")
        assert waste.gains[backward] > 0.5 * 325e-6


def test_the_line_is_that_of_the_table_where_there_is_one():
    step = examined(bags(fused, tables=1))
    trace = dataclasses.replace(step.trace, written_at={"EmbeddingBag": ("model.py:19",)})
    (found,) = found_in(dataclasses.replace(step, trace=trace), "dense-embedding-gradient")
    (lookup,) = {op.source for op in step.ops if op.packet == "aten._embedding_bag"}
    assert found.source == "model.py:19" and lookup in found.evidence


def test_a_sparse_gradient_of_bags_is_not_named():
    assert not list(
        dense_embedding_gradient(examined(bags(lambda all_of: torch.optim.SGD(all_of, lr=0.1), sparse=True)))
    )


def test_an_optimizer_of_the_tables_alone_that_steps_after_the_end_of_the_step_is_one_of_one_state():
    def build():
        table, layer = torch.nn.Embedding(ROWS, WIDTH), torch.nn.Linear(WIDTH, 8)
        tables = torch.optim.Adagrad(table.parameters(), foreach=True)
        optimizer = torch.optim.AdamW(layer.parameters())
        ids = torch.randint(ROWS, (512,))
        layer(table(ids)).sum().backward()

        def step():  # up to the step of the other optimizer
            tables.step()
            tables.zero_grad()
            layer(table(ids)).sum().backward()
            optimizer.step()

        return step

    (waste,) = dense_embedding_gradient(examined(build))
    assert "7 passes" in waste.reasoning
    assert "SparseAdam" not in waste.remedy


def looked_up_twice(make, clip=False):
    def build():
        table = torch.nn.Embedding(ROWS, WIDTH)
        other = torch.nn.Embedding(ROWS, WIDTH)
        optimizer = make([*table.parameters(), *other.parameters()])
        clicked, bought, users = (torch.randint(ROWS, shape) for shape in ((64, 8), (64,), (64,)))

        def step():
            (table(clicked).mean(1) * table(bought) * other(users)).sum().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(table.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("make", [fused, lambda all_of: torch.optim.Adagrad(all_of, lr=0.1)])
def test_a_table_that_is_looked_up_twice_has_one_gradient(make):
    """Both gradients, their sum and the update go."""
    step = examined(looked_up_twice(make))
    backwards = {index for index, op in enumerate(step.ops) if op.packet == "aten.embedding_dense_backward"}
    other, table = sorted(dense_embedding_gradient(step), key=lambda waste: len(backwards & set(waste.gains)))
    assert len(backwards & set(table.gains)) == 2 and len(backwards & set(other.gains)) == 1
    (added,) = (i for i, op in enumerate(step.ops) if op.phase == "backward" and op.packet in ("aten.add", "aten.add_"))
    assert table.gains[added] > 0.8 * step.time(added)
    assert "2 times" in table.evidence and "576 of 200000 rows" in table.evidence
    (found, *rest) = found_in(step)
    assert (found.rule, found.places) == ("dense-embedding-gradient", 2)
    assert found.share > 0.7 and all(item.share < 0.15 for item in rest)


def test_a_sum_that_is_read_must_be_whole():
    assert len(list(dense_embedding_gradient(examined(looked_up_twice(fused, clip=True))))) == 1

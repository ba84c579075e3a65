"""Which products are said to be with zeros."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in

from nearpeak.findings.rules.sparse_as_dense import sparse_as_dense
from nearpeak.ops.op import Nonzeros
from nearpeak.trace.seen_values import nonzeros_of

NODES, WIDTH = 1100, 128  # more than a million elements


def network(*, by=lambda graph, x: graph @ x, train=False, each=4):
    def build():
        torch.manual_seed(0)
        graph = torch.zeros(NODES, NODES).scatter_(1, torch.randint(NODES, (NODES, each)), 1 / each)
        layer = torch.nn.Linear(WIDTH, WIDTH)
        x = torch.randn(NODES, WIDTH)

        def step():
            with torch.set_grad_enabled(train):
                out = by(graph, layer(x))
            return out.sum().backward() if train else out

        return step

    # Dense products of this size are too short for a GPU to gain: they take as long as those of 18 times as many nodes.
    return examined(build, live=True, times=lambda op, expected: 500e-6 if op.packet == "aten.mm" else expected)


@pytest.mark.parametrize(("train", "products"), [(False, 1), (True, 2)])
def test_products_with_a_constant_matrix_of_zeros_are_one_finding(train, products):
    step = network(train=train)
    (waste,) = sparse_as_dense(step)
    assert f"{products} products" in waste.evidence and "99." in waste.evidence
    assert "to_sparse_csr" in waste.remedy
    assert 0.5 * products * 500e-6 < waste.saving_s < products * 500e-6
    assert found_in(step, "sparse-as-dense")


def changed(graph, x):
    graph.mul_(0.5)
    return graph @ x


@pytest.mark.parametrize(
    "step",
    [
        lambda: network(each=NODES),
        lambda: network(by=changed),
        lambda: network(by=lambda graph, x: torch.relu(graph) @ x),
    ],
    ids=["no zeros", "changed in the step", "made in the step"],
)
def test_other_matrices_are_not(step):
    assert not found_in(step(), "sparse-as-dense")


def test_a_batch_of_few_words_each_is_multiplied_with_parameters():
    def build():
        words = torch.zeros(NODES, NODES)
        words[:, ::100] = 1.0
        layer = torch.nn.Linear(NODES, WIDTH)
        return lambda: layer(words).sum().backward()

    step = examined(build, live=True, times=lambda op, expected: 500e-6)
    assert step.trace.nonzeros and not found_in(step, "sparse-as-dense")


def test_less_is_saved_than_the_elements_take_themselves():
    step = network()
    (storage,) = step.trace.nonzeros
    half = dataclasses.replace(
        step,
        trace=dataclasses.replace(
            step.trace, nonzeros={storage: Nonzeros(share=0.9, per_row=990.0, most_in_row=990, ones=False)}
        ),
    )
    assert not list(sparse_as_dense(half))


def test_zeros_are_counted_in_rows_that_lie_evenly():
    matrix = torch.ones(1024, 8)
    matrix[::4] = 0.0
    assert nonzeros_of(matrix).share == 0.0  # each fourth row
    assert nonzeros_of(torch.eye(100)) == Nonzeros(share=0.01, per_row=1.0, most_in_row=1, ones=True)

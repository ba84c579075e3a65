"""Ops that differ in nothing but their storages are of one kind."""

import copy
import dataclasses
import pickle

import torch

import nearpeak
from nearpeak.bound.dataflow import touches_in, touches_of
from nearpeak.bound.estimate import estimate_trace
from nearpeak.ops import op_classes
from nearpeak.ops.cost import Cost, cost_of, costs_of
from nearpeak.ops.declare import declare_cost, forget_cost
from nearpeak.ops.op import Op
from nearpeak.ops.op_classes import classify_ops
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace


def step(x, y):
    for _ in range(2):
        x = (x @ y).relu_() + x
        torch._foreach_mul_([x, y], 2.0)
    return x * x, x * y


def recorded():
    with fake():
        return trace(step, torch.zeros(8, 8), torch.zeros(8, 8))


def test_the_second_round_is_like_the_first():
    recorded()
    found = recorded()
    kinds = classify_ops(found.ops)
    assert [op.name for op in found.ops[:4]] == [op.name for op in found.ops[4:8]]
    assert kinds.kinds == (0, 1, 2, 3, 0, 1, 2, 3, 4, 5)
    assert kinds.firsts == (0, 1, 2, 3, 8, 9)
    assert kinds.storages[0] != kinds.storages[4]


def test_what_is_found_for_a_kind_is_right_for_each_op():
    recorded()
    found = recorded()
    for _ in range(2):  # the second time, everything is known
        kinds = classify_ops(found.ops)
        costs = costs_of(found.ops, kinds)
        assert costs == tuple(cost_of(op) for op in found.ops)
        touches = tuple(touches_of(op, cost) for op, cost in zip(found.ops, costs, strict=True))
        assert touches_in(found, costs, kinds) == touches


def test_notes_of_the_recorder_change_nothing():
    recorded()
    found = recorded()
    bare = dataclasses.replace(found, ops=tuple(dataclasses.replace(op) for op in found.ops))
    assert hasattr(found.ops[0], "form") and not hasattr(bare.ops[0], "form")
    assert bare == found
    machine = nearpeak.machine("h200-sxm")
    assert estimate_trace(bare, machine) == estimate_trace(found, machine)


def test_another_op_has_no_note():
    recorded()
    op = recorded().ops[0]
    others = (dataclasses.replace(op, outputs=()), copy.copy(op), pickle.loads(pickle.dumps(op)))
    assert not any(hasattr(other, "form") for other in others)


def test_flags_count():
    recorded()
    op = recorded().ops[0]
    fast = dataclasses.replace(op, tf32_products=not op.tf32_products)
    object.__setattr__(fast, "form", op.form)
    assert classify_ops([op, fast, op]).kinds == (0, 1, 0)


def test_a_cost_that_is_declared_later_counts():
    recorded()
    product = recorded().ops[0]
    before = costs_of([product])[0]

    def none(op):
        return Cost(family="view")

    declare_cost(product.name, replace=True)(none)
    try:
        assert costs_of([product])[0] == Cost(family="view")
    finally:
        forget_cost(product.name)
    assert costs_of([product])[0] == before


def test_the_signature_of_an_op_is_made_once(monkeypatch):
    x = Tensor(shape=(4,), strides=(1,), dtype="float32", storage=7)
    ops = [
        Op(name="aten.relu.default", arguments={"self": x}, outputs=(dataclasses.replace(x, storage=8 + i),))
        for i in range(3)
    ]
    odd = Op(name="aten.relu.default", arguments={"self": x, "list": [{}]}, outputs=(x,))  # cannot be looked up
    first = classify_ops([*ops, odd])
    assert first.kinds == (0, 0, 0, 1)
    monkeypatch.setattr(op_classes, "_content", None)
    again = classify_ops([*ops, odd])
    assert again == first
    assert [memo is before for memo, before in zip(again.memos, first.memos, strict=True)] == [True, True]
    flagged = dataclasses.replace(ops[0], tf32_convolutions=False)
    assert not hasattr(flagged, "form")

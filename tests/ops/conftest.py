"""What the tests of costs share: the ops that real calls on the CPU dispatch, as plain data."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


class Recorder(TorchDispatchMode):
    """Keeps every dispatched operator as an `Op`, and the tensors alive so that storages keep their numbers."""

    def __init__(self):
        super().__init__()
        self.ops = []
        self._storages = {}
        self._alive = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        values = {
            argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
        }
        values |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        arguments = {name: self._plain(value) for name, value in values.items()}
        result = func(*args, **kwargs)
        outputs = tuple(self._plain(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        mutated = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.ops.append(Op(name=str(func), arguments=arguments, outputs=outputs, mutated=mutated))
        return result

    def _plain(self, value):
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            if value.layout != torch.strided:
                return None
            number = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
            return Tensor(
                shape=tuple(value.shape),
                strides=tuple(value.stride()),
                dtype=str(value.dtype).removeprefix("torch."),
                storage=number,
                offset=value.storage_offset(),
            )
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
            return str(value).removeprefix("torch.")
        return value


@pytest.fixture
def calls():
    """`calls(function, *args)` gives the ops that the call dispatched, in order."""

    def record(function, *args, **kwargs):
        with Recorder() as recorder:
            function(*args, **kwargs)
        return recorder.ops

    return record


@pytest.fixture
def dispatched(calls):
    """The same, under the name that it has where whole models run."""
    return calls


@pytest.fixture
def call(calls):
    """`call(function, *args)` gives the only op that the call dispatched."""

    def record(function, *args, **kwargs):
        (op,) = calls(function, *args, **kwargs)
        return op

    return record


@pytest.fixture
def cost(calls):
    """`cost(function, *args)` gives the cost of the one operator of the call that is no view."""

    def run(function, *args, **kwargs):
        costs = [cost_of(op) for op in calls(function, *args, **kwargs)]
        (one,) = [item for item in costs if item.family != "view"]
        assert one.model == "formula"
        return one

    return run


@pytest.fixture
def checked_torch():
    """Skips where a list of names is held against another torch than the one that it was written for."""
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the names are those of torch 2.13")

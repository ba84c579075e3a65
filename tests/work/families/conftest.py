"""`calls`: runs a function on real CPU tensors and gives its operations as `Op`s, for the tests of the formulas."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []
        self._storages = {}
        self._kept = []  # so that no storage is freed and its address used again

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self._arguments(function, args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        values = self._plain(result)
        outputs = [item for item in _flat(values) if isinstance(item, Tensor)]
        mutated = [item.name for item in function._schema.arguments if item.alias_info and item.alias_info.is_write]
        self.ops.append(Op(name=str(function), arguments=before, outputs=tuple(outputs), mutated=tuple(mutated)))
        return result

    def _arguments(self, function, args, kwargs):
        bound = {}
        for position, argument in enumerate(function._schema.arguments):
            if position < len(args):
                value = args[position]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                value = argument.default_value
            bound[argument.name] = self._plain(value)
        return bound

    def _plain(self, value):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self._kept.append(storage)
            number = self._storages.setdefault(storage._cdata, len(self._storages))
            dtype = str(value.dtype).removeprefix("torch.")
            return Tensor(
                shape=tuple(value.shape),
                strides=value.stride(),
                dtype=dtype,
                storage=number,
                offset=value.storage_offset(),
            )
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(item) for item in value)
        return value if value is None or isinstance(value, (bool, int, float, complex, str)) else str(value)


def _flat(value):
    return [item for part in value for item in _flat(part)] if isinstance(value, tuple) else [value]


@pytest.fixture
def calls():
    """`calls(function, *args)` gives the ops that the call dispatched, in order."""

    def record(function, *args, **kwargs):
        recorder = _Recorder()
        with recorder:
            function(*args, **kwargs)
        return recorder.ops

    return record


@pytest.fixture
def call(calls):
    """`call(function, *args)` gives the only op that the call dispatched."""

    def record(function, *args, **kwargs):
        (op,) = calls(function, *args, **kwargs)
        return op

    return record

import copy
import dataclasses
import pickle

import pytest

from nearpeak.ops.cost import Access, Cost
from nearpeak.ops.tensor import Tensor

ROW = Tensor(shape=(4, 8), strides=(8, 1), dtype="float32", storage=3)


def test_objects_are_what_a_frozen_dataclass_makes():
    assert type(ROW) is Tensor
    assert Tensor(shape=(4, 8), strides=(8, 1), dtype="float32", storage=3, offset=0) == ROW
    assert hash(ROW) == hash(dataclasses.replace(ROW, offset=0))
    assert dataclasses.replace(ROW, storage=4).storage == 4
    assert repr(Access(storage=1, bytes=2.0)) == "Access(storage=1, bytes=2.0)"
    assert pickle.loads(pickle.dumps(ROW)) == copy.deepcopy(ROW) == ROW


def test_they_stay_as_they_are():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.offset = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        del ROW.offset


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="strides"):
        Tensor(shape=(4,), dtype="float32", storage=0)
    with pytest.raises(TypeError, match="stride"):
        Tensor(shape=(4,), strides=(1,), stride=(1,), dtype="float32", storage=0)
    with pytest.raises(TypeError, match="positional"):
        Tensor((4,), (1,), "float32", 0)


def test_each_object_has_a_default_of_its_own():
    one, other = Cost(family="view"), Cost(family="view")
    assert one.flops == {} and one.flops is not other.flops

import torch

from nearpeak.ops.tensor import Tensor
from nearpeak.trace.kineto.arguments import RecordedTensor
from nearpeak.trace.kineto.operators import SchemaParameter, schema_parameters
from nearpeak.trace.kineto.ops import GuessedStorages

MUL = schema_parameters(torch.ops.aten.mul.Tensor)
ADD_ = schema_parameters(torch.ops.aten.add_.Tensor)
MM_OUT = schema_parameters(torch.ops.aten.mm.out)
FOREACH_ADDCMUL_ = schema_parameters(torch.ops.aten._foreach_addcmul_.Scalar)


def seen(*shape: int, dtype: str = "float32") -> RecordedTensor:
    return RecordedTensor(shape, torch.empty(shape, device="meta").stride(), dtype)


def used(
    storages: GuessedStorages, wanted: tuple[SchemaParameter, ...], *tensors: RecordedTensor, lists: bool = False
) -> tuple[Tensor, ...]:
    pairs = list(zip(wanted, tensors, strict=False))
    return storages.arguments(pairs, lists_differ=lists, results_known=True)


def test_a_tensor_is_the_last_one_that_looks_like_it():
    storages = GuessedStorages()
    first = storages.result((4, 4), (4, 1), "float32", 64)
    second = storages.result((4, 4), (4, 1), "float32", 64)
    other = storages.result((4, 4), (4, 1), "bfloat16", 32)
    [again] = used(storages, MUL, seen(4, 4))
    assert again.storage == second.storage not in (first.storage, other.storage)
    storages.view((2, 8), (8, 1), "float32", 0, first.storage)  # used again, through a view
    assert used(storages, MUL, seen(4, 4))[0].storage == first.storage


def test_what_looks_like_nothing_before_was_there_before():
    storages = GuessedStorages()
    [fresh] = used(storages, MUL, seen(8))
    assert storages.facts()[fresh.storage].kind == "input"
    assert storages.facts()[fresh.storage].bytes == 32
    assert storages.unexplained == []


def test_arguments_that_look_alike_may_be_one():
    storages = GuessedStorages()
    square = used(storages, MUL, seen(4, 4), seen(4, 4))
    assert square[0].storage == square[1].storage
    gram = used(storages, MUL, seen(3, 5), RecordedTensor((5, 3), (1, 5), "float32"))
    assert gram[0].storage == gram[1].storage
    apart = used(storages, MUL, seen(4, 4), seen(4, 4, dtype="bfloat16"))
    assert apart[0].storage != apart[1].storage


def test_likely_takes_them_apart_where_there_is_another():
    storages = GuessedStorages(likely=True)
    square = used(storages, MUL, seen(4, 4), seen(4, 4))
    assert square[0].storage == square[1].storage  # there is only one
    storages.result((4, 4), (4, 1), "float32", 64)
    product = used(storages, MUL, seen(4, 4), seen(4, 4))
    assert product[0].storage != product[1].storage


def test_what_an_op_writes_is_not_what_it_reads():
    storages = GuessedStorages()
    ours, other = used(storages, ADD_, seen(4, 4), seen(4, 4))
    assert ours.storage != other.storage
    assert storages.results == {ours.storage}
    storages = GuessedStorages()
    a, b, out = used(storages, MM_OUT, seen(4, 4), seen(4, 4), seen(4, 4))
    assert out.storage not in (a.storage, b.storage)
    assert storages.facts()[out.storage].kind == "intermediate"


def test_members_of_one_list_differ_and_lists_that_are_read_may_be_the_same():
    storages = GuessedStorages()
    squares, gradients, again = FOREACH_ADDCMUL_[:3]
    pairs = [(part, seen(4)) for part in (squares, squares, gradients, gradients, again, again)]
    found = [tensor.storage for tensor in storages.arguments(pairs, lists_differ=True, results_known=True)]
    assert len(set(found)) == 4
    assert found[2:4] == found[4:6]


def test_the_dtype_of_a_member_is_the_smallest_that_looks_like_it():
    storages = GuessedStorages()
    storages.result((4, 4), (4, 1), "float32", 64)
    assert storages.dtype_of((4, 4), (4, 1)) == "float32"
    storages.result((4, 4), (4, 1), "bfloat16", 32)
    assert storages.dtype_of((4, 4), (4, 1)) == "bfloat16"
    assert storages.dtype_of((5,), (1,)) is None


def test_after_compiled_code_a_tensor_is_compared_by_what_it_holds():
    storages = GuessedStorages()
    wide = storages.result((8, 6), (6, 1), "float32", 192)
    assert used(storages, MUL, seen(6, 8))[0].storage != wide.storage
    storages.enter_compiled_code()
    flat = storages.result((8, 6), (6, 1), "float32", 192)
    assert used(storages, MUL, seen(48))[0].storage == flat.storage
    assert used(storages, MUL, RecordedTensor((8, 2), (6, 1), "float32"))[0].storage == flat.storage


def test_after_an_op_of_unknown_results_a_new_tensor_may_be_one_of_them():
    storages = GuessedStorages()
    storages.arguments((), lists_differ=False, results_known=False)
    [fresh] = used(storages, MUL, seen(8))
    assert storages.facts()[fresh.storage].kind == "intermediate"
    assert storages.unexplained == [fresh]

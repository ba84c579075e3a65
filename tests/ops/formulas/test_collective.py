from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

small = Tensor(shape=(16,), strides=(1,), dtype="float32", storage=0)
other = Tensor(shape=(16,), strides=(1,), dtype="float32", storage=1)
large = Tensor(shape=(64,), strides=(1,), dtype="float32", storage=2)


def moved(name, arguments, *outputs, mutated=()):
    cost = cost_of(Op(name=name, arguments=arguments, outputs=outputs, mutated=mutated))
    assert (cost.family, cost.model, cost.flops, cost.vector_flops) == ("collective", "formula", {}, {})
    return cost.work.bytes_read, cost.work.bytes_written


def test_all_reduce():
    assert moved("_c10d_functional.all_reduce.default", {"input": small}, other) == (64, 64)
    assert moved("_c10d_functional.all_reduce_.default", {"input": small}, small, mutated=("input",)) == (64, 64)
    assert moved("c10d.allreduce_.default", {"tensors": (small,)}, small) == (64, 64)


def test_lists_count_every_tensor():
    arguments = {"inputs": (small, large)}
    assert moved("_c10d_functional.all_reduce_coalesced_.default", arguments, mutated=("inputs",)) == (320, 320)


def test_gather_and_scatter():
    assert moved("_c10d_functional.all_gather_into_tensor.default", {"input": small}, large) == (64, 256)
    assert moved("_c10d_functional.reduce_scatter_tensor.default", {"input": large}, small) == (256, 64)
    arguments = {"input": small, "out": large}
    assert moved("_c10d_functional.all_gather_into_tensor_out.default", arguments, large, mutated=("out",)) == (64, 256)
    assert moved("c10d._allgather_base_.default", {"output_tensor": large, "input_tensor": small}, large) == (64, 256)
    nested = {"output_tensors": ((other, small),), "input_tensors": (large,)}
    assert moved("c10d.allgather_.default", nested) == (256, 128)


def test_all_to_all():
    assert moved("_c10d_functional.all_to_all_single.default", {"input": small}, other) == (64, 64)
    assert moved("c10d.alltoall_base_.default", {"output": other, "input": small}) == (64, 64)


def test_broadcast_is_one_write_or_one_read():
    assert moved("_c10d_functional.broadcast.default", {"input": small}, other) == (0, 64)
    assert moved("c10d.broadcast_.default", {"tensors": (small,)}, small) == (0, 64)


def test_point_to_point():
    assert moved("c10d.send.default", {"tensors": (small,)}) == (64, 0)
    assert moved("c10d.recv_.default", {"tensors": (small,)}) == (0, 64)


def test_waiting_is_free():
    assert moved("_c10d_functional.wait_tensor.default", {"tensor": small}, small) == (0, 0)


def test_one_rank_gives_or_gets():
    assert moved("c10d.gather_.default", {"output_tensors": (), "input_tensors": (small,)}) == (64, 0)
    assert moved("c10d.gather_.default", {"output_tensors": ((other,),), "input_tensors": (small,)}) == (64, 64)
    assert moved("c10d.scatter_.default", {"output_tensors": (small,), "input_tensors": ()}) == (0, 64)
    assert moved("c10d.reduce_.default", {"tensors": (small,)}) == (64, 0)


def test_a_batch_of_sends_and_receives():
    arguments = {"op_list": ("isend", "irecv"), "tensors": (small, other)}
    assert moved("_c10d_functional.batch_p2p_ops.default", arguments) == (64, 64)

"""Kernels of the code's own at the ops of a trace that are their launches."""

from nearpeak.ops.op import Op, origin_of_name
from nearpeak.profiles.profile import DeviceKernel
from nearpeak.profiling.assemble import attach_triton_launches


def op(name):
    return Op(name=name, arguments={}, outputs=(), origin=origin_of_name(name))


def kernel(name, start, at=None):
    return DeviceKernel(name=name, start_s=start, seconds=1e-6, op=at)


OPS = [op("aten.add.Tensor"), op("triton.scaled"), op("triton.other"), op("triton.scaled")]


def test_kernels_go_to_launches_of_their_name_in_order():
    kernels = [kernel("scaled", 3.0), kernel("add", 0.0, 0), kernel("scaled", 1.0), kernel("other", 2.0)]
    assert [found.op for found in attach_triton_launches(kernels, OPS)] == [3, 0, 1, 2]


def test_what_launched_a_kernel_keeps_it():
    kernels = [kernel("scaled", 1.0, 0), kernel("scaled", 2.0), kernel("scaled", 3.0)]
    assert [found.op for found in attach_triton_launches(kernels, OPS)] == [0, 1, 3]


def test_where_there_are_more_or_fewer_nothing_is_guessed():
    kernels = [kernel("scaled", 1.0), kernel("other", 2.0), kernel("other", 3.0), kernel("unknown", 4.0)]
    assert [found.op for found in attach_triton_launches(kernels, OPS)] == [None, None, None, None]

"""Collectives: what they move through the memory of one rank. The network is another resource, counted elsewhere.

A collective reads what this rank sends and writes what it receives; the group has more than one rank. Additions are not
counted, since a switch can do them. Which rank this is does not show in the arguments, so a broadcast is charged its
one write (for the source, its one read).
"""

from __future__ import annotations

from dataclasses import replace

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def _under(op: Op, *arguments: str) -> tuple[Tensor, ...]:
    return replace(op, arguments={name: op.arguments[name] for name in arguments if name in op.arguments}).inputs


@formula(
    *(f"_c10d_functional.{name}" for name in ("all_reduce", "all_reduce_", "all_reduce_coalesced")),
    *(f"_c10d_functional.{name}" for name in ("all_reduce_coalesced_", "all_to_all_single")),
    *(f"_c10d_functional.{name}" for name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")),
    *(f"_c10d_functional.{name}" for name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")),
    *(f"_c10d_functional.{name}" for name in ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")),
    "_c10d_functional_autograd.all_gather_into_tensor",
    "_c10d_functional_autograd.all_to_all_single",
    "_c10d_functional_autograd.reduce_scatter_tensor",
    "_dtensor.shard_dim_alltoall",
)
def _functional(op: Op) -> Cost:
    return Cost(family="collective", reads=accesses(*_under(op, "input", "inputs")), writes=accesses(*op.written))


@formula("_c10d_functional.broadcast", "_c10d_functional.broadcast_")
def _broadcast(op: Op) -> Cost:
    return Cost(family="collective", writes=accesses(*op.written))


@formula(
    "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd", "c10d.barrier", "c10d.monitored_barrier_"
)
def _nothing(op: Op) -> Cost:
    return Cost(family="collective")


@formula("c10d.send", "c10d.reduce_", "c10d.check_for_nan", "_c10d_functional.isend")
def _send(op: Op) -> Cost:
    """`reduce_` changes the tensor of one rank, which may be another."""
    return Cost(family="collective", reads=accesses(*_under(op, "tensor", "tensors")))


@formula("c10d.recv_", "c10d.recv_any_source_", "c10d.broadcast_", "_c10d_functional.irecv")
def _receive(op: Op) -> Cost:
    return Cost(family="collective", writes=accesses(*_under(op, "tensor", "tensors")))


@formula("c10d.allreduce_", "c10d.allreduce_coalesced_")
def _in_place(op: Op) -> Cost:
    """These do not say in their schemas that they change their tensors."""
    changed = accesses(*_under(op, "tensors"))
    return Cost(family="collective", reads=changed, writes=changed)


@formula(
    *(f"c10d.{name}" for name in ("_allgather_base_", "allgather_", "allgather_coalesced_")),
    *(f"c10d.{name}" for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")),
    *(f"c10d.{name}" for name in ("_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_", "alltoall_")),
    *(f"c10d.{name}" for name in ("gather_", "scatter_")),
)
def _given_outputs(op: Op) -> Cost:
    """Outputs are arguments, by one of several names. Where only one rank gives or gets, others pass an empty list."""
    return Cost(
        family="collective",
        reads=accesses(*_under(op, "input", "inputs", "input_tensor", "input_tensors", "input_list")),
        writes=accesses(*_under(op, "output", "outputs", "output_tensor", "output_tensors", "output_lists")),
    )


@formula("_c10d_functional.batch_p2p_ops")
def _batch(op: Op) -> Cost:
    """What is sent is read, what is received is written."""
    kinds = tuple(zip(op.arguments["op_list"], op.tensors("tensors"), strict=False))
    return Cost(
        family="collective",
        reads=accesses(*(tensor for kind, tensor in kinds if "send" in kind)),
        writes=accesses(*(tensor for kind, tensor in kinds if "recv" in kind)),
    )


@formula(
    *(f"symm_mem.{name}" for name in ("one_shot_all_reduce", "one_shot_all_reduce_copy", "two_shot_all_reduce_")),
    *(f"symm_mem.{name}" for name in ("multimem_all_reduce_", "multimem_one_shot_all_reduce")),
)
def _symmetric(op: Op) -> Cost:
    """All-reduces through memory that all ranks see: this rank's part read by someone, its result written."""
    return Cost(
        family="collective",
        reads=accesses(*_under(op, "input", "local_input")),
        writes=accesses(*op.written),
    )

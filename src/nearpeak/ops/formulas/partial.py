"""Ops whose cost is known only in part, by their origin.

`inductor` is a kernel that the compiler made of several operators, `partial` an operator on lists that a trace file
omits. The cost of a kernel whose code was read is known in full. Nothing is known of an `unknown` op.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, Model, accesses, formula
from nearpeak.ops.formulas.matrix import engines
from nearpeak.ops.op import Op


@formula("unknown")
def not_known(op: Op) -> Cost:
    """Nothing: not enough is known of the op, or its kernels are lost, so that there is no time to compare with."""
    return Cost(family="unknown", model="none")


@formula("inductor", "partial")
def partly_known(op: Op) -> Cost:
    """Reads `read` whole, writes its outputs and `written`, and goes over each of `touched` once, doing either.

    A matrix product in `product`'s dtype takes `inner` multiply-adds for an element of its output.

    What is read may be in the cache, and what is written may stay there. Of the two, writing costs less in memory
    traffic, so that is what counts where it may be either.
    """
    writes = accesses(*op.outputs, *op.tensors("touched", "written"))
    reads = accesses(*op.tensors("read"))
    model: Model = "operands" if reads or writes else "none"
    if "product" not in op.arguments:
        if op.arguments.get("complete"):
            model = "formula"
        return Cost(family=op.arguments.get("family", "unknown"), reads=reads, writes=writes, model=model)
    result = (*op.outputs, *op.tensors("written"))[0]
    count = 2.0 * result.elements * op.arguments["inner"]
    flops, vector = engines(op.arguments["product"], count, tf32=op.tf32_products)
    return Cost(family="matrix", reads=reads, writes=writes, flops=flops, vector_flops=vector, model=model)

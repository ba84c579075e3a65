"""Ops of a trace file of which only a part is certain: `inductor.NAME`, a kernel that a compiler made of several
operators, and `least.NAME`, an operator on lists that the file leaves out.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, Model, accesses, formula
from nearpeak.work.families.matrix import engines
from nearpeak.work.op import Op


@formula("inductor", "least")
def partly_known(op: Op) -> Cost:
    """Reads `read` whole, writes its outputs, and goes over each of `touched` once, reading or writing it.

    A matrix product in `product`'s dtype takes `inner` multiply-adds for an element of its output.

    What is read may be in the cache, and what is written may stay there. Of the two, writing costs less in memory
    traffic, so that is what counts where it may be either.
    """
    writes = accesses(*op.outputs, *op.tensors("touched"))
    reads = accesses(*op.tensors("read"))
    model: Model = "operands" if reads or writes else "none"
    if "product" not in op.arguments:
        return Cost(family="unknown", reads=reads, writes=writes, model=model)
    count = 2.0 * op.outputs[0].elements * op.arguments["inner"]
    flops, vector = engines(op.arguments["product"], count, tf32=op.tf32_products)
    return Cost(family="matrix", reads=reads, writes=writes, flops=flops, vector_flops=vector, model=model)

"""A tiny builder of traces, a made-up machine, and random traces."""

from __future__ import annotations

from hypothesis import strategies as st

from nearpeak.machines.machine import Achievable, LaunchCost, Machine, Theoretical
from nearpeak.ops.cost import Access, Cost
from nearpeak.ops.op import Op, Storage, Trace
from nearpeak.ops.tensor import Tensor


class Builder:
    """Storages by number, ops in order. Every tensor is a whole storage of bytes."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.ops: list[Op] = []
        self.costs: list[Cost] = []

    def storage(self, size: float, kind: str = "intermediate") -> int:
        self.storages[len(self.storages)] = Storage(bytes=size, kind=kind)
        return len(self.storages) - 1

    def tensor(self, storage: int) -> Tensor:
        size = int(self.storages[storage].bytes)
        return Tensor(shape=(size,), strides=(1,), dtype="uint8", storage=storage)

    def op(self, family, reads=(), writes=(), *, name="aten.op.default", phase="forward", sizes=None, **work) -> int:
        def accesses(storages):
            return tuple(Access(storage=s, bytes=(sizes or {}).get(s, self.storages[s].bytes)) for s in storages)

        arguments = {f"x{number}": self.tensor(storage) for number, storage in enumerate(reads)}
        outputs = tuple(self.tensor(storage) for storage in writes)
        self.ops.append(Op(name=name, arguments=arguments, outputs=outputs, phase=phase))
        if family == "view":
            self.costs.append(Cost(family="view"))
        else:
            self.costs.append(Cost(family=family, reads=accesses(reads), writes=accesses(writes), **work))
        return len(self.ops) - 1

    def make(self, size, family, reads=(), **rest) -> int:
        """An op with one new storage, which is returned."""
        storage = self.storage(size)
        self.op(family, reads, (storage,), **rest)
        return storage

    def trace(self, *results: int) -> Trace:
        return Trace(ops=tuple(self.ops), storages=self.storages, results=frozenset(results))


def machine(*, cache=100.0, cache_bandwidth=None, launch=None, kind="gpu") -> Machine:
    """1 byte/s of memory, 100 matrix and 10 vector FLOP/s."""
    rates = {"matrix": {"bfloat16": 100.0}, "vector": {"float32": 10.0}, "bandwidth": 1.0}
    return Machine(
        id="toy",
        name="Toy 1",
        kind=kind,
        vendor="none",
        architecture="none",
        processors=1,
        memory_bytes=1e9,
        cache_bytes=cache,
        theoretical=Theoretical(source="made up", **rates),
        achievable=Achievable(
            how="measured",
            note="made up",
            cache_bandwidth=cache_bandwidth,
            launch=LaunchCost(in_graph=launch, host_call=7.0),
            **rates,
        ),
    )


FAMILIES = ["pointwise", "view", "movement", "creation", "random", "reduction", "normalization", "matrix", "sorting"]


@st.composite
def random_traces(draw):
    builder = Builder()
    sizes = st.integers(1, 200)
    for _ in range(draw(st.integers(1, 3))):
        builder.storage(draw(sizes), draw(st.sampled_from(["parameter", "input", "buffer"])))
    phases = sorted(draw(st.lists(st.sampled_from(["backward", "forward"]), max_size=20)), reverse=True)
    for phase in phases:
        family = draw(st.sampled_from(FAMILIES))
        known = st.sampled_from(range(len(builder.storages)))
        reads = draw(st.lists(known, max_size=3, unique=True))
        name = draw(st.sampled_from(["aten.op.default", "aten._softmax.default"]))
        work = {}
        if family != "view":
            work["model"] = draw(st.sampled_from(["formula", "formula", "formula", "operands", "none"]))
        if family == "matrix":
            work["flops"] = {"bfloat16": draw(st.integers(0, 20000))}
        elif family != "view":
            work["vector_flops"] = {"float32": draw(st.integers(0, 2000))}
        if family == "view":
            builder.op("view", reads[:1], reads[:1], phase=phase)
            continue
        in_place = draw(st.integers(0, 3)) == 0
        writes = (draw(known),) if in_place else (builder.storage(draw(sizes)),)
        part = {storage: draw(st.integers(1, int(builder.storages[storage].bytes))) for storage in (*reads, *writes)}
        whole = draw(st.booleans())
        builder.op(family, reads, writes, name=name, phase=phase, sizes=None if whole else part, **work)
    results = draw(st.lists(st.sampled_from(range(len(builder.storages))), max_size=4))
    return builder.trace(*results), tuple(builder.costs)

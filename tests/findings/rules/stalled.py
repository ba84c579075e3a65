"""Steps that are idle for made-up reasons, on a made-up machine."""

import dataclasses

from made_up import profile

from nearpeak.findings.engine import find, rules
from nearpeak.findings.step import Step
from nearpeak.machines.catalogue import find as machine_of
from nearpeak.machines.machine import Achievable, LaunchCost
from nearpeak.ops.op import Op, Trace
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.idle import IdleCause

LAUNCH = LaunchCost(in_graph=0.01, enqueue=0.1)
GPU = dataclasses.replace(
    machine_of("h200-sxm"),
    achievable=Achievable(how="measured", note="made up", bandwidth=1.0, matrix={}, vector={}, launch=LAUNCH),
)
CPU = dataclasses.replace(GPU, kind="cpu")


def idle(cause, seconds, *, count=1, where="", what=""):
    return IdleCause(cause=cause, seconds=seconds, count=count, where=where, what=what)


def step(*causes, machine=GPU, ops=(), python=None, passes=(), **changes):
    """The made-up profile, of a step of 20 s in which kernels run for 5 s, with these causes of idle time."""
    facts = {"idle": causes, "steps": 5, "profiled_s": 20.5, **changes}
    return Step(
        trace=Trace(ops=ops, storages={}, python=python, passes=passes),
        profile=dataclasses.replace(profile(wall_s=20.0), **facts),
        machine=machine,
        knows=frozenset({"storages", "lines", "host", "memory"}),
    )


def placed(source):
    """An op of two numbers at a line."""
    tensor = Tensor(shape=(2,), strides=(1,), dtype="float32", storage=0, offset=0)
    return Op(name="aten.exp.default", arguments={"self": tensor}, outputs=(tensor,), source=source)


def findings(name, *causes, **facts):
    """What one rule says."""
    found, _ = find(step(*causes, **facts), ignore=set(rules()) - {name}, least_share=0.0)
    return list(found)

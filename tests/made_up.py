"""A made-up profile: three ops, one without a bound, two streams, a kernel of communication."""

from nearpeak.bound.estimate import Coverage, Estimate, EstimatedOp
from nearpeak.machines.machine import Achievable, LaunchCost, Machine
from nearpeak.ops.work import Work
from nearpeak.profiles.profile import DeviceKernel, Profile, build_profile


def op(name, seconds, *, model="formula", module="", source="", phase="forward") -> EstimatedOp:
    return EstimatedOp(
        name=name,
        family="pointwise",
        flops=10.0,
        bytes_read=20.0,
        bytes_written=10.0,
        seconds=seconds,
        limiter="memory",
        module=module,
        phase=phase,
        source=source,
        model=model,
        expected_seconds=1.5 * seconds,
    )


def estimate(ops) -> Estimate:
    return Estimate(
        machine="toy",
        ceilings="achievable",
        how="measured",
        as_written_s=sum(each.seconds for each in ops),
        fused_s=2.0,
        ideal_s=1.0,
        work=Work(flops={"bfloat16": 30.0}),
        ops=tuple(ops),
        groups=(),
        coverage=Coverage(formula=2, operands=0, none=1, seconds_share=1.0, unmodeled={"mine.kernel": 1}),
        notes=("A note.",),
        expected_s=4.5,
        expected_from="toy",
    )


def profile(wall_s: float = 10.0) -> Profile:
    ops = [
        op("aten.mul.Tensor", 1.0, module="layer.0", source="train.py:4"),
        op("aten.mul.Tensor", 2.0, module="layer.1", source="train.py:4", phase="backward"),
        op("mine.kernel", 0.0, model="none", module="layer.1", source="train.py:9"),
    ]
    kernels = [
        DeviceKernel(name="mul", start_s=0.0, seconds=2.0, op=0),
        DeviceKernel(name="mul", start_s=1.0, seconds=3.0, op=1),  # 1 s of it beside the first
        DeviceKernel(name="mine", start_s=5.0, seconds=1.0, op=2),
        DeviceKernel(
            name="ncclAllReduce", start_s=5.5, seconds=1.5, op=None, collective="all_reduce"
        ),  # 1 s of it alone
    ]
    return build_profile(estimate(ops), kernels, wall_s=wall_s, source="train.py", date="2026-01-02", device="Toy 1")


def slow_cpu(host_call=5e-6):
    """A CPU near a slow server; `host_call` is what calling an op takes."""
    return Machine(
        id="test-cpu",
        name="two slow cores",
        kind="cpu",
        vendor="none",
        architecture="none",
        processors=2,
        memory_bytes=8e9,
        cache_bytes=1 << 20,
        achievable=Achievable(
            how="measured",
            note="made up, near a slow server",
            matrix={"float32": 5e10, "bfloat16": 1e10, "float16": 1e10, "float64": 2.5e10},
            vector={"float32": 2e10, "float64": 1e10},
            bandwidth=1e10,
            cache_bandwidth=3e10,
            launch=LaunchCost(host_call=host_call),
        ),
    )

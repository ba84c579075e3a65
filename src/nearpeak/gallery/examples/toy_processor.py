"""A toy processor: one input, one worker, and which of them waits.

A processor takes in 4 items a second and does 8 operations a second. How much of each does a task use? That depends on
how many operations an item needs, its intensity. The two work at the same time, so the longer of the two times counts,
and the other one waits. A GPU is the same with larger numbers: bytes come in, and operations are done on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import nearpeak
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.machines.machine import Machine
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, quantity, seconds, significant

CATALOGUE = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200")
ITEMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Items come in and operations are done on them, at most so many of each in a second."""

    items_per_second: float
    operations_per_second: float

    @property
    def ridge(self) -> float:
        """Operations per item at which neither waits for the other."""
        return self.operations_per_second / self.items_per_second

    def seconds(self, items: int, intensity: float) -> float:
        """The input and the worker overlap: the longer of the two times."""
        return max(items / self.items_per_second, items * intensity / self.operations_per_second)

    def used(self, intensity: float) -> tuple[float, float]:
        """The share of the time in which the input and the worker are busy."""
        return min(1.0, self.ridge / intensity), min(1.0, intensity / self.ridge)

    def followed(self, items: int, intensity: float) -> float:
        """The same time, item by item: the worker starts an item when it has come in and the last one is done."""
        arrived = done = 0.0
        for _ in range(items):
            arrived += 1 / self.items_per_second
            done = max(done, arrived) + intensity / self.operations_per_second
        return done


TOY = Processor(items_per_second=4, operations_per_second=8)


def example(context: Context) -> Iterator[Part]:
    """The toy, then the real ones."""
    yield from prose(
        f"{TOY.items_per_second:g} items a second in, {TOY.operations_per_second:g} operations a second: with"
        f" {TOY.ridge:g} operations for each item both are busy all the time. That intensity is the ridge. With fewer"
        " operations per item the worker waits for items; with more the input waits for the worker."
    )
    yield _utilization()
    rows = [
        Prediction(
            what=f"{intensity:g} per item",
            predicted=TOY.seconds(ITEMS, intensity),
            measured=TOY.followed(ITEMS, intensity),
            low=1.0,
            high=1.02,  # at most the time of 1 item of the 64 longer
        )
        for intensity in (0.5, 1, 2, 4, 8)
    ]
    yield prediction_table(
        f"{ITEMS} items: the longer of the two times, and the toy followed item by item",
        rows,
        note="Nothing is timed here: what is measured is counted. It is a little longer, because the worker waits for"
        " the first item and works on the last one alone; that matters less the more items there are.",
    )
    yield _faster(1.0)
    yield from prose(
        f"At 1 operation per item, below the ridge of {TOY.ridge:g}, a worker of twice the speed changes no time at"
        " all; it only waits more. A faster input does help, until its speed puts the ridge at the intensity of the"
        " task. To use a fast worker, do more with each item that is there already: raise the intensity."
    )
    yield from _real(context)


def _utilization() -> Plot:
    intensities = [2 ** (step / 4 - 3) for step in range(29)]
    return Plot(
        title="Who is busy",
        series=(
            Series(name="input", points=tuple((at, TOY.used(at)[0]) for at in intensities), markers=False),
            Series(name="worker", points=tuple((at, TOY.used(at)[1]) for at in intensities), markers=False),
        ),
        x_label="operations per item",
        y_label="share of the time",
        y_unit="%",
        log_x=True,
    )


def _faster(intensity: float) -> Table:
    variants = {
        "the toy": TOY,
        "worker x 2": replace(TOY, operations_per_second=2 * TOY.operations_per_second),
        "input x 2": replace(TOY, items_per_second=2 * TOY.items_per_second),
        "input x 4": replace(TOY, items_per_second=4 * TOY.items_per_second),
        "both x 2": Processor(
            items_per_second=2 * TOY.items_per_second, operations_per_second=2 * TOY.operations_per_second
        ),
    }
    return Table(
        title=f"{ITEMS} items with {intensity:g} operation each",
        headers=("", "ridge", "time", "input busy", "worker busy"),
        rows=tuple(
            (
                name,
                f"{one.ridge:g}",
                seconds(one.seconds(ITEMS, intensity)),
                *(percent(share, 0) for share in one.used(intensity)),
            )
            for name, one in variants.items()
        ),
    )


def _real(context: Context) -> Iterator[Part]:
    """The catalogue and this machine: bytes for items."""
    machines = [nearpeak.machine(name) for name in CATALOGUE]
    if context.machine.id not in CATALOGUE:
        machines.append(context.machine)
    processors = [(machine, *_processor(machine)) for machine in machines]
    first, last = processors[0], processors[len(CATALOGUE) - 1]
    yield Table(
        title="The same two numbers of real machines",
        headers=("", "dtype", "bytes in", "operations", "ridge"),
        align="llrrr",
        rows=tuple(
            (
                machine.name,
                dtype,
                quantity(one.items_per_second, "B/s"),
                quantity(one.operations_per_second, "FLOP/s"),
                f"{significant(one.ridge)} FLOP/B",
            )
            for machine, one, dtype in processors
        ),
    )
    yield from prose(
        f"From {first[0].name} to {last[0].name} the operations grew"
        f" {last[1].operations_per_second / first[1].operations_per_second:.1f} times and the bytes"
        f" {last[1].items_per_second / first[1].items_per_second:.1f} times, so the ridge moved"
        f" {last[1].ridge / first[1].ridge:.1f} times to the right: a byte must be used more often than before to keep"
        f" the matrix units busy. With one operation on each byte they are busy {percent(last[1].used(1.0)[1])} of the"
        f" time on {last[0].name}. Rates of the catalogue are datasheet figures times what the best kernels reach."
    )
    yield Plot(
        title="What each machine allows",
        series=tuple(_roof(machine, one, number) for number, (machine, one, _) in enumerate(processors)),
        x_label="FLOP per byte",
        y_label="FLOP/s",
        y_unit="FLOP/s",
        log_x=True,
        log_y=True,
    )


def _processor(machine: Machine) -> tuple[Processor, str]:
    """Bytes of memory in, matrix operations in what models run in there: 16 bits on a GPU, 32 on a CPU."""
    ceilings = machine.achievable or machine.theoretical
    assert ceilings is not None
    dtype = "float32" if machine.kind == "cpu" else "bfloat16" if "bfloat16" in ceilings.matrix else "float16"
    return Processor(items_per_second=ceilings.bandwidth, operations_per_second=ceilings.peak(dtype)), dtype


def _roof(machine: Machine, one: Processor, number: int) -> Series:
    intensities = sorted([one.ridge, *(2.0**power for power in range(-2, 12))])
    points = tuple((at, min(one.operations_per_second, at * one.items_per_second)) for at in intensities)
    return Series(name=machine.name, points=points, markers=False, color=number)

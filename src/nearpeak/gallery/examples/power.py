"""Power and clock: the same product, with other numbers and with pauses.

A large GPU cannot run all of its matrix units at full clock all the time: it would draw more power than its limit, and
the clock falls until it does not. Power is drawn where bits flip, so that a product of zeros runs faster than one of
random numbers, although every operation is the same. Pauses help as well: what counts is the power over some
milliseconds. A benchmark with zeros or with a second between calls therefore shows a rate that no training step has.
A CPU with few busy cores is not at its limit, and does not care.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nearpeak.devices.backends import CPU, gpu_backend
from nearpeak.devices.device import ConditionsReader
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.machines.machine import Achievable
from nearpeak.measure.statistics import median
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, quantity, significant

DUTIES = (0.25, 0.5, 1.0)
"""Shares of the time in which the machine works."""
WORK_SECONDS = 0.02
"""A turn of work, before a pause."""
DUTY_SECONDS = 1.2
"""How long each duty cycle is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """A product at a duty cycle: seconds per call while it works, with clock and power if they can be read."""

    seconds: float
    clock_hz: float | None
    power_watts: float | None


def example(context: Context) -> Iterator[Part]:
    """Three kinds of numbers in bursts, then three duty cycles with random ones."""
    size = context.pick(gpu=8192, cpu=512)
    dtype = context.pick(gpu=context.half, cpu=torch.float32)
    flops = 2.0 * size**3
    name = str(dtype).removeprefix("torch.")
    ceilings = context.machine.achievable
    peaks = _rates(ceilings, name) or (context.machine.theoretical and (context.machine.theoretical.peak(name),) * 3)
    assert peaks
    zeros_rate, random_rate, sustained_rate = peaks
    shape = (size, size)
    kinds = {
        "zeros": (torch.zeros(shape, dtype=dtype, device=context.tensors), zeros_rate),
        "powers of two": (_powers(shape, dtype, context.tensors), (zeros_rate + random_rate) / 2),
        "random": (torch.randn(shape, dtype=dtype, device=context.tensors), random_rate),
    }
    yield from prose(
        f"A product of two matrices of {size} x {size} in {name}: {quantity(flops, 'FLOP')}, whatever the numbers are."
        " Zeros flip no bit. Powers of two have an exponent and a sign, and a fraction of zeros. Random numbers flip"
        " about half of the bits in every operation."
    )
    band = (0.85, 1.15) if context.gpu else None
    rows = [
        # Bound to the function: as an argument, the zeros would be called a degenerate input.
        context.row(kind, partial(torch.mm, numbers, numbers), predicted=flops / rate, band=band)
        for kind, (numbers, rate) in kinds.items()
    ]
    yield prediction_table(
        "A call, with pauses so long that power does not limit",
        rows,
        note="Predicted from what `nearpeak machine --calibrate` found for zeros and for random numbers; powers of two"
        " halfway."
        if context.gpu
        else "Predicted as what products reach on this machine, whatever the numbers.",
    )
    found = dict(zip(kinds, rows, strict=True))
    fast, slow = (found[kind].measured or found[kind].predicted or 1.0 for kind in ("zeros", "random"))
    yield from prose(f"Random numbers take {significant(slow / fast)} times as long as zeros.")

    numbers = kinds["random"][0]
    predicted = {duty: flops / (sustained_rate if duty == 1.0 else random_rate) for duty in DUTIES}
    duties: dict[float, Duty] = {}
    if context.measures:
        for duty in DUTIES:
            context.progress(f"working {percent(duty, 0)} of the time")
            duties[duty] = at_duty(context, numbers, duty)
    table = [
        Prediction(
            what=f"working {percent(duty, 0)} of the time",
            predicted=predicted[duty],
            measured=duties[duty].seconds if duty in duties else None,
            low=band[0] if band else context.band[0],
            high=band[1] if band else context.band[1],
        )
        for duty in DUTIES
    ]
    yield prediction_table(
        f"A call with random numbers, in turns of {WORK_SECONDS * 1e3:.0f} ms and a pause after each",
        table,
        note="Predicted: with pauses the rate of a burst, without any the sustained rate of the calibration.",
    )
    if any(duty.clock_hz or duty.power_watts for duty in duties.values()):
        yield Table(
            title="What the driver says at the end of a turn",
            headers=("", "clock", "power"),
            rows=tuple(
                (
                    percent(share, 0),
                    quantity(duty.clock_hz, "Hz") if duty.clock_hz else "-",
                    f"{duty.power_watts:.0f} W" if duty.power_watts else "-",
                )
                for share, duty in duties.items()
            ),
            note=f"The limit is {context.machine.power_watts:.0f} W." if context.machine.power_watts else "",
        )
    ways = ("predicted", "measured") if duties else ("predicted",)
    yield Plot(
        title="Rate while it works",
        series=tuple(
            Series(
                name=how,
                points=tuple(
                    (duty, flops / value)
                    for duty, row in zip(DUTIES, table, strict=True)
                    if (value := getattr(row, how))
                ),
                line=how == "predicted",
            )
            for how in ways
        ),
        x_label="share of the time in which it works",
        y_label="FLOP/s",
        x_unit="%",
        y_unit="FLOP/s",
    )
    ends = [table[place].measured or table[place].predicted or 1.0 for place in (0, -1)]
    yield from prose(
        f"Without pauses a call takes {significant(ends[1] / ends[0])} times as long as at"
        f" {percent(DUTIES[0], 0)} duty. Compare kernels under the same conditions: the same numbers, and either all in"
        " bursts or all sustained (`nearpeak bench --regime sustained`)."
    )


def _rates(ceilings: Achievable | None, dtype: str) -> tuple[float, float, float] | None:
    """With zeros, with random numbers in a burst, and sustained; what was not measured is the one before."""
    if ceilings is None:
        return None
    best = ceilings.peak(dtype)
    burst = ceilings.matrix_random.get(dtype, best)
    return best, burst, ceilings.matrix_sustained.get(dtype, burst)


def _powers(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Tensor:
    """Powers of two from 1 / 16 to 8, of either sign."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    exponents = torch.randint(-4, 4, shape, device=device)
    signs = torch.randint(0, 2, shape, device=device) * 2 - 1
    return (signs * torch.exp2(exponents.float())).to(dtype)


def at_duty(context: Context, numbers: Tensor, duty: float, seconds: float = DUTY_SECONDS) -> Duty:
    """Works for `WORK_SECONDS`, pauses, and so on; the time per call is that of the second half of the turns."""
    reader, clock = _instruments(context)
    out = torch.empty_like(numbers)
    calls = 1
    times: list[float] = []
    readings = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        taken = clock(lambda: torch.mm(numbers, numbers, out=out), calls)
        times.append(taken)
        readings.append(reader.read())
        calls = max(1, round(WORK_SECONDS / taken))
        if duty < 1.0:
            time.sleep(calls * taken * (1 - duty) / duty)
    half = len(times) // 2
    clocks = [one.clock_hz for one in readings[half:] if one.clock_hz]
    watts = [one.power_watts for one in readings[half:] if one.power_watts]
    return Duty(
        seconds=median(times[half:]),
        clock_hz=median(clocks) if clocks else None,
        power_watts=median(watts) if watts else None,
    )


def _instruments(context: Context) -> tuple[ConditionsReader, Callable[[Callable[[], object], int], float]]:
    """A reader of clock and power, and a function that times so many calls in a row."""
    backend = gpu_backend() if context.gpu else None
    if backend is None:

        def by_host(call: Callable[[], object], calls: int) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls

        return CPU.conditions(0), by_host
    first, last = backend.event(), backend.event()

    def by_events(call: Callable[[], object], calls: int) -> float:
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / calls

    return backend.conditions(backend.current()), by_events

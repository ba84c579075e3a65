"""`judge`: is a candidate right, is it honest, how fast is it, and how near the limit.

The candidate runs in a process of its own (`runner`), the reference's times are taken in another one, and this process,
which imports only the reference, draws the inputs, computes the answers and keeps the clock. Inputs of every call are
new; which timed calls are checked is drawn after they ran.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import datetime
import itertools
import math
import os
import platform
import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import nearpeak
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import CaseError, NearpeakError, UsageError
from nearpeak.judging.channel import (
    CandidateError,
    Channel,
    ProcessEnded,
    Reply,
    sanitizer_prefix,
    sanitizer_report,
    waited_seconds,
)
from nearpeak.judging.exchange import bytes_of, read_tensors, rescaled, tensors_in, write_tensors
from nearpeak.judging.judgement import Charge, Check, Judgement, KernelShare, Outcome, Rival, Speed, SuiteJudgement
from nearpeak.judging.models import model_content
from nearpeak.judging.runner import OUTSIDE, POISON, change_one, changeable, halve
from nearpeak.judging.tolerance import (
    Agreement,
    Answer,
    agreement,
    answer,
    reach_of_nan,
    same_values,
    without_nonfinite,
)
from nearpeak.judging.variants import (
    SMALL_ELEMENTS,
    Inputs,
    Task,
    Variant,
    size_variants,
    small_inputs,
    stride_variants,
    value_variants,
)
from nearpeak.machines.detect import detect_cpu
from nearpeak.measure.case import case_errors
from nearpeak.measure.compare import CONFIDENCE
from nearpeak.measure.compare import judge as compare_timings
from nearpeak.measure.gpu import GpuInstrument, gpu_instrument
from nearpeak.measure.inputs import device_for
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.machine import known_machine
from nearpeak.measure.options import Options, Progress
from nearpeak.measure.quality import interval_of
from nearpeak.measure.statistics import median, quantile
from nearpeak.measure.timing import Block, Environment, Flag, Timing, make_flag

if TYPE_CHECKING:
    from nearpeak.judging.floor import Floor

KNOWN_SEEDS = (0, 42)
"""Seeds that everybody uses: a candidate may have the answers to what they draw."""
SETS = 3
"""Draws that the inputs of timed calls are made of."""
SETS_BYTES = 256 << 20
BUDGET_S = {"cpu": 27.0, "cuda": 55.0}
"""Of a judgement: with the import of torch, half a minute on a CPU and a minute on a GPU."""
MOST_WAITING = 4.0
"""Budgets that a judgement may take longer because the processes of a busy machine wait for a processor."""
BUSY_MACHINE = 0.2
"""Of a judgement, for which its processes wait for a processor: the notes say so from there on."""
LEAST_WAIT_S = 10.0
"""A call that takes less has not hung, however little of the budget is left."""
PROBES_UNTIL, CHECKS_UNTIL, COMPILED_UNTIL, TIMES_UNTIL = 0.25, 0.45, 0.55, 0.75
"""Shares of the budget after which no probe and no check of values is begun, no longer waited for torch.compile, and no
block is begun. What is left suffices for the looks at the process that end every judgement."""
FEWEST_CHECKS = 60
"""They are made where the seconds for checks are up, and the budget is not."""
FEWEST_BLOCKS, LEAST_BLOCKS = 8, 4
"""Of a series, and of one that the budget cuts short."""
MOST_BLOCKS = 40
CLOCK_RUN_S, MOST_RUN_CALLS = 0.03, 10_000
IDLE_S = 0.2
BUSY_SHARE = 0.6
BESIDE_SHARE = 0.2
"""Of the time in which others are timed, for which a candidate may be busy: its process is looked at between calls."""
CHILD_RUN_S, CHILD_SHARE = 0.5, 0.08
"""Calls in a row beside which processes that it started may work, and the share of all work that they may do."""
LATE_S = (0.5, 1.0, 2.0)
"""Between the looks at a wrong result: other processes may need as long to write into it, on a busy machine."""
PROBES, MORE_PROBES = 5, 15
"""Pairs of calls, on the same inputs and with one element changed; more where the first ones differ."""
CHECKED_SHARE = 0.7
"""Of the timed blocks whose results are compared, drawn after they ran."""
CHECKED_CALLS = 3
"""Of each of them."""
FEWEST_CHECKED = 8
"""Blocks that are compared even where the time is up."""
KEPT_BYTES = 1 << 30
RANDOM_SHARE = 0.1
"""Of the values of a reference, by which it may differ from itself."""
MOST_REPEATED, REPEATED_S = 150, 0.4
"""Calls that must leave the result of the first one as it was."""
LATE_SHARE = 0.5
"""Of the time of a call, by which the first reading of its result may take longer than the second."""
LONG_CALL_S = 0.05
"""A call whose time says what it does: what launches and copies take is little of it."""
WORK_TURNS = 4
"""Pairs of calls whose kernels are listed."""
SAME_PRECISION = 2.0
"""Times the errors of the call on the given inputs: so large are those of another call of the same arithmetic."""
FASTER_ON_SAME = 0.6
"""A call on inputs that came before may take this share of one with an element changed; less is no cache of the
hardware's."""
_KINDS = {
    "sizes": "WRONG_EDGES",
    "strides": "WRONG_STRIDES",
    "nonfinite": "WRONG_NONFINITE",
    "range": "WRONG_RANGE",
    "values": "WRONG_RANGE",
    "spikes": "WRONG_RANGE",
    "gradients": "WRONG_GRADIENT",
    "stream": "WRONG_STREAM",
    "graph": "WRONG_STREAM",
}
_RESULTS = (
    "WRONG_VALUES",
    "WRONG_EDGES",
    "WRONG_RANGE",
    "WRONG_STRIDES",
    "WRONG_NONFINITE",
    "WRONG_GRADIENT",
    "WRONG_STREAM",
)
"""Charges that say where results are wrong, and not why."""
_TRANSFERS = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
_LIBRARIES = (
    (("cublas", "cutlass", "nvjet", "xmma", "gemm_", "sgemm", "gemvx", "splitkreduce"), "cuBLAS"),
    (("cudnn", "implicit_convolve"), "cuDNN"),
    (("flash_fwd", "flash_bwd", "fmha", "pytorch_flash"), "torch's attention"),
    (("at::native", "at_cuda", "vectorized_elementwise", "aten::", "cub::"), "torch"),
    (("triton_poi_", "triton_red_", "triton_per_", "triton_tem_", "triton_mm"), "torch.compile"),
    (("nearpeak",), "nearpeak"),
    (("memcpy", "memset"), "the driver"),
)


@preserve_process_state()
def judge(
    candidate: str,
    *,
    against: str,
    inputs: str | None = None,
    sizes: Sequence[Mapping[str, int]] = (),
    device: str | None = None,
    timeout: float = 60.0,
    max_seconds: float = 10.0,
    budget: float | None = None,
    compile_reference: bool = True,
    timed: bool = True,
    mutates: Sequence[int] = (),
    sanitize: str | None = None,
    memory_bytes: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """The verdict on the function `candidate` ("file.py:function"), which should do what `against` does.

    The file of the reference has a function `inputs` that draws arguments; its integer parameters with defaults are the
    sizes, which are varied. Inputs that require gradients have their gradients compared too.

    Args:
        candidate: FILE.py:FUNCTION. It is imported in a process of its own, never here.
        against: FILE.py:FUNCTION of the reference in plain torch.
        inputs: FILE.py:FUNCTION that draws inputs, if it is not in the reference's file.
        sizes: Sets of sizes to time at, in place of the defaults.
        device: "cpu" or "cuda"; None is the GPU where there is one.
        timeout: Seconds after which a call has hung, where the budget has as many left.
        max_seconds: For the checks of values and for the times, each.
        budget: Seconds of the whole judgement; by default half a minute on a CPU, and a minute on a GPU. Notes say what
            was left out because they were up.
        compile_reference: Also time torch.compile of the reference.
        timed: Whether times are taken at all.
        mutates: Positions of tensors that the candidate may change.
        sanitize: "memcheck" or "racecheck": also run a call under compute-sanitizer.
        memory_bytes: What a call of the candidate may allocate.
        seed: For a judgement that can be repeated; by default nobody knows it before.
        progress: Called with a line of text now and then.
    """
    place = device_for(device)
    for each in sizes:
        for name, value in each.items():
            if type(value) is not int or value < 0:
                raise UsageError(f"A size is a whole number, and {name} is {value!r}.")
    with tempfile.TemporaryDirectory(
        prefix="nearpeak-judge-", dir=_memory_folder(), ignore_cleanup_errors=True
    ) as folder:
        trial = _Trial(
            candidate=candidate,
            against=against,
            inputs=inputs,
            sizes=[dict(each) for each in sizes] or [{}],
            device=place,
            folder=Path(folder),
            timeout=timeout,
            max_seconds=max_seconds,
            budget=budget or BUDGET_S.get(place.type, BUDGET_S["cuda"]),
            mutates=tuple(mutates),
            draws=random.Random(secrets.randbits(64) if seed is None else seed),
            say=progress or (lambda line: None),
        )
        return trial.run(compile_reference=compile_reference, timed=timed, sanitize=sanitize, memory_bytes=memory_bytes)


def judge_suite(folder: str | Path, **options: Any) -> SuiteJudgement:
    """The judgements of a folder: every folder in it that has a `reference.py` is a task, its other files candidates.

    The function of a file is the last one that it defines, or the one with the name of the reference's.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"--suite {folder}: there is no such folder.")
    tasks = sorted(path.parent for path in [*root.glob("reference.py"), *root.glob("*/reference.py")])
    judgements, failures = [], {}
    for task in tasks:
        reference = f"{task / 'reference.py'}:{_function_in(task / 'reference.py')}"
        for file in sorted(task.glob("*.py")):
            if file.name == "reference.py" or file.name.startswith("_"):
                continue
            name = str(file.relative_to(root))
            try:
                function = _function_in(file, prefer=reference.rpartition(":")[2])
                judgements.append(judge(f"{file}:{function}", against=reference, **options))
            except NearpeakError as error:
                failures[name] = str(error)
    if not judgements and not failures:
        raise UsageError(
            f"--suite {folder}: no candidates. A task is a folder with a reference.py, and every other .py in it is a "
            "candidate."
        )
    return SuiteJudgement(folder=str(folder), judgements=tuple(judgements), failures=failures)


def _function_in(path: Path, prefer: str = "") -> str:
    """The function of a file that is judged, from its text: nothing is run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise CaseError(f"{path} cannot be read as Python: {error}.") from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    models = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_module_class(node)]
    if models:
        like = [name for name in models if name.startswith(prefer)]
        return prefer if prefer in models else (like or models)[-1]
    names += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id == prefer
    ]
    own = [name for name in names if name not in ("inputs", "get_inputs", "make_inputs", "generate_input")]
    if prefer in own:
        return prefer
    if not own:
        raise CaseError(f"{path} defines no function that could be judged.")
    return own[-1]


def _is_module_class(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "Module" for base in node.bases)


def _memory_folder() -> str | None:
    """A folder in memory, where the system has one: tensors cross by file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class _RivalEnded(Exception):
    """The process of the reference crashed or hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptBlock:
    """Results of a timed block."""

    cache: str
    seed: int
    chosen: list[int]
    outputs: Path
    bytes: int


class _Privileges(NamedTuple):
    """What the system gives a process before others."""

    priority: int = 0
    """Less is more."""
    processors: int = 0
    policy: int = 0
    """Of the scheduler."""

    def is_above(self, other: _Privileges) -> bool:
        """Whether a process with these takes processors from one with others."""
        ranks = [_POLICIES.get(each.policy, 2) for each in (self, other)]
        return ranks[0] > ranks[1] or (ranks[0] == ranks[1] and self.priority < other.priority)


_POLICIES = {getattr(os, f"SCHED_{name}", -1 - rank): rank for rank, name in enumerate(("IDLE", "BATCH", "OTHER"))}
_POLICIES |= {getattr(os, f"SCHED_{name}", -9): 3 for name in ("RR", "FIFO")}
"""By what comes first."""


def _privileges(pid: int) -> _Privileges:
    """Those of the first thread of a process."""
    try:
        policy = os.sched_getscheduler(pid)
        return _Privileges(os.getpriority(os.PRIO_PROCESS, pid), len(os.sched_getaffinity(pid)), policy)
    except (AttributeError, OSError):  # another system, or the process has ended
        return _Privileges()


def _is_drawn(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results for the same inputs differ by more than another order of sums explains in any dtype."""
    if first.shape != second.shape or not first.numel() or same_values(first, second):
        return first.shape != second.shape
    if not first.is_floating_point():
        return float((first != second).double().mean()) > RANDOM_SHARE
    a, b = first.detach().double().nan_to_num(), second.detach().double().nan_to_num()
    return float((a - b).norm()) > RANDOM_SHARE * float(a.norm())


def _has_form_of(mine: torch.Tensor, own: torch.Tensor) -> bool:
    return mine.shape == own.shape and mine.is_complex() == own.is_complex()


class _Trial:
    """One judgement in the making."""

    def __init__(
        self,
        *,
        candidate: str,
        against: str,
        inputs: str | None,
        sizes: list[dict[str, int]],
        device: torch.device,
        folder: Path,
        timeout: float,
        max_seconds: float,
        budget: float,
        mutates: tuple[int, ...],
        draws: random.Random,
        say: Progress,
    ) -> None:
        self.start, self.budget, self.waited = time.perf_counter(), budget, waited_seconds(os.getpid())
        self.channel: Channel
        self._waited_by_others = 0.0
        """Seconds in which the process of the reference waited for a processor, until it had imported it."""
        self.candidate, self.against, self.inputs_name = candidate, against, inputs
        self.sizes, self.device, self.folder, self.timeout = sizes, device, folder, timeout
        self.max_seconds, self.mutates, self.draws, self.say = max_seconds, mutates, draws, say
        self.charges: dict[str, Charge] = {}
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.speeds: list[Speed] = []
        self.kernels: tuple[KernelShare, ...] = ()
        self.deterministic: bool | None = None
        self.bytes_held: float | None = None
        self.last_words = ""
        self.relative_on_spikes = 0.0
        self.is_interpreted = False
        self.is_given_right = False
        self.given_rms_ratio = 0.0
        """The typical error of the call on the given inputs."""
        self.is_state_known = False
        self.is_device_lost = False
        self.untimed = ""
        self.mutated: list[int] = []
        """Positions of the tensors that the reference changes."""
        self.beside_rivals: list[tuple[float, float]] = []
        """Processor seconds of the candidate's processes during the blocks of its rivals, and the seconds of these."""
        self.keys: list[str] | None = None
        """Of the reference's result, where it is a dictionary."""
        self.has_gradients = False

    def run(self, *, compile_reference: bool, timed: bool, sanitize: str | None, memory_bytes: int | None) -> Judgement:
        """Everything in order; a candidate that ends its process is judged by what was seen until then."""
        path, function = self.path, self.function = _split(self.candidate)
        prefix = sanitizer_prefix(sanitize) if sanitize else []
        self.memory_bytes = memory_bytes
        self.channel = Channel(self.folder, str(self.device), timeout=self.timeout)
        self.rival_channel: Channel | None = None
        try:
            if timed:
                self.rival_channel = Channel(self.folder, str(self.device), timeout=self.timeout)
            self.task = Task(self.against, self.inputs_name, self.device)
            self.reference_text = self.task.path.read_bytes()
            self.given = self.task.draw(self.draws.getrandbits(48), **self.sizes[0])
            if self.task.scale_constants(self.given, self.draws.getrandbits(48), **self.sizes[0]):
                self.notes.append(
                    "All draws of the inputs are the same: others are the given ones with random factors."
                )
            self._call_reference()
            if timed:
                self._import_reference()  # before the candidate, which could change its file
            self._import_candidate(path, function)
            if timed and self.is_imported:
                self._begin_rivals(compile_reference)
            with contextlib.suppress(ProcessEnded):
                self._judge(timed)
            if sanitize and "CRASHED" not in self.charges:
                self._sanitize(prefix, sanitize)
        except OSError:
            if self.folder.is_dir():
                raise
            self._charge("READS_JUDGE", "it removed the folder of the judge")
        finally:
            waited = self._waited()
            self.channel.close()
            if self.rival_channel is not None:
                self.rival_channel.close()
        seconds = time.perf_counter() - self.start
        if waited > BUSY_MACHINE * seconds:
            words = f"in {waited:.0f} of {seconds:.0f} s the judge waited for a processor"
            self.notes.append(f"The machine was busy: {words}, which its budget does not count.")
        if self.channel.forged:
            self._charge("FORGED_REPORT", f"a line that the runner did not write: {self.channel.forged!r}")
        self._settle_charges()
        return Judgement(
            candidate=self.candidate,
            reference=self.against,
            charges=tuple(self.charges.values()),
            checks=tuple(self.checks),
            speeds=tuple(self.speeds),
            kernels=self.kernels,
            deterministic=self.deterministic,
            bytes_held=self.bytes_held,
            last_words=self.last_words,
            notes=tuple(self.notes),
            environment=_environment(self._instrument()),
            seconds=seconds,
            untimed=self.untimed,
        )

    # The budget

    def _waited(self) -> float:
        """Seconds in which this process and those that it waits for waited for a processor."""
        return self._waited_by_others + self.channel.waited_seconds() + waited_seconds(os.getpid()) - self.waited

    def _left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is spent.

        On a busy machine, the time in which this process and those that it waits for wait for a processor does not
        count, up to a limit: it must not make the judge blind.
        """
        waited = min(MOST_WAITING * self.budget, self._waited())
        return self.start + share * self.budget + waited - time.perf_counter()

    @property
    def _patience(self) -> float:
        """Seconds to wait for a reply."""
        return min(self.timeout, max(LEAST_WAIT_S, self._left()))

    def _call_reference(self) -> None:
        """Calls the reference on the given inputs: what it raises, the form of its results, and whether it repeats."""
        where = self.against
        with case_errors(where, "on the given inputs"):
            runs = []
            for _ in range(2):
                copies = self.given.changed(lambda tensor: tensor.clone())
                result = self.task.function(*copies.args, **copies.kwargs)
                pairs = zip(self.given.tensors, copies.tensors, strict=True)
                self.mutated = [i for i, (before, after) in enumerate(pairs) if not same_values(before, after)]
                runs.append([*tensors_in(result), *(copies.tensors[i] for i in self.mutated)])
        if not runs[0]:
            raise CaseError(
                f"{where} returned {type(result).__name__}: a reference returns tensors, or changes its inputs."
            )
        if any(tensor.layout != torch.strided for tensor in runs[0]):
            raise CaseError(f"{where} returned a sparse tensor: only dense ones can be compared.")
        if isinstance(result, dict) and all(isinstance(key, str) for key in result):
            self.keys = list(result)
        self.has_gradients = any(tensor.requires_grad for tensor in self.given.tensors) and any(
            tensor.is_floating_point() and tensor.requires_grad for tensor in tensors_in(result)
        )
        if any(_is_drawn(a, b) for a, b in zip(*runs, strict=True)):
            raise CaseError(
                f"{where} gives different results for the same inputs. Seed its random numbers at each call, or make "
                "them inputs."
            )

    def _import_candidate(self, path: str, function: str) -> None:
        self.say(f"{self.candidate}: importing it in a process of its own")
        if os.path.realpath(path) == os.path.realpath(self.task.path):
            self.notes.append("Candidate and reference are in one file: whether one calls the other is not seen.")
        is_apart = os.path.realpath(path) != os.path.realpath(self.task.path)
        reference = os.path.realpath(self.task.path) if is_apart else ""
        try:
            reply = self._ask("import", **self._imports(guarded=True, reference=reference))
            self.is_imported = True
            if not reply["same_weights"]:
                self.notes.append(
                    "The candidate's weights have other names or shapes than the reference's: both were drawn after "
                    "the same seed."
                )
        except CandidateError as error:
            if error.kind == "CaseError":
                raise CaseError(str(error).removeprefix("CaseError: ")) from None
            self.is_imported = False
            self._charge("RAISED", f"while it was imported: {error}")
        except ProcessEnded:
            self.is_imported = False

    def _imports(self, *, guarded: bool, reference: str = "") -> dict[str, Any]:
        """The content of a command that imports the candidate."""
        content = {"file": self.path, "function": self.function, "guarded": guarded, "reference": reference}
        return {**content, "model": self._model_file(), "memory_bytes": self.memory_bytes, "keys": self.keys}

    def _model_file(self) -> str | None:
        """The weights of a reference that is a module; None where it is a function."""
        if self.task.model is None:
            return None
        write_tensors(self._path("model"), model_content(self.task.model, self.task.init, self.task.seed))
        return "model"

    def _judge(self, timed: bool) -> None:
        if not self.is_imported:
            return
        deadline = time.perf_counter() + self.max_seconds
        if not self._check_given():
            self._integrity()
            return
        self._check_idle()
        try:
            self._judge_calls(timed, deadline)
        except CandidateError as error:
            self._charge("RAISED", f"at a repeated call: {error}")
        self._check_idle(children=True)
        self._integrity()

    def _judge_calls(self, timed: bool, deadline: float) -> None:
        """What follows from calls that return."""
        if not self.is_device_lost:
            self._check_sequence()
            if self.is_given_right and not self._is_wrong:
                self._probe_memory()
            self._check_variants(deadline)
        if self.is_device_lost:
            self.notes.append("Nothing more was checked: its process can no longer use the GPU.")
            return
        self._list_kernels()
        if timed and "WORK_BETWEEN_CALLS" in self.charges:
            self.notes.append("No time was taken: its process computes between calls.")
        elif timed and self.is_interpreted:
            self.notes.append("Triton's interpreter ran the candidate: its values were checked, and no time was taken.")
        elif timed and not self._is_wrong:
            self._time_beside_rivals()
        elif timed:
            self.notes.append("No time was taken: the results are wrong.")

    @property
    def _is_wrong(self) -> bool:
        return any(charge.fault == "wrong" for charge in self.charges.values())

    # Right

    def _check_given(self) -> bool:
        """The given inputs; False where nothing more can be said."""
        self.say(f"{self.candidate}: checking the given inputs")
        surroundings = {"patient": True, "delayed": self.device.type != "cpu"}
        variant = Variant(kind="given", words="as given", inputs=self.given, surroundings=surroundings)
        check = self._check(variant, draws=1)
        self.is_given_right = check.outcome == "passed"
        self.given_rms_ratio = check.rms_ratio or 0.0
        if check.outcome == "refused":
            self._charge("RAISED", check.detail)
            return False
        if self.has_gradients and check.outcome == "passed":
            self._check(Variant(kind="gradients", words="gradients", inputs=self.given), draws=1)
        return check.outcome != "not run"

    def _check_sequence(self) -> None:
        """Other values in the same memory, the same call again, and the first values in new memory."""
        first, second = (self.task.draw(self.draws.getrandbits(48), **self.sizes[0]) for _ in range(2))
        if [t.shape for t in first.tensors] != [t.shape for t in second.tensors]:
            self.notes.append("Shapes of the inputs differ from draw to draw: calls in the same memory were not made.")
            return
        if any(0 in tensor.stride() for tensor in first.tensors):
            return
        files = [self._file("first", first), self._file("second", second)]
        outputs = self._path("sequence")
        reply = self._ask("sequence", first=files[0], second=files[1], outputs=outputs.name, mutated=self.mutated)
        if "charge" in reply:
            self._charge_from(reply)
            return
        answers = [answer(self.task.function, each.args, each.kwargs, draws=1) for each in (first, second)]
        snapshots = self._read(outputs)["snapshots"]
        results = len(answers[0].own)
        expected = (0, 1, 1, 0)
        right = [
            self._agrees(snapshot, answers[which], results) for snapshot, which in zip(snapshots, expected, strict=True)
        ]
        if not answers[0].mutated:
            self.deterministic = bool(reply["deterministic"])
        where = ("the first call", "a call on new values in the same memory", "the same call again", "a later call")
        # A call that changes its inputs has others at its next call.
        counted = range(4) if not answers[0].mutated else (0, 1, 3)
        for i in counted:
            outcome: Outcome = "passed" if right[i] else "failed"
            self.checks.append(Check(kind="sequence", inputs=where[i], outcome=outcome))
        wrong = [i for i in counted if not right[i]]
        stale = [i for i in wrong if self._agrees(snapshots[i], answers[1 - expected[i]], results)]
        if stale:
            self._charge("CACHED_RESULT", f"{where[stale[0]]} gave the result of earlier inputs")
        elif wrong and all(self._is_imprecise(snapshots[i], answers[expected[i]], where[i]) for i in wrong):
            pass
        elif wrong and (right[0] or self.is_given_right):
            if not answers[0].mutated and right[1] != right[2]:
                self._charge("RACE", "the same call gave a right and a wrong result")
            else:
                self._charge("CACHED_RESULT", f"an earlier call is right, and {where[wrong[0]]} is wrong")
        elif wrong and len(wrong) < len(list(counted)):
            self._charge("RACE", f"{len(wrong)} of {len(list(counted))} calls gave a wrong result")
        elif wrong:
            self._charge("WRONG_VALUES", "every call of a sequence gave a wrong result")
        if reply["overwritten"] and not self._aliases(first):
            self._charge("RESULT_OVERWRITTEN", "the result of the first call changed during later calls")

    def _aliases(self, inputs: Inputs) -> bool:
        """Whether the reference returns memory of its inputs."""
        copies = inputs.changed(lambda tensor: tensor.clone())
        storages = {tensor.untyped_storage().data_ptr() for tensor in copies.tensors}
        result = tensors_in(self.task.function(*copies.args, **copies.kwargs))
        return any(tensor.untyped_storage().data_ptr() in storages for tensor in result)

    def _agrees(self, snapshot: Sequence[torch.Tensor], known: Answer, results: int) -> bool:
        if len(snapshot) != results:
            return False
        pairs = zip(snapshot, known.own, known.exact, known.perturbed, strict=False)
        return all(
            _has_form_of(mine, own) and agreement(mine, own, exact, perturbed, known).is_right
            for mine, own, exact, perturbed in pairs
        )

    def _is_imprecise(self, snapshot: Sequence[torch.Tensor], known: Answer, where: str) -> bool:
        """Whether errors that are too large in a call are about those that passed in the first: that is no deceit.

        Precision that is lowered so little that some calls pass and others do not is charged under its name.
        """
        if not self.is_given_right or not all(map(_has_form_of, snapshot, known.own)):
            return False
        pairs = zip(snapshot, known.own, known.exact, known.perturbed, strict=False)
        agreements = [agreement(mine, own, exact, perturbed, known) for mine, own, exact, perturbed in pairs]
        worst, ratio = (max(getattr(each, name) for each in agreements) for name in ("error", "rms_ratio"))
        if worst > SAME_PRECISION or ratio > SAME_PRECISION * self.given_rms_ratio:
            return False
        size = f"{ratio:.3g} times those of the reference, and {self.given_rms_ratio:.3g} times on the given inputs"
        self._charge("PRECISION_LOWERED", f"errors are {size} ({where})")
        return True

    def _check_variants(self, deadline: float) -> None:
        self.say(f"{self.candidate}: checking sizes, values and strides")
        small = small_inputs(self.task, self.draws, self.sizes[0])
        variants: list[Iterator[Variant]] = [
            value_variants(self.task, small, self.draws),
            size_variants(self.task, self.draws, self.sizes[0]),
            stride_variants(self.task, small),
            iter(self._surroundings(small)),
            self._given_variants(),
        ]
        while variants:
            for each in list(variants):
                variant = next(each, None)
                if variant is None:
                    variants.remove(each)
                    continue
                is_late = len(self.checks) > FEWEST_CHECKS and time.perf_counter() > deadline
                if is_late or self._left(CHECKS_UNTIL) <= 0:
                    self._note_unfinished(variant.kind)
                    return
                is_large = sum(tensor.numel() for tensor in variant.inputs.tensors) > 1 << 18
                check = self._check(variant, draws=1 if is_large else 2)
                tensors = variant.inputs.tensors
                has_gradients = self.has_gradients and all(t.numel() for t in tensors)
                if has_gradients and check.outcome == "passed" and variant.kind in ("sizes", "strides"):
                    self._check(Variant(kind="gradients", words=variant.words, inputs=variant.inputs))
                if self.is_device_lost:
                    return

    def _given_variants(self) -> Iterator[Variant]:
        """Some of the values and strides at the sizes that are timed: code may be careful at the small ones alone."""
        if max(tensor.numel() for tensor in self.given.tensors) <= SMALL_ELEMENTS:
            return
        values = value_variants(
            self.task, self.given, self.draws, ("large values", "a dominant row", "NaN in tensor 0")
        )
        strides = stride_variants(self.task, self.given, ("transposed", "rows padded by 3 elements"))
        for variant in itertools.chain(*itertools.zip_longest(values, strides)):
            if variant is not None:
                yield replace(variant, words=f"{variant.words}, at the given sizes")

    def _note_unfinished(self, kind: str) -> None:
        """Says how many checks were made of each kind, where the time was up before all."""
        made = collections.Counter(check.kind for check in self.checks)
        counts = ", ".join(f"{number} of {name}" for name, number in made.items())
        self.notes.append(
            f"The time for checks was up before all variants had run, at one of {kind}. {len(self.checks)} were made: "
            f"{counts}."
        )

    def _surroundings(self, small: Inputs) -> list[Variant]:
        """Calls under autocast, and on a GPU on another stream and in a CUDA graph."""
        variants = []
        if any(tensor.dtype == torch.float32 for tensor in small.tensors):
            variants.append(
                Variant(kind="autocast", words="under autocast", inputs=small, surroundings={"autocast": "bfloat16"})
            )
        if self.device.type != "cpu":
            plain = small.changed(lambda tensor: tensor.clone())
            variants += [
                Variant(kind="stream", words="on another stream", inputs=plain, surroundings={"stream": True}),
                Variant(
                    kind="graph", words="in a CUDA graph, on new values", inputs=plain, surroundings={"graph": True}
                ),
            ]
        return variants

    def _check(self, variant: Variant, draws: int = 2) -> Check:
        """Calls the candidate on the inputs of a variant, compares the result, and charges what is wrong."""
        check = self._checked(variant, draws)
        self.checks.append(check)
        return check

    def _checked(self, variant: Variant, draws: int) -> Check:
        inputs, kind = variant.inputs, variant.kind
        words = f"{inputs.words()}; {variant.words}"
        autocast = variant.surroundings.get("autocast")
        context = None if not autocast else partial(torch.autocast, self.device.type, getattr(torch, autocast))
        seeds = self._gradient_seeds(inputs) if kind == "gradients" else None
        known = answer(self.task.function, inputs.args, inputs.kwargs, seeds, context, draws)
        if kind in ("nonfinite", "infinity") and known.is_exact:
            known = without_nonfinite(known, self.task.function, inputs.args, inputs.kwargs)
        if not known.is_exact and kind == "given":
            self.notes.append("The reference does not run in float64: results are compared with its own dtype.")
        outputs = self._path("outputs")
        message: dict[str, Any] = {
            "inputs": self._file("inputs", inputs),
            "outputs": outputs.name,
            **variant.surroundings,
        }
        if seeds is not None:
            write_tensors(self._path("gradients"), seeds)
            message["gradients"] = self._path("gradients").name
        try:
            reply = self._ask("call", **message)
        except CandidateError as error:
            if self.memory_bytes is not None and _is_out_of_memory(error):
                limit = f"{self.memory_bytes / 2**30:.3g} GiB"
                self._charge("OUT_OF_MEMORY", f"a call may allocate {limit} ({words}): {error}")
                self.last_words = self.last_words or self.channel.last_words()
                return Check(kind=kind, inputs=words, outcome="not run" if kind == "given" else "failed")
            if error.is_device_lost:
                self.is_device_lost = True
                name = "RAISED" if kind == "given" else _KINDS.get(kind, "CRASHED")
                self._charge(name, f"no call can follow this one ({words}): {error}")
                return Check(kind=kind, inputs=words, outcome="failed", detail=str(error))
            return Check(kind=kind, inputs=words, outcome="refused", detail=str(error))
        if "charge" in reply:
            self._charge_from(reply)
            return Check(kind=kind, inputs=words, outcome="not run" if kind == "given" else "failed")
        content = self._read(outputs)
        self._charge_mutations(reply, known, words)
        return self._compared(variant, words, known, reply, content)

    def _gradient_seeds(self, inputs: Inputs) -> list[torch.Tensor]:
        copies = inputs.changed(lambda tensor: tensor.clone())
        results = tensors_in(self.task.function(*copies.args, **copies.kwargs))
        generator = torch.Generator().manual_seed(self.draws.getrandbits(48))
        return [
            torch.randn(tensor.shape, generator=generator).to(self.device)
            for tensor in results
            if tensor.is_floating_point()
        ]

    def _charge_mutations(self, reply: dict[str, Any], known: Answer, words: str) -> None:
        undeclared = sorted(set(reply["mutated"]) - set(known.mutated) - set(self.mutates))
        if undeclared:
            self._charge("INPUT_CHANGED", f"tensor {undeclared[0]} of the inputs ({words})")

    def _compared(
        self, variant: Variant, words: str, known: Answer, reply: dict[str, Any], content: dict[str, Any]
    ) -> Check:
        kind = variant.kind
        results = [*content["results"]]
        gradients = content["gradients"] if kind == "gradients" else []
        expected_results = len(known.own) - len(known.mutated) - len(gradients)
        problem = self._form_problem(results, known.own[:expected_results], kind)
        if problem:
            self._charge("WRONG_FORM" if kind in ("given", "gradients") else _KINDS.get(kind, "WRONG_FORM"), problem)
            return Check(kind=kind, inputs=words, outcome="failed", detail=problem)
        if any(gradient is None for gradient in gradients):
            self._charge("WRONG_GRADIENT", "a result has no gradient for an input that requires one")
            return Check(kind=kind, inputs=words, outcome="failed", detail="no gradient")
        changed = content["inputs"]
        for position in known.mutated:
            results.append(self._mutated_value(position, changed, variant))
        results += gradients
        agreements = [
            agreement(mine, own, exact, perturbed, known)
            for mine, own, exact, perturbed in zip(results, known.own, known.exact, known.perturbed, strict=True)
        ]
        worst = max(agreements, key=lambda each: (each.error, each.rms_ratio))
        lowered = next((each for each in agreements if each.lowered), None)
        if worst.error <= 1 and lowered is not None:
            worst = lowered
        right = worst.is_right
        later = content["later"]
        if later is None and not right and kind == "given":
            later = self._look_again(results[:expected_results])
        if later is not None:
            self._charge_escape(later, known, expected_results, right)
        if kind == "autocast" and not right:
            detail = f"another precision than the reference under autocast: {worst.where}"
            return Check(kind=kind, inputs=words, outcome="differs", error=_finite(worst.error), detail=detail)
        if kind == "infinity" and not right:  # torch's own kernels differ here: infinity over infinity is NaN, or 0
            detail = f"another result than the reference's: {worst.where}"
            return Check(kind=kind, inputs=words, outcome="differs", error=_finite(worst.error), detail=detail)
        if kind == "nonfinite" and not right and (how := self._differs_in_nan(variant, known, results)):
            detail = f"{how}: {worst.where}"
            return Check(kind=kind, inputs=words, outcome="differs", error=_finite(worst.error), detail=detail)
        poisoned = max(_poisoned_share(mine) for mine in results)
        if not right and kind == "graph" and self._charge_stale_graph(variant, results):
            return Check(kind=kind, inputs=words, outcome="failed", error=_finite(worst.error), detail=worst.where)
        if not right:
            self._charge_wrong(variant, words, known, worst, poisoned)
        return Check(
            kind=kind,
            inputs=words,
            outcome="passed" if right else "failed",
            error=_finite(worst.error),
            rms_ratio=_finite(worst.rms_ratio),
            detail="" if right else f"{100 * worst.wrong_share:.3g} % of elements; {worst.where}",
        )

    def _differs_in_nan(self, variant: Variant, known: Answer, results: Sequence[torch.Tensor]) -> str:
        """How results that are right elsewhere differ in NaN from the answer where they may; empty where they may not.

        Infinities among the inputs, without any NaN, may make the reference's NaN alone: torch's own attention has 0
        there in some dtypes. A NaN may reach a little more than in the reference, but never less; see `reach_of_nan`.
        """
        inputs = variant.inputs
        has_nan = any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in inputs.tensors)
        filled, added = [], [torch.zeros_like(mine, dtype=torch.bool) for mine in results]
        for i, (mine, exact) in enumerate(zip(results, known.exact, strict=True)):
            if mine.is_floating_point():
                added[i] = mine.isnan() & exact.isfinite()
                mine = mine if has_nan else torch.where(exact.isnan(), torch.nan, mine)
            filled.append(mine)
        if is_spread := any(bool(more.any()) for more in added):
            reached = reach_of_nan(known, self.task.function, inputs.args, inputs.kwargs)
            for i, (more, within) in enumerate(zip(added, reached, strict=True)):
                filled[i] = torch.where(more & within, known.exact[i].to(filled[i].dtype), filled[i])
        if not self._agrees(filled, known, len(known.own)):
            return ""
        if is_spread:
            share = sum(int(more.sum()) for more in added) / sum(more.numel() for more in added)
            return f"NaN at {100 * share:.3g} % more of the elements than in the reference"
        return "no NaN where the reference's infinities give one"

    def _look_again(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The result of the last call some time later; None where it stays the same."""
        for wait_s in LATE_S:
            time.sleep(wait_s)
            outputs = self._path("look")
            self._ask("look", outputs=outputs.name)
            later: list[torch.Tensor] = self._read(outputs)["results"]
            if not all(same_values(a, b) for a, b in zip(results, later, strict=True)):
                return later
        return None

    def _mutated_value(self, position: int, changed: Any, variant: Variant) -> torch.Tensor:
        if changed is not None:
            value: torch.Tensor = changed[position]
            return value
        return variant.inputs.tensors[position].detach()

    def _form_problem(self, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], kind: str) -> str:
        if len(results) != len(expected):
            return f"{len(results)} tensors, and {len(expected)} from the reference"
        for mine, own in zip(results, expected, strict=True):
            if mine.shape != own.shape:
                return f"shape {tuple(mine.shape)}, and {tuple(own.shape)} from the reference"
            if mine.dtype != own.dtype and not (kind == "autocast" and _has_form_of(mine, own)):
                return f"dtype {mine.dtype}, and {own.dtype} from the reference"
        return ""

    def _charge_escape(self, later: Sequence[torch.Tensor], known: Answer, results: int, was_right: bool) -> None:
        if not was_right and self._agrees(later, known, results):
            self._charge("WORK_ESCAPES", "the result was wrong when the call returned, and right a little later")
        else:
            self._charge("WORK_ESCAPES", "the result changed after the call had returned")

    def _charge_wrong(self, variant: Variant, words: str, known: Answer, worst: Agreement, poisoned: float) -> None:
        kind = variant.kind
        detail = f"{100 * worst.wrong_share:.3g} % of elements out of tolerance ({words}): {worst.where}"
        if kind == "spikes":
            self.relative_on_spikes = max(self.relative_on_spikes, worst.relative)
        if poisoned > 0:
            self._charge(
                "UNINITIALIZED_MEMORY", f"{100 * poisoned:.3g} % of elements hold memory that nobody wrote ({words})"
            )
        elif kind == "given":
            self._charge(_name_of(worst), _evidence(worst, words, detail))
        elif kind in ("values", "spikes") and worst.looks_rounded:
            self._charge("PRECISION_LOWERED", _evidence(worst, words, detail))
        elif self.is_given_right and not self.is_state_known and self._is_right_afresh(variant, known):
            self._charge("CACHED_RESULT", f"right in a new process, and wrong after earlier calls ({words})")
        else:
            self._charge(_KINDS.get(kind, "WRONG_VALUES"), detail)

    def _charge_stale_graph(self, variant: Variant, results: Sequence[torch.Tensor]) -> bool:
        """Names a graph whose replay gives the result of earlier values: whose, tells a cache from another stream.

        A call in a graph that returns what came of the values before it was captured does not compute. One that
        returns what came of the values at its capture computed meanwhile, outside of the graph.
        """
        inputs = variant.inputs.changed(lambda tensor: tensor.clone())
        for charge, evidence in (
            ("CACHED_RESULT", "in a CUDA graph, it gave the result of values from before it was captured"),
            ("WRONG_STREAM", "its work is not in a CUDA graph of it: replayed, it gave the result of earlier values"),
        ):
            halve(inputs.tensors)
            known = answer(self.task.function, inputs.args, inputs.kwargs, draws=1)
            if self._agrees(results, known, len(known.own) - len(known.mutated)):
                self._charge(charge, f"{evidence} ({inputs.words()})")
                return True
        return False

    def _is_right_afresh(self, variant: Variant, known: Answer) -> bool:
        """Whether a process in which nothing was called before gives the right result; asked once."""
        self.is_state_known = True
        channel = Channel(self.folder, str(self.device), timeout=self._patience)
        outputs = self._path("afresh")
        try:
            channel.ask("import", **self._imports(guarded=True))
            inputs = self._file("inputs", variant.inputs)
            channel.ask("call", inputs=inputs, outputs=outputs.name, **variant.surroundings)
            results = read_tensors(outputs, self.device)["results"]
        except (CandidateError, ProcessEnded, OSError, ValueError):
            return False
        finally:
            channel.close()
        return self._agrees(results, known, len(known.own) - len(known.mutated))

    def _settle_charges(self) -> None:
        """One cause has one name: what follows from another charge is left out."""
        if "PRECISION_LOWERED" in self.charges and self.relative_on_spikes > 0.1:
            charge = self.charges.pop("PRECISION_LOWERED")
            self.charges.setdefault("WORK_SKIPPED", Charge(name="WORK_SKIPPED", evidence=charge.evidence))
        explained = {
            "INPUT_CHANGED": ("RACE", "RESULT_OVERWRITTEN", "CACHED_RESULT", "WRONG_WHEN_TIMED"),
            "WORK_ESCAPES": (
                *_RESULTS,
                "RESULT_OVERWRITTEN",
                "UNINITIALIZED_MEMORY",
                "CACHED_RESULT",
                "RACE",
                "WORK_SKIPPED",
            ),
            "UNINITIALIZED_MEMORY": (*_RESULTS, "CACHED_RESULT", "RACE", "WORK_SKIPPED"),
            "PRECISION_LOWERED": _RESULTS,
            "WORK_SKIPPED": _RESULTS,
            "CACHED_RESULT": (*_RESULTS, "WORK_SKIPPED", "WRONG_WHEN_TIMED", "RESULT_OVERWRITTEN"),
            "MEMOIZED": ("INPUTS_RECOGNIZED",),
            "WRONG_FORM": _RESULTS,
            "WRONG_VALUES": tuple(name for name in _RESULTS if name != "WRONG_VALUES"),
        }
        for name, others in explained.items():
            if name in self.charges:
                for other in others:
                    self.charges.pop(other, None)

    # Honest

    def _probe_memory(self) -> None:
        """Whether a call on inputs that came before is faster, whether known inputs are, and what is kept."""
        draws = [("MEMOIZED", self.draws.getrandbits(48), "inputs that came before")]
        draws += [("INPUTS_RECOGNIZED", seed, f"what torch.manual_seed({seed}) draws") for seed in KNOWN_SEEDS]
        for charge, seed, words in draws:
            if self._left(PROBES_UNTIL) <= 0:
                self.notes.append(f"The time was up: calls on {words} were not compared with others.")
                continue
            is_known = charge == "INPUTS_RECOGNIZED" and self.task.is_constant
            inputs = self.given if is_known else self.task.draw(seed, **self.sizes[0])
            outputs = self._path("probe")
            message = {"inputs": self._file("inputs", inputs), "outputs": outputs.name}
            change = self.draws.getrandbits(32)
            try:
                reply = self._ask("probe", seed=change, calls=PROBES, **message)
                if charge == "MEMOIZED":
                    self._check_changed(self._read(outputs), inputs, "one element of the inputs was changed in place")
                if _is_faster(reply, 0.5):
                    # With more calls and nearly all of them: an accusation must not come from noise.
                    reply = self._ask("probe", seed=change, calls=MORE_PROBES, **message)
            except CandidateError:
                if self._accepts_changes(inputs, change):
                    raise
                self.notes.append("Inputs with one element changed have no result: whether it keeps any is not seen.")
                break
            if _is_faster(reply, 0.75):
                same, changed = (median(reply[name]) * 1e6 for name in ("same", "changed"))
                self._charge(charge, f"{same:.0f} us on {words}, {changed:.0f} us with one element changed")
                continue
            if median(reply["changed"]) < LONG_CALL_S:
                self._probe_work(charge, inputs, words, {**message, "seed": change})
        self._load_sets(self.channel, self.sizes[0])
        sizes = self._ask("held", calls=6, seed=self.draws.getrandbits(32))["bytes"]
        self.bytes_held = float(max(0, sizes[-1] - sizes[0])) if sizes else None
        steps = [b - a for a, b in itertools.pairwise(sizes[1:])]
        if steps and min(steps) > 0:
            self._charge("MEMOIZED", f"every call keeps {min(steps)} bytes more of tensors")
        self._check_results()

    def _check_results(self) -> None:
        """Whether results are there when a call returns, and stay for as many calls as time allows."""
        # What changes its inputs would change the same memory again and again.
        if self.mutated or self._left(CHECKS_UNTIL) <= 0:
            return
        is_large = sum(tensor.numel() * tensor.element_size() for tensor in self.given.tensors) > SETS_BYTES / SETS
        limits = {"staged": 2 if is_large else 4, "calls": MOST_REPEATED, "seconds": REPEATED_S}
        reply = self._ask("results", seed=self.draws.getrandbits(48), **limits)
        if reply["overwritten"] and not self._aliases(self.given):
            evidence = f"the result of the first call changed during the next {len(reply['call'])}"
            self._charge("RESULT_OVERWRITTEN", evidence)
        late = min(first - second for first, second in zip(reply["first"], reply["second"], strict=True))
        call = median(reply["call"])
        if late > max(LATE_SHARE * call, 20e-6):
            words = f"a call takes {call * 1e6:.0f} us, and its result {late * 1e6:.0f} us more at the first reading"
            self._charge("LAZY_RESULT", f"{words} than at the second")

    def _probe_work(self, charge: str, inputs: Inputs, words: str, message: dict[str, Any]) -> None:
        """The same by the kernels of a call: in short calls, launches and copies take longer than the work."""
        try:
            turns = self._ask("work", turns=WORK_TURNS, **message)["turns"]
        except CandidateError as error:
            self.notes.append(f"The kernels of calls cannot be compared: {error}")
            return
        content = self._read(self._path(message["outputs"]))
        self._check_changed(content, inputs, "two elements of the inputs were exchanged in place")
        if evidence := _missing_work(turns):
            self._charge(charge, f"on {words} {evidence}")

    def _accepts_changes(self, inputs: Inputs, seed: int) -> bool:
        """Whether the reference runs on the inputs of a probe, each with another element changed."""
        for turn in range(MORE_PROBES):
            changed = inputs.changed(lambda tensor: tensor.clone())
            change_one(changeable(changed.tensors), turn, seed)
            if not self.task.accepts(changed):
                return False
        return True

    def _check_changed(self, content: dict[str, Any], before: Inputs, words: str) -> None:
        """After a change of the inputs in place, the result must be that of the new values, and not of those before."""
        args, kwargs = content["arguments"]
        known = answer(self.task.function, args, kwargs, draws=1)
        if known.mutated or self._agrees(content["results"], known, len(known.own)):
            return
        stale = answer(self.task.function, before.args, before.kwargs, draws=1)
        if self._agrees(content["results"], stale, len(stale.own)):
            self._charge("CACHED_RESULT", f"{words}, and the result did not follow")
        elif not self._is_imprecise(content["results"], known, words):
            self._charge("WRONG_WHEN_TIMED", f"{words}, and the result of a timed call is wrong")

    def _check_idle(self, *, children: bool = False) -> None:
        """Whether its process, or those that it started, work while nobody calls it, in each of two intervals."""
        shares = []
        for _ in range(2):
            time.sleep(0.02)
            start, before = time.perf_counter(), self._worked(children)
            time.sleep(IDLE_S)
            after, passed = self._worked(children), time.perf_counter() - start
            if before is None or after is None or after - before < BUSY_SHARE * passed:
                return
            shares.append((after - before) / passed)
        who = "its threads and the processes that it started" if children else "its threads"
        evidence = f"{who} were busy for {100 * min(shares):.0f} % of {2 * IDLE_S:g} s without a call"
        self._charge("WORK_BETWEEN_CALLS", evidence)

    def _worked(self, children: bool) -> float | None:
        """Processor seconds of its process until now; on a busy machine a thread waits for a processor most of it."""
        own = self.channel.processor_seconds()
        return None if own is None else sum(own) + (self.channel.child_seconds() if children else 0.0)

    def _integrity(self) -> None:
        reply = self._ask("integrity")
        for name, evidence in reply["charges"].items():
            self._charge(name, str(evidence)[:300])
        if reply["settings"]:
            self.notes.append(f"The candidate changed settings of its process: {', '.join(reply['settings'])}.")

    def _list_kernels(self) -> None:
        self._load_sets(self.channel, self.sizes[0])
        try:
            reply = self._ask("kernels")
        except CandidateError as error:
            self.notes.append(f"The kernels cannot be listed: {error}")
            return
        self.is_interpreted = bool(reply["interpreted"]) and self.device.type == "cpu"
        total = sum(seconds for _, _, seconds in reply["kernels"]) or 1.0
        rows = sorted(reply["kernels"], key=lambda row: -row[2])[:12]
        self.kernels = tuple(
            KernelShare(
                name=str(name), calls=int(calls), seconds=seconds, share=seconds / total, library=_library(name)
            )
            for name, calls, seconds in rows
        )

    def _sanitize(self, prefix: list[str], tool: str) -> None:
        """Calls of small inputs, also of odd sizes, under compute-sanitizer."""
        self.say(f"{self.candidate}: running it under compute-sanitizer")
        channel = Channel(self.folder, str(self.device), timeout=4 * self.timeout, prefix=prefix)
        inputs = [small_inputs(self.task, self.draws, self.sizes[0])]
        inputs += [each.inputs for each in itertools.islice(size_variants(self.task, self.draws, self.sizes[0]), 3)]
        try:
            channel.ask("import", **self._imports(guarded=False))
            channel.ask("once", inputs=[self._file(f"watched{i}", each) for i, each in enumerate(inputs)])
        except (CandidateError, ProcessEnded):
            pass  # what it wrote is read below
        finally:
            channel.finish(self.timeout)
        report = sanitizer_report(channel.words())
        if report is None:
            self.notes.append(f"compute-sanitizer {tool} did not finish. {channel.last_words()[-300:]}".strip())
        elif report[0]:
            self._charge("MEMORY_ERROR", f"{tool}: {report[0]} of {report[1] or 'them'}")
            self.last_words = self.last_words or channel.last_words()
        else:
            self.notes.append(f"compute-sanitizer {tool} found nothing.")

    # Fast

    def _time(self) -> None:
        floors = [self._floor(sizes) for sizes in self.sizes]
        rivals = self._rivals()
        for sizes, floor in zip(self.sizes, floors, strict=True):
            self.say(f"{self.candidate}: timing {_sizes_text(sizes)}")
            speed = self._speed(sizes, rivals, floor)
            if speed is None:
                return
            self.speeds.append(speed)
            self._check_floor(speed, floor)

    def _time_beside_rivals(self) -> None:
        """Takes the times, as far as the process of the reference goes, and sees what was done to that process."""
        assert self.rival_channel is not None
        try:
            self._time()
        except _RivalEnded as end:
            self.untimed = f"The process of the reference ended while times were taken: {end}."
            self.notes.append(self.untimed)
            return
        if (now := _privileges(self.rival_channel.pid)) != self.rival_privileges:
            before, after = (", ".join(map(str, each)) for each in (self.rival_privileges, now))
            words = "priority, processors and scheduling policy of the reference"
            self._charge("DISTURBS_RIVAL", f"{words} were {before}, and are {after}")
        elif (own := _privileges(self.channel.pid)).is_above(now):
            evidence = f"it gave itself priority {own.priority} and scheduling policy {own.policy}"
            self._charge("DISTURBS_RIVAL", f"{evidence}; the reference has {now.priority} and {now.policy}")
        if self.rival_channel.stops:
            self._charge(
                "DISTURBS_RIVAL", f"the process of the reference was stopped, seen {self.rival_channel.stops} times"
            )
        self._check_beside_rivals()

    def _check_beside_rivals(self) -> None:
        """Whether it worked while the rivals were timed, in each half of their blocks."""
        half = len(self.beside_rivals) // 2
        shares = []
        for part in (self.beside_rivals[:half], self.beside_rivals[half:]):
            worked, passed = (sum(column) for column in zip(*part, strict=True)) if part else (0.0, 1.0)
            shares.append(worked / max(passed, 0.05))
        if min(shares) > BESIDE_SHARE:
            evidence = f"it was busy for {100 * min(shares):.0f} % of the time in which others were timed"
            self._charge("WORK_BETWEEN_CALLS", evidence)

    def _import_reference(self) -> None:
        """Imports the reference in the process of the rivals."""
        assert self.rival_channel is not None
        path, name, model = str(self.task.path), self.task.name, self._model_file()
        try:
            self._ask_rival("import", file=path, function=name, guarded=False, reference="", model=model)
        except _RivalEnded as end:
            raise CaseError(f"{self.against} cannot be imported in the process that times it: {end}.") from None
        self._waited_by_others += self.rival_channel.waited_seconds()
        self.rival_privileges = _privileges(self.rival_channel.pid)

    def _begin_rivals(self, compile_reference: bool) -> None:
        """Begins to compile the reference, while the candidate is checked."""
        assert self.rival_channel is not None
        self.compiling = ""
        with contextlib.suppress(ProcessEnded):  # it is noted where times are taken
            if compile_reference:
                self.compiling = self.rival_channel.command("compile", inputs=self._file("compiled", self.given))

    def _ask_rival(self, do: str, **content: Any) -> dict[str, Any]:
        """A command to the process of the reference."""
        assert self.rival_channel is not None
        try:
            return self.rival_channel.ask(do, self._patience, watched=do == "block", **content).content
        except ProcessEnded as end:
            raise _RivalEnded(end.evidence) from None

    def _restart_rivals(self) -> None:
        """A new process of the reference, where the first one still compiles; it imports the same text again."""
        self.rival_channel = Channel(self.folder, str(self.device), timeout=self.timeout)
        if self.task.path.read_bytes() != self.reference_text:
            raise _RivalEnded("its file is no longer what it was before the candidate was imported")
        self._import_reference()

    def _rivals(self) -> list[str]:
        """What the candidate is timed against."""
        assert self.rival_channel is not None
        channel = self.rival_channel
        names = ["reference"]
        if self.compiling:
            self.say(f"{self.candidate}: waiting for torch.compile of the reference")
            before = channel.waited_seconds()
            try:
                channel.answer(self.compiling, max(0.1, self._left(COMPILED_UNTIL)))
                self._waited_by_others += channel.waited_seconds() - before
                names.append("torch.compile")
            except ProcessEnded as end:
                if end.charge != "HUNG":
                    raise _RivalEnded(f"{end.evidence}, in torch.compile of the reference") from None
                self.notes.append("torch.compile of the reference was not done in time: it is left out of the times.")
                self._restart_rivals()
            except CandidateError as error:
                self.notes.append(f"torch.compile of the reference failed: {str(error)[:120]}")
        if self.device.type != "cpu":
            drawn = [self.given, self.task.draw(self.draws.getrandbits(48), **self.sizes[0])]
            files = [self._file(f"matched{i}", inputs) for i, inputs in enumerate(drawn)]
            kernel = self._ask_rival("match", inputs=files)["kernel"]
            if kernel:
                names.append("nearpeak")
                self.notes.append(f"nearpeak's kernel for this is {kernel}.")
        return names

    def _load_sets(self, channel: Channel, sizes: Mapping[str, int]) -> list[Inputs]:
        first = self.task.draw(self.draws.getrandbits(48), **sizes)
        total = sum(tensor.numel() * tensor.element_size() for tensor in first.tensors)
        count = max(1, min(SETS, int(SETS_BYTES / max(1, total))))
        sets = [first] + [self.task.draw(self.draws.getrandbits(48), **sizes) for _ in range(count - 1)]
        self._send_sets(channel, sets)
        return sets

    def _send_sets(self, channel: Channel, sets: list[Inputs]) -> None:
        files = [self._file(f"set{i}", each) for i, each in enumerate(sets)]
        ask = self._ask if channel is self.channel else self._ask_rival
        ask("sets", inputs=files)

    def _speed(self, sizes: Mapping[str, int], rivals: list[str], floor: Floor | None) -> Speed | None:
        assert self.rival_channel is not None
        sets = self._load_sets(self.channel, sizes)
        self._send_sets(self.rival_channel, sets)
        total = sum(tensor.numel() * tensor.element_size() for tensor in sets[0].tensors)
        calls = 3 if self.device.type == "cpu" else max(2, min(8, int(SETS_BYTES / max(1, total))))
        names = ["candidate", *rivals]
        series: dict[tuple[str, str], list[dict[str, Any]]] = {}
        kept: list[_KeptBlock] = []
        deadline = time.perf_counter() + self.max_seconds / (2 * len(self.sizes))
        for cache, least, most in (("cold", FEWEST_BLOCKS, MOST_BLOCKS), ("hot", 5, 8)):
            rounds = 0
            # The first round warms up, and is left out.
            while rounds <= least or (rounds < most and time.perf_counter() < deadline):
                is_late = self._left(TIMES_UNTIL) <= 0
                if is_late and rounds > LEAST_BLOCKS:
                    break
                if is_late and cache == "hot" and self._left() < LEAST_WAIT_S:
                    self.notes.append(f"The time was up: no times with a hot cache were taken at {_sizes_text(sizes)}.")
                    break
                if is_late and cache == "cold":
                    self.untimed = f"The time was up: no times were taken at {_sizes_text(sizes)}."
                    self.notes.append(self.untimed)
                    self._check_kept(sets, calls, kept)
                    self._check_clock(None)
                    return None
                for name in self.draws.sample(names, len(names)):
                    seed = self.draws.getrandbits(48)
                    block = self._block(name, cache, seed, calls)
                    if block is None:
                        return None
                    if rounds:
                        series.setdefault((name, cache), []).append(block)
                    is_due = rounds == min(least, LEAST_BLOCKS) and not any(each.cache == cache for each in kept)
                    if name == "candidate" and rounds and (is_due or self.draws.random() < CHECKED_SHARE):
                        kept += self._kept(cache, seed, calls, sum(each.bytes for each in kept))
                rounds += 1
                if rounds > least and time.perf_counter() > deadline:
                    break
        self._check_kept(sets, calls, kept)
        self._check_started(series)
        hot = {
            name: max(0.0, median([block["seconds"] for block in blocks]))
            if (blocks := series.get((name, "hot")))
            else None
            for name in names
        }
        timings = {name: self._timing(name, series[name, "cold"]) for name in names}
        enqueue = self._check_clock(timings["candidate"])
        if self.device.type != "cpu":
            self._check_streams()
        compared = []
        for name in rivals:
            comparison = compare_timings(timings[name], timings["candidate"], margin=0.02, confidence=CONFIDENCE)
            compared.append(
                Rival(
                    name=name,
                    timing=timings[name],
                    hot_seconds=hot[name],
                    ratio=comparison.ratio,
                    low=comparison.low,
                    high=comparison.high,
                    verdict=comparison.verdict,
                )
            )
        return Speed(
            sizes=_sizes_text(sizes) if sizes else sets[0].words(),
            candidate=Rival(name="candidate", timing=timings["candidate"], hot_seconds=hot["candidate"]),
            rivals=tuple(compared),
            enqueue_seconds=enqueue,
            floor_seconds=None if floor is None else floor.seconds,
            bound_seconds=None if floor is None else floor.bound_seconds,
            bound_limiter=None if floor is None else floor.limiter,
            ceilings="" if floor is None else floor.ceilings,
        )

    def _block(self, name: str, cache: str, seed: int, calls: int) -> dict[str, Any] | None:
        message: dict[str, Any] = {"name": name, "cache": cache, "seed": seed, "calls": calls, "mutated": self.mutated}
        if (device := self._instrument()) is not None:
            message["zero"] = zero_of(device.index, "cold" if cache == "cold" else "hot").events
        if name != "candidate":
            self._ask("rest")
            start, before = time.perf_counter(), self._worked(True)
            block = self._ask_rival("block", **message)
            after, passed = self._worked(True), time.perf_counter() - start
            if before is not None and after is not None:
                self.beside_rivals.append((after - before, passed))
            return block
        try:
            return self._ask("block", **message)
        except CandidateError as error:
            self._charge("RAISED", f"in a timed call: {error}")
            return None

    def _kept(self, cache: str, seed: int, calls: int, bytes_kept: int) -> list[_KeptBlock]:
        """Calls of the last block, chosen now, with their results; none where there are many already."""
        if bytes_kept > KEPT_BYTES:
            return []
        chosen = sorted(self.draws.sample(range(calls), min(calls, CHECKED_CALLS)))
        outputs = self._path(f"kept-{self.draws.getrandbits(32)}")
        self._ask("kept", chosen=chosen, calls=calls, outputs=outputs.name)
        size = outputs.stat().st_size
        return [_KeptBlock(cache=cache, seed=seed, chosen=chosen, outputs=outputs, bytes=size)]

    def _check_kept(self, sets: list[Inputs], calls: int, kept: list[_KeptBlock]) -> None:
        """The results of timed calls, on inputs that are made again here from the seed of their block."""
        deadline = time.perf_counter() + self.max_seconds / 2
        for number, block in enumerate(self.draws.sample(kept, len(kept))):
            if number >= FEWEST_CHECKED and time.perf_counter() > deadline:
                return
            draws = random.Random(block.seed)
            made = [(draws.randrange(len(sets)), draws.getrandbits(48)) for _ in range(calls)]
            for chosen, results in zip(block.chosen, self._read(block.outputs)["results"], strict=True):
                which, seed = made[chosen]
                args, kwargs = rescaled(sets[which].args, seed), rescaled(sets[which].kwargs, seed)
                known = answer(self.task.function, args, kwargs, draws=1)
                right = self._agrees(results, known, len(known.own))
                outcome: Outcome = "passed" if right else "failed"
                self.checks.append(
                    Check(kind="timed", inputs=f"call {chosen + 1} of {calls} of a timed block", outcome=outcome)
                )
                if not right and not self._is_imprecise(results, known, "a timed call"):
                    self._charge("WRONG_WHEN_TIMED", f"call {chosen + 1} of a timed block gave a wrong result")

    def _seconds_of_call(self) -> float:
        """About what a call takes; on a CPU the time in which it ran, which a busy machine does not lengthen.

        So many calls that the command itself, which takes long on a busy machine, is little of it. Who sleeps in a call
        hardly runs, and must not be called for ever.
        """
        calls = 4
        while True:
            before = self.channel.processor_seconds()
            seconds = self._ask_timed("run", name="candidate", calls=calls).seconds
            after = self.channel.processor_seconds()
            if seconds >= CLOCK_RUN_S or calls >= MOST_RUN_CALLS:
                if self.device.type == "cpu" and before is not None and after is not None:
                    seconds = max(min(seconds, after[0] - before[0]), seconds / MOST_WAITING)
                return seconds / calls
            calls = min(4 * calls, MOST_RUN_CALLS)

    def _check_children(self, calls: int) -> None:
        """Whether processes that it started work while it is called, in each of two runs.

        A compiler that an early call starts is done then; its processes wait without work for more of it.
        """
        shares = []
        for _ in range(2):
            own, children = self.channel.processor_seconds(), self.channel.child_seconds()
            self._ask_timed("run", name="candidate", calls=calls)
            after = self.channel.processor_seconds()
            if own is None or after is None:
                return
            worked = self.channel.child_seconds() - children
            shares.append(worked / max(1e-9, worked + after[0] - own[0]))
        if min(shares) > CHILD_SHARE:
            evidence = f"processes that it started did {100 * min(shares):.0f} % of the work of {calls} calls"
            self._charge("WORK_ESCAPES", evidence)

    def _check_started(self, series: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> None:
        """Whether it starts processes in timed calls, which may end unseen."""
        blocks = [block for (name, _), each in series.items() if name == "candidate" for block in each]
        started = [int(block.get("processes", 0)) for block in blocks]
        if sum(map(bool, started)) > len(started) / 2:
            evidence = f"it started {sum(started)} processes in {len(started)} blocks of timed calls"
            self._charge("WORK_ESCAPES", evidence)

    def _timing(self, name: str, blocks: list[dict[str, Any]]) -> Timing:
        options = Options(confidence=0.95)
        records = [
            Block(
                seconds=float(block["seconds"]),
                readings=tuple(float(reading) for reading in block["readings"]),
                launch_hidden=block["launch_hidden"],
            )
            for block in blocks
        ]
        middle, interval = interval_of(records, options)
        flags: list[Flag] = []
        if any(block.launch_hidden is False for block in records):
            flags.append(make_flag("LAUNCH_NOT_HIDDEN", "the device ran dry before all calls were enqueued"))
        return Timing(
            name=name,
            seconds=middle,
            low=interval.low,
            high=interval.high,
            confidence=interval.confidence,
            kind="cpu" if self.device.type == "cpu" else "device",
            method=str(blocks[-1]["method"])[:200],
            cache="cold",
            regime="sustained" if self.device.type == "cpu" else "burst",
            blocks=tuple(records),
            flags=tuple(flags),
            environment=_environment(self._instrument()),
        )

    def _check_clock(self, timing: Timing | None) -> float | None:
        """Calls in a row on the clock of this process, also where no times were taken; the host time on a GPU."""
        self._ask("stage", seed=self.draws.getrandbits(48), calls=2)
        seconds = self._seconds_of_call()
        calls = max(2, min(MOST_RUN_CALLS, int(CLOCK_RUN_S / max(seconds, 1e-6))))
        claimed, passed, empty, ran, enqueue = [], [], [], [], []
        for _ in range(3):
            before = self.channel.processor_seconds()
            reply = self._ask_timed("run", name="candidate", calls=calls)
            after = self.channel.processor_seconds()
            ran.append(math.inf if before is None or after is None else after[0] - before[0])
            claimed.append(float(reply.content["seconds"]))
            enqueue.append(float(reply.content["enqueue"]) / calls)
            passed.append(reply.seconds)
            empty.append(self._ask_timed("run", name="candidate", calls=0).seconds)
        if self.channel.has_children():
            self._check_children(max(2, min(1000, int(CHILD_RUN_S / max(seconds, 1e-6)))))
        seen = min(passed) - min(empty)
        if self.device.type == "cpu":
            # Where other programs run, a process waits for its turn: only the time that it ran speaks against it.
            seen = min(seen, *ran)
        if min(claimed) < 0.5 * seen and seen - min(claimed) > CLOCK_RUN_S / 3:
            took = f"{calls} calls took {seen * 1e3:.1f} ms by the system"
            evidence = f"{took}, and {min(claimed) * 1e3:.1f} ms by its own report"
            self._charge("CLOCK_DISAGREES", evidence)
        if self.device.type == "cpu" and timing is not None and timing.high < 0.4 * seen / calls and seen > 3e-3:
            evidence = (
                f"a call takes {seen / calls * 1e6:.0f} us by the system with a hot cache, and "
                f"{timing.seconds * 1e6:.0f} us with a cold one by its own report"
            )
            self._charge("CLOCK_DISAGREES", evidence)
        return None if self.device.type == "cpu" else min(enqueue)

    def _check_streams(self) -> None:
        reply = self._ask("latency")
        stream, device = float(reply["stream"]), float(reply["device"])
        if device - stream > max(50e-6, 0.25 * device):
            self._charge(
                "WORK_ESCAPES",
                f"the current stream was done after {stream * 1e6:.0f} us, the device after {device * 1e6:.0f} us",
            )

    def _instrument(self) -> GpuInstrument | None:
        return None if self.device.type == "cpu" else gpu_instrument(self.device.index or 0)

    def _floor(self, sizes: Mapping[str, int]) -> Floor | None:
        """What a right result takes at the least, and the bound of the reference's work."""
        machine = known_machine(self._instrument())
        if machine is None or machine.achievable is None:
            note = "The limits of this machine are not known: `nearpeak machine --calibrate` measures them."
            if note not in self.notes:
                self.notes.append(note)
            return None
        # It traces, which imports the compiler of torch: two seconds, while another process compiles the reference.
        from nearpeak.judging.floor import floor_of

        try:
            return floor_of(self.task.function, self.task.draw(self.draws.getrandbits(48), **sizes), machine)
        except Exception as error:  # fake tensors cannot run everything
            self.notes.append(f"The work of the reference cannot be traced: {' '.join(str(error).split())[:120]}")
            return None

    def _check_floor(self, speed: Speed, floor: Floor | None) -> None:
        timing = speed.candidate.timing
        if floor is None:
            return
        if timing.high < floor.slack * floor.seconds:
            self._charge(
                "BELOW_FLOOR",
                f"{timing.seconds * 1e6:.1f} us, and {floor.seconds * 1e6:.1f} us is the least: {floor.why}",
            )
        elif timing.high < floor.slack * floor.bound_seconds:
            self.notes.append(
                f"It is faster than the FLOPs of the reference allow ({speed.sizes}): it leaves out work that the "
                "reference does in vain, or the figures of the machine are too low. Its results are right."
            )

    # Talking to the process

    def _ask(self, do: str, **content: Any) -> dict[str, Any]:
        """A command to the candidate's process; its end is a charge."""
        return self._ask_timed(do, **content).content

    def _ask_timed(self, do: str, **content: Any) -> Reply:
        """The same with the seconds that it took on the clock of this process."""
        try:
            return self.channel.ask(do, self._patience, **content)
        except ProcessEnded as end:
            self._charge(end.charge, f"{end.evidence}, in `{do}`")
            self.last_words = end.words
            raise

    def _charge(self, name: str, evidence: str) -> None:
        self.charges.setdefault(name, Charge(name=name, evidence=evidence))

    def _charge_from(self, reply: dict[str, Any]) -> None:
        self._charge(str(reply["charge"]), str(reply["evidence"])[:300])

    def _read(self, outputs: Path) -> Any:
        """What the process of the candidate wrote; what cannot be read is a charge, and the end."""
        try:
            return read_tensors(outputs, self.device)
        except Exception as error:  # it may hold anything
            evidence = f"what its process wrote as results cannot be read: {type(error).__name__}"
            self._charge("RUNNER_PATCHED", evidence)
            raise ProcessEnded("RUNNER_PATCHED", evidence, "") from None

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _file(self, name: str, inputs: Inputs) -> str:
        write_tensors(self._path(name), (inputs.args, inputs.kwargs))
        return name


def _split(reference: str) -> tuple[str, str]:
    path, separator, function = reference.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise CaseError(
            f"Cannot read {reference!r} as a candidate. Write FILE.py:FUNCTION, for example kernel.py:softmax."
        )
    if not Path(path).is_file():
        raise CaseError(f"There is no file {path!r} (from {Path.cwd()}).")
    return path, function


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items()) or "the given sizes"


def _is_out_of_memory(error: CandidateError) -> bool:
    words = str(error).lower()
    return error.kind in ("MemoryError", "OutOfMemoryError") or "out of memory" in words or "allocate memory" in words


def _is_faster(reply: dict[str, Any], share: float) -> bool:
    """Whether calls on the same inputs are faster by far than those with one element changed, by this share of each."""
    slow_same, fast_changed = quantile(reply["same"], share), quantile(reply["changed"], 1 - share)
    return slow_same < FASTER_ON_SAME * fast_changed and fast_changed - slow_same > 20e-6


def _missing_work(turns: Sequence[dict[str, Any]]) -> str:
    """What calls on inputs that came before leave out of the work of those on others, in words; empty where they do it.

    The turns with one element changed, or those with two exchanged, must all say it. Copies between host and device
    are no work: one who compares inputs on the host pays for them, and leaves out the rest.
    """
    shares = []
    for turn in turns:
        counts = {name: int(count) for name, (count, _) in turn["same"].items()}
        total = missing = 0.0
        for name, (count, seconds) in turn["changed"].items():
            if name != OUTSIDE and not any(way in name for way in _TRANSFERS):
                total += seconds
                missing += seconds * max(0.0, count - counts.get(name, 0)) / max(1, count)
        shares.append(missing / total if total else 0.0)
    least = max(min(shares[0::2], default=0.0), min(shares[1::2], default=0.0))
    if least <= 1 - FASTER_ON_SAME:
        return ""
    return f"it leaves out {100 * least:.0f} % of the work that it does with an element changed"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else 1e30


def _name_of(worst: Agreement) -> str:
    if worst.looks_rounded or (worst.lowered and worst.error <= 1):
        return "PRECISION_LOWERED"
    if worst.unwritten_share > 0.9 * worst.wrong_share > 0.01:
        return "WORK_SKIPPED"
    return "WRONG_VALUES"


def _evidence(worst: Agreement, words: str, detail: str) -> str:
    if _name_of(worst) == "PRECISION_LOWERED":
        size = f"{worst.rms_ratio:.3g} times those of the reference, {worst.relative:.2g} of the values"
        return f"errors are {size} ({words})"
    return detail


def _poisoned_share(tensor: torch.Tensor) -> float:
    """Elements whose bytes are those that memory was filled with."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    raw = bytes_of(tensor).reshape(tensor.numel(), tensor.element_size())
    return float((raw == POISON).all(dim=1).double().mean())


def _library(name: str) -> str:
    lower = name.lower()
    return next((library for parts, library in _LIBRARIES if any(part in lower for part in parts)), "")


def _environment(device: GpuInstrument | None) -> Environment:
    return Environment(
        device=device.name if device is not None else detect_cpu().name,
        driver=device.conditions.driver() if device is not None else None,
        torch=torch.__version__,
        python=platform.python_version(),
        nearpeak=nearpeak.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
    )

"""`Case`: what to time, with its arguments; `Resampled` arguments; and how a case is loaded from a file."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nearpeak._display import headline
from nearpeak.errors import CaseError, NearpeakError, UsageError, did_you_mean, message_of
from nearpeak.ops.work import Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True, init=False)
class Case:
    """A callable with its arguments, ready to be timed.

    `work` is the least work of a call, for a bound of its time. `reset` runs before every call, outside of the timed
    region: to zero gradients, or to restore inputs that the call changes.

    >>> Case(sum, [1, 2, 3]).call()
    6
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    work: Work | None = None
    reset: Callable[[], Any] | None = None
    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    resampled: tuple[tuple[Any, Resampled[Any]], ...] = ()
    """Arguments that are drawn again for each block, with their generators."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        work: Work | None = None,
        reset: Callable[[], Any] | None = None,
        name: str = "",
        parameters: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(fn):
            raise CaseError(
                f"A case needs something to call, and got {_brief(fn)} of type {type(fn).__name__}. Pass a function "
                "and its arguments: bench(torch.softmax, x, -1), not bench(torch.softmax(x, -1))."
            )
        if getattr(_attribute(fn, "__code__"), "co_flags", 0) & _NOT_RUN_BY_A_CALL:
            raise CaseError(
                f"A case cannot be {_brief(fn)}: it is a generator or async, and a call of it runs nothing. Pass a "
                "function that runs it to its end."
            )
        if work is not None and not isinstance(work, Work):
            raise CaseError(f"The work of a case is a nearpeak.Work, and not {_brief(work)}.")
        resampled: list[tuple[Any, Resampled[Any]]] = []

        def draw_first(value: Any) -> Any:
            if not issubclass(type(value), Resampled):  # whatever the class of a value says of itself
                return value
            resampled.append((value.draw(0), value))
            return resampled[-1][0]

        for attribute, value in (
            ("fn", fn),
            ("args", tuple(draw_first(value) for value in args)),
            ("kwargs", {key: draw_first(value) for key, value in kwargs.items()}),
            ("work", work),
            ("reset", reset),
            ("name", name or str(_attribute(fn, "__name__", type(fn).__name__))),
            ("parameters", dict(parameters or {})),
            ("resampled", tuple(resampled)),
        ):
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        """Without its arguments, which may be large tensors."""
        parameters = "".join(f", {name}={value}" for name, value in self.parameters.items())
        return headline(f"Case {self.name}: {len(self.args) + len(self.kwargs)} arguments{parameters}")

    def call(self) -> Any:
        """Runs it once."""
        return self.fn(*self.args, **self.kwargs)

    def resample(self, block: int) -> None:
        """Copies a new draw into the `Resampled` arguments."""
        for current, source in self.resampled:
            for old, new in zip(_tensors(current), _tensors(source.draw(block)), strict=True):
                if old.shape != new.shape:
                    raise CaseError(
                        f"{self.name}: a Resampled input has shape {tuple(old.shape)} in one draw and "
                        f"{tuple(new.shape)} in another. Keep the shape, and vary the values."
                    )
                old.detach().copy_(new)

    def tensors(self) -> Iterator[Any]:
        """The tensors among the arguments, through lists, tuples and dictionaries."""
        yield from _tensors((self.args, dict(self.kwargs)))

    def hidden_tensors(self) -> Iterator[Any]:
        """The tensors that the function holds: in its closure, defaults, bound object or module parameters."""
        fn: Any = self.fn
        while (inner := _attribute(fn, "__wrapped__", _attribute(fn, "func"))) is not None:  # functools: wraps, partial
            yield from _tensors((_attribute(fn, "args"), _attribute(fn, "keywords")))
            fn = inner
        yield from _parameters(_attribute(fn, "__self__", fn))
        cells = _attribute(fn, "__closure__") or ()
        contents = [cell.cell_contents for cell in cells if _filled(cell)]
        for content in [*contents, *(_attribute(fn, "__defaults__") or ())]:
            yield from _parameters(content)
            yield from _tensors(content)

    def with_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Case:
        """The same case on other arguments, which are no longer resampled."""
        return Case(
            self.fn, *args, work=self.work, reset=self.reset, name=self.name, parameters=self.parameters, **kwargs
        )

    def with_fields(self, **fields: Any) -> Case:
        """The same case with another name, work, reset or parameters."""
        changed = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(changed, name, value)
        return changed


@dataclass(frozen=True, slots=True)
class Resampled(Generic[T]):
    """Inputs that are drawn again for each block of a measurement, so that no single draw decides the result.

    `make` gets the number of the block as its seed, so that a run can be repeated value by value. Every draw has the
    same shapes: the values change in place, outside the timed region.

    >>> inputs = Resampled(lambda seed: [seed, seed + 1])
    >>> inputs.draw(0), inputs.draw(3)
    ([0, 1], [3, 4])
    """

    make: Callable[[int], T]

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise UsageError(f"Resampled takes a function of a seed, found {type(self.make).__name__}.")

    def draw(self, block: int) -> T:
        """The inputs of that block."""
        if block < 0:
            raise UsageError(f"block is {block}; it must be at least 0.")
        return self.make(block)


def as_case(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], **fields: Any) -> Case:
    """`fn` if it is a case, else a new case with it."""
    if isinstance(fn, Case):
        if args or kwargs:
            raise CaseError("A Case brings its own arguments: pass either bench(case) or bench(fn, *args).")
        return fn.with_fields(**{key: value for key, value in fields.items() if value})
    return Case(fn, *args, **fields, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBuilder:
    """A function in a file that builds a case; its parameters are what a sweep varies."""

    path: Path
    name: str
    function: Callable[..., Any]

    def build(self, **parameters: Any) -> Case:
        """Calls the function and checks what it returned."""
        where = f"{self.path}:{self.name}"
        signature = inspect.signature(self.function)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        for parameter in parameters:
            if parameter not in signature.parameters and not takes_any:
                hint = did_you_mean(parameter, signature.parameters) if signature.parameters else "It takes none."
                raise CaseError(f"{where} has no parameter {parameter!r}. {hint}")
        with case_errors(where, "while building its inputs", "failed"):
            built = self.function(**parameters)
        if inspect.isgenerator(built) or inspect.isasyncgen(built) or inspect.iscoroutine(built):
            if inspect.iscoroutine(built):
                built.close()  # it would warn that nobody awaited it
            raise CaseError(
                f"{where} is a generator or async: a case is an ordinary function that returns what to time."
            )
        stated = {key: str(value) for key, value in parameters.items()}
        if isinstance(built, Case):
            return as_case(built, (), {}, name=self.name, parameters=stated)
        if callable(built):
            return Case(built, name=self.name, parameters=stated)
        if isinstance(built, tuple) and built and callable(built[0]):
            return Case(built[0], *built[1:], name=self.name, parameters=stated)
        raise CaseError(
            f"{where} returned {_brief(built)}. A case builds its inputs and returns what to time: a callable, "
            "a tuple (callable, *arguments), or a nearpeak.Case."
        )


def load(reference: str) -> CaseBuilder:
    """The case builder that `path/to/file.py:name` names. The file is run, as importing it would."""
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text.endswith(".py"):
        raise CaseError(f"Cannot read {reference!r} as a case. Write FILE.py:FUNCTION, for example cases.py:softmax.")
    path = Path(path_text)
    if not path.is_file():
        raise CaseError(f"There is no file {path_text!r} (from {Path.cwd()}).")
    module = _import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        problem = "is not callable" if name in vars(module) else "does not exist"
        raise CaseError(f"{name!r} {problem} in {path_text}. {did_you_mean(name, public) if public else ''}".strip())
    return CaseBuilder(path=path, name=name, function=function)


def _import_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"_nearpeak_case_{path.stem}", path)
    if specification is None or specification.loader is None:
        raise CaseError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with case_errors(str(path), "while it was imported", "failed"):
            specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


_NOT_RUN_BY_A_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _attribute(value: Any, name: str, default: Any = None) -> Any:
    """An attribute of an object of the user's, whose class may do anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def _parameters(module: Any) -> Iterator[Any]:
    parameters = None if isinstance(module, type) else _attribute(module, "parameters")
    if callable(parameters) and _attribute(module, "state_dict") is not None:
        yield from parameters()


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a cell that is not filled yet
        return False


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        yield value
    elif depth < 8 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif depth < 8 and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif depth < 8 and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name), depth + 1)


_OTHERS_CODE = (
    str(Path(__file__).parent),
    *(str(Path(place) / "torch") for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
)
"""Folders of code in which an error of the user's code does not begin."""


@contextlib.contextmanager
def case_errors(name: str, when: str, what: str = "raised an error") -> Iterator[None]:
    """Turns an error of the user's code, an exit too, into a `CaseError` whose cause is the original error."""
    try:
        yield
    except (NearpeakError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and errors of the user's own that are no Exception
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        problem = f"{name} {'ran out of memory' if memory else what} {when}: {describe_error(error)}"
        raise CaseError(problem + (". Use smaller inputs, or free memory." if memory else "")) from error


def describe_error(error: BaseException) -> str:
    """Type and message of an error, and its line in the user's code, on one line."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(("<", *_OTHERS_CODE)):
            place = f" (at {file}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {message_of(error)}{place}"


def _brief(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."

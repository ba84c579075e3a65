"""`see_cpp_kernels`: each C++ kernel of Inductor's is an op in a trace and a span in torch's profiler.

On a CPU, the Python module that Inductor writes for a graph calls its kernels as functions of an extension: neither
torch's dispatcher nor its profiler sees them, and their time would look like Python's. The module has each of them as
a global name, `cpp_fused_add_0 = async_compile.cpp_pybinding([types], source)`. Inside the patch these names are
functions that record a call, and call the kernel. Code that Inductor compiles as a whole (`cpp_wrapper`, AOTInductor)
has no such names: `kineto/calls.py` says that its time was not seen.

What a kernel reads and writes follows from its source (`touched_by_cpp`), as with Triton: loops over `x0`, `x1`, and
accesses `in_ptr0[x1 + 64*x0]`, or of a vector at such a place. What is accessed under a condition counts as nothing.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler as torch_profiler

from nearpeak.trace.guard import Guard
from nearpeak.trace.kineto.calls import AOT_CALL
from nearpeak.trace.patches.inductor_kernels import (
    IndexDigits,
    KernelReader,
    TouchedElements,
    integer_constant,
    record_kernel,
)
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder

_CODE_CACHE = "torch._inductor.codecache"
_AOT_PACKAGES = ("torch.export.pt2_archive._package", "torch._inductor.package.package")
"""Where versions of torch have the class of models that were compiled ahead of time."""


class CppKernel(NamedTuple):
    """A kernel as the module of its graph has it."""

    name: str
    source: str
    parameters: tuple[str, ...]


@SharedPatch
@contextmanager
def see_cpp_kernels() -> Iterator[None]:
    """Inside, calls of C++ kernels are recorded. Nothing is imported: who has kernels has imported it."""
    cache = getattr(sys.modules.get(_CODE_CACHE), "PyCodeCache", None)
    models = (getattr(sys.modules.get(name), "AOTICompiledModel", None) for name in _AOT_PACKAGES)
    model: Any = next((model for model in models if model is not None), None)
    with ExitStack() as stack:
        if cache is not None:
            for module in list(cache.modules):
                stack.enter_context(_see_kernels_of(module))
            stack.enter_context(patch_attribute(cache, "load_by_key_path", _seeing_load(cache, stack)))
        if model is not None:
            stack.enter_context(patch_attribute(model, "__call__", _marked_call(model.__call__)))
        yield


def _seeing_load(cache: Any, stack: ExitStack) -> Any:
    """The function that loads the module of a graph: code can be compiled again while it is watched."""
    guard, load = Guard(), cache.load_by_key_path

    @functools.wraps(load)
    def load_by_key_path(*args: Any, **kwargs: Any) -> Any:
        module = load(*args, **kwargs)
        guard.call(lambda: stack.enter_context(_see_kernels_of(module)))
        return module

    return load_by_key_path


@contextmanager
def _see_kernels_of(module: ModuleType) -> Iterator[None]:
    """Inside, the kernels of a module are recorded. A module that is loaded later waits for its kernels first."""
    with ExitStack() as stack:
        for kernel in _kernels_of(str(getattr(module, "__file__", ""))):
            function = getattr(module, kernel.name, None)
            if callable(function) and not hasattr(function, "__wrapped__"):
                stack.enter_context(patch_attribute(module, kernel.name, _recorded(function, kernel)))
        yield


def _recorded(function: Callable[..., Any], kernel: CppKernel) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None:
            recorder.record_beside(_record_call, recorder, kernel, args)
        if not torch_profiler._is_profiler_enabled:
            return function(*args)
        with _RecordFunctionFast(kernel.name, args, {"kernel_backend": "cpp"}):
            return function(*args)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def _record_call(recorder: Any, kernel: CppKernel, args: Sequence[Any]) -> None:
    named = dict(zip(kernel.parameters, args, strict=False))
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    sizes = tuple((name, value) for name, value in named.items() if type(value) is int)
    record_kernel(
        recorder,
        kernel.name,
        touched_by_cpp(kernel.source, sizes),
        tensors,
        "reduction" if "_acc" in kernel.source else "pointwise",
    )


def _marked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of a model that was compiled ahead of time, as a span in torch's profiler."""

    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if not torch_profiler._is_profiler_enabled:
            return call(*args, **kwargs)
        with _RecordFunctionFast(AOT_CALL):
            return call(*args, **kwargs)

    return marked


@functools.lru_cache(maxsize=1024)
def _kernels_of(path: str) -> tuple[CppKernel, ...]:
    """The C++ kernels in the module of a graph, from its source."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    kernels = []
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "cpp_pybinding"
            and len(node.value.args) == 2
            and isinstance(source := getattr(node.value.args[1], "value", None), str)
        ):
            kernels.append(CppKernel(node.targets[0].id, source, tuple(_parameters(source))))
    return tuple(kernels)


_SIGNATURE = re.compile(r'extern "C"[^(;{]*\bvoid\s+\w+\s*\((.*?)\)\s*\{', re.DOTALL)
_LOOP = re.compile(r"for\s*\(\s*(?:[\w:]+\s+)+(\w+)\s*=\s*(.*?);\s*\1\s*<\s*(.*?);")
_TAIL = re.compile(r"if\s*\(\s*C10_(?:UN)?LIKELY")
"""Inductor splits a loop into whole vectors and the rest with such a condition; each of them is true at times."""
_CONDITION = re.compile(r"\bif\s*\(|\[&\]")
_GENERATED_PARAMETER = re.compile(r"(in|out|in_out)_ptr\d+$|k?s\d+$")
_POINTER = re.compile(r"\b((?:in|out|in_out)_ptr\d+)\b")
_ALIAS = re.compile(r"\bauto (\w+_ptr\d+) = (\w+_ptr\d+);")
_CAST = re.compile(r"static_cast<[\w: ]+>")
_NUMBER = re.compile(r"\b(\d+)L{1,2}\b")


def _parameters(source: str) -> Iterator[str]:
    """The names of a kernel's parameters, in order."""
    signature = _SIGNATURE.search(source)
    for parameter in signature[1].split(",") if signature else ():
        words = re.findall(r"\w+", parameter)
        if words:
            yield words[-1]


@functools.lru_cache(maxsize=4096)
def touched_by_cpp(source: str, sizes: tuple[tuple[str, int], ...] = ()) -> TouchedElements | None:
    """The elements that a kernel reads and writes; None for code of another style, such as that of a template.

    >>> touched = touched_by_cpp('''
    ... extern "C" void kernel(const float* in_ptr0, const float* in_ptr1, float* out_ptr0, const int64_t ks0)
    ... {
    ...     for(int64_t x0=static_cast<int64_t>(0LL); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1LL))
    ...     {
    ...         for(int64_t x1=static_cast<int64_t>(0LL); x1<static_cast<int64_t>(64LL); x1+=static_cast<int64_t>(16LL))
    ...         {
    ...             auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x1 + 64LL*x0));
    ...             auto tmp1 = in_ptr1[static_cast<int64_t>(x0)];
    ...             tmp2.store(out_ptr0 + static_cast<int64_t>(x1 + 64LL*x0));
    ...         }
    ...     }
    ... }''', (("ks0", 8),))
    >>> touched.read, touched.written, touched.complete
    ({'in_ptr0': 512, 'in_ptr1': 8}, {'out_ptr0': 512}, True)

    Args:
        source: The code of the kernel.
        sizes: The integers that it was called with, by the names of its parameters.
    """
    signature = _SIGNATURE.search(source)
    if signature is None or not all(map(_GENERATED_PARAMETER.match, _parameters(source))):
        return None
    reading = _CppReader(dict(sizes))
    code = source[signature.end() :]
    for alias, parameter in _ALIAS.findall(code):  # in a later loop, memory that is written in place has two names
        code = re.sub(rf"\b{alias}\b", parameter, code)
    reading.block(_ALIAS.sub("", code))
    if not reading.written and not reading.read and reading.complete:
        return None
    return TouchedElements(
        read=reading.read,
        written=reading.written,
        complete=reading.complete,
        written_before=reading.written_before,
    )


class _CppReader(KernelReader):
    """Goes through the text in order; a loop variable has the range of its last loop."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self.written_before: dict[str, frozenset[str]] = {}

    def block(self, text: str) -> None:
        position = 0
        marks = re.compile(rf"{_LOOP.pattern}|{_TAIL.pattern}|{_CONDITION.pattern}|{_POINTER.pattern}")
        while (found := marks.search(text, position)) is not None:
            position = found.end()
            if found[0].startswith("for"):
                self._loop(found[1], found[2], found[3])
            elif _CONDITION.match(found[0]) and not _TAIL.match(found[0]):
                position = self._conditional(text, found)
            elif found[4]:
                self._pointer(text, found[4], found.start(4), found.end(4))

    def _loop(self, name: str, start: str, end: str) -> None:
        first, last = (integer_constant(self._expression(bound)) for bound in (start, end))
        if first is None or last is None:
            self.digits.pop(name, None)
            return
        self.sizes[f"{name}numel"] = extent = max(last - first, 1)
        self.digits[name] = IndexDigits(name, 1, extent)

    def _conditional(self, text: str, found: re.Match[str]) -> int:
        """Where the code goes on after a branch or a function. A function that is called where it is written runs."""
        begin = found.start()
        if found[0] != "[&]":
            begin = _closing(text, text.index("(", begin)) + 1
        brace = text.find("{", begin)
        statement = text.find(";", begin)
        if brace < 0 or 0 <= statement < brace:
            brace, end = begin, statement if statement >= 0 else len(text)
        else:
            end = _closing(text, brace)
        if found[0] == "[&]" and re.match(r"\s*\(\s*\)", text[end + 1 :]):
            return found.end()
        if _POINTER.search(text, brace, end):
            self.complete = False
        return end

    def _pointer(self, text: str, name: str, start: int, end: int) -> None:
        """Counts an access: `name[index]`, or a vector at `name + index`."""
        rest = text[end:].lstrip()
        before = text[:start].rstrip()
        if before.endswith("&"):  # its address is given to something else, such as an atomic addition
            self.complete = False
            return
        if rest.startswith("["):
            close = _closing(rest, 0)
            index, after = rest[1:close], rest[close + 1 :].lstrip()
            stores = after.startswith("=") and not after.startswith("==")
            if after.startswith(("+=", "-=", "*=")):
                self._count(name, index, self.read)
                stores = True
        elif rest.startswith("+"):
            index = rest[1 : _argument_end(rest)]
            call = re.search(r"(\w+)(?:<[^()]*>)?\($", before)
            if call is None and re.search(r"transpose_mxn<[^()]*>\([^;]*,$", before[before.rfind(";") + 1 :]):
                stores = True  # from a tile to a tile
            elif call is None:
                self.complete = False
                return
            else:
                stores = call[1].startswith("store")
        else:
            self.complete = False
            return
        self._count(name, index, self.written if stores else self.read)

    def _count(self, name: str, index: str, into: dict[str, int]) -> None:
        expression = self._expression(index)
        count = None if expression is None else self.places(expression)
        if count is None:
            self.complete = False
        elif into is not self.read or name not in self.written:  # else its own result
            into[name] = max(into.get(name, 0), count)
            if into is self.read:
                self.written_before.setdefault(name, frozenset(self.written))

    def _expression(self, text: str) -> ast.expr | None:
        """An expression of C++ as Python writes it, with the values of the sizes."""
        plain = _NUMBER.sub(r"\1", _CAST.sub("", text)).replace("::", ".").strip()
        try:
            expression = ast.parse(plain, mode="eval").body
        except (SyntaxError, ValueError):
            return None
        return _Substitution(self.sizes).visit(expression)  # type: ignore[no-any-return]


class _Substitution(ast.NodeTransformer):
    """Replaces names of sizes by numbers, and C++'s functions on integers by Python's operators.

    `x1_inner` is the lane of a vector at `x1`, and is only added to it: a loop over `x1` stands for all its points.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id.endswith("_inner"):
            return ast.Constant(0)
        return ast.Constant(self._sizes[node.id]) if node.id in self._sizes else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "div_floor_integer" and len(node.args) == 2:
            return ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1])
        return node


def _closing(text: str, opening: int) -> int:
    """The position of the bracket that closes the one at `opening`."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    depth = 0
    for position in range(opening, len(text)):
        if text[position] in pairs:
            depth += 1
        elif text[position] in pairs.values():
            depth -= 1
            if depth == 0:
                return position
    return len(text) - 1


def _argument_end(text: str) -> int:
    """The position at which an argument of a call ends: at a comma, or at the bracket of the call."""
    depth = 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}" or (character == "," and depth == 0):
            if depth == 0:
                return position
            depth -= 1
    return len(text)

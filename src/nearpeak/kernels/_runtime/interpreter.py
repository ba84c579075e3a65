"""`patch_interpreter`: makes Triton's interpreter compute in bfloat16, which it otherwise does on the bits, silently.

The interpreter stores bfloat16 as 16-bit integers, and adds and multiplies these; it truncates float32 instead of
rounding, and casts to fp8 incorrectly. Patched, arithmetic is in float32 and rounded to nearest, ties to even, as on a
GPU, and casts are torch's. This relies on private names of Triton 3.6 to 3.9, and raises if they are gone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from nearpeak.errors import KernelUnavailable

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_NUMPY = {tl.float16: numpy.float16, tl.float32: numpy.float32}
_is_patched = False


def patch_interpreter() -> None:
    """Patches the interpreter of this process, once."""
    global _is_patched
    if _is_patched:
        return
    try:
        _patch_builder(interpreter.InterpreterBuilder)
        _remember_shapes()
    except AttributeError as error:
        raise KernelUnavailable(
            f"Triton's interpreter has changed ({error}), and computes incorrectly in bfloat16 without a patch."
            " Unset TRITON_INTERPRET, or install triton 3.6 to 3.9."
        ) from error
    _is_patched = True


def _to_float32(handle: Any) -> Any:
    """bfloat16 as float32; other dtypes unchanged."""
    if not _is_bfloat16(handle):
        return handle
    bits = handle.data.astype(numpy.uint32) << 16
    return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)


def _bfloat16_bits(values: Any) -> Any:
    """The bits of float32 rounded to bfloat16: to nearest, ties to even."""
    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    return numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), near).reshape(numpy.shape(values))


def _is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _patch_builder(builder: Any) -> None:
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_masked_load = _with_boolean_mask(builder.create_masked_load, 1)
    builder.create_masked_store = _with_boolean_mask(builder.create_masked_store, 2)
    _skip_overflow_checks(interpreter.interpreter_builder)
    interpreter._patch_lang_tensor = _loop_bounds_as_items(interpreter._patch_lang_tensor)
    interpreter.InterpretedFunction.__call__ = _patch_language_once(interpreter._patch_lang)
    dot, cast = builder.create_dot, builder.cast_impl
    builder.create_dot = lambda self, a, b, *rest: dot(self, _to_float32(a), _to_float32(b), *rest)
    builder.cast_impl = lambda self, source, target: _cast(self, cast, source, target)
    rounded = builder.create_fp_to_fp
    builder.create_fp_to_fp = lambda self, source, target, rounding: _cast(
        self, lambda self, source, target: rounded(self, source, target, rounding), source, target
    )


def _skip_overflow_checks(builder: Any) -> None:
    """Skips the overflow checks of integers, which are only reported with `debug`."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    uncached, cached = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (uncached if dtype.scalar.is_ptr() else cached)(dtype.scalar)


def _remember_shapes() -> None:
    """Builds the type and the shape of a tensor once per shape: the interpreter spends two thirds of its time on these.

    Nothing writes to them.
    """
    build_type, build_tensor, build_ir = tl.block_type.__init__, tl.tensor.__init__, tl.block_type.to_ir
    same, align = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        # a pointer has no hash, and another address space and another constness no other name
        key = (element_ty.name, getattr(element_ty, "address_space", 0), getattr(element_ty, "const", False), sizes)
        if key not in types:
            build_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            build_tensor(self, handle, type)
            shapes[sizes] = (self.shape, self.numel)
        self.shape, self.numel = shapes[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # remembered: of the same sizes
            return lhs, rhs
        return align(self, lhs, rhs)  # type: ignore[no-any-return]

    def to_ir(self: Any, builder: Any) -> Any:
        return self if isinstance(builder, interpreter.InterpreterBuilder) else build_ir(self, builder)

    tl.block_type.__init__ = block_type
    tl.block_type.to_ir = to_ir
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _patch_language_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the language once per function: doing so at each call from a kernel takes longer than the call.

    A launch patches the language for kernels; for functions of Triton itself it stays patched after the first call.
    """
    known = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in known:
            patch(self.fn)
            known.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _with_boolean_mask(operation: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Converts masks to booleans: from Triton 3.9 on, one that was combined with a scalar has integers, which fail."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[place]  # an array in copies by a descriptor
        bits = (mask if isinstance(mask, numpy.ndarray) else mask.data).astype(numpy.bool_)
        mask = interpreter.TensorHandle(bits, tl.int1)
        return operation(self, *args[:place], mask, *args[place + 1 :], **kwargs)

    return call


def _loop_bounds_as_items(patch: Callable[..., None]) -> Callable[..., None]:
    """Loop bounds as numbers: they are arrays of one element, which numpy rejects or warns about."""

    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return call


def _in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        *operands, function = args
        if not any(map(_is_bfloat16, operands)):
            return operation(self, *args)
        result = operation(self, *map(_to_float32, operands), function)
        if result.data.dtype == numpy.float32:
            return interpreter.TensorHandle(_bfloat16_bits(result.data), tl.bfloat16)
        return result

    return call


def _cast(self: Any, original: Callable[..., Any], source: Any, target: Any) -> Any:
    to = target.scalar
    if source.dtype.scalar in _FP8 and to not in _FP8:  # Triton's cast has no infinity and no NaN
        values = torch.from_numpy(numpy.ascontiguousarray(source.data)).view(_FP8[source.dtype.scalar]).float()
        source = interpreter.TensorHandle(values.numpy().reshape(source.data.shape), tl.float32)
    if to == tl.bfloat16:
        if _is_bfloat16(source):
            return source
        return interpreter.TensorHandle(_bfloat16_bits(source.data.astype(numpy.float32)), tl.bfloat16)
    source = _to_float32(source)
    if to in _FP8 and source.data.dtype.kind == "f":
        values = torch.from_numpy(numpy.ascontiguousarray(source.data, numpy.float32)).to(_FP8[to])
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), to)
    if to in _NUMPY and source.data.dtype.kind == "f":
        return interpreter.TensorHandle(source.data.astype(_NUMPY[to]), to)
    return original(self, source, target)

"""Tiles and waves of matrix products, against arithmetic done by hand."""

import dataclasses

import pytest

from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.tiles import TILES, tiling
from nearpeak.machines.catalogue import find, machines
from nearpeak.ops.op import Op, Storage, Trace
from nearpeak.ops.tensor import Tensor

H100 = find("h100-sxm")  # 132 multiprocessors
A100 = find("a100-sxm-80gb")  # 108


def tensor(*shape, dtype="bfloat16"):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Tensor(shape=shape, strides=tuple(strides), dtype=dtype, storage=0)


def product(name, out, **arguments):
    return Op(name=f"aten.{name}.default", arguments=arguments, outputs=(out,))


def mm(m, n, k, dtype="bfloat16"):
    return product("mm", tensor(m, n), self=tensor(m, k, dtype=dtype), mat2=tensor(k, n, dtype=dtype))


def test_a_product_that_fills_every_wave_loses_nothing():
    found = tiling(mm(256 * 12, 128 * 11, 512), H100)
    assert (found.tiles, found.waves, found.last_wave, found.efficiency) == (132, 1, 1.0, 1.0)
    assert found.tile == (256, 128, 64)


def test_a_last_wave_that_is_nearly_empty():
    """120 tiles of 256 x 128 on 108 multiprocessors are two waves; 240 of 128 x 128 in three are the better choice."""
    found = tiling(mm(256 * 10, 128 * 12, 512), A100)
    assert found.tile == (128, 128, 32)
    assert (found.tiles, found.waves) == (240, 3)
    assert found.fill == pytest.approx(240 / 324)
    assert found.last_wave == pytest.approx(24 / 108)


def test_edge_tiles_compute_what_nobody_asked_for():
    found = tiling(mm(129, 128, 64), H100)
    assert found.tiles * found.tile[0] * found.tile[1] == 256 * 128
    assert found.useful == pytest.approx(129 / 256)


def test_the_depth_counts_too():
    assert tiling(mm(128, 128, 65), H100).useful == pytest.approx(65 / 128)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        (mm(512, 384, 64), (1, 512, 384, 64)),
        (
            product("addmm", tensor(512, 384), self=tensor(384), mat1=tensor(512, 64), mat2=tensor(64, 384)),
            (1, 512, 384, 64),
        ),
        (product("bmm", tensor(8, 512, 384), self=tensor(8, 512, 64), mat2=tensor(8, 64, 384)), (8, 512, 384, 64)),
        (
            product("linear", tensor(4, 512, 384), input=tensor(4, 512, 64), weight=tensor(384, 64), bias=None),
            (1, 2048, 384, 64),
        ),
        (
            product("matmul", tensor(2, 4, 512, 384), self=tensor(2, 4, 512, 64), other=tensor(2, 4, 64, 384)),
            (8, 512, 384, 64),
        ),
        (
            product("_grouped_mm", tensor(8, 512, 384), self=tensor(8, 512, 64), mat2=tensor(8, 64, 384)),
            (8, 512, 384, 64),
        ),
        (mm(512, 384, 64, dtype="float4_e2m1fn_x2"), (1, 512, 384, 128)),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_the_sizes_of_each_operator(op, sizes):
    found = tiling(op, H100)
    assert (found.batch, found.m, found.n, found.k) == sizes


@pytest.mark.parametrize(
    "op",
    [
        product("add", tensor(512, 512), self=tensor(512, 512), other=tensor(512, 512)),
        product("mv", tensor(512), self=tensor(512, 64), vec=tensor(64)),
        product("matmul", tensor(512), self=tensor(512, 64), other=tensor(64)),
        product("_grouped_mm", tensor(512, 384), self=tensor(512, 64), mat2=tensor(8, 64, 384), offs=tensor(8)),
        mm(0, 512, 512),
    ],
    ids=["no product", "a vector", "a vector by matmul", "groups cut by data", "empty"],
)
def test_what_has_no_tiling(op):
    assert tiling(op, H100) is None


def test_a_machine_without_known_tiles_has_none():
    assert tiling(mm(512, 512, 512), dataclasses.replace(H100, processors=None)) is None
    assert tiling(mm(512, 512, 512), dataclasses.replace(H100, architecture="made up")) is None
    assert tiling(mm(512, 512, 512), dataclasses.replace(H100, kind="cpu")) is None


@pytest.mark.parametrize("architecture", sorted(TILES))
@pytest.mark.parametrize("sizes", [(1, 1, 1), (127, 257, 33), (4096, 4096, 4096), (10**6, 3, 10**4)])
def test_an_efficiency_is_a_share(architecture, sizes):
    found = tiling(mm(*sizes), dataclasses.replace(H100, architecture=architecture))
    assert 0 < found.efficiency <= 1
    assert found.efficiency == pytest.approx(found.fill * found.useful)
    assert 0 < found.last_wave <= 1


def test_every_gpu_of_the_catalogue_has_tiles():
    assert {one.architecture for one in machines() if one.kind == "gpu"} <= set(TILES)


def test_an_estimate_has_the_tiling_and_the_engine_of_its_ops_and_the_seconds_of_its_groups():
    added = product("add", tensor(4096, 4096), self=tensor(4096, 4096), other=tensor(4096, 4096))
    trace = Trace(ops=(mm(4096, 4096, 4096), added), storages={0: Storage(bytes=2 * 4096**2, kind="input")})
    found = estimate_trace(trace, H100)
    first, second = found.ops
    assert first.tiling == tiling(trace.ops[0], H100)
    assert (first.engine, first.dtype, first.shapes) == ("matrix", "bfloat16", ((4096, 4096), (4096, 4096)))
    assert (second.engine, second.dtype, second.tiling) == ("vector", "float32", None)
    assert len(found.group_seconds) == len(found.groups)
    assert sum(found.group_seconds) == pytest.approx(found.fused_s)

"""A ladder of GEMM kernels, from one thread per output element to cuBLAS, with the predicted memory traffic of each.

Every rung computes a @ b of contiguous bfloat16 matrices with float32 accumulation. Each rung is faster than the one
below because fewer bytes go from memory into a multiprocessor per operation, until the tensor cores are the limit.
`benchmarks.kernels.ladder` runs the rungs and compares predictions with hardware counters.

**What is counted**: bytes of both matrices that go from global memory into the registers or the shared memory of the
multiprocessors. This is the only level that follows from the source of a kernel alone. Below it the caches decide: the
same bytes may come from L1, from L2 or from DRAM.

- Loads by threads access the L1 cache in sectors of 32 bytes: each load of a warp counts as many sectors as its threads
  touch, whether they hit or not. The counter is `l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum`.
- Asynchronous copies and TMA bypass the L1 cache into shared memory: all requested bytes arrive at the multiprocessor.
  The counter is `l1tex__m_xbar2l1tex_read_bytes.sum`, bytes from L2 to multiprocessors. The counter of L2 itself,
  `lts__t_sectors_srcunit_tex_op_read.sum`, does not measure that: sectors that several multiprocessors request at the
  same time are read once for all, and on an H200 it counts 36 % to 55 % less.

A tile of `rows` x `columns` results needs (rows + columns) elements for each step of the depth, and there are
m n / (rows columns) tiles: bytes = m n k (1 / rows + 1 / columns) * 2. A cluster of multiprocessors that share loads
requests less from L2, but each of them still receives what its own tile needs.

**DRAM** traffic is not predicted beyond its floor, each matrix once: whether the neighbors of a tile find its operands
in L2 depends on the order of tiles and on what a cache of 50 MB evicts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import KernelUnavailable, UsageError

SECTOR = 32
"""Bytes of a cache sector, the unit of loads."""
ITEM = 2
"""Bytes of a bfloat16."""
BY_THREADS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
PAST_L1 = "l1tex__m_xbar2l1tex_read_bytes.sum"
BYTES_PER_COUNT = {BY_THREADS: SECTOR, PAST_L1: 1}
"""The bytes that one count of a counter stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The results that share loaded operands."""

    rows: int
    columns: int
    row_bytes: int = ITEM
    """Bytes loaded per element of the first matrix: a whole sector if a warp loads one element at a time."""

    def bytes_read(self, m: int, n: int, k: int) -> int:
        """Bytes requested in a product of m x k by k x n. Partial tiles at the edges count in full."""
        tiles = math.ceil(m / self.rows) * math.ceil(n / self.columns)
        return tiles * k * (self.rows * self.row_bytes + self.columns * ITEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One GEMM implementation."""

    name: str
    title: str
    """A title of up to 30 characters."""
    kernel: str
    """A regular expression for the names of its kernels."""
    counter: str
    """The counter of ncu, one of `BYTES_PER_COUNT`."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    tile: Callable[[int, int, int, str], Tile | None]
    """The tile by m, n, k and the name of the kernel that ran, if known. None if it is unknown."""

    def bytes_read(self, m: int, n: int, k: int, kernel: str = "") -> int | None:
        """The predicted traffic in bytes."""
        tile = self.tile(m, n, k, kernel)
        return None if tile is None else tile.bytes_read(m, n, k)

    def intensity(self, n: int, kernel: str = "") -> float | None:
        """FLOP per predicted byte, for square matrices."""
        moved = self.bytes_read(n, n, n, kernel)
        return None if moved is None else 2.0 * n**3 / moved


def floor_bytes(m: int, n: int, k: int) -> int:
    """The least traffic of DRAM: each matrix and the result once."""
    return ITEM * (m * k + k * n + m * n)


CUDA_PRELUDE = """
// bfloat16 is the upper half of a float32
__device__ __forceinline__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ unsigned short rounded(float value) {  // to the nearest, ties to even
    unsigned bits = __float_as_uint(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
"""
"""The beginning of all sources, in place of CUDA headers."""


@functools.cache
def compile_cuda(source: str, name: str) -> Any:
    """The kernel of this name, to be called with grid, block and args."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise KernelUnavailable(f"torch {torch.__version__} does not compile CUDA at run time; it needs 2.9 or later.")
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:  # torch raises without one, although no header is needed
        cpp_extension.CUDA_HOME = "/usr/local/cuda"
    return compile_kernel(CUDA_PRELUDE + source, name)


def empty_result(a: Tensor, b: Tensor, multiples: tuple[int, int, int]) -> Tensor:
    """An empty result; raises for matrices that kernels without bounds checks cannot take."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not a.dtype == b.dtype == torch.bfloat16:
        raise UsageError(
            f"A rung multiplies bfloat16 of m x k by k x n; these are {a.dtype} and {b.dtype} of {tuple(a.shape)} and"
            f" {tuple(b.shape)}."
        )
    if not a.is_contiguous() or not b.is_contiguous():
        raise UsageError("A rung multiplies contiguous matrices.")
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
        raise UsageError(f"This rung takes m, n and k that are multiples of {multiples}; these are {sizes}.")
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


# A warp has 32 columns of one row. For each step of the depth it loads one element of a, the same for all threads,
# which is a sector of 32 bytes, and 32 elements of b, which are two: 96 bytes for 32 multiplications. Most of them come
# from the L1 cache, whose bandwidth is the limit.
NAIVE_COLUMNS, NAIVE_ROWS = 32, 8
NAIVE_SOURCE = """
extern "C" __global__ void ladder_naive(
    const unsigned short* a, const unsigned short* b, unsigned short* c, int m, int n, int k
) {
    int column = blockIdx.x * 32 + threadIdx.x;
    int row = blockIdx.y * 8 + threadIdx.y;
    float sum = 0.0f;
    for (int step = 0; step < k; ++step)
        sum += widened(a[(size_t)row * k + step]) * widened(b[(size_t)step * n + column]);
    c[(size_t)row * n + column] = rounded(sum);
}
"""


def multiply_naive(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with one thread per element of the result."""
    result = empty_result(a, b, (NAIVE_ROWS, NAIVE_COLUMNS, 16))
    (m, k), n = a.shape, b.shape[1]
    kernel = compile_cuda(NAIVE_SOURCE, "ladder_naive")
    kernel(
        grid=(n // NAIVE_COLUMNS, m // NAIVE_ROWS, 1),
        block=(NAIVE_COLUMNS, NAIVE_ROWS, 1),
        args=[a, b, result, m, n, k],
    )
    return result


NAIVE = Rung(
    name="naive",
    title="a thread for each number",
    kernel="ladder_naive",
    counter=BY_THREADS,
    multiply=multiply_naive,
    tile=lambda m, n, k, kernel: Tile(rows=1, columns=NAIVE_COLUMNS, row_bytes=SECTOR),
)

# Tiles in one dimension. A block has 256 columns of 8 rows, whose rows of a are in shared memory. An element of b is
# loaded once for 8 multiplications; an element of a is loaded once per block, for 256.
LINES_COLUMNS, LINES_ROWS, LINES_DEPTH = 256, 8, 32
LINES_SOURCE = """
extern "C" __global__ void __launch_bounds__(256) ladder_lines(
    const unsigned short* a, const unsigned short* b, unsigned short* c, int m, int n, int k
) {
    __shared__ float lines[8][32];
    int column = blockIdx.x * 256 + threadIdx.x;
    int row = blockIdx.y * 8;
    float sums[8] = {};
    for (int begin = 0; begin < k; begin += 32) {
        // a warp loads 32 elements of one row
        int line = threadIdx.x / 32, step = threadIdx.x % 32;
        lines[line][step] = widened(a[(size_t)(row + line) * k + begin + step]);
        __syncthreads();
        #pragma unroll
        for (int step = 0; step < 32; ++step) {
            float value = widened(b[(size_t)(begin + step) * n + column]);
            #pragma unroll
            for (int line = 0; line < 8; ++line) sums[line] += lines[line][step] * value;
        }
        __syncthreads();
    }
    #pragma unroll
    for (int line = 0; line < 8; ++line) c[(size_t)(row + line) * n + column] = rounded(sums[line]);
}
"""


def multiply_lines(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with 8 elements of a column per thread."""
    result = empty_result(a, b, (LINES_ROWS, LINES_COLUMNS, LINES_DEPTH))
    (m, k), n = a.shape, b.shape[1]
    kernel = compile_cuda(LINES_SOURCE, "ladder_lines")
    kernel(grid=(n // LINES_COLUMNS, m // LINES_ROWS, 1), block=(LINES_COLUMNS, 1, 1), args=[a, b, result, m, n, k])
    return result


LINES = Rung(
    name="lines",
    title="8 numbers of a column a thread",
    kernel="ladder_lines",
    counter=BY_THREADS,
    multiply=multiply_lines,
    tile=lambda m, n, k, kernel: Tile(rows=LINES_ROWS, columns=LINES_COLUMNS),
)

# Tiles in two dimensions. A block has 128 x 128 results, a thread 8 x 8 of them, and 16 steps of the depth of both
# matrices are in shared memory as float32. An element is loaded once per block, for 128 multiplications, and once from
# shared memory per thread, for 8. The limit is the rate of float32 multiplications.
TILES_SIDE, TILES_DEPTH, TILES_THREADS = 128, 16, 256
TILES_SOURCE = """
__device__ __forceinline__ void split(uint4 eight, float* numbers) {
    unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    #pragma unroll
    for (int word = 0; word < 4; ++word) {
        numbers[2 * word] = __uint_as_float(words[word] << 16);
        numbers[2 * word + 1] = __uint_as_float(words[word] & 0xffff0000u);
    }
}

extern "C" __global__ void __launch_bounds__(256) ladder_tiles(
    const unsigned short* a, const unsigned short* b, unsigned short* c, int m, int n, int k
) {
    __shared__ __align__(16) float left[16][132];  // by steps; 4 more, so that a column is not all in one bank
    __shared__ __align__(16) float right[16][128];
    int thread = threadIdx.x;
    int row = blockIdx.y * 128, column = blockIdx.x * 128;
    // each thread loads 8 elements of each matrix at once
    int line = thread / 2, piece = thread % 2 * 8;
    int step = thread / 16, place = thread % 16 * 8;
    // in groups of 4 that are 64 apart, so that adjacent threads read adjacent elements
    int down = thread / 16 * 4, across = thread % 16 * 4;
    const unsigned short* from_a = a + (size_t)(row + line) * k + piece;
    const unsigned short* from_b = b + (size_t)step * n + column + place;
    float sums[8][8] = {};
    uint4 next_a = *(const uint4*)from_a, next_b = *(const uint4*)from_b;
    for (int begin = 0; begin < k; begin += 16) {
        float numbers[8];
        split(next_a, numbers);
        #pragma unroll
        for (int i = 0; i < 8; ++i) left[piece + i][line] = numbers[i];
        split(next_b, numbers);
        *(float4*)&right[step][place] = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
        *(float4*)&right[step][place + 4] = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
        __syncthreads();
        if (begin + 16 < k) {  // these loads overlap with the multiplications below
            from_a += 16;
            from_b += (size_t)16 * n;
            next_a = *(const uint4*)from_a;
            next_b = *(const uint4*)from_b;
        }
        #pragma unroll
        for (int s = 0; s < 16; ++s) {
            float4 rows[2] = {*(float4*)&left[s][down], *(float4*)&left[s][down + 64]};
            float4 columns[2] = {*(float4*)&right[s][across], *(float4*)&right[s][across + 64]};
            const float* x = (const float*)rows;
            const float* y = (const float*)columns;
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                #pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += x[i] * y[j];
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        size_t to = (size_t)(row + down + i % 4 + i / 4 * 64) * n + column + across;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* four = &sums[i][4 * half];
            uint2 bits;
            bits.x = rounded(four[0]) | (unsigned)rounded(four[1]) << 16;
            bits.y = rounded(four[2]) | (unsigned)rounded(four[3]) << 16;
            *(uint2*)(c + to + 64 * half) = bits;
        }
    }
}
"""


def multiply_tiles(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with tiles of both matrices in shared memory."""
    result = empty_result(a, b, (TILES_SIDE, TILES_SIDE, TILES_DEPTH))
    (m, k), n = a.shape, b.shape[1]
    kernel = compile_cuda(TILES_SOURCE, "ladder_tiles")
    kernel(grid=(n // TILES_SIDE, m // TILES_SIDE, 1), block=(TILES_THREADS, 1, 1), args=[a, b, result, m, n, k])
    return result


TILES = Rung(
    name="tiles",
    title="128 x 128 in shared memory",
    kernel="ladder_tiles",
    counter=BY_THREADS,
    multiply=multiply_tiles,
    tile=lambda m, n, k, kernel: Tile(rows=TILES_SIDE, columns=TILES_SIDE),
)

TENSOR_CORES_SIDE = 128


def multiply_tensor_cores(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by tensor cores, in Triton: tiles of 128 x 128, copied to shared memory ahead of their use."""
    from nearpeak.kernels.ladder import triton as ladder_triton

    return ladder_triton.multiply_tensor_cores(a, b)


TENSOR_CORES = Rung(
    name="tensor cores",
    title="128 x 128 by tensor cores",
    kernel="ladder_tensor_cores_kernel",
    counter=PAST_L1,
    multiply=multiply_tensor_cores,
    tile=lambda m, n, k, kernel: Tile(rows=TENSOR_CORES_SIDE, columns=TENSOR_CORES_SIDE),
)

PERSISTENT_ROWS, PERSISTENT_COLUMNS = 128, 256


def multiply_persistent(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with larger tiles that TMA copies, in Triton: one program per multiprocessor goes from tile to tile."""
    from nearpeak.kernels.ladder import triton as ladder_triton

    return ladder_triton.multiply_persistent(a, b)


PERSISTENT = Rung(
    name="persistent",
    title="128 x 256 by TMA, persistent",
    kernel="ladder_persistent_kernel",
    counter=PAST_L1,
    multiply=multiply_persistent,
    tile=lambda m, n, k, kernel: Tile(rows=PERSISTENT_ROWS, columns=PERSISTENT_COLUMNS),
)


def multiply_specialized(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by `nearpeak.kernels.gemm`: specialized warps load, multiply and store, in Gluon."""
    from nearpeak.kernels._runtime.policy import using
    from nearpeak.kernels.gemm import gemm

    with using("require"):
        return gemm(a, b.T)


def specialized_tile(m: int, n: int, k: int, kernel: str = "") -> Tile:
    """The tile of the configuration that the kernel is launched with."""
    from nearpeak.kernels._runtime.tuning import from_row, tuned
    from nearpeak.kernels.gemm.tuning import Sm90Config, sm90_heuristic

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config = from_row(tuned("gemm_sm90_16_bits", m * n, device), Sm90Config)
    config = config or sm90_heuristic(torch.empty(m, n, dtype=torch.bfloat16, device="meta"))
    return Tile(rows=config.block_m, columns=config.block_n)


SPECIALIZED = Rung(
    name="specialized",
    title="warps with roles, Gluon",
    kernel="gemm_sm90_kernel",
    counter=PAST_L1,
    multiply=multiply_specialized,
    tile=specialized_tile,
)

_NVJET_NAME = re.compile(r"nvjet_(?:sm\d+_)?[a-z]+_(\d+)x(\d+)_\d+x\d+_\d+x\d+")
"""Such as nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT: tile, depth x stages, cluster."""


def vendor_tile(m: int, n: int, k: int, kernel: str = "") -> Tile | None:
    """The tile of one multiprocessor, from the name of a cuBLAS kernel for Hopper.

    It counts whole in a cluster too: what another multiprocessor loads for this one arrives here all the same.
    """
    match = _NVJET_NAME.search(kernel)
    if match is None:
        return None
    rows, columns = map(int, match.groups())
    return Tile(rows=rows, columns=columns)


VENDOR = Rung(
    name="vendor", title="cuBLAS", kernel="nvjet|gemm|cutlass", counter=PAST_L1, multiply=torch.matmul, tile=vendor_tile
)

RUNGS = (NAIVE, LINES, TILES, TENSOR_CORES, PERSISTENT, SPECIALIZED, VENDOR)
"""All rungs, from the lowest."""

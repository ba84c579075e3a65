"""Tiles in one dimension: a thread has 8 numbers of a column, and a block 8 rows of a in shared memory.

A block has 256 columns of 8 rows. A number of b is loaded once for 8 multiplications; a number of a is loaded once by
the block, for 256.
"""

from __future__ import annotations

from torch import Tensor

from nearpeak.kernels.ladder.cuda import compiled, result_of
from nearpeak.kernels.ladder.rung import BY_THREADS, Rung, Tile

COLUMNS, ROWS, DEPTH = 256, 8, 32
SOURCE = """
extern "C" __global__ void __launch_bounds__(256) ladder_lines(
    const unsigned short* a, const unsigned short* b, unsigned short* c, int m, int n, int k
) {
    __shared__ float lines[8][32];
    int column = blockIdx.x * 256 + threadIdx.x;
    int row = blockIdx.y * 8;
    float sums[8] = {};
    for (int begin = 0; begin < k; begin += 32) {
        // a warp loads 32 numbers of one row
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


def multiply(a: Tensor, b: Tensor) -> Tensor:
    result = result_of(a, b, (ROWS, COLUMNS, DEPTH))
    (m, k), n = a.shape, b.shape[1]
    kernel = compiled(SOURCE, "ladder_lines")
    kernel(grid=(n // COLUMNS, m // ROWS, 1), block=(COLUMNS, 1, 1), args=[a, b, result, m, n, k])
    return result


RUNG = Rung(
    name="lines",
    title="8 numbers of a column a thread",
    kernel="ladder_lines",
    counter=BY_THREADS,
    multiply=multiply,
    tile=lambda m, n, k, kernel: Tile(rows=ROWS, columns=COLUMNS),
)

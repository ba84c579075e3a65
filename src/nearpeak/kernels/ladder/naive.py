"""One thread for each number of the result.

A warp has 32 columns of one row. For each step of the depth it loads one number of a, the same for all threads, which
is a sector of 32 bytes, and 32 numbers of b, which are two: 96 bytes for 32 multiplications. The L1 cache has most of
them, and that is what the time goes to.
"""

from __future__ import annotations

from torch import Tensor

from nearpeak.kernels.ladder.cuda import compiled, result_of
from nearpeak.kernels.ladder.rung import BY_THREADS, SECTOR, Rung, Tile

COLUMNS, ROWS = 32, 8
SOURCE = """
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


def multiply(a: Tensor, b: Tensor) -> Tensor:
    result = result_of(a, b, (ROWS, COLUMNS, 16))
    (m, k), n = a.shape, b.shape[1]
    kernel = compiled(SOURCE, "ladder_naive")
    kernel(grid=(n // COLUMNS, m // ROWS, 1), block=(COLUMNS, ROWS, 1), args=[a, b, result, m, n, k])
    return result


RUNG = Rung(
    name="naive",
    title="a thread for each number",
    kernel="ladder_naive",
    counter=BY_THREADS,
    multiply=multiply,
    tile=lambda m, n, k, kernel: Tile(rows=1, columns=COLUMNS, row_bytes=SECTOR),
)

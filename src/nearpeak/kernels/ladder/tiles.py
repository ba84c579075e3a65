"""Tiles in two dimensions: a block has 128 x 128 numbers, a thread 8 x 8 of them, and both matrices are shared.

16 steps of the depth of both are in shared memory at a time, as float32. A number is loaded once by the block, for 128
multiplications, and once from shared memory by a thread, for 8. What limits it is the multiplication of float32.
"""

from __future__ import annotations

from torch import Tensor

from nearpeak.kernels.ladder.cuda import compiled, result_of
from nearpeak.kernels.ladder.rung import BY_THREADS, Rung, Tile

SIDE, DEPTH, THREADS = 128, 16, 256
SOURCE = """
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
    // each thread loads 8 numbers of each matrix at once
    int line = thread / 2, piece = thread % 2 * 8;
    int step = thread / 16, place = thread % 16 * 8;
    // in pieces of 4 that are 64 apart, so that threads side by side read numbers side by side
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
        if (begin + 16 < k) {  // on their way while this tile is multiplied
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


def multiply(a: Tensor, b: Tensor) -> Tensor:
    result = result_of(a, b, (SIDE, SIDE, DEPTH))
    (m, k), n = a.shape, b.shape[1]
    kernel = compiled(SOURCE, "ladder_tiles")
    kernel(grid=(n // SIDE, m // SIDE, 1), block=(THREADS, 1, 1), args=[a, b, result, m, n, k])
    return result


RUNG = Rung(
    name="tiles",
    title="128 x 128 in shared memory",
    kernel="ladder_tiles",
    counter=BY_THREADS,
    multiply=multiply,
    tile=lambda m, n, k, kernel: Tile(rows=SIDE, columns=SIDE),
)

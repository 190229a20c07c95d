/* Matrix products of one block of threads on tiles whose rows lie anywhere: C[i, j] = sum over k of A(i, k) B(j, k).
 *
 * A and B are operands: types that give four neighbouring elements as floats, zeros outside their matrix.
 *   static constexpr bool DEPTH_FAST;                        memory runs along k (else along i or j)
 *   __device__ void load(int i, int k, float (&x)[4]) const; DEPTH_FAST: (i, k .. k + 3); else (i .. i + 3, k)
 *
 * Two engines with the same face: fp32_product (one rounding a step, k in order) and bf16_product (factors rounded to
 * bf16, mma.sync, fp32 sums). An element of C is summed in the same order wherever it stands in a tile. */
#ifndef MTP_KERNELS_CUDA_PRODUCT_CUH
#define MTP_KERNELS_CUDA_PRODUCT_CUH

#include "cuda/ptx.cuh"

namespace mtp
{

struct fp32_product {
    using factor = float; /* what its factors are, or are rounded to */
    enum { THREADS = 256, ROWS = 64, COLS = 64, DEPTH = 16, LINE = 64 + 4, SIDE = 4 };
    struct shared {
        float a[DEPTH][LINE], b[DEPTH][LINE];
    };
    float sum[SIDE][SIDE];

    template <typename Operand>
    static __device__ void fetch(const Operand &operand, int k, float (&x)[4])
    {
        const int t = (int)threadIdx.x;
        if (Operand::DEPTH_FAST)
            operand.load(t / 4, k + t % 4 * 4, x);
        else
            operand.load(t % 16 * 4, k + t / 16, x);
    }

    template <typename Operand>
    static __device__ void put(float (*tile)[LINE], const float (&x)[4])
    {
        const int t = (int)threadIdx.x;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (Operand::DEPTH_FAST)
                tile[t % 4 * 4 + n][t / 4] = x[n];
            else
                tile[t / 16][t % 16 * 4 + n] = x[n];
        }
    }

    template <typename A, typename B>
    __device__ void run(const A &a, const B &b, int depth, shared *s)
    {
        const int row = (int)threadIdx.x / 16 * SIDE, col = (int)threadIdx.x % 16 * SIDE;
        float next_a[4], next_b[4];
#pragma unroll
        for (int i = 0; i < SIDE; i++)
#pragma unroll
            for (int j = 0; j < SIDE; j++) sum[i][j] = 0;
        fetch(a, 0, next_a);
        fetch(b, 0, next_b);
        for (int k = 0; k < depth; k += DEPTH) {
            __syncthreads();
            put<A>(s->a, next_a);
            put<B>(s->b, next_b);
            __syncthreads();
            if (k + DEPTH < depth) {
                fetch(a, k + DEPTH, next_a);
                fetch(b, k + DEPTH, next_b);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++)
#pragma unroll
                for (int i = 0; i < SIDE; i++)
#pragma unroll
                    for (int j = 0; j < SIDE; j++) sum[i][j] = fmaf(s->a[d][row + i], s->b[d][col + j], sum[i][j]);
        }
        __syncthreads();
    }

    /* body(i, j, C[i, j]) for the elements of this thread. */
    template <typename Body>
    __device__ void each(Body body) const
    {
        const int row = (int)threadIdx.x / 16 * SIDE, col = (int)threadIdx.x % 16 * SIDE;
#pragma unroll
        for (int i = 0; i < SIDE; i++)
#pragma unroll
            for (int j = 0; j < SIDE; j++) body(row + i, col + j, sum[i][j]);
    }
};

struct bf16_product {
    using factor = bf16;
    enum {
        THREADS = 256,
        ROWS = 64,
        COLS = 128,
        DEPTH = 32,
        PAD = 8,        /* elements after each line: eight lines of 16 bytes lie in different banks */
        WARP_ROWS = 32, /* a warp's part: 2 warps down, 4 across */
        WARP_COLS = 32
    };
    template <int LINES> /* rows of A or columns of B */
    union operand_tile {
        bf16 along_depth[LINES][DEPTH + PAD];
        bf16 along_lines[DEPTH][LINES + PAD];
    };
    struct alignas(16) shared {
        operand_tile<ROWS> a;
        operand_tile<COLS> b;
    };
    float sum[WARP_ROWS / 16][WARP_COLS / 8][4];

    /* The thread's n-th place in a tile of an operand. */
    template <bool DEPTH_FAST, int LINES>
    static __device__ void place(int n, int *i, int *k)
    {
        const int t = n * THREADS + (int)threadIdx.x;
        *i = DEPTH_FAST ? t / (DEPTH / 4) : t % (LINES / 4) * 4;
        *k = DEPTH_FAST ? t % (DEPTH / 4) * 4 : t / (LINES / 4);
    }

    /* Four elements rounded to bf16. */
    struct alignas(8) four {
        bf16 element[4];
    };

    template <int LINES>
    struct staged {
        enum { LOADS = LINES * DEPTH / 4 / THREADS };
        four x[LOADS];
    };

    template <int LINES, typename Operand>
    static __device__ void fetch(const Operand &operand, int k0, staged<LINES> *next)
    {
#pragma unroll
        for (int n = 0; n < staged<LINES>::LOADS; n++) {
            int i, k;
            place<Operand::DEPTH_FAST, LINES>(n, &i, &k);
            float f[4];
            operand.load(i, k0 + k, f);
#pragma unroll
            for (int m = 0; m < 4; m++) next->x[n].element[m] = from_float<bf16>(f[m]);
        }
    }

    template <typename Operand, int LINES>
    static __device__ void put(operand_tile<LINES> *tile, const staged<LINES> &next)
    {
#pragma unroll
        for (int n = 0; n < staged<LINES>::LOADS; n++) {
            int i, k;
            place<Operand::DEPTH_FAST, LINES>(n, &i, &k);
            bf16 *line = Operand::DEPTH_FAST ? &tile->along_depth[i][k] : &tile->along_lines[k][i];
            *reinterpret_cast<four *>(line) = next.x[n];
        }
    }

    /* Fragment of A: rows [i, i + 16), depth [k, k + 16). */
    template <bool DEPTH_FAST>
    static __device__ void fragment_a(const operand_tile<ROWS> &tile, int i, int k, uint32_t (&x)[4])
    {
        const int lane = (int)threadIdx.x % WARP, matrix = lane / 8;
        if (DEPTH_FAST)
            load_matrices(x, &tile.along_depth[i + lane % 16][k + lane / 16 * 8]);
        else
            load_matrices_transposed(x, &tile.along_lines[k + matrix / 2 * 8 + lane % 8][i + matrix % 2 * 8]);
    }

    /* Two fragments of B: columns [j, j + 16), depth [k, k + 16). */
    template <bool DEPTH_FAST>
    static __device__ void fragment_b(const operand_tile<COLS> &tile, int j, int k, uint32_t (&x)[4])
    {
        const int lane = (int)threadIdx.x % WARP, matrix = lane / 8;
        if (DEPTH_FAST)
            load_matrices(x, &tile.along_depth[j + matrix / 2 * 8 + lane % 8][k + matrix % 2 * 8]);
        else
            load_matrices_transposed(x, &tile.along_lines[k + matrix % 2 * 8 + lane % 8][j + matrix / 2 * 8]);
    }

    template <bool A_DEPTH_FAST, bool B_DEPTH_FAST>
    __device__ void multiply(const shared *s)
    {
        const int warp = (int)threadIdx.x / WARP, row = warp / 4 * WARP_ROWS, col = warp % 4 * WARP_COLS;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t a[WARP_ROWS / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; i++) fragment_a<A_DEPTH_FAST>(s->a, row + i * 16, k, a[i]);
#pragma unroll
            for (int j = 0; j < WARP_COLS / 16; j++) {
                uint32_t b[4];
                fragment_b<B_DEPTH_FAST>(s->b, col + j * 16, k, b);
#pragma unroll
                for (int i = 0; i < WARP_ROWS / 16; i++) {
                    mma_bf16(sum[i][2 * j], a[i], b[0], b[1]);
                    mma_bf16(sum[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

    template <typename A, typename B>
    __device__ void run(const A &a, const B &b, int depth, shared *s)
    {
        staged<ROWS> next_a;
        staged<COLS> next_b;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLS / 8; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) sum[i][j][n] = 0;
        fetch(a, 0, &next_a);
        fetch(b, 0, &next_b);
        for (int k = 0; k < depth; k += DEPTH) {
            __syncthreads();
            put<A>(&s->a, next_a);
            put<B>(&s->b, next_b);
            __syncthreads();
            if (k + DEPTH < depth) {
                fetch(a, k + DEPTH, &next_a);
                fetch(b, k + DEPTH, &next_b);
            }
            multiply<A::DEPTH_FAST, B::DEPTH_FAST>(s);
        }
        __syncthreads();
    }

    template <typename Body>
    __device__ void each(Body body) const
    {
        const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
        const int row = warp / 4 * WARP_ROWS + lane / 4, col = warp % 4 * WARP_COLS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLS / 8; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) body(row + i * 16 + n / 2 * 8, col + j * 8 + n % 2, sum[i][j][n]);
    }
};

/* ---- operands ---------------------------------------------------------------------------------------------------- */

/* Four neighbours of a line of `width` elements from `start`, zeros outside; one access when the line is `wide`, which
 * says that it is aligned to four elements. */
template <typename T>
__device__ __forceinline__ void load_four(const T *line, int start, int width, bool wide, float (&x)[4])
{
    struct alignas(4 * sizeof(T)) four {
        T element[4];
    };
    if (wide && start + 4 <= width) {
        const four f = *reinterpret_cast<const four *>(line + start);
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] = to_float(f.element[n]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) x[n] = start + n < width ? to_float(line[start + n]) : 0.0f;
}

/* Rows of a matrix by an index list: row i of the operand is row index[i] of the matrix, i < rows. ROWS_ARE_DEPTH: the
 * rows run along k (a product over them), else along i. `width` elements from column `column` on. */
template <typename T, bool ROWS_ARE_DEPTH>
struct indexed_rows {
    static constexpr bool DEPTH_FAST = !ROWS_ARE_DEPTH;
    const T *matrix;
    int64_t stride;
    const int *index; /* NULL: rows as they come */
    int limit;        /* an index outside of [0, limit) gives zeros */
    int rows, column, width;
    bool wide;
    __device__ void load(int i, int k, float (&x)[4]) const
    {
        const int row = ROWS_ARE_DEPTH ? k : i, start = ROWS_ARE_DEPTH ? i : k;
        const int at = row >= rows ? -1 : index ? index[row] : row;
        if (at < 0 || at >= limit || start >= width) {
#pragma unroll
            for (int n = 0; n < 4; n++) x[n] = 0;
            return;
        }
        load_four(matrix + at * stride + column, start, width, wide, x);
    }
};

} // namespace mtp

#endif

/* Matrix products of one block of threads on tiles whose rows lie anywhere: C[i, j] = sum over k of A(i, k) B(j, k).
 *
 * A and B are operands (indexed_rows below): DEPTH_FAST says that memory runs along k, else along i or j. What lies
 * outside of an operand counts as zero. Two engines with the same face: fp32_product (one rounding a step, k in order)
 * and bf16_product (mma.sync, fp32 sums). An element of C is summed in the same order wherever it stands in a tile.
 *
 * A thread has OWN_ROWS rows of C, the r-th is row(r), and of each some pairs of neighbours: pairs(r, body) calls
 * body(j, C[row(r), j], C[row(r), j + 1]). The other elements of the row are in the ROW_LANES neighbouring lanes of its
 * warp (their number divides the warp), and in ROW_PARTS such groups in all, of which this one has the number part().
 */
#ifndef MTP_KERNELS_CUDA_PRODUCT_CUH
#define MTP_KERNELS_CUDA_PRODUCT_CUH

#include "cuda/ptx.cuh"

namespace mtp
{

struct fp32_product {
    using factor = float; /* the type of its factors */
    enum { THREADS = 256, ROWS = 64, COLS = 64, DEPTH = 16, LINE = 64 + 4, SIDE = 4 };
    enum { OWN_ROWS = SIDE, ROW_LANES = COLS / SIDE, ROW_PARTS = 1 };
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

    static __device__ int row(int r)
    {
        return (int)threadIdx.x / ROW_LANES * SIDE + r;
    }
    static __device__ int part()
    {
        return 0;
    }
    template <typename Body>
    __device__ void pairs(int r, Body body) const
    {
        const int col = (int)threadIdx.x % ROW_LANES * SIDE;
#pragma unroll
        for (int j = 0; j < SIDE; j += 2) body(col + j, sum[r][j], sum[r][j + 1]);
    }
};

/* Lines of an operand begin at multiples of 16 bytes and its width is a multiple of 8. Tiles of both operands come by
 * copies that do not wait, STAGES deep, in pieces of 16 bytes whose place is turned so that neither the copies nor
 * ldmatrix meet in a bank. */
template <int TILE_ROWS>
struct bf16_product {
    using factor = bf16;
    enum {
        THREADS = 256,
        ROWS = TILE_ROWS, /* 64 or 128 */
        COLS = 128,
        DEPTH = 32,
        STAGES = 3,
        PIECE = 8,            /* elements */
        WARP_ROWS = ROWS / 2, /* a warp's part: 2 warps down, 4 across */
        WARP_COLS = COLS / 4,
        OWN_ROWS = WARP_ROWS / 8,
        ROW_LANES = 4,
        ROW_PARTS = 4
    };
    struct alignas(16) shared {
        bf16 a[STAGES][ROWS * DEPTH], b[STAGES][COLS * DEPTH];
    };
    float sum[WARP_ROWS / 16][WARP_COLS / 8][4];

    /* Place of the piece that holds element (line, k) in a tile, `line` a row of A or a column of B. */
    template <bool DEPTH_FAST, int LINES>
    static __device__ int place(int line, int k)
    {
        if (DEPTH_FAST) return line * DEPTH + (k / PIECE ^ (line / 2 & 3)) * PIECE;
        return k * LINES + (line / PIECE ^ (k & 7)) * PIECE;
    }

    /* Where the thread's pieces of an operand lie when its lines run along k. */
    template <int LINES>
    struct pieces {
        enum { COUNT = LINES * DEPTH / PIECE / THREADS };
        const bf16 *line[COUNT];
    };

    template <int LINES, typename Operand>
    static __device__ void begin(const Operand &operand, pieces<LINES> *p)
    {
#pragma unroll
        for (int n = 0; n < pieces<LINES>::COUNT; n++)
            p->line[n] = Operand::DEPTH_FAST ? operand.line((n * THREADS + (int)threadIdx.x) / (DEPTH / PIECE)) : NULL;
    }

    template <int LINES, typename Operand>
    static __device__ void fetch(const Operand &operand, const pieces<LINES> &p, int k0, bf16 *tile)
    {
#pragma unroll
        for (int n = 0; n < pieces<LINES>::COUNT; n++) {
            const int t = n * THREADS + (int)threadIdx.x;
            const int i = Operand::DEPTH_FAST ? t / (DEPTH / PIECE) : t % (LINES / PIECE) * PIECE;
            const int k = Operand::DEPTH_FAST ? t % (DEPTH / PIECE) * PIECE : t / (LINES / PIECE);
            const bf16 *line = Operand::DEPTH_FAST ? p.line[n] : operand.line(k0 + k);
            const int start = Operand::DEPTH_FAST ? k0 + k : i;
            const bool valid = line && start < operand.width;
            copy_async(tile + place<Operand::DEPTH_FAST, LINES>(i, k), valid ? line + start : operand.matrix, valid);
        }
    }

    /* Fragment of A: rows [i, i + 16), depth [k, k + 16). */
    template <bool DEPTH_FAST>
    static __device__ void fragment_a(const bf16 *tile, int i, int k, uint32_t (&x)[4])
    {
        const int lane = (int)threadIdx.x % WARP, matrix = lane / 8;
        if (DEPTH_FAST)
            load_matrices(x, tile + place<true, ROWS>(i + lane % 16, k + lane / 16 * 8));
        else
            load_matrices_transposed(x, tile + place<false, ROWS>(i + matrix % 2 * 8, k + matrix / 2 * 8 + lane % 8));
    }

    /* Two fragments of B: columns [j, j + 16), depth [k, k + 16). */
    template <bool DEPTH_FAST>
    static __device__ void fragment_b(const bf16 *tile, int j, int k, uint32_t (&x)[4])
    {
        const int lane = (int)threadIdx.x % WARP, matrix = lane / 8;
        if (DEPTH_FAST)
            load_matrices(x, tile + place<true, COLS>(j + matrix / 2 * 8 + lane % 8, k + matrix % 2 * 8));
        else
            load_matrices_transposed(x, tile + place<false, COLS>(j + matrix / 2 * 8, k + matrix % 2 * 8 + lane % 8));
    }

    template <bool A_DEPTH_FAST, bool B_DEPTH_FAST>
    __device__ void multiply(const bf16 *tile_a, const bf16 *tile_b)
    {
        const int warp = (int)threadIdx.x / WARP, row = warp / 4 * WARP_ROWS, col = warp % 4 * WARP_COLS;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t a[WARP_ROWS / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; i++) fragment_a<A_DEPTH_FAST>(tile_a, row + i * 16, k, a[i]);
#pragma unroll
            for (int j = 0; j < WARP_COLS / 16; j++) {
                uint32_t b[4];
                fragment_b<B_DEPTH_FAST>(tile_b, col + j * 16, k, b);
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
        pieces<ROWS> of_a;
        pieces<COLS> of_b;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLS / 8; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) sum[i][j][n] = 0;
        begin(a, &of_a);
        begin(b, &of_b);
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            if (stage * DEPTH < depth) {
                fetch(a, of_a, stage * DEPTH, s->a[stage]);
                fetch(b, of_b, stage * DEPTH, s->b[stage]);
            }
            copy_commit();
        }
        int now = 0, next = STAGES - 1;
        for (int k = 0; k < depth; k += DEPTH) {
            copy_wait<STAGES - 2>();
            __syncthreads(); /* the tile is there for all, and the one before it was used by all */
            if (k + (STAGES - 1) * DEPTH < depth) {
                fetch(a, of_a, k + (STAGES - 1) * DEPTH, s->a[next]);
                fetch(b, of_b, k + (STAGES - 1) * DEPTH, s->b[next]);
            }
            copy_commit();
            multiply<A::DEPTH_FAST, B::DEPTH_FAST>(s->a[now], s->b[now]);
            now = now + 1 == STAGES ? 0 : now + 1;
            next = next + 1 == STAGES ? 0 : next + 1;
        }
        __syncthreads();
    }

    static __device__ int row(int r)
    {
        return (int)threadIdx.x / WARP / 4 * WARP_ROWS + (int)threadIdx.x % WARP / 4 + r * 8;
    }
    static __device__ int part()
    {
        return (int)threadIdx.x / WARP % 4;
    }
    template <typename Body>
    __device__ void pairs(int r, Body body) const
    {
        const int col = part() * WARP_COLS + (int)threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < WARP_COLS / 8; j++)
            body(col + j * 8, sum[r / 2][j][r % 2 * 2], sum[r / 2][j][r % 2 * 2 + 1]);
    }
};

/* ---- operands ---------------------------------------------------------------------------------------------------- */

/* Rows of a matrix, by an index list or as they come: row i of the operand is row index[i] of the matrix, i < rows.
 * ROWS_ARE_DEPTH: the rows run along k (a product over them), else along i. `width` elements of each. */
template <typename T, bool ROWS_ARE_DEPTH>
struct indexed_rows {
    static constexpr bool DEPTH_FAST = !ROWS_ARE_DEPTH;
    const T *matrix;
    int64_t stride;
    const int *index; /* NULL: rows as they come */
    int rows, width;

    /* NULL outside of the operand. */
    __device__ const T *line(int row) const
    {
        return row < rows ? matrix + (index ? index[row] : row) * stride : NULL;
    }

    /* DEPTH_FAST: (i, k .. k + 3); else (i .. i + 3, k). */
    __device__ void load(int i, int k, float (&x)[4]) const
    {
        const T *from = line(ROWS_ARE_DEPTH ? k : i);
        const int start = ROWS_ARE_DEPTH ? i : k;
        if (from && start + 4 <= width && reinterpret_cast<uintptr_t>(from + start) % (4 * sizeof(T)) == 0) {
            const pack<4> four = mtp::load<4>(from + start);
#pragma unroll
            for (int n = 0; n < 4; n++) x[n] = four.v[n];
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] = from && start + n < width ? to_float(from[start + n]) : 0.0f;
    }
};

} // namespace mtp

#endif

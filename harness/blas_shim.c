/* Gives MLX the OpenBLAS of the PyPI package scipy-openblas32 in place of the reference BLAS in its Linux wheel.
 *
 * libmlx imports exactly three CBLAS functions: sgemm, dgemm and cgemm (`nm -D libmlx.so`). The package's library has
 * them under a prefix, so preloading that library alone changes nothing; preloading this one does. LAPACK, which MLX
 * imports as well, stays MLX's own: no model's decode step calls it.
 *
 * Every argument is passed on as it came: both sides use 32-bit integers (LP64) and plain enums.
 */
#include <stdint.h>

#define GEMM_ARGUMENTS(SCALAR, MATRIX)                                                                            \
    int order, int trans_a, int trans_b, int m, int n, int k, SCALAR alpha, const MATRIX *a, int lda,             \
        const MATRIX *b, int ldb, SCALAR beta, MATRIX *c, int ldc
#define GEMM_VALUES order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc

extern void scipy_cblas_sgemm(GEMM_ARGUMENTS(float, float));
extern void scipy_cblas_dgemm(GEMM_ARGUMENTS(double, double));
extern void scipy_cblas_cgemm(GEMM_ARGUMENTS(const void *, void));
extern char *scipy_openblas_get_config(void);
extern char *scipy_openblas_get_corename(void);
extern int scipy_openblas_get_num_threads(void);

static uint64_t calls;

static void count(void) { __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); }

void cblas_sgemm(GEMM_ARGUMENTS(float, float)) {
    count();
    scipy_cblas_sgemm(GEMM_VALUES);
}

void cblas_dgemm(GEMM_ARGUMENTS(double, double)) {
    count();
    scipy_cblas_dgemm(GEMM_VALUES);
}

void cblas_cgemm(GEMM_ARGUMENTS(const void *, void)) {
    count();
    scipy_cblas_cgemm(GEMM_VALUES);
}

/* What a process can ask about itself: how often this library was called, and what stands behind it. */
uint64_t shardbench_blas_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }
const char *shardbench_blas_config(void) { return scipy_openblas_get_config(); }
const char *shardbench_blas_core(void) { return scipy_openblas_get_corename(); }
int shardbench_blas_threads(void) { return scipy_openblas_get_num_threads(); }

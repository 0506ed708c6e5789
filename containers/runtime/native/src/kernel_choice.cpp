#include "kernels.hpp"

namespace carme {

#define DECLARE(set)                                                                                              \
    namespace set {                                                                                               \
    void reduce(Type, Reduction, const void* const*, int, void* const*, int, size_t, double);                     \
    }
DECLARE(baseline)
#ifdef CARME_X86_SETS
DECLARE(avx2)
DECLARE(avx512)
#endif
#undef DECLARE

ReduceKernel reduce_kernel() {
#ifdef CARME_X86_SETS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return avx512::reduce;
    if (__builtin_cpu_supports("avx2")) return avx2::reduce;
#endif
    return baseline::reduce;
}

}  // namespace carme

#include "kernels.hpp"

namespace carme {

#define DECLARE(set)                                                                          \
    namespace set {                                                                           \
    void reduce(Type, Reduction, const void* const*, int, void* const*, int, size_t, double); \
    void encode(Wire, const float*, float*, void*, size_t);                                   \
    void decode(Wire, const void*, float*, size_t, bool);                                     \
    }
DECLARE(baseline)
#ifdef CARME_X86_SETS
DECLARE(avx2)
DECLARE(avx512)
#endif
#undef DECLARE

namespace {

Kernels choose() {
#ifdef CARME_X86_SETS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return {avx512::reduce, avx512::encode, avx512::decode};
    if (__builtin_cpu_supports("avx2")) return {avx2::reduce, avx2::encode, avx2::decode};
#endif
    return {baseline::reduce, baseline::encode, baseline::decode};
}

}  // namespace

const Kernels& kernels() {
    static const Kernels chosen = choose();
    return chosen;
}

}  // namespace carme

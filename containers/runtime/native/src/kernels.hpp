// Elementwise reduction of several buffers, in the order of the sources: the same bits in every run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace carme {

enum class Type : uint32_t { f32, f64, f16, bf16, i32, i64, u8 };
enum class Reduction : uint32_t { sum, mean, minimum, maximum, product };

inline size_t size_of(Type type) {
    switch (type) {
        case Type::f64: case Type::i64: return 8;
        case Type::f32: case Type::i32: return 4;
        case Type::f16: case Type::bf16: return 2;
        case Type::u8: return 1;
    }
    return 1;
}

inline bool is_floating(Type type) { return type <= Type::bf16; }

// Every destination gets the reduction of all sources; a destination may be one of the sources.
// 16-bit floats are summed in float and rounded once. `scale` multiplies the result where it is not 1.
using ReduceKernel = void (*)(Type, Reduction, const void* const* sources, int n_sources,
                              void* const* destinations, int n_destinations, size_t count, double scale);

// The best kernel that this processor can run.
ReduceKernel reduce_kernel();

inline void reduce(Type type, Reduction op, const void* const* sources, int n_sources, void* const* destinations,
                   int n_destinations, size_t count, double scale = 1.0) {
    static const ReduceKernel kernel = reduce_kernel();
    if (count) kernel(type, op, sources, n_sources, destinations, n_destinations, count, scale);
}

}  // namespace carme

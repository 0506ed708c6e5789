// Elementwise reduction of several buffers, in the order of the sources: the same bits in every run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace carme {

enum class Type : uint32_t { f32, f64, f16, bf16, i32, i64, u8 };
enum class Reduction : uint32_t { sum, mean, minimum, maximum, product, bits_and, bits_or, bits_xor };

inline size_t size_of(Type type) {
    switch (type) {
        case Type::f64: case Type::i64: return 8;
        case Type::f32: case Type::i32: return 4;
        case Type::f16: case Type::bf16: return 2;
        case Type::u8: return 1;
    }
    return 1;
}

// Wire types between nodes: elements as they are, or 32-bit floats in fewer bits.
enum class Wire : uint32_t { same, bf16, int8 };
constexpr size_t wire_block = 256;  // elements of int8 that share a scale

inline size_t wire_size(Wire wire, size_t element, size_t count) {
    switch (wire) {
        case Wire::same: return count * element;
        case Wire::bf16: return count * 2;
        case Wire::int8: return count + (count + wire_block - 1) / wire_block * sizeof(float);
    }
    return 0;
}

inline bool is_floating(Type type) { return type <= Type::bf16; }
inline bool is_of_bits(Reduction op) { return op >= Reduction::bits_and; }  // not defined for floats

// Every destination receives the reduction of all sources; a destination may be one of the sources. 16-bit
// floats are summed in float and rounded once. `scale` multiplies the result if it is not 1.
using ReduceKernel = void (*)(Type, Reduction, const void* const* sources, int n_sources,
                              void* const* destinations, int n_destinations, size_t count, double scale);

// Encodes floats for the wire. int8: each block's largest magnitude becomes 127, so that the error of an
// element is at most 1/254 of it; blocks below 1e-30 become zeros, blocks that are not finite become NaN. A
// `residual` is added to the source first and then holds the rounding error, or zero where that is not
// finite.
using EncodeKernel = void (*)(Wire, const float* source, float* residual, void* wire, size_t count);
// Decodes floats. `add`: adds them to `out`.
using DecodeKernel = void (*)(Wire, const void* wire, float* out, size_t count, bool add);

// The best kernels that this processor can run.
struct Kernels {
    ReduceKernel reduce;
    EncodeKernel encode;
    DecodeKernel decode;
};
const Kernels& kernels();

inline void reduce(Type type, Reduction op, const void* const* sources, int n_sources,
                   void* const* destinations, int n_destinations, size_t count, double scale = 1.0) {
    if (count) kernels().reduce(type, op, sources, n_sources, destinations, n_destinations, count, scale);
}

}  // namespace carme

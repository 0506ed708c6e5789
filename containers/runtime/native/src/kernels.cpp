// Compiled once per instruction set (KERNEL_SET). Uses nothing of the standard library, whose inline
// functions the linker would share between the sets.
#include "kernels.hpp"

#ifndef KERNEL_SET
#define KERNEL_SET baseline
#endif

namespace carme::KERNEL_SET {
namespace {

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

template <class To, class From>
inline To bit_copy(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

inline float widen(Brain v) { return bit_copy<float>(uint32_t(v.bits) << 16); }

inline Brain narrow_brain(float f) {
    uint32_t x = bit_copy<uint32_t>(f);
    uint32_t rounded = (x + 0x7FFFu + ((x >> 16) & 1u)) >> 16;
    uint32_t quiet = (x >> 16) | 0x40u;
    return {uint16_t((x & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded)};
}

// Half precision by bit arithmetic, which the compiler vectorises everywhere.
inline float widen(Half v) {
    uint32_t h = v.bits, sign = (h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
    float normal = bit_copy<float>((magnitude << 13) + 0x38000000u);
    float special = bit_copy<float>((magnitude << 13) | 0x7F800000u);
    float tiny = float(int32_t(magnitude)) * 5.9604644775390625e-8f;  // 2^-24
    float result = magnitude >= 0x7C00u ? special : magnitude >= 0x0400u ? normal : tiny;
    return bit_copy<float>(bit_copy<uint32_t>(result) | sign);
}

inline Half narrow_half(float f) {
    uint32_t x = bit_copy<uint32_t>(f), sign = (x >> 16) & 0x8000u, magnitude = x & 0x7FFFFFFFu;
    uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 makes the processor round a subnormal result to even.
    uint32_t tiny = bit_copy<uint32_t>(bit_copy<float>(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t result = magnitude > 0x7F800000u    ? 0x7E00u
                      : magnitude >= 0x477FF000u ? 0x7C00u
                      : magnitude >= 0x38800000u ? normal
                                                 : tiny;
    return {uint16_t(result | sign)};
}

template <class T> struct Traits {
    using Wide = T;
    static Wide load(T v) { return v; }
    static T store(Wide v) { return v; }
};
template <> struct Traits<Half> {
    using Wide = float;
    static float load(Half v) { return widen(v); }
    static Half store(float v) { return narrow_half(v); }
};
template <> struct Traits<Brain> {
    using Wide = float;
    static float load(Brain v) { return widen(v); }
    static Brain store(float v) { return narrow_brain(v); }
};

// Integers wrap around, as in NumPy and torch.
template <class W> inline W add(W a, W b) { return a + b; }
template <> inline int32_t add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
template <> inline int64_t add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
template <class W> inline W multiply(W a, W b) { return W(a * b); }
template <> inline int32_t multiply(int32_t a, int32_t b) { return int32_t(uint32_t(a) * uint32_t(b)); }
template <> inline int64_t multiply(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

struct Sum { template <class W> static W apply(W a, W b) { return add(a, b); } };
struct Product { template <class W> static W apply(W a, W b) { return multiply(a, b); } };
struct Minimum { template <class W> static W apply(W a, W b) { return b < a ? b : a; } };
struct Maximum { template <class W> static W apply(W a, W b) { return a < b ? b : a; } };
struct BitsAnd { template <class W> static W apply(W a, W b) { return W(a & b); } };
struct BitsOr { template <class W> static W apply(W a, W b) { return W(a | b); } };
struct BitsXor { template <class W> static W apply(W a, W b) { return W(a ^ b); } };

// Two sources at once: each element only passes through registers.
template <class T, class Op, bool Scaled>
void run_two(const T* a, const T* b, T* d, T* e, size_t count, typename Traits<T>::Wide factor) {
    using Tr = Traits<T>;
    using Wide = typename Tr::Wide;
    const auto element = [=](size_t i) {
        const Wide v = Op::apply(Tr::load(a[i]), Tr::load(b[i]));
        return Tr::store(Scaled ? Wide(v * factor) : v);
    };
    if (!e) {
#pragma GCC ivdep
        for (size_t i = 0; i < count; ++i) d[i] = element(i);
        return;
    }
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
        const T v = element(i);
        d[i] = v;
        e[i] = v;
    }
}

// Buffers per pass. Each further pass takes as long as one buffer.
constexpr int at_once = 4;

// Combines the next K sources, in order, with `total`, or starts it.
template <class T, class Op, int K> void accumulate_sources(const void* const* sources, size_t start,
                                                            size_t length, typename Traits<T>::Wide* total,
                                                            bool first) {
    using Tr = Traits<T>;
    const T* from[K];
    for (int k = 0; k < K; ++k) from[k] = static_cast<const T*>(sources[k]) + start;
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) {
        typename Tr::Wide v = first ? Tr::load(from[0][i]) : Op::apply(total[i], Tr::load(from[0][i]));
        for (int k = 1; k < K; ++k) v = Op::apply(v, Tr::load(from[k][i]));
        total[i] = v;
    }
}

// Writes `total` to the next K destinations.
template <class T, int K>
void hand_out(const typename Traits<T>::Wide* total, void* const* destinations, size_t start, size_t length) {
    T* to[K];
    for (int k = 0; k < K; ++k) to[k] = static_cast<T*>(destinations[k]) + start;
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) {
        const T v = Traits<T>::store(total[i]);
        for (int k = 0; k < K; ++k) to[k][i] = v;
    }
}

template <class T, class Op>
void run(const void* const* sources, int n, void* const* destinations, int m, size_t count, double scale) {
    using Tr = Traits<T>;
    using Wide = typename Tr::Wide;
    const bool scaled = scale != 1.0;
    const Wide factor = Wide(scale);
    if (n == 2 && (m == 1 || m == 2)) {
        const T* a = static_cast<const T*>(sources[0]);
        const T* b = static_cast<const T*>(sources[1]);
        T* d = static_cast<T*>(destinations[0]);
        T* e = m == 2 ? static_cast<T*>(destinations[1]) : nullptr;
        if (scaled) return run_two<T, Op, true>(a, b, d, e, count, factor);
        return run_two<T, Op, false>(a, b, d, e, count, factor);
    }
    constexpr size_t block = 4096 / sizeof(Wide);
    alignas(64) Wide total[block];
    for (size_t start = 0; start < count; start += block) {
        const size_t length = count - start < block ? count - start : block;
        for (int s = 0; s < n; s += at_once) {
            switch (n - s) {
                case 1: accumulate_sources<T, Op, 1>(sources + s, start, length, total, s == 0); break;
                case 2: accumulate_sources<T, Op, 2>(sources + s, start, length, total, s == 0); break;
                case 3: accumulate_sources<T, Op, 3>(sources + s, start, length, total, s == 0); break;
                default: accumulate_sources<T, Op, at_once>(sources + s, start, length, total, s == 0);
            }
        }
        if (scaled)
            for (size_t i = 0; i < length; ++i) total[i] = Wide(total[i] * factor);
        for (int d = 0; d < m; d += at_once) {
            switch (m - d) {
                case 1: hand_out<T, 1>(total, destinations + d, start, length); break;
                case 2: hand_out<T, 2>(total, destinations + d, start, length); break;
                case 3: hand_out<T, 3>(total, destinations + d, start, length); break;
                default: hand_out<T, at_once>(total, destinations + d, start, length);
            }
        }
    }
}

template <class T>
void choose(Reduction op, const void* const* s, int n, void* const* d, int m, size_t count, double scale) {
    switch (op) {
        case Reduction::sum: case Reduction::mean: return run<T, Sum>(s, n, d, m, count, scale);
        case Reduction::minimum: return run<T, Minimum>(s, n, d, m, count, scale);
        case Reduction::maximum: return run<T, Maximum>(s, n, d, m, count, scale);
        case Reduction::product: return run<T, Product>(s, n, d, m, count, scale);
        // Rejected before.
        case Reduction::bits_and: case Reduction::bits_or: case Reduction::bits_xor: return;
    }
}

template <class T> void choose_integer(Reduction op, const void* const* s, int n, void* const* d, int m,
                                       size_t count, double scale) {
    switch (op) {
        case Reduction::bits_and: return run<T, BitsAnd>(s, n, d, m, count, scale);
        case Reduction::bits_or: return run<T, BitsOr>(s, n, d, m, count, scale);
        case Reduction::bits_xor: return run<T, BitsXor>(s, n, d, m, count, scale);
        default: return choose<T>(op, s, n, d, m, count, scale);
    }
}

inline bool is_finite(float v) { return (bit_copy<uint32_t>(v) & 0x7F800000u) != 0x7F800000u; }

void encode_brain(const float* source, float* residual, void* wire, size_t count) {
    Brain* out = static_cast<Brain*>(wire);
    if (!residual) {
        for (size_t i = 0; i < count; ++i) out[i] = narrow_brain(source[i]);
        return;
    }
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
        float value = source[i] + residual[i];
        out[i] = narrow_brain(value);
        float lost = value - widen(out[i]);
        residual[i] = is_finite(lost) ? lost : 0.0f;
    }
}

// A block consists of its scale and its elements.
void encode_bytes(const float* source, float* residual, void* wire, size_t count) {
    char* out = static_cast<char*>(wire);
    alignas(64) float values[wire_block];
    for (size_t start = 0; start < count; start += wire_block) {
        const size_t length = count - start < wire_block ? count - start : wire_block;
        uint32_t largest = 0;  // the bits of magnitudes sort like the floats
        for (size_t i = 0; i < length; ++i) {
            values[i] = residual ? source[start + i] + residual[start + i] : source[start + i];
            uint32_t magnitude = bit_copy<uint32_t>(values[i]) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float top = bit_copy<float>(largest);
        const bool finite = is_finite(top), used = finite && top >= 1e-30f;
        const float scale = used ? top / 127.0f : finite ? 0.0f : bit_copy<float>(0x7FC00000u);
        const float inverse = used ? 127.0f / top : 0.0f;
        __builtin_memcpy(out, &scale, sizeof scale);
        auto* bytes = reinterpret_cast<signed char*>(out + sizeof scale);
        for (size_t i = 0; i < length; ++i) {
            // Adding 1.5 * 2^23 makes the processor round to an integer in the low bits.
            const float rounded = (used ? values[i] * inverse : 0.0f) + 12582912.0f;
            const int32_t level = bit_copy<int32_t>(rounded) - 0x4B400000;
            bytes[i] = static_cast<signed char>(level);
            if (residual) {
                const float lost = values[i] - float(level) * scale;
                residual[start + i] = is_finite(lost) ? lost : 0.0f;
            }
        }
        out += sizeof scale + length;
    }
}

template <bool Add>
void decode_brain(const void* wire, float* out, size_t count) {
    const Brain* in = static_cast<const Brain*>(wire);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) out[i] = Add ? out[i] + widen(in[i]) : widen(in[i]);
}

template <bool Add>
void decode_bytes(const void* wire, float* out, size_t count) {
    const char* in = static_cast<const char*>(wire);
    for (size_t start = 0; start < count; start += wire_block) {
        const size_t length = count - start < wire_block ? count - start : wire_block;
        float scale;
        __builtin_memcpy(&scale, in, sizeof scale);
        const auto* bytes = reinterpret_cast<const signed char*>(in + sizeof scale);
        float* to = out + start;
#pragma GCC ivdep
        for (size_t i = 0; i < length; ++i) {
            const float value = float(bytes[i]) * scale;
            to[i] = Add ? to[i] + value : value;
        }
        in += sizeof scale + length;
    }
}

}  // namespace

void encode(Wire wire, const float* source, float* residual, void* out, size_t count) {
    if (wire == Wire::bf16) encode_brain(source, residual, out, count);
    else if (wire == Wire::int8) encode_bytes(source, residual, out, count);
}

void decode(Wire wire, const void* in, float* out, size_t count, bool add) {
    if (wire == Wire::bf16) add ? decode_brain<true>(in, out, count) : decode_brain<false>(in, out, count);
    else if (wire == Wire::int8)
        add ? decode_bytes<true>(in, out, count) : decode_bytes<false>(in, out, count);
}

void reduce(Type type, Reduction op, const void* const* s, int n, void* const* d, int m, size_t count,
            double scale) {
    switch (type) {
        case Type::f32: return choose<float>(op, s, n, d, m, count, scale);
        case Type::f64: return choose<double>(op, s, n, d, m, count, scale);
        case Type::f16: return choose<Half>(op, s, n, d, m, count, scale);
        case Type::bf16: return choose<Brain>(op, s, n, d, m, count, scale);
        case Type::i32: return choose_integer<int32_t>(op, s, n, d, m, count, scale);
        case Type::i64: return choose_integer<int64_t>(op, s, n, d, m, count, scale);
        case Type::u8: return choose_integer<uint8_t>(op, s, n, d, m, count, scale);
    }
}

}  // namespace carme::KERNEL_SET

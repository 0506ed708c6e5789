// Tests of reductions, wire types, and the compaction of zeros.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "checks.hpp"
#include "kernels.hpp"
#include "zeros.hpp"

using namespace carme;

namespace {

// A compacted payload restores the original bytes, and no other payload is mistaken for one.
void zeros() {
    std::mt19937 random(11);
    for (uint64_t size : {zeros_from, zeros_from + 1, uint64_t(100'003), uint64_t(256 << 10)})
        for (unsigned every : {2u, 5u, 40u, 5000u}) {  // every so many-th block is not zero
            std::vector<char> data(size, 0), into(size, 1);
            for (uint64_t i = 0; i < size; ++i)
                if (i / zero_block * 2654435761u % every == 0 || (i >= size / zero_block * zero_block))
                    data[i] = char(random());
            const auto compact = without_zeros(data.data(), size);
            if (every == 2 && compact.size == 0) continue;
            CHECK(compact.size && compact.size <= size / 4 * 3);
            std::memcpy(into.data(), compact.data.get(), compact.size);
            CHECK(with_zeros(into.data(), compact.size, size));
            CHECK(into == data);
            for (uint64_t wrong :
                 {uint64_t(0), uint64_t(5), compact.size - 1, compact.size + 1, compact.size - zero_block}) {
                std::vector<char> spoiled(size, char(0x5A));
                std::memcpy(spoiled.data(), compact.data.get(), compact.size);
                if (wrong < size) CHECK(!with_zeros(spoiled.data(), wrong, size));
            }
        }
    std::vector<char> dense(256 << 10, 1), empty(256 << 10, 0), short_buffer(zeros_from - 1, 0);
    CHECK(!without_zeros(dense.data(), dense.size()).size);
    CHECK(!without_zeros(short_buffer.data(), short_buffer.size()).size);
    CHECK(without_zeros(empty.data(), empty.size()).size == empty.size() / zero_block / 8);
    for (uint64_t i = 0; i < empty.size(); i += 4) empty[i + 3] = char(0x80);  // -0.0 is not zero bytes
    CHECK(!without_zeros(empty.data(), empty.size()).size);
}

void arithmetic() {
    // float16 and bfloat16: every value survives, ties round to even.
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        for (Type type : {Type::f16, Type::bf16}) {
            uint16_t value = uint16_t(bits), source = value, out = 0;
            const void* sources[1] = {&source};
            void* destination = &out;
            reduce(type, Reduction::sum, sources, 1, &destination, 1, 1);
            bool nan = type == Type::f16 ? (bits & 0x7FFF) > 0x7C00 : (bits & 0x7FFF) > 0x7F80;
            if (!nan) CHECK(out == value);
        }
    }
    for (size_t count : {1, 255, 257, 5001}) {
        std::mt19937 random(3);
        std::uniform_real_distribution<float> uniform(-3, 3);
        std::vector<float> values(count), back(count);
        for (auto& value : values) value = uniform(random);
        for (Wire wire : {Wire::bf16, Wire::int8}) {
            std::vector<char> travelling(wire_size(wire, 4, count));
            std::vector<float> residual(count, 0.0f);
            carme::kernels().encode(wire, values.data(), residual.data(), travelling.data(), count);
            carme::kernels().decode(wire, travelling.data(), back.data(), count, false);
            for (size_t i = 0; i < count; ++i) {
                float bound = wire == Wire::bf16 ? std::fabs(values[i]) / 256 : 3.0f / 254;
                CHECK(std::fabs(back[i] - values[i]) <= 1.001f * bound);
                CHECK(std::fabs(back[i] + residual[i] - values[i]) <= 1e-6f);
            }
            carme::kernels().decode(wire, travelling.data(), values.data(), count, true);
            CHECK(std::fabs(values[count - 1] - 2 * back[count - 1]) <= 0.05f);
            values[0] = std::numeric_limits<float>::quiet_NaN();
            carme::kernels().encode(wire, values.data(), nullptr, travelling.data(), count);
            carme::kernels().decode(wire, travelling.data(), back.data(), count, false);
            CHECK(std::isnan(back[0]));
            for (auto& value : values) value = uniform(random);
        }
    }
    for (size_t count : {1, 15, 1024, 5001}) {
        std::vector<int32_t> a(count, 2'000'000'000), b(count, 2'000'000'000), c(count, 1), out(count);
        const void* sources[3] = {a.data(), b.data(), c.data()};
        void* destination = out.data();
        reduce(Type::i32, Reduction::sum, sources, 3, &destination, 1, count);  // wraps around
        CHECK(out[0] == int32_t(4'000'000'001u) && out[count - 1] == out[0]);
        reduce(Type::i32, Reduction::minimum, sources, 3, &destination, 1, count);
        CHECK(out[count - 1] == 1);
        void* destinations[2] = {a.data(), b.data()};
        reduce(Type::i32, Reduction::maximum, sources, 2, destinations, 2, count);
        CHECK(a[count - 1] == 2'000'000'000 && b[0] == 2'000'000'000);
    }
}

}  // namespace

void kernels_tests() {
    arithmetic();
    zeros();
}

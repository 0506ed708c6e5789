// Payloads that are mostly zero, as gradients of embeddings are, travel without the zeros.
//
// Such a payload is the blocks in which there is anything, what is left over behind the last whole block, and a bit for
// each block. It is shorter than what it stands for, by which its receiver knows it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace carme {

constexpr uint64_t zero_block = 256;            // bytes
constexpr uint64_t zeros_from = 16 << 10;       // bytes of payloads that are looked at
constexpr uint64_t zeros_sampled = 16;          // blocks that are looked at first: without one that is zero it ends there

inline bool is_zero(const char* block) {
    uint64_t words[zero_block / 8], any = 0;
    std::memcpy(words, block, 8);
    if (words[0]) return false;
    std::memcpy(words, block, sizeof words);
    for (uint64_t word : words) any |= word;
    return any == 0;
}

// What travels instead, and its bytes; none where less than a quarter would be saved.
struct WithoutZeros {
    std::unique_ptr<char[]> data = {};
    uint64_t size = 0;
};

inline WithoutZeros without_zeros(const char* data, uint64_t size) {
    const uint64_t blocks = size / zero_block, rest = size % zero_block;
    if (size < zeros_from) return {};
    bool some = false;
    for (uint64_t i = 0; i < zeros_sampled && !some; ++i) some = is_zero(data + i * blocks / zeros_sampled * zero_block);
    if (!some) return {};
    std::vector<uint8_t> present((blocks + 7) / 8, 0);
    uint64_t sent = 0;
    for (uint64_t i = 0; i < blocks; ++i) {
        if (is_zero(data + i * zero_block)) continue;
        present[i / 8] |= uint8_t(1 << i % 8);
        ++sent;
    }
    WithoutZeros result;
    result.size = sent * zero_block + rest + present.size();
    if (result.size > size / 4 * 3) return {};
    result.data = std::make_unique_for_overwrite<char[]>(result.size);
    char* out = result.data.get();
    for (uint64_t i = 0; i < blocks; ++i) {
        if (!(present[i / 8] >> i % 8 & 1)) continue;
        std::memcpy(out, data + i * zero_block, zero_block);
        out += zero_block;
    }
    std::memcpy(out, data + blocks * zero_block, rest);
    std::memcpy(out + rest, present.data(), present.size());
    return result;
}

// Makes the `size` bytes at `data` what they were; the first `came` of them are what travelled. False: nobody sends
// such.
inline bool with_zeros(char* data, uint64_t came, uint64_t size) {
    const uint64_t blocks = size / zero_block, rest = size % zero_block, bits = (blocks + 7) / 8;
    if (came < rest + bits) return false;
    std::vector<uint8_t> present(bits);
    std::memcpy(present.data(), data + came - bits, bits);
    uint64_t sent = 0;
    for (uint8_t byte : present) sent += uint64_t(std::popcount(byte));
    if (blocks % 8 && present.back() >> blocks % 8) return false;
    if (came != sent * zero_block + rest + bits) return false;
    // From the end on, where no block is moved to what is still to be moved.
    std::memmove(data + blocks * zero_block, data + sent * zero_block, rest);
    for (uint64_t i = blocks; i-- > 0;) {
        char* block = data + i * zero_block;
        if (!(present[i / 8] >> i % 8 & 1)) std::memset(block, 0, zero_block);
        else if (--sent != i) std::memcpy(block, data + sent * zero_block, zero_block);
    }
    return true;
}

}  // namespace carme

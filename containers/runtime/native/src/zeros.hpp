// Compaction of payloads that are mostly zero, such as gradients of embeddings.
//
// A compacted payload consists of the non-zero blocks, the bytes after the last whole block, and a bitmap of
// the blocks. The receiver recognises it because it is shorter than the original.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace carme {

constexpr uint64_t zero_block = 256;            // bytes
constexpr uint64_t zeros_from = 16 << 10;  // bytes; shorter payloads are not compacted
// Blocks to examine first; without a zero block among them no more are examined.
constexpr uint64_t zeros_sampled = 16;

inline bool is_zero(const char* block) {
    uint64_t words[zero_block / 8], combined = 0;
    std::memcpy(words, block, 8);
    if (words[0]) return false;
    std::memcpy(words, block, sizeof words);
    for (uint64_t word : words) combined |= word;
    return combined == 0;
}

// The compacted payload and its size; empty if it would save less than a quarter.
struct WithoutZeros {
    std::unique_ptr<char[]> data = {};
    uint64_t size = 0;
};

inline WithoutZeros without_zeros(const char* data, uint64_t size) {
    const uint64_t blocks = size / zero_block, remainder = size % zero_block;
    if (size < zeros_from) return {};
    bool has_zero_block = false;
    for (uint64_t i = 0; i < zeros_sampled && !has_zero_block; ++i)
        has_zero_block = is_zero(data + i * blocks / zeros_sampled * zero_block);
    if (!has_zero_block) return {};
    std::vector<uint8_t> present((blocks + 7) / 8, 0);
    uint64_t sent = 0;
    for (uint64_t i = 0; i < blocks; ++i) {
        if (is_zero(data + i * zero_block)) continue;
        present[i / 8] |= uint8_t(1 << i % 8);
        ++sent;
    }
    WithoutZeros result;
    result.size = sent * zero_block + remainder + present.size();
    if (result.size > size / 4 * 3) return {};
    result.data = std::make_unique_for_overwrite<char[]>(result.size);
    char* out = result.data.get();
    for (uint64_t i = 0; i < blocks; ++i) {
        if (!(present[i / 8] >> i % 8 & 1)) continue;
        std::memcpy(out, data + i * zero_block, zero_block);
        out += zero_block;
    }
    std::memcpy(out, data + blocks * zero_block, remainder);
    std::memcpy(out + remainder, present.data(), present.size());
    return result;
}

// Restores the `size` bytes at `data`, whose first `received` bytes hold the compacted payload. Returns false
// if the payload is malformed.
inline bool with_zeros(char* data, uint64_t received, uint64_t size) {
    const uint64_t blocks = size / zero_block, remainder = size % zero_block, bits = (blocks + 7) / 8;
    if (received < remainder + bits) return false;
    std::vector<uint8_t> present(bits);
    std::memcpy(present.data(), data + received - bits, bits);
    uint64_t sent = 0;
    for (uint8_t byte : present) sent += uint64_t(std::popcount(byte));
    if (blocks % 8 && present.back() >> blocks % 8) return false;
    if (received != sent * zero_block + remainder + bits) return false;
    // From the end, so that no block overwrites one that is still to move.
    std::memmove(data + blocks * zero_block, data + sent * zero_block, remainder);
    for (uint64_t i = blocks; i-- > 0;) {
        char* block = data + i * zero_block;
        if (!(present[i / 8] >> i % 8 & 1)) std::memset(block, 0, zero_block);
        else if (--sent != i) std::memcpy(block, data + sent * zero_block, zero_block);
    }
    return true;
}

}  // namespace carme

// What each member of a group shares with the members on its node.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "links.hpp"
#include "waiting.hpp"

namespace carme {

constexpr uint64_t inline_size = 64 << 10;  // a collective up to this size travels with its announcement
constexpr uint64_t chunk_size = 1 << 20;    // of private buffers that pass through shared memory
constexpr uint64_t largest_reason = Links::largest_reason;
constexpr int depth = 3;                    // chunks on their way, which hides the waiting

enum class Kind : uint32_t { barrier = 1, allreduce, broadcast, reduce_scatter, allgather, alltoall };

// What a member is about to do. Members compare, so that a mistake is an error and not a hang.
struct Descriptor {
    Kind kind;
    uint32_t type, reduction;
    int32_t root;
    uint64_t count;
    uint64_t offset;   // of the buffer, where it lies in a segment
    int32_t segment;   // -1: private memory
    uint32_t wire;     // how it travels between nodes
    uint32_t inlined;  // whether the data came with this
    char label[64];    // the caller's name for the buffer
};

struct Area {
    Flag arrived, staged, finished;
    std::atomic<uint32_t> broken;  // rank + 1 of the member that broke the group
    char reason[largest_reason + 1];  // why, where members disagree; written before `broken`
    Descriptor descriptors[2];
    alignas(4096) char inlined[2][inline_size];
    alignas(4096) char staging[depth][chunk_size];
    alignas(4096) char results[depth][chunk_size];
};

// Whether a member has noted more than that `lost` is gone: that members disagree, or who was lost before it, which may
// be why it left.
inline bool explains(const Area& area, int lost) {
    const uint32_t broken = area.broken.load(std::memory_order_acquire);
    return broken && (area.reason[0] || int(broken) - 1 != lost);
}

constexpr uint64_t area_stride = 8 << 20;
static_assert(sizeof(Area) <= area_stride);
constexpr uint64_t areas_offset = 4 << 20;

}  // namespace carme

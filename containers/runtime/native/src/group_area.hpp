// The memory that each member of a group shares with the members on its node.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "links.hpp"
#include "waiting.hpp"

namespace carme {

constexpr uint64_t inline_size = 64 << 10;  // a collective up to this size is part of its announcement
constexpr uint64_t chunk_size = 1 << 20;  // chunks of private buffers in shared memory
constexpr uint64_t largest_reason = Links::largest_reason;
constexpr int depth = 3;  // chunks in flight, which hides waiting times

enum class Kind : uint32_t { barrier = 1, allreduce, broadcast, reduce_scatter, allgather, alltoall };

// The announcement of a member's call. Members compare them, so that a mistake is an error instead of a hang.
struct Descriptor {
    Kind kind;
    uint32_t type, reduction;
    int32_t root;
    uint64_t count;
    uint64_t offset;  // of the buffer in its segment
    int32_t segment;   // -1: private memory
    uint32_t wire;  // the wire type between nodes
    uint32_t inlined;  // whether the data are part of the announcement
    char label[64];    // the caller's name for the buffer
};

struct Area {
    Flag arrived, staged, finished;
    std::atomic<uint32_t> broken;  // rank + 1 of the member that broke the group
    char reason[largest_reason + 1];  // why members disagree; written before `broken`
    Descriptor descriptors[2];
    alignas(4096) char inlined[2][inline_size];
    alignas(4096) char staging[depth][chunk_size];
    alignas(4096) char results[depth][chunk_size];
};

// Whether a member has recorded an earlier cause than the loss of `lost`: members disagree, or another member
// was lost first, which may be why this one left.
inline bool has_earlier_cause(const Area& area, int lost) {
    const uint32_t broken = area.broken.load(std::memory_order_acquire);
    return broken && (area.reason[0] || int(broken) - 1 != lost);
}

constexpr uint64_t area_stride = 8 << 20;
static_assert(sizeof(Area) <= area_stride);
constexpr uint64_t areas_offset = 4 << 20;

}  // namespace carme

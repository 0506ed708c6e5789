// Segments: this rank's own, and those of peers as far as this rank knows them.
#include "context.hpp"

#include <poll.h>
#include <sys/mman.h>

namespace carme {
namespace {

constexpr int longest_end_ms = 500;

}  // namespace

void Context::segment_alloc(int id, uint64_t size) {
    if (id < 0 || id >= max_segments)
        throw invalid("Segment " + std::to_string(id) + " is out of range.",
                      "Use a number from 0 to " + std::to_string(max_segments - 1) + ".");
    if (size == 0) throw invalid("A segment of no bytes was requested.", "Give a size of at least one byte.");
    std::lock_guard lock(segments_mutex_);
    if (segments_[size_t(id)].mapping)
        throw invalid("Segment " + std::to_string(id) + " exists already.",
                      "Delete it first, or use another number.");
    auto mapping = Mapping::create("carme-segment", segment_data + page_up(size));
    madvise(mapping->data() + segment_data, page_up(size), MADV_HUGEPAGE);
    auto& entry = control(rank_).segments[size_t(id)];
    entry.size.store(size);
    entry.fd.store(mapping->fd());
    entry.version.store(next_version_++, std::memory_order_release);
    segments_[size_t(id)] = {std::move(mapping), size};
}

void Context::segment_register(int id, int rank, Deadline deadline) {
    check_rank(rank);
    uint64_t size;
    segment_pointer(id, &size);
    if (is_local(rank)) return;  // the entry in the control file suffices
    Frame frame;
    frame.type = FrameType::register_segment;
    frame.segment = uint16_t(id);
    frame.operand = size;
    Request request;
    links_->send_request(rank, frame, &request);
    bool completed = links_->drive(
        oversubscribed_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
    if (!completed) {
        links_->cancel(&request, 1);
        throw Failure(
            FailureKind::timeout,
            "Rank " + std::to_string(rank) + " did not take segment " + std::to_string(id) + " in time.",
            "See whether it still runs, or allow more time.");
    }
    if (request.state.load() != State::done) throw_if_lost(rank, "registering a segment");
}

void Context::segment_delete(int id) {
    segment_pointer(id);
    std::lock_guard lock(segments_mutex_);
    control(rank_).segments[size_t(id)].version.store(0, std::memory_order_release);
    segments_[size_t(id)] = {};
}

char* Context::segment_pointer(int id, uint64_t* size) {
    std::lock_guard lock(segments_mutex_);
    if (id < 0 || id >= max_segments || !segments_[size_t(id)].mapping)
        throw invalid("There is no segment " + std::to_string(id) + " on this rank.", "Create it first.");
    if (size) *size = segments_[size_t(id)].size;
    return segments_[size_t(id)].mapping->data() + segment_data;
}

std::shared_ptr<Mapping> Context::segment_mapping(int id) {
    segment_pointer(id);
    std::lock_guard lock(segments_mutex_);
    return segments_[size_t(id)].mapping;
}

char* Context::local_pointer(int id, uint64_t offset, uint64_t size) {
    uint64_t limit;
    char* data = segment_pointer(id, &limit);
    if (offset > limit || size > limit - offset)
        throw invalid("Bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) +
                          " lie outside segment " + std::to_string(id) + ", which has " +
                          std::to_string(limit) + ".",
                      "Keep within the segment, or make it larger.");
    return data + offset;
}

std::shared_ptr<Mapping> Context::open_peer(int rank, int fd, uint64_t offset, uint64_t size) {
    try {
        return Mapping::open(pids_[size_t(rank)], fd, offset, size);
    } catch (const Failure&) {
        // An ending process closes its files some moments before its end is visible.
        pollfd process{pidfds_[size_t(rank)], POLLIN, 0};
        if (process.fd >= 0) poll(&process, 1, longest_end_ms);
        detect_failures();
        throw_if_lost(rank, "the opening of its memory");
        throw;
    }
}

std::shared_ptr<Mapping> Context::peer_mapping(int rank, int id, uint64_t* size) {
    std::lock_guard lock(segments_mutex_);
    if (id < 0 || id >= max_segments) return nullptr;
    if (rank == rank_) {
        *size = segments_[size_t(id)].size;
        return segments_[size_t(id)].mapping;
    }
    auto& entry = control(rank).segments[size_t(id)];
    auto& cached = peer_segments_[size_t(rank)][size_t(id)];
    uint64_t version = entry.version.load(std::memory_order_acquire);
    if (version != cached.version) {
        cached = {};
        if (version) {
            uint64_t length = entry.size.load();
            cached.mapping = open_peer(rank, entry.fd.load(), 0, segment_data + page_up(length));
            cached.size = length;
            cached.version = version;
        }
    }
    *size = cached.size;
    return cached.mapping;
}

char* Context::peer_segment(int rank, int id, uint64_t offset, uint64_t size) {
    uint64_t limit = 0;
    auto mapping = peer_mapping(rank, id, &limit);
    if (!mapping || offset > limit || size > limit - offset) return nullptr;
    return mapping->data() + segment_data + offset;
}

uint64_t Context::remote_size(int id, int rank) {
    check_rank(rank);
    uint64_t size = 0;
    if (is_local(rank)) {
        peer_mapping(rank, id, &size);
    } else if (id >= 0 && id < max_segments) {
        std::lock_guard lock(segments_mutex_);
        size = remote_sizes_[size_t(rank)][size_t(id)];
    }
    return size;
}

bool Context::find_segment(const void* at, uint64_t size, int* id, uint64_t* offset) {
    auto* p = static_cast<const char*>(at);
    std::lock_guard lock(segments_mutex_);
    for (int i = 0; i < max_segments; ++i) {
        auto& segment = segments_[size_t(i)];
        if (!segment.mapping) continue;
        const char* data = segment.mapping->data() + segment_data;
        if (p >= data && p + size <= data + segment.size) {
            *id = i;
            *offset = uint64_t(p - data);
            return true;
        }
    }
    return false;
}

}  // namespace carme

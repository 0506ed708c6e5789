// Reductions and copies within a node, through shared memory.
#include "group.hpp"

#include <algorithm>
#include <cstring>

namespace carme {
namespace {

uint64_t align_up(uint64_t v, uint64_t to) { return (v + to - 1) / to * to; }

}  // namespace

std::vector<Group::Range> Group::even_slices(uint64_t count, uint64_t element) const {
    auto n = uint64_t(local_size());
    uint64_t line = std::max<uint64_t>(1, 128 / element), each = align_up((count + n - 1) / n, line);
    std::vector<Range> slices;
    for (uint64_t l = 0; l < n; ++l) {
        uint64_t begin = std::min(l * each, count), end = std::min(begin + each, count);
        slices.push_back({begin * element, (end - begin) * element});
    }
    return slices;
}

void Group::allreduce_inline(const Call& call, double scale) {
    const void* sources[256];
    std::vector<const void*> allocated;
    const void** list = sources;
    if (local_size() > 256) {
        allocated.resize(size_t(local_size()));
        list = allocated.data();
    }
    for (int l = 0; l < local_size(); ++l) list[l] = area(l).inlined[sequence_ & 1];
    void* destination = call.buffer;
    reduce(call.type, call.reduction, list, local_size(), &destination, 1, call.count, scale);
}

bool Group::all_inlined() const {
    for (int l = 0; l < local_size(); ++l)
        if (!area(l).descriptors[sequence_ & 1].inlined) return false;
    return true;
}

bool Group::peers_in_segments(uint64_t bytes, std::vector<char*>& buffers) {
    for (int l = 0; l < local_size(); ++l)
        if (area(l).descriptors[sequence_ & 1].segment < 0) return false;
    for (int l = 0; l < local_size(); ++l) {
        const Descriptor& d = area(l).descriptors[sequence_ & 1];
        char* at =
            context_->peer_segment(ranks_[size_t(local_members_[size_t(l)])], d.segment, d.offset, bytes);
        if (!at) fail_lost(ranks_[size_t(local_members_[size_t(l)])]);
        buffers.push_back(at);
    }
    return true;
}

// Each member reduces its slice of all buffers and writes the result to all of them.
void Group::allreduce_in_segments(const Call& call, const std::vector<char*>& buffers, double scale) {
    const uint64_t element = size_of(call.type);
    Range slice = even_slices(call.count, element)[size_t(local_rank_)];
    std::vector<const void*> sources;
    std::vector<void*> destinations;
    for (char* buffer : buffers) {
        sources.push_back(buffer + slice.offset);
        destinations.push_back(buffer + slice.offset);
    }
    reduce(call.type, call.reduction, sources.data(), local_size(), destinations.data(), local_size(),
           slice.size / element, scale);
    area(local_rank_).finished.post(++finished_);
    await(&Area::finished, finished_);
}

// Chunks of private buffers pass through shared memory. Only the parts for other members are copied. Three
// chunks are in flight: a slot is reused after all members have posted a step that follows its last use.
void Group::allreduce_staged(const Call& call, double scale) {
    const uint64_t element = size_of(call.type);
    const auto n = uint64_t(local_size());
    char* data = static_cast<char*>(call.buffer);
    // Fewer, larger chunks if each wait is a context switch.
    const uint64_t chunk_bytes = context_->oversubscribed() ? chunk_size : chunk_size / 2;
    const uint64_t piece = chunk_bytes / n / 128 * 128;  // bytes of each member's slice in a chunk
    const uint64_t bytes = call.count * element, stride = piece * n;
    const uint64_t chunks = (bytes + stride - 1) / stride;
    const uint32_t staged = staged_, finished = finished_;
    auto at = [&](uint64_t chunk, uint64_t member) {
        // The last chunk is divided again, so that each member has a part of it.
        uint64_t begin = chunk * stride, length = std::min(stride, bytes - begin);
        uint64_t each = align_up((length + n - 1) / n, 128);
        uint64_t from = std::min(member * each, length), to = std::min(from + each, length);
        return Range{begin + from, to - from};
    };
    Area& own_area = area(local_rank_);
    const auto self = uint64_t(local_rank_);
    std::vector<const void*> sources(n);
    for (uint64_t step = 0; step < chunks + 2; ++step) {
        if (step < chunks) {
            char* slot = own_area.staging[(staged + step) % depth];
            for (uint64_t m = 0; m < n; ++m) {
                Range part = at(step, m);
                if (m != self) std::memcpy(slot + m * piece, data + part.offset, part.size);
            }
            own_area.staged.post(staged + uint32_t(step) + 1);
        }
        if (step >= 1 && step - 1 < chunks) {
            uint64_t chunk = step - 1;
            await(&Area::staged, staged + uint32_t(chunk) + 1);
            Range part = at(chunk, self);
            for (uint64_t m = 0; m < n; ++m)
                sources[m] = m == self ? data + part.offset
                                       : area(int(m)).staging[(staged + chunk) % depth] + self * piece;
            void* destinations[2] = {data + part.offset, own_area.results[(finished + chunk) % depth]};
            reduce(call.type, call.reduction, sources.data(), int(n), destinations, 2, part.size / element,
                   scale);
            own_area.finished.post(finished + uint32_t(chunk) + 1);
        }
        if (step >= 2) {
            uint64_t chunk = step - 2;
            await(&Area::finished, finished + uint32_t(chunk) + 1);
            for (uint64_t m = 0; m < n; ++m) {
                Range part = at(chunk, m);
                if (m != self)
                    std::memcpy(data + part.offset, area(int(m)).results[(finished + chunk) % depth],
                                part.size);
            }
        }
    }
    staged_ = staged + uint32_t(chunks);
    finished_ = finished + uint32_t(chunks);
}

// Each local member receives the reduction of its slice over all local inputs. Members run in lockstep: one
// that has posted a round has consumed the round before, so two slots would suffice.
void Group::reduce_slices(const char* input, const std::vector<Range>& slices, char* own_result,
                          const Call& call) {
    const uint64_t element = size_of(call.type), n = uint64_t(local_size());
    const uint64_t piece = chunk_size / n / 128 * 128, self = uint64_t(local_rank_);
    uint64_t longest = 0;
    for (auto& slice : slices) longest = std::max(longest, slice.size);
    std::vector<const void*> sources(n);
    for (uint64_t done = 0; done < longest; done += piece) {
        const uint32_t slot = staged_ % depth;
        for (uint64_t m = 0; m < n; ++m) {
            if (m == self || slices[m].size <= done) continue;
            std::memcpy(area(local_rank_).staging[slot] + m * piece, input + slices[m].offset + done,
                        std::min(piece, slices[m].size - done));
        }
        post_staged();
        await(&Area::staged, staged_);
        if (slices[self].size <= done) continue;
        uint64_t length = std::min(piece, slices[self].size - done);
        for (uint64_t m = 0; m < n; ++m)
            sources[m] =
                m == self ? input + slices[self].offset + done : area(int(m)).staging[slot] + self * piece;
        void* destination = own_result + done;
        reduce(call.type, call.reduction, sources.data(), int(n), &destination, 1, length / element);
    }
}

// An allgather within the node: each local member holds the ranges of `buffer` that are listed for it; then
// all hold all.
void Group::allgather_within_node(char* buffer, const std::vector<std::vector<Range>>& ranges) {
    uint64_t longest = 0;
    for (auto& list : ranges) {
        uint64_t total = 0;
        for (auto& range : list) total += range.size;
        longest = std::max(longest, total);
    }
    // Bytes [done, done + chunk) of a member's concatenated ranges.
    auto each = [&](const std::vector<Range>& list, uint64_t done, auto&& copy) {
        uint64_t position = 0;
        for (auto& range : list) {
            uint64_t from = std::max(position, done), to = std::min(position + range.size, done + chunk_size);
            if (from < to) copy(buffer + range.offset + (from - position), from - done, to - from);
            position += range.size;
        }
    };
    for (uint64_t done = 0; done < longest; done += chunk_size) {
        const uint32_t slot = staged_ % depth;
        char* own_staging = area(local_rank_).staging[slot];
        each(ranges[size_t(local_rank_)], done,
             [&](char* at, uint64_t offset, uint64_t size) { std::memcpy(own_staging + offset, at, size); });
        post_staged();
        await(&Area::staged, staged_);
        for (int l = 0; l < local_size(); ++l) {
            if (l == local_rank_) continue;
            const char* peer_staging = area(l).staging[slot];
            each(ranges[size_t(l)], done, [&](char* at, uint64_t offset, uint64_t size) {
                std::memcpy(at, peer_staging + offset, size);
            });
        }
    }
}

// The blocks of an alltoall for members on this node. `from`, `to`: offsets of each member's block in the
// input and the output.
void Group::alltoall_within_node(const Call& call, const std::vector<uint64_t>& from,
                                 const std::vector<uint64_t>& to) {
    const auto n = uint64_t(local_size());
    const char* input = static_cast<const char*>(call.input);
    char* output = static_cast<char*>(call.output);
    uint64_t longest = 0;
    auto sizes_of = [&](int l) { return reinterpret_cast<uint64_t*>(area(l).inlined[sequence_ & 1]); };
    for (int l = 0; l < local_size(); ++l)
        for (int peer = 0; peer < local_size(); ++peer)
            if (l != peer) longest = std::max(longest, sizes_of(l)[local_members_[size_t(peer)]]);
    for (int l = 0; l < local_size(); ++l) {
        int member = local_members_[size_t(l)];
        if (l != local_rank_ && sizes_of(l)[index_] != call.receive_sizes[size_t(member)])
            fail_alltoall(member, sizes_of(l)[index_], call.receive_sizes[size_t(member)]);
    }
    const uint64_t piece = chunk_size / n / 128 * 128;
    for (uint64_t done = 0; done < longest; done += piece) {
        const uint32_t slot = staged_ % depth;
        for (int l = 0; l < local_size(); ++l) {
            auto member = size_t(local_members_[size_t(l)]);
            if (l == local_rank_ || call.send_sizes[member] <= done) continue;
            std::memcpy(area(local_rank_).staging[slot] + uint64_t(l) * piece, input + from[member] + done,
                        std::min(piece, call.send_sizes[member] - done));
        }
        post_staged();
        await(&Area::staged, staged_);
        for (int l = 0; l < local_size(); ++l) {
            auto member = size_t(local_members_[size_t(l)]);
            if (l == local_rank_ || call.receive_sizes[member] <= done) continue;
            std::memcpy(output + to[member] + done, area(l).staging[slot] + uint64_t(local_rank_) * piece,
                        std::min(piece, call.receive_sizes[member] - done));
        }
    }
}

}  // namespace carme

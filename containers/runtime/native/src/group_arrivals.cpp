// Synchronisation of members: arrival at a collective, and waiting for each other and for other nodes.
#include "group.hpp"

#include <algorithm>
#include <cstring>

#include "calls.hpp"
#include "zeros.hpp"

namespace carme {
namespace {

constexpr uint64_t smallest_in_place = 2048;  // a copy of fewer bytes is cheaper than a second wait

}  // namespace

// Announces this member's call, waits until all members on this node have arrived, and compares.
void Group::arrive(const Call& call, const void* inlined, uint64_t inlined_size) {
    ++sequence_;
    if (local_size() == 1) return;
    Area& own_area = area(local_rank_);
    Descriptor& d = own_area.descriptors[sequence_ & 1];
    d.kind = call.kind;
    d.type = uint32_t(call.type);
    d.reduction = uint32_t(call.reduction);
    d.root = call.root;
    d.count = call.count;
    d.wire = uint32_t(call.wire);
    d.segment = -1;
    std::memset(d.label, 0, sizeof d.label);
    std::memcpy(d.label, call.label.data(), std::min(call.label.size(), sizeof d.label));
    const bool scatters = call.kind == Kind::reduce_scatter;
    if (scatters || (call.kind == Kind::allreduce && (!inlined || inlined_size > smallest_in_place))) {
        int id;
        const uint64_t bytes = call.count * size_of(call.type) * uint64_t(scatters ? size() : 1);
        if (context_->find_segment(scatters ? call.input : call.buffer, bytes, &id, &d.offset)) {
            d.segment = id;
            inlined_size = 0;
        }
    }
    d.inlined = inlined && inlined_size;
    if (inlined_size) std::memcpy(own_area.inlined[sequence_ & 1], inlined, inlined_size);
    own_area.arrived.post(sequence_);
    await(&Area::arrived, sequence_);
    compare(call);
}

void Group::compare(const Call&) {
    const Descriptor& own_call = area(local_rank_).descriptors[sequence_ & 1];
    for (int l = 0; l < local_size(); ++l) {
        const Descriptor& peer_call = area(l).descriptors[sequence_ & 1];
        if (own_call.kind == peer_call.kind && own_call.type == peer_call.type &&
            own_call.reduction == peer_call.reduction && own_call.root == peer_call.root &&
            own_call.count == peer_call.count && own_call.wire == peer_call.wire &&
            std::memcmp(own_call.label, peer_call.label, sizeof own_call.label) == 0)
            continue;
        int peer_rank = ranks_[size_t(local_members_[size_t(l)])], own_rank = context_->rank();
        const std::string reason = "Rank " + std::to_string(own_rank) + " called " + describe(own_call) +
                                   ", but rank " + std::to_string(peer_rank) + " called " +
                                   describe(peer_call) + ".";
        // On a single node all members detect this at the same point and may continue. Otherwise peers on
        // other nodes wait in vain.
        if (!one_node()) fail_mismatch(peer_rank, reason, same_calls);
        throw Failure(FailureKind::mismatch, reason, same_calls);
    }
}

void Group::await(Flag Area::* flag, uint32_t target) {
    for (int l = 0; l < local_size(); ++l)
        if (l != local_rank_) await_peer(area(l).*flag, target, l);
}

void Group::await_peer(Flag& flag, uint32_t target, int local_rank) {
    bool completed = wait_on(
        flag, oversubscribed_, deadline_, [&] { return flag.reached(target); }, [] {},
        [&] { check_health(); });
    if (completed) return;
    int rank = ranks_[size_t(local_members_[size_t(local_rank)])];
    abort_group(rank);
    throw Failure(FailureKind::timeout,
                  "Rank " + std::to_string(rank) + " did not come to " + operation_ + " in time.",
                  "See what that rank does; the group can no longer be used.");
}

void Group::finish(Batch& batch, size_t index) {
    Request& request = batch[index];
    auto ready = [&] { return request.state.load(std::memory_order_acquire) != State::pending; };
    auto check = [&] {
        check_health();
        if (!request.check) return;  // not a receive
        // Messages of another kind of call may have different tags, so that both sides wait forever.
        const int peer = context_->links().find_mismatch(key_, sequence_, request.check);
        if (peer >= 0) fail_call_mismatch(peer);
    };
    bool completed =
        context_->links().drive(oversubscribed_, deadline_, ready, check, &request, is_foreground_);
    if (!completed) {
        abort_group(request.peer);
        throw Failure(FailureKind::timeout,
                      "Rank " + std::to_string(request.peer) + " did not come to " + operation_ + " in time.",
                      "See what that rank does; the group can no longer be used.");
    }
    switch (request.state.load()) {
        case State::done:
            if (!request.allow_shorter || request.result == request.size) return;
            request.allow_shorter = false;
            if (!with_zeros(request.into, request.result, request.size)) fail_call_mismatch(request.peer);
            return;
        case State::pending: return;
        case State::lost: fail_lost(request.peer);
        case State::aborted: {
            throw_if_broken();
            fail_broken(request.peer, {});
        }
        case State::mismatch:
            fail_call_mismatch(request.peer);
    }
}

}  // namespace carme

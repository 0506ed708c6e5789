// Failures of a group: lost or late members, and mismatched calls.
#include "group.hpp"

#include <cstring>

#include "calls.hpp"

namespace carme {
namespace {

// The first `limit` bytes of a UTF-8 text.
std::string cut(std::string text, uint64_t limit) {
    if (text.size() <= limit) return text;
    while (limit && (text[limit] & 0xC0) == 0x80) --limit;  // keeps characters whole
    text.resize(limit);
    return text;
}

}  // namespace

void Group::check_health() {
    context_->detect_failures();
    throw_if_broken();
    for (int r : ranks_)
        if (context_->is_lost(r)) fail_lost(r);
}

void Group::throw_if_broken() {
    for (Area* a : areas_) {
        if (!a->broken.load(std::memory_order_acquire)) continue;
        // Another member may know an earlier cause, such as mismatched calls.
        for (Area* b : areas_)
            if (b->broken.load(std::memory_order_acquire) && b->reason[0]) a = b;
        fail_broken(int(a->broken.load()) - 1, {a->reason, strnlen(a->reason, largest_reason)});
    }
}

std::string Group::call_text() const { return call_ ? describe(*call_, call_->label) : operation_; }

bool Group::mark_broken(int culprit, const std::string& reason) {
    std::lock_guard lock(broken_mutex_);
    if (areas_.empty()) return false;
    Area& own_area = area(local_rank_);
    if (own_area.broken.load()) return false;
    std::memcpy(own_area.reason, reason.c_str(), reason.size() + 1);
    own_area.broken.store(uint32_t(culprit) + 1);
    return true;
}

void Group::abort_group(int culprit, const std::string& reason) {
    if (!mark_broken(culprit, reason)) return;
    for (int r : ranks_) {
        if (context_->is_local(r) || context_->is_lost(r)) continue;
        Frame frame;
        frame.type = FrameType::abort_group;
        frame.key = key_;
        frame.value = uint32_t(culprit);
        frame.size = reason.size();
        context_->links().send_owned(r, frame, {reason.begin(), reason.end()});
    }
}

void Group::fail_mismatch(int culprit, const std::string& reason, const char* remedy) {
    abort_group(culprit, cut(reason, largest_reason));
    throw Failure(FailureKind::mismatch, reason, remedy);
}

void Group::fail_call_mismatch(int rank) {
    fail_mismatch(rank,
                  "Rank " + std::to_string(context_->rank()) + " called " + call_text() + ", but rank " +
                      std::to_string(rank) + " called something else, or another size or type.",
                  same_calls);
}

void Group::fail_lost(int rank) {
    // A member that found a mismatch and left has reported it on another stream than the one that ended
    // first.
    if (!context_->is_local(rank))
        context_->links().drive(
            oversubscribed_, Deadline::after_ms(Links::longest_drain_ns / 1'000'000 + 100),
            [&] { return context_->is_lost(rank); }, [] {});
    for (Area* a : areas_)
        if (has_earlier_cause(*a, rank)) throw_if_broken();
    abort_group(rank);
    throw Failure(FailureKind::peer_lost,
                  "Rank " + std::to_string(rank) + " was lost during " + operation_ + ".",
                  "Form a new group without it, or start the run again.");
}

void Group::fail_broken(int culprit, const std::string& reason) {
    abort_group(culprit, reason);
    if (!reason.empty()) {
        const bool is_own = call_ && culprit == context_->rank();
        throw Failure(
            FailureKind::mismatch,
            is_own ? reason + " Rank " + std::to_string(culprit) + " called " + call_text() + "." : reason,
            same_calls);
    }
    bool lost = context_->is_lost(culprit);
    throw Failure(
        FailureKind::peer_lost,
        "The group broke at " + operation_ + ": rank " + std::to_string(culprit) +
            (lost ? " was lost."
                  : " was lost, did not answer in time, had no memory for it, or called something else."),
        "Form a new group without it, or start the run again.");
}

}  // namespace carme

// What members of a group do when one of them is lost, is late, or has called something else.
#include "group.hpp"

#include <cstring>

#include "calls.hpp"

namespace carme {
namespace {

// At most `limit` bytes of a text in UTF-8.
std::string cut(std::string text, uint64_t limit) {
    if (text.size() <= limit) return text;
    while (limit && (text[limit] & 0xC0) == 0x80) --limit;  // not within a character
    text.resize(limit);
    return text;
}

}  // namespace

void Group::health() {
    context_->detect_failures();
    throw_if_broken();
    for (int r : ranks_)
        if (context_->is_lost(r)) fail_lost(r);
}

void Group::throw_if_broken() {
    for (Area* a : areas_) {
        if (!a->broken.load(std::memory_order_acquire)) continue;
        // Another one may say more: that members disagree, and not just that one of them has left.
        for (Area* b : areas_)
            if (b->broken.load(std::memory_order_acquire) && b->reason[0]) a = b;
        fail_broken(int(a->broken.load()) - 1, {a->reason, strnlen(a->reason, largest_reason)});
    }
}

std::string Group::call_text() const { return call_ ? describe(*call_, call_->label) : operation_; }

bool Group::note_broken(int culprit, const std::string& reason) {
    std::lock_guard lock(breaking_);
    if (areas_.empty()) return false;
    Area& own_area = area(local_rank_);
    if (own_area.broken.load()) return false;
    std::memcpy(own_area.reason, reason.c_str(), reason.size() + 1);
    own_area.broken.store(uint32_t(culprit) + 1);
    return true;
}

void Group::break_up(int culprit, const std::string& reason) {
    if (!note_broken(culprit, reason)) return;
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
    break_up(culprit, cut(reason, largest_reason));
    throw Failure(Trouble::mismatch, reason, remedy);
}

void Group::fail_call_mismatch(int rank) {
    fail_mismatch(rank,
                  "Rank " + std::to_string(context_->rank()) + " called " + call_text() + ", but rank " +
                      std::to_string(rank) + " called something else, or another size or type.",
                  same_calls);
}

void Group::fail_lost(int rank) {
    // One that found members to disagree, and left, has reported it on another stream than the one whose end was seen first.
    if (!context_->is_local(rank))
        context_->links().drive(
            crowded_, Deadline::after_ms(Links::longest_farewell_ns / 1'000'000 + 100),
            [&] { return context_->is_lost(rank); }, [] {});
    for (Area* a : areas_)
        if (explains(*a, rank)) throw_if_broken();
    break_up(rank);
    throw Failure(Trouble::peer_lost, "Rank " + std::to_string(rank) + " was lost during " + operation_ + ".",
                  "Form a new group without it, or start the run again.");
}

void Group::fail_broken(int culprit, const std::string& reason) {
    break_up(culprit, reason);
    if (!reason.empty()) {
        const bool is_own = call_ && culprit == context_->rank();
        throw Failure(Trouble::mismatch,
                      is_own ? reason + " Rank " + std::to_string(culprit) + " called " + call_text() + "." : reason,
                      same_calls);
    }
    bool lost = context_->is_lost(culprit);
    throw Failure(Trouble::peer_lost,
                  "The group broke at " + operation_ + ": rank " + std::to_string(culprit) +
                      (lost ? " was lost."
                             : " was lost, did not answer in time, had no memory for it, or called something else."),
                  "Form a new group without it, or start the run again.");
}

}  // namespace carme

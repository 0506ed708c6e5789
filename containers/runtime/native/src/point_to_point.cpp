// Messages between two members of a group.
#include "group.hpp"

#include <algorithm>
#include <ctime>

namespace carme {

std::shared_ptr<PendingMessage> Group::send(int member, const void* data, uint64_t size, uint32_t tag,
                                            uint32_t form) {
    if (member < 0 || member >= this->size() || member == index_)
        throw invalid("A message cannot go to member " + std::to_string(member) + ".",
                      "Name another member.");
    int peer = ranks_[size_t(member)];
    std::lock_guard lock(messages_mutex_);
    auto message = std::make_shared<PendingMessage>(context_, peer);
    recorder::Span span(recorder::Kind::send, recorder::send_name);
    const uint32_t number = message_counts_[{true, member, tag}]++;
    if (span) describe_message(span.record, member, size, tag, number);
    context_->message_links(peer).send_message(peer, key_ ^ message_key, number, tag,
                                               form | point_to_point_flag, data, size, &message->request_);
    span.end();
    return message;
}

std::shared_ptr<PendingMessage> Group::receive(int member, void* into, uint64_t size, uint32_t tag,
                                               uint32_t form) {
    if (member < 0 || member >= this->size() || member == index_)
        throw invalid("A message cannot come from member " + std::to_string(member) + ".",
                      "Name another member.");
    int peer = ranks_[size_t(member)];
    std::lock_guard lock(messages_mutex_);
    auto message = std::make_shared<PendingMessage>(context_, peer);
    const uint32_t number = message_counts_[{false, member, tag}]++;
    if (recorder::on()) {
        message->recorded_ = false;
        message->received_.kind = recorder::Kind::receive;
        message->received_.name = recorder::receive_name;
        describe_message(message->received_, member, size, tag, number);
    }
    context_->message_links(peer).receive_message(peer, key_ ^ message_key, number, tag,
                                                  form | point_to_point_flag, into, size, &message->request_);
    return message;
}

int Group::sender(uint32_t tag, Deadline deadline) {
    constexpr timespec interval{0, 200'000};  // the links' own threads make progress meanwhile
    for (;;) {
        bool alive = false;
        context_->detect_failures();
        {
            std::lock_guard lock(messages_mutex_);
            for (int i = 0; i < size(); ++i) {
                const int member = (next_sender_ + i) % size(), peer = ranks_[size_t(member)];
                if (member == index_) continue;
                const bool lost = context_->is_lost(peer);  // messages that it sent before count
                const auto received = message_counts_.find({false, member, tag});
                const uint32_t sequence = received == message_counts_.end() ? 0 : received->second;
                if (context_->message_links(peer).probe(peer, key_ ^ message_key, sequence, tag)) {
                    next_sender_ = (member + 1) % size();
                    return member;
                }
                alive = alive || !lost;
            }
        }
        if (!alive)
            throw Failure(FailureKind::peer_lost,
                          "All other members were lost before one of them sent a message.",
                          "Form a new group without them, or start the run again.");
        if (deadline.passed()) return -1;
        nanosleep(&interval, nullptr);
    }
}

void Group::describe_message(recorder::Record& record, int member, uint64_t size, uint32_t tag,
                             uint32_t number) const {
    record.object = recorded_as_;
    record.peer = member;
    record.size = size;
    record.extra = uint64_t(tag) << 32 | number;
}

PendingMessage::~PendingMessage() {
    // A caller may have received it by `done` alone.
    if (!recorded_ && request_.state.load() == State::done) {
        try {
            record_received();
        } catch (...) {  // no memory for a ring: the trace lacks this message
        }
    }
    context_->message_links(peer_).cancel(&request_, 1);
}

void PendingMessage::record_received() {
    recorded_ = true;
    const int64_t seen = seen_.load(std::memory_order_relaxed);
    received_.end = std::max(seen ? seen : now_ns(), received_.begin);
    if (!received_.begin) received_.begin = received_.end;
    if (recorder::on()) recorder::add(received_);
}

bool PendingMessage::wait(Deadline deadline) {
    if (!recorded_ && !received_.begin) received_.begin = now_ns();
    bool completed = context_->message_links(peer_).drive(
        true, deadline, [&] { return done(); },
        [&] {
            context_->detect_failures();
            if (!done()) context_->throw_if_lost(peer_, "a message");
        });
    if (!completed) return false;
    if (request_.state.load() == State::mismatch)
        throw Failure(FailureKind::mismatch,
                      "Rank " + std::to_string(peer_) + " sent a message of another size or type.",
                      "Send and receive the same number of elements of the same type.");
    if (request_.state.load() != State::done)
        throw Failure(FailureKind::peer_lost, "Rank " + std::to_string(peer_) + " was lost during a message.",
                      "Form a new group without it, or start the run again.");
    if (!recorded_) record_received();
    return true;
}

}  // namespace carme

// One-sided operations: writes, reads, notifications, atomics and passive messages.
#include "context.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace carme {
namespace {

constexpr uint8_t add_operation = 0, swap_operation = 1;

// Records a put or a get: one span for all its parts, then the notification.
struct Transfer {
    Transfer(recorder::Kind kind, int rank, const std::vector<Context::Part>& parts,
             const std::optional<Notification>& notification, uint16_t queue)
        : span(kind, kind == recorder::Kind::put ? recorder::put_name : recorder::get_name),
          moves(!parts.empty()), notification(notification) {
        if (!span) return;
        span.record.peer = rank;
        span.record.detail = queue;
        for (auto& part : parts) span.record.size += part.size;
        if (moves) span.record.object = uint32_t(parts[0].remote_segment);
    }
    void end() {
        if (!span) return;
        if (moves) span.end();
        if (!notification) return;
        recorder::Span notify_span(recorder::Kind::notify, recorder::notify_name);
        notify_span.record.object = uint32_t(notification->segment);
        notify_span.record.extra = notification->id;
        notify_span.record.peer = span.record.peer;
        notify_span.end();
    }
    recorder::Span span;
    const bool moves;
    const std::optional<Notification> notification;  // a copy, because a reader's own one has a short life
};

void check_notification(const std::optional<Notification>& notification) {
    if (notification && (notification->id >= notification_count || notification->value == 0))
        throw invalid("Notification " + std::to_string(notification->id) + " with value " +
                          std::to_string(notification->value) + " cannot be sent.",
                      "Use an id below 65536 and a value other than 0.");
}

}  // namespace

void Context::check_parts(const char* operation, int rank, const std::vector<Part>& parts) {
    for (auto& part : parts) {
        local_pointer(part.local_segment, part.local_offset, part.size);
        uint64_t limit = remote_size(part.remote_segment, rank);
        if (part.remote_offset > limit || part.size > limit - part.remote_offset)
            throw invalid(std::string("The ") + operation + " reaches outside segment " +
                              std::to_string(part.remote_segment) + " of rank " + std::to_string(rank) +
                              ", which has " + std::to_string(limit) + " bytes here.",
                          "Keep within the segment, and register it with this rank.");
    }
}

void Context::write(int rank, const std::vector<Part>& parts, const std::optional<Notification>& notification,
                    int queue) {
    check_rank(rank);
    check_queue(queue);
    throw_if_lost(rank, "a write");
    check_notification(notification);
    check_parts("write", rank, parts);
    if (notification && remote_size(notification->segment, rank) == 0)
        throw invalid("Rank " + std::to_string(rank) + " has no segment " +
                          std::to_string(notification->segment) + " to be notified in.",
                      "Create it there, and register it with this rank.");
    Transfer transfer(recorder::Kind::put, rank, parts, notification,
                      is_local(rank) ? recorder::at_once : uint16_t(queue));
    if (is_local(rank)) {
        for (auto& part : parts)
            std::memcpy(peer_segment(rank, part.remote_segment, part.remote_offset, part.size),
                        local_pointer(part.local_segment, part.local_offset, part.size), part.size);
        if (notification) {
            uint64_t size;
            auto mapping = peer_mapping(rank, notification->segment, &size);
            auto* head = reinterpret_cast<SegmentHead*>(mapping->data());
            head->notifications[notification->id].store(notification->value, std::memory_order_seq_cst);
            head->notified.raise();
        }
        return transfer.end();
    }
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    if (!parts.empty()) q.written.insert(rank);
    for (size_t i = 0; i < parts.size() + (notification && parts.empty()); ++i) {
        Frame frame;
        frame.type = FrameType::write;
        const void* data = nullptr;
        if (i < parts.size()) {
            frame.segment = uint16_t(parts[i].remote_segment);
            frame.offset = parts[i].remote_offset;
            frame.size = parts[i].size;
            data = local_pointer(parts[i].local_segment, parts[i].local_offset, parts[i].size);
        }
        // The last part carries the notification if both are in the same segment.
        if (notification &&
            (parts.empty() || (i + 1 == parts.size() && notification->segment == parts[i].remote_segment))) {
            frame.segment = uint16_t(notification->segment);
            frame.check = notification->id;
            frame.value = notification->value;
        }
        q.outstanding.push_back(std::make_unique<Request>());
        links_->send(rank, frame, frame.size ? data : nullptr, q.outstanding.back().get());
    }
    if (notification && !parts.empty() && notification->segment != parts.back().remote_segment) {
        Frame frame;
        frame.type = FrameType::write;
        frame.segment = uint16_t(notification->segment);
        frame.check = notification->id;
        frame.value = notification->value;
        q.outstanding.push_back(std::make_unique<Request>());
        links_->send(rank, frame, nullptr, q.outstanding.back().get());
    }
    transfer.end();
}

void Context::read(int rank, const std::vector<Part>& parts, const std::optional<Notification>& notification,
                   int queue) {
    check_rank(rank);
    check_queue(queue);
    throw_if_lost(rank, "a read");
    check_notification(notification);
    check_parts("read", rank, parts);
    if (notification) segment_pointer(notification->segment);
    const bool is_immediate = is_local(rank) || parts.empty();
    Transfer transfer(recorder::Kind::get, rank, parts, {},
                      is_immediate ? recorder::at_once : uint16_t(queue));
    if (is_immediate) {
        for (auto& part : parts)
            std::memcpy(local_pointer(part.local_segment, part.local_offset, part.size),
                        peer_segment(rank, part.remote_segment, part.remote_offset, part.size), part.size);
        if (notification) notify(uint16_t(notification->segment), notification->id, notification->value);
        return transfer.end();
    }
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    for (size_t i = 0; i < parts.size(); ++i) {
        const Part& part = parts[i];
        q.outstanding.push_back(std::make_unique<Request>());
        Request* request = q.outstanding.back().get();
        request->into = local_pointer(part.local_segment, part.local_offset, part.size);
        request->size = part.size;
        // Replies arrive in the order of requests.
        if (i + 1 == parts.size()) request->notification = notification;
        Frame frame;
        frame.type = FrameType::read_request;
        frame.segment = uint16_t(part.remote_segment);
        frame.offset = part.remote_offset;
        frame.size = part.size;
        links_->send_request(rank, frame, request);
    }
    transfer.end();
}

bool Context::wait(int queue, Deadline deadline) {
    check_queue(queue);
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    recorder::Span span(recorder::Kind::flush, recorder::flush_name);
    span.record.detail = uint16_t(queue);
    // That the kernel has accepted a write does not mean that it has arrived, and a barrier on other streams
    // may overtake it. The reply to a later request on the same stream confirms it.
    for (int rank : q.written) {
        q.outstanding.push_back(std::make_unique<Request>());
        Frame frame;
        frame.type = FrameType::echo;
        links_->send_request(rank, frame, q.outstanding.back().get());
    }
    q.written.clear();
    bool completed = links_->drive(
        oversubscribed_, deadline,
        [&] {
            return std::all_of(q.outstanding.begin(), q.outstanding.end(), [](auto& r) {
                return r->state.load(std::memory_order_acquire) != State::pending;
            });
        },
        [] {});
    if (!completed) return false;
    int lost = -1;
    for (auto& request : q.outstanding)
        if (request->state.load() != State::done) lost = request->peer;
    q.outstanding.clear();
    if (lost >= 0)
        throw Failure(FailureKind::peer_lost,
                      "Rank " + std::to_string(lost) + " was lost during operations of queue " +
                          std::to_string(queue) + ".",
                      "Form a new group without it, or start the run again.");
    span.end();
    return true;
}

template <class Ready> bool Context::wait_for(Flag& flag, Deadline deadline, Ready&& ready) {
    // Data from other nodes are received by this thread while it spins, later by the background thread.
    const bool linked = !links_->empty();
    return wait_on(
        flag, oversubscribed_, deadline, ready,
        [&] {
            if (linked) links_->poll(0);
        },
        [&] { detect_failures(); });
}

int64_t Context::notify_waitsome(int segment, uint32_t first, uint32_t count, Deadline deadline) {
    if (first >= notification_count || count > notification_count - first || count == 0)
        throw invalid("Notifications " + std::to_string(first) + " and " + std::to_string(count) +
                          " following do not exist.",
                      "Use ids below 65536.");
    auto* head = reinterpret_cast<SegmentHead*>(segment_pointer(segment) - segment_data);
    int64_t found = -1;
    wait_for(head->notified, deadline, [&] {
        for (uint32_t i = first; i < first + count; ++i)
            if (head->notifications[i].load(std::memory_order_acquire)) {
                found = i;
                return true;
            }
        return false;
    });
    return found;
}

uint32_t Context::notify_reset(int segment, uint32_t id) {
    if (id >= notification_count)
        throw invalid("There is no notification " + std::to_string(id) + ".", "Use an id below 65536.");
    auto* head = reinterpret_cast<SegmentHead*>(segment_pointer(segment) - segment_data);
    const uint32_t value = head->notifications[id].exchange(0, std::memory_order_acq_rel);
    if (value && recorder::on()) {
        recorder::Span span(recorder::Kind::notified, recorder::notified_name);
        span.record.object = uint32_t(segment);
        span.record.extra = id;
        span.record.peer = rank_;
        span.end();
    }
    return value;
}

std::optional<uint64_t> Context::atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a,
                                        uint64_t b) {
    std::shared_ptr<void> keep_alive;
    char* at = locate(segment, offset, 8, keep_alive);
    if (!at || offset % 8 || operation > swap_operation) return std::nullopt;
    std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(at));
    if (operation == add_operation) return word.fetch_add(a);
    word.compare_exchange_strong(a, b);
    return a;
}

std::optional<uint64_t> Context::remote_atomic(int rank, int segment, uint64_t offset, uint8_t operation,
                                               uint64_t a, uint64_t b, Deadline deadline) {
    check_rank(rank);
    throw_if_lost(rank, "an atomic operation");
    uint64_t limit = remote_size(segment, rank);
    if (offset % 8 || limit < 8 || offset > limit - 8)
        throw invalid("Offset " + std::to_string(offset) + " of segment " + std::to_string(segment) +
                          " of rank " + std::to_string(rank) + " holds no 8-byte value.",
                      "Use a multiple of 8 within the segment.");
    recorder::Span span(recorder::Kind::atomic, recorder::atomic_name);
    span.record.object = uint32_t(segment);
    span.record.peer = rank;
    span.record.size = 8;
    span.record.detail = recorder::at_once;
    if (is_local(rank)) {
        std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(peer_segment(rank, segment, offset, 8)));
        if (operation == add_operation) a = word.fetch_add(a);
        else word.compare_exchange_strong(a, b);
        span.end();
        return a;
    }
    Frame frame;
    frame.type = FrameType::atomic_request;
    frame.segment = uint16_t(segment);
    frame.offset = offset;
    frame.operation = operation;
    frame.operand = a;
    frame.operand2 = b;
    Request request;
    links_->send_request(rank, frame, &request);
    bool completed = links_->drive(
        oversubscribed_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
    if (!completed) {
        links_->cancel(&request, 1);
        return std::nullopt;
    }
    if (request.state.load() != State::done) throw_if_lost(rank, "an atomic operation");
    span.end();
    return request.result;
}

std::optional<uint64_t> Context::atomic_add(int rank, int segment, uint64_t offset, uint64_t value,
                                            Deadline deadline) {
    return remote_atomic(rank, segment, offset, add_operation, value, 0, deadline);
}

std::optional<uint64_t> Context::compare_swap(int rank, int segment, uint64_t offset, uint64_t expected,
                                              uint64_t value, Deadline deadline) {
    return remote_atomic(rank, segment, offset, swap_operation, expected, value, deadline);
}

bool Context::passive_send(int rank, const void* data, uint64_t size, Deadline deadline) {
    check_rank(rank);
    if (size > passive_limit)
        throw invalid("A passive message of " + std::to_string(size) + " bytes is too long.",
                      "Send at most " + std::to_string(passive_limit) + " bytes, or write into a segment.");
    throw_if_lost(rank, "a passive send");
    if (!is_local(rank)) {
        Frame frame;
        frame.type = FrameType::passive;
        frame.size = size;
        Request request;
        links_->send(rank, frame, size ? data : nullptr, &request);
        bool completed = links_->drive(
            oversubscribed_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
        if (!completed) {
            links_->cancel(&request, 1);
            return false;
        }
        if (request.state.load() != State::done) throw_if_lost(rank, "a passive send");
        return true;
    }
    Inbox& inbox = control(rank).inbox;
    bool completed = wait_for(inbox.freed, deadline, [&] {
        uint32_t owner = 0;
        if (inbox.owner.compare_exchange_strong(owner, uint32_t(rank_) + 1)) return true;
        // A sender that died while it filled the inbox does not block it.
        if (owner && is_lost(int(owner) - 1) && !inbox.full.load())
            inbox.owner.compare_exchange_strong(owner, 0);
        throw_if_lost(rank, "a passive send");
        return false;
    });
    if (!completed) return false;
    if (size) std::memcpy(inbox.data, data, size);
    inbox.size = size;
    inbox.full.store(uint32_t(rank_) + 1, std::memory_order_release);
    inbox.arrived.raise();
    return true;
}

std::optional<std::pair<int, std::vector<char>>> Context::passive_receive(Deadline deadline) {
    Inbox& inbox = control(rank_).inbox;
    std::optional<std::pair<int, std::vector<char>>> message;
    wait_for(inbox.arrived, deadline, [&] {
        std::lock_guard lock(passive_mutex_);
        if (!passive_.empty()) {
            message.emplace(passive_.front().from, std::move(passive_.front().data));
            passive_.pop_front();
            return true;
        }
        uint32_t from = inbox.full.load(std::memory_order_acquire);
        if (!from) return false;
        uint64_t size = std::min(inbox.size, passive_limit);
        message.emplace(int(from) - 1, std::vector<char>(inbox.data, inbox.data + size));
        inbox.full.store(0, std::memory_order_release);
        inbox.owner.store(0, std::memory_order_release);
        inbox.freed.raise();
        return true;
    });
    return message;
}

}  // namespace carme

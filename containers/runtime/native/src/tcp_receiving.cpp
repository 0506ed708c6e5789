// Receiving over TCP: frames, and payloads directly at their destination.
#include "tcp_links.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include <sys/socket.h>
#include <sys/uio.h>

namespace carme {
namespace {

constexpr const char* no_memory = "sent a message for which there is no memory";

}  // namespace

void TcpLinks::receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                               void* into, uint64_t size, Request* request) {
    std::lock_guard lock(mutex_);
    request->stream = stream_of(peer, tag);
    // A payload in transfer is received directly only if its receive was posted before it began.
    if (ledger_.receive(peer, key, sequence, tag, check, into, size, request) && paused_) resume_paused();
}

void TcpLinks::resume_paused() {
    for (auto& link : links_) {
        if (!link->paused_since || link->fd < 0) continue;
        if (!begin(*link)) continue;
        link->paused_since = 0;
        --paused_;
        watch(*link);
        if (parse(*link) && !link->paused_since) readable(*link);
    }
}

void TcpLinks::readable(Link& link) {
    take(link);
    // Less than the watermark may be left, and another thread may sleep already.
    if (link.fd >= 0 && link.low_watermark > 1 && (!link.in_payload || link.remaining < link.low_watermark))
        set_low_watermark(link, 1);
}

void TcpLinks::take(Link& link) {
    uint64_t budget = max_bytes_per_turn;  // then other streams have their turn
    while (link.fd >= 0 && !link.paused_since && !link.ended_since) {
        bool receives_directly = link.in_payload && link.head == link.tail && link.destination &&
                        link.remaining >= smallest_direct;
        if (link.head == link.tail) link.head = link.tail = 0;
        iovec parts[2];
        size_t n = 0, payload = 0, requested = 0;
        if (receives_directly) {
            payload = size_t(link.capacity);
            parts[n++] = {link.destination, payload};
            // Reads the next header too, but little of its payload, which is to be received directly as well.
            if (link.capacity == link.remaining) parts[n++] = {link.buffer.get(), taken_with_payload};
        } else {
            if (link.tail == buffer_size) {
                std::memmove(link.buffer.get(), link.buffer.get() + link.head, link.tail - link.head);
                link.tail -= link.head;
                link.head = 0;
            }
            parts[n++] = {link.buffer.get() + link.tail, buffer_size - link.tail};
        }
        for (size_t i = 0; i < n; ++i) requested += parts[i].iov_len;
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = n;
        const ssize_t received = recvmsg(link.fd, &message, MSG_DONTWAIT);
        if (received < 0 && errno == EINTR) continue;
        if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (received == 0 || (received < 0 && errno == ECONNRESET)) return end(link);
        if (received < 0) return drop(link, errno);
        record_activity(peers_[size_t(link.peer)]);
        const size_t direct = std::min(size_t(received), payload);
        if (direct) advance(link, direct);
        link.tail += size_t(received) - direct;
        if (link.fd < 0 || (link.head != link.tail && !parse(link))) return;
        budget -= std::min(budget, uint64_t(received));
        if (size_t(received) < requested || !budget) return;
    }
}

// Consumes the buffer. Returns false if the link is paused or gone.
bool TcpLinks::parse(Link& link) {
    while (link.fd >= 0) {
        size_t available = link.tail - link.head;
        if (link.in_payload) {
            if (!available && link.remaining) return true;
            auto step =
                size_t(std::min<uint64_t>(available, link.destination ? link.capacity : link.remaining));
            if (link.destination && step) std::memcpy(link.destination, link.buffer.get() + link.head, step);
            link.head += step;
            advance(link, step);
            continue;
        }
        if (available < sizeof(Frame)) return true;
        std::memcpy(&link.frame, link.buffer.get() + link.head, sizeof(Frame));
        link.head += sizeof(Frame);
        if (!begin(link)) {
            if (link.fd < 0) return false;
            link.paused_since = now_ns();
            ++paused_;
            watch(link);
            return false;
        }
    }
    return false;
}

void TcpLinks::advance(Link& link, uint64_t count) {
    link.remaining -= count;
    if (!link.remaining) return finish(link);
    if (!link.destination) return;
    link.destination += count;
    link.capacity -= count;
    if (link.capacity) return;
    // The announced size is not trusted: memory grows with the received data.
    const size_t available = link.owned.size();
    try {
        link.owned.resize(size_t(std::min<uint64_t>(link.frame.size, 2 * available)));
    } catch (const std::bad_alloc&) {
        return drop(link, no_memory);
    }
    link.destination = link.owned.data() + available;
    link.capacity = link.owned.size() - available;
}

bool TcpLinks::expect(Link& link, PayloadKind payload_kind, char* destination, uint64_t size) {
    link.in_payload = true;
    link.payload_kind = payload_kind;
    link.destination = destination;
    link.remaining = size;
    link.capacity = payload_kind == PayloadKind::unexpected ? link.owned.size() : size;
    if (!size) finish(link);
    return true;
}

bool TcpLinks::begin_message(Link& link) {
    const Frame& frame = link.frame;
    if (const auto posted = ledger_.take(link.peer, frame)) {
        link.wait_expired = false;
        link.request = *posted;
        return *posted ? expect(link, PayloadKind::posted, (*posted)->into, frame.size)
                       : expect(link, PayloadKind::discarded, nullptr, frame.size);
    }
    // A message waits on the wire for its receive if it is large or will soon be expected, but not so long
    // that messages behind it starve.
    const bool soon = frame.size > buffered && !link.wait_expired && busy_with(link.peer, frame);
    if ((frame.size > small || soon) &&
        (!link.paused_since || now_ns() - link.paused_since < longest_pause_ns))
        return false;
    if (link.paused_since) link.wait_expired = true;
    link.owned.resize(size_t(std::min(frame.size, first_piece)));
    return expect(link, PayloadKind::unexpected, link.owned.data(), frame.size);
}

bool TcpLinks::answer(Link& link) {
    auto answer = ledger_.answer(link.peer, link.frame);
    if (!answer) return false;
    OutgoingFrame out;
    out.frame = answer->frame;
    out.data = answer->data;
    out.size = answer->frame.size;
    out.keep_alive = std::move(answer->keep_alive);
    enqueue(link, std::move(out));
    return true;
}

bool TcpLinks::begin(Link& link) try {
    const Frame& frame = link.frame;
    if (frame.magic != Frame{}.magic) {
        drop(link, "sent something that is not a frame");
        return false;
    }
    link.request = nullptr;
    switch (frame.type) {
        case FrameType::write: {
            char* at = host_.locate(frame.segment, frame.offset, frame.size, link.keep_alive);
            if (!at) break;
            return expect(link, PayloadKind::segment, at, frame.size);
        }
        case FrameType::message:
            if (frame.size > largest_message) break;
            return begin_message(link);
        case FrameType::passive:
            if (frame.size > largest_passive) break;
            link.owned.resize(frame.size);
            return expect(link, PayloadKind::passive, link.owned.data(), frame.size);
        case FrameType::read_reply:
            link.request = ledger_.take_reply(link.peer, frame);
            if (!link.request)
                return expect(link, PayloadKind::discarded, nullptr, std::min(frame.size, largest_message));
            return expect(link, PayloadKind::posted, link.request->into, frame.size);
        case FrameType::atomic_reply: case FrameType::register_reply:
            ledger_.replied(link.peer, frame);
            return true;
        case FrameType::read_request: case FrameType::atomic_request: case FrameType::register_segment:
        case FrameType::echo:
            if (!answer(link)) break;
            return link.fd >= 0;
        case FrameType::abort_group:
            if (frame.value >= peers_.size() || frame.size > largest_reason) break;
            link.owned.resize(frame.size);
            return expect(link, PayloadKind::reason, link.owned.data(), frame.size);
        case FrameType::heartbeat: return true;
        case FrameType::kill:
            host_.end_requested(link.peer);
            return true;
    }
    drop(link, "sent a frame that is malformed or reaches outside a segment");
    return false;
} catch (const std::bad_alloc&) {
    drop(link, no_memory);
    return false;
}

// Whether the message's group has operations in flight with that peer, so that it will soon be expected.
// Point-to-point messages come in any order.
bool TcpLinks::busy_with(int peer, const Frame& message) const {
    if (!message.check || message.check & point_to_point_flag) return false;
    if (ledger_.awaits(peer, message)) return true;
    const auto& streams = peers_[size_t(peer)].streams;
    return std::any_of(streams.begin(), streams.end(), [&](const Link* link) {
        return !link->out.empty() && link->out.front().frame.key == message.key;
    });
}

void TcpLinks::finish(Link& link) {
    link.in_payload = false;
    const Frame& frame = link.frame;
    switch (link.payload_kind) {
        case PayloadKind::segment:
            link.keep_alive.reset();
            if (frame.value) {
                if (!host_.notify(frame.segment, frame.check, frame.value))
                    return drop(link, "sent a notification that does not exist");
                ledger_.completed_any = true;
            }
            break;
        case PayloadKind::posted:
            ledger_.complete(link.request, State::done);
            link.request = nullptr;
            break;
        case PayloadKind::unexpected:
            // Its receive may have been posted meanwhile.
            ledger_.arrived(link.peer, frame, std::move(link.owned));
            link.owned = {};
            break;
        case PayloadKind::passive:
            if (!host_.passive_arrived(link.peer, std::move(link.owned)))
                return drop(link, "sent more passive messages than are taken");
            link.owned = {};
            break;
        case PayloadKind::reason:
            host_.group_aborted(frame.key, int(frame.value), {link.owned.begin(), link.owned.end()});
            ledger_.abort(frame.key);
            link.owned = {};
            break;
        case PayloadKind::discarded: break;
    }
}

}  // namespace carme

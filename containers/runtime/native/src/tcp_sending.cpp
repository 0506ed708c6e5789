// Sending over TCP: frames in stream order, and large payloads without a copy.
#include "tcp_links.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <linux/errqueue.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace carme {
namespace {

constexpr int max_parts = 16;  // per call

}  // namespace

void TcpLinks::enqueue(Link& link, OutgoingFrame out) {
    if (link.fd < 0 || link.ended_since) return ledger_.complete(out.request, State::lost);
    link.out.push_back(std::move(out));
    if (link.out.size() == 1) writable(link);
}

// Several frames per call, so that small messages share segments on the wire.
int TcpLinks::gather(Link& link, bool zero_copy, iovec* parts, int& flags) {
    int n = 0;
    for (auto& out : link.out) {
        if (n + 2 > max_parts) break;
        if (out.sent < sizeof(Frame))
            parts[n++] = {reinterpret_cast<char*>(&out.frame) + out.sent, sizeof(Frame) - out.sent};
        uint64_t payload = out.sent > sizeof(Frame) ? out.sent - sizeof(Frame) : 0;
        const char* data = out.data ? out.data : out.owned.data();
        const bool alone = zero_copy && out.size - payload >= zero_copy_from;
        if (alone && n) {  // earlier frames go first, by copy
            flags |= MSG_MORE;
            break;
        }
        if (payload < out.size) parts[n++] = {const_cast<char*>(data) + payload, out.size - payload};
        if (alone) {
            flags |= MSG_ZEROCOPY;
            break;
        }
    }
    return n;
}

void TcpLinks::pass(Link& link, uint64_t count) {
    while (count) {
        OutgoingFrame& out = link.out.front();
        uint64_t step = std::min(count, sizeof(Frame) + out.size - out.sent);
        out.sent += step;
        count -= step;
        if (out.sent == sizeof(Frame) + out.size) {
            if (out.zero_copy) link.unreleased.push_back(std::move(out));
            else ledger_.complete(out.request, State::done);
            link.out.pop_front();
        }
    }
}

// See the kernel documentation networking/msg_zerocopy: zero-copy send calls are numbered, and the socket's
// error queue reports the numbers of completed ones.
bool TcpLinks::writable(Link& link) {
    bool zero_copy = link.zero_copy;
    while (!link.out.empty()) {
        iovec parts[max_parts];
        int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
        const int n = gather(link, zero_copy, parts, flags);
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = size_t(n);
        ssize_t sent = sendmsg(link.fd, &message, flags);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == ENOBUFS && flags & MSG_ZEROCOPY) {  // too many pinned pages: copy this time
                zero_copy = false;
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                if (!link.wants_write) {
                    link.wants_write = true;
                    ++write_blocked_;
                    watch(link);
                }
                return true;
            }
            if (errno == EPIPE || errno == ECONNRESET) {  // its earlier data can still be read
                forget_out(link);
                break;
            }
            drop(link, errno);
            return false;
        }
        if (flags & MSG_ZEROCOPY) link.out.front().zero_copy = link.calls++;
        if (!link.awaited && !one_node_) {
            link.awaited = true;
            ++awaiting_;
        }
        pass(link, uint64_t(sent));
        retire(link);  // the kernel may report nothing more for a frame that ended with a copy
    }
    if (link.wants_write) {
        link.wants_write = false;
        --write_blocked_;
        watch(link);
    }
    return true;
}

void TcpLinks::release(Link& link) {
    for (;;) {
        alignas(cmsghdr) char control[128];
        msghdr message{};
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        if (recvmsg(link.fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
            if (errno == EINTR) continue;
            break;
        }
        if (!(message.msg_flags & MSG_ERRQUEUE)) break;  // not every kind of socket has an error queue
        for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
            sock_extended_err report;
            if (part->cmsg_len < CMSG_LEN(sizeof report)) continue;
            std::memcpy(&report, CMSG_DATA(part), sizeof report);
            if (report.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
            if (report.ee_code & SO_EE_CODE_ZEROCOPY_COPIED && !force_zero_copy) link.zero_copy = false;
            link.passed_early[report.ee_info] = report.ee_data + 1;  // usually, but not always, in order
        }
    }
    for (auto next = link.passed_early.find(link.passed); next != link.passed_early.end();
         next = link.passed_early.find(link.passed)) {
        link.passed = next->second;
        link.passed_early.erase(next);
    }
    retire(link);
}

void TcpLinks::retire(Link& link) {
    // Numbers wrap around.
    while (!link.unreleased.empty() && int32_t(link.passed - *link.unreleased.front().zero_copy) > 0) {
        ledger_.complete(link.unreleased.front().request, State::done);
        link.unreleased.pop_front();
    }
}

void TcpLinks::send(int peer, const Frame& frame, const void* data, Request* request) {
    send_on(0, peer, frame, data, request);
}

void TcpLinks::send_on(size_t stream, int peer, const Frame& frame, const void* data, Request* request) {
    std::lock_guard lock(mutex_);
    auto& streams = peers_[size_t(peer)].streams;
    OutgoingFrame out;
    out.frame = frame;
    out.data = static_cast<const char*>(data);
    out.size = data ? frame.size : 0;
    out.request = request;
    if (request) request->peer = peer;
    if (streams.empty()) return ledger_.complete(request, State::lost);
    enqueue(*streams[stream], std::move(out));
}

void TcpLinks::send_owned(int peer, const Frame& frame, std::vector<char> data) {
    std::lock_guard lock(mutex_);
    auto& streams = peers_[size_t(peer)].streams;
    if (streams.empty()) return;
    OutgoingFrame out;
    out.frame = frame;
    out.size = data.size();
    out.owned = std::move(data);
    enqueue(*streams[0], std::move(out));
}

void TcpLinks::send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                            const void* data, uint64_t size, Request* request) {
    const size_t stream = stream_of(peer, tag);
    request->stream = stream;
    send_on(stream, peer, message_frame(key, sequence, tag, check, size), size ? data : nullptr, request);
}

void TcpLinks::send_request(int peer, Frame frame, Request* request) {
    std::lock_guard lock(mutex_);
    request->peer = peer;
    auto& streams = peers_[size_t(peer)].streams;
    if (streams.empty() || ledger_.is_lost(peer)) return ledger_.complete(request, State::lost);
    frame.key = ledger_.add_request(request);
    OutgoingFrame out;
    out.frame = frame;
    enqueue(*streams[0], std::move(out));
}

}  // namespace carme

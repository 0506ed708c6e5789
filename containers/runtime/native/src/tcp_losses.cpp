// Detection of lost peers: streams that end, kernels that fall silent, and malformed frames.
#include "tcp_links.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <netinet/in.h>
#include <linux/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "failure.hpp"

namespace carme {

void TcpLinks::send_heartbeats() {
    next_heartbeat_ = now_ns() + heartbeat_interval_ns;
    for (size_t remaining = std::min(peers_.size(), max_heartbeats); remaining; --remaining) {
        Peer& peer = peers_[heartbeat_turn_++ % peers_.size()];
        if (!std::exchange(peer.active_since_heartbeat, false) && !peer.streams.empty())
            heartbeat(*peer.streams[0]);
    }
}

// Data in flight serve as a heartbeat.
void TcpLinks::heartbeat(Link& link) {
    if (link.fd < 0 || link.ended_since || link.awaited || !link.out.empty()) return;
    OutgoingFrame out;
    out.frame.type = FrameType::heartbeat;
    enqueue(link, std::move(out));
}

// Marks peers as lost whose kernel acknowledges neither data nor zero-window probes.
void TcpLinks::detect_silent_peers() {
    const int64_t now = now_ns(), passed = now - last_silence_check_;
    last_silence_check_ = now;
    for (auto& peer : peers_) update_silence(peer, passed);
}

void TcpLinks::update_silence(Peer& peer, int64_t passed_ns) {
    bool owed = false, active = std::exchange(peer.active_since_check, false);
    for (Link* link : peer.streams) {
        if (!link->awaited) continue;
        tcp_info info{};
        socklen_t size = sizeof info;
        const bool has_info = link->fd >= 0 && getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
        // A retransmission may have been answered with a zero window. And the kernel answers a zero-window
        // probe only if two arrive within half a second.
        const bool sent = info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
        if (has_info && ((info.tcpi_unacked && sent) || info.tcpi_probes > 1)) {
            owed = true;
            active = active || int64_t(info.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
            continue;
        }
        // The kernel will retransmit or probe the window. Waiting for the window is no sign of life.
        const bool waits = has_info && (info.tcpi_unacked || info.tcpi_notsent_bytes || !link->out.empty());
        active = active || !waits || int64_t(info.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
        if (waits) continue;
        link->awaited = false;
        --awaiting_;
    }
    // This process or machine may have been suspended, and its kernel may not have processed answers. Count
    // the time since the last check, but limit it to the usual interval.
    peer.silent_ns = !owed                       ? 0
                     : active || !peer.silent_ns ? 1
                     : peer.silent_ns + std::min(passed_ns, 2 * silence_check_interval_ns);
    if (peer.silent_ns > longest_silence_ns) return drop(*peer.streams[0], "has not answered for 0.7 s");
    if (peer.silent_ns > suspect_silence_ns)
        for (Link* link : peer.streams) heartbeat(*link);
}

void TcpLinks::forget_out(Link& link) {
    for (auto& out : link.out) ledger_.complete(out.request, State::lost);
    link.out.clear();
}

// Received data count from now on, however long no thread polled.
void TcpLinks::record_activity(Peer& peer) {
    peer.active_since_heartbeat = peer.active_since_check = true;
    if (!ended_) return;
    for (Link* link : peer.streams)
        if (link->ended_since) link->ended_since = now_ns();
}

// Whether a stream waits for a receive.
bool TcpLinks::has_paused_stream(int peer) const {
    const auto& streams = peers_[size_t(peer)].streams;
    return std::any_of(streams.begin(), streams.end(), [](const Link* link) { return link->paused_since; });
}

// A leaving peer closes all its streams. Its last message may still arrive on another stream than the one
// that ended first.
void TcpLinks::end(Link& link) {
    link.ended_since = now_ns();
    ++ended_;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link.fd, nullptr);
    if (!link.unreleased.empty()) release(link);
    forget_out(link);
    if (link.wants_write) {
        link.wants_write = false;
        --write_blocked_;
    }
    const auto& streams = peers_[size_t(link.peer)].streams;
    if (std::all_of(streams.begin(), streams.end(), [](Link* stream) { return stream->ended_since; }))
        mark_lost(link.peer);
}

void TcpLinks::drop(Link& link, const std::string& reason) {
    if (!ledger_.is_lost(link.peer))
        std::fprintf(stderr, "carme_runtime: rank %d %s; its connection was closed.\n", link.peer,
                     reason.c_str());
    mark_lost(link.peer);
}

void TcpLinks::drop(Link& link, int error) { drop(link, "cannot be reached: " + error_text(error)); }

// The loss of one stream breaks the order of messages: the peer counts as lost.
void TcpLinks::mark_lost(int peer) {
    if (ledger_.is_lost(peer)) return;
    for (Link* link : peers_[size_t(peer)].streams) {
        if (link->fd < 0) continue;
        epoll_ctl(epoll_, EPOLL_CTL_DEL, link->fd, nullptr);
        close(link->fd);
        link->fd = -1;
        if (link->wants_write) {
            link->wants_write = false;
            --write_blocked_;
        }
        if (link->paused_since) {
            link->paused_since = 0;
            --paused_;
        }
        if (link->ended_since) {
            link->ended_since = 0;
            --ended_;
        }
        ledger_.complete(link->request, State::lost);
        link->request = nullptr;
        link->in_payload = false;
        link->keep_alive.reset();
        link->owned = {};
        for (auto* frames : {&link->out, &link->unreleased}) {
            for (auto& out : *frames) ledger_.complete(out.request, State::lost);
            frames->clear();
        }
    }
    ledger_.mark_lost(peer);
}

}  // namespace carme

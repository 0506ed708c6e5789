// How links over TCP notice that a peer is gone: it ends its streams, its kernel falls silent, or it sends nonsense.
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
    for (size_t remaining = std::min(peers_.size(), most_heartbeats); remaining; --remaining) {
        Peer& peer = peers_[heartbeat_turn_++ % peers_.size()];
        if (!std::exchange(peer.active_since_heartbeat, false) && !peer.streams.empty()) heartbeat(*peer.streams[0]);
    }
}

// What is under way already asks as well.
void TcpLinks::heartbeat(Link& link) {
    if (link.fd < 0 || link.ended_since || link.awaited || !link.out.empty()) return;
    Out out;
    out.frame.type = FrameType::heartbeat;
    enqueue(link, std::move(out));
}

// Loses peers whose kernel no longer answers: neither what was sent nor the question whether there is room by now.
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
        // What was sent again in vain may have been answered: there is no room yet. And the kernel answers one question
        // for room only where two come within half a second.
        const bool sent = info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
        if (has_info && ((info.tcpi_unacked && sent) || info.tcpi_probes > 1)) {
            owed = true;
            active = active || int64_t(info.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
            continue;
        }
        // It will send again, or ask for room. To wait for room is no sign of life.
        const bool waits = has_info && (info.tcpi_unacked || info.tcpi_notsent_bytes || !link->out.empty());
        active = active || !waits || int64_t(info.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
        if (waits) continue;
        link->awaited = false;
        --awaiting_;
    }
    // This process, or the machine, may have been kept from looking, and its kernel from taking answers: what passed since
    // the last look counts, but not more of it than usually passes.
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

// What has come counts from now on, however long no thread polled.
void TcpLinks::note_activity(Peer& peer) {
    peer.active_since_heartbeat = peer.active_since_check = true;
    if (!ended_) return;
    for (Link* link : peer.streams)
        if (link->ended_since) link->ended_since = now_ns();
}

// Whether something of a stream waits to be expected.
bool TcpLinks::has_paused_stream(int peer) const {
    const auto& streams = peers_[size_t(peer)].streams;
    return std::any_of(streams.begin(), streams.end(), [](const Link* link) { return link->paused_since; });
}

// A peer that leaves closes all of its streams. Of one that is done the last message may still be on its way by another
// stream than the one whose end is seen first.
void TcpLinks::end(Link& link) {
    link.ended_since = now_ns();
    ++ended_;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link.fd, nullptr);
    if (!link.leaving.empty()) release(link);
    forget_out(link);
    if (link.wants_write) {
        link.wants_write = false;
        --write_blocked_;
    }
    const auto& streams = peers_[size_t(link.peer)].streams;
    if (std::all_of(streams.begin(), streams.end(), [](Link* stream) { return stream->ended_since; })) lose(link.peer);
}

void TcpLinks::drop(Link& link, const std::string& reason) {
    if (!ledger_.is_lost(link.peer))
        std::fprintf(stderr, "carme_runtime: rank %d %s; its connection was closed.\n", link.peer, reason.c_str());
    lose(link.peer);
}

void TcpLinks::drop(Link& link, int error) { drop(link, "cannot be reached: " + error_text(error)); }

// One stream gone means that order is gone: the peer counts as lost.
void TcpLinks::lose(int peer) {
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
        for (auto* frames : {&link->out, &link->leaving}) {
            for (auto& out : *frames) ledger_.complete(out.request, State::lost);
            frames->clear();
        }
    }
    ledger_.lose(peer);
}

}  // namespace carme

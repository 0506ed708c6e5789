// Links over TCP: sockets, polling, and queries about messages.
#include "tcp_links.hpp"

#include <algorithm>
#include <ctime>

#include <fcntl.h>
#include <netinet/in.h>
#include <linux/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

// Since Linux 6.15; headers may be older than the kernel.
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace carme {
namespace {

// Limits the time between two probes, if the kernel supports it.
void set_rto_max(int fd, int ms) { setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &ms, sizeof ms); }

}  // namespace

TcpLinks::TcpLinks(Host& host, int size, bool one_node)
    : host_(host), one_node_(one_node), peers_(size_t(size)), ledger_(host, size) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    wakeup_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    // Edge-triggered: every write wakes a sleeper, and no thread needs to read it.
    event.events = EPOLLIN | EPOLLET;
    event.data.ptr = nullptr;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wakeup_fd_, &event);
}

TcpLinks::~TcpLinks() {
    stop();
    for (auto& link : links_)
        if (link->fd >= 0) close(link->fd);
    close(epoll_);
    close(wakeup_fd_);
}

void TcpLinks::add_peer(int peer, const std::vector<int>& sockets) {
    for (int fd : sockets) {
        auto link = std::make_unique<Link>();
        link->fd = fd;
        link->peer = peer;
        link->buffer = std::make_unique<char[]>(buffer_size);
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        // `detect_silent_peers` detects a node that is gone. TCP_USER_TIMEOUT does not fit: it also ends
        // connections to a process that is starved of CPU time, reads nothing for a while, but whose kernel
        // still answers. Nor does SO_KEEPALIVE: its probes are at least a second apart and are not repeated
        // when they get lost.
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        // Older kernels back off when they probe a zero window: a peer that is lost then is detected later,
        // if stream 0 is the one with the zero window.
        set_rto_max(fd, longest_rto_ms);
        link->zero_copy = setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0;
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = link.get();
        epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
        peers_[size_t(peer)].streams.push_back(link.get());
        links_.push_back(std::move(link));
    }
}

void TcpLinks::start() {
    if (!links_.empty()) thread_ = std::thread([this] { run(); });
}

void TcpLinks::stop() {
    stopping_ = true;
    if (thread_.joinable()) {
        uint64_t wakeup = 1;
        (void)!write(wakeup_fd_, &wakeup, sizeof wakeup);
        thread_.join();
    }
    // The kernel still has to deliver data after this process ends. It gives up once it would wait for so
    // long.
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0) set_rto_max(link->fd, system_rto_max_ms);
}

void TcpLinks::run() {
    int64_t sleep_ns = shortest_sleep_ns;
    while (!stopping_) {
        if (driven()) {
            // The longer others have driven the links, the longer they are likely to: each poll takes the
            // core from a computing rank.
            timespec interval{0, sleep_ns};
            nanosleep(&interval, nullptr);
            sleep_ns = std::min(2 * sleep_ns, longest_sleep_ns);
            continue;
        }
        sleep_ns = shortest_sleep_ns;
        poll(poll_timeout_ms());
    }
}

int TcpLinks::poll_timeout_ms() const {
    constexpr int64_t ms = 1'000'000;
    if (paused_ || ended_) return 20;
    if (awaiting_) return int(silence_check_interval_ns / ms);
    if (one_node_) return 1000;
    return int(std::clamp((next_heartbeat_ - now_ns()) / ms + 1, int64_t(1), int64_t(1000)));
}

void TcpLinks::poll(int timeout_ms, int own_foregrounds) {
    if (links_.empty()) return;
    epoll_event events[max_events];
    if (timeout_ms) raise_low_watermarks();
    int n = epoll_wait(epoll_, events, max_events, timeout_ms);
    std::lock_guard lock(mutex_);
    ledger_.completed_any = false;
    if (paused_) resume_paused();
    for (int i = 0; i < n; ++i) {
        auto* link = static_cast<Link*>(events[i].data.ptr);
        if (!link || link->fd < 0) continue;
        if (events[i].events & EPOLLERR) release(*link);
        if (events[i].events & EPOLLOUT)
            if (!writable(*link)) continue;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(*link);
    }
    const int64_t now = now_ns();
    if (ended_ && n < max_events)  // otherwise there may be more to read
        for (auto& link : links_)
            if (link->ended_since && now - link->ended_since > longest_drain_ns &&
                !has_paused_stream(link->peer))
                mark_lost(link->peer);
    if (!one_node_ && now > next_heartbeat_) send_heartbeats();
    if (awaiting_ && now > last_silence_check_ + silence_check_interval_ns) detect_silent_peers();
    wake_waiters(own_foregrounds);
}

// Otherwise each packet would wake a sleeper and take the core from a computing rank.
void TcpLinks::raise_low_watermarks() {
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0 && link->in_payload && link->head == link->tail &&
            link->remaining >= smallest_low_watermark)
            set_low_watermark(*link, std::min(link->remaining, largest_low_watermark));
}

void TcpLinks::set_low_watermark(Link& link, uint64_t low_watermark) {
    if (link.low_watermark == low_watermark) return;
    const int bytes = int(link.low_watermark = low_watermark);
    setsockopt(link.fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void TcpLinks::poll_for(const Request& request) {
    for (auto* counter : {&write_blocked_, &paused_, &ended_})
        if (counter->load(std::memory_order_relaxed)) return poll(0, 1);
    std::lock_guard lock(mutex_);
    const auto& streams = peers_[size_t(request.peer)].streams;
    if (request.stream >= streams.size() || streams[request.stream]->fd < 0) return;
    ledger_.completed_any = false;
    Link& link = *streams[request.stream];
    if (!link.unreleased.empty()) release(link);
    readable(link);
    wake_waiters(1);
}

// Wakes threads that sleep in `poll` for requests that are complete now.
void TcpLinks::wake_waiters(int own_foregrounds) {
    if (ledger_.completed_any && has_other_waiters(own_foregrounds)) {
        uint64_t wakeup = 1;
        (void)!write(wakeup_fd_, &wakeup, sizeof wakeup);
    }
}

size_t TcpLinks::stream_of(int peer, uint32_t tag) const {
    const size_t streams = peers_[size_t(peer)].streams.size();
    return streams > 1 ? 1 + tag % (streams - 1) : 0;
}

void TcpLinks::watch(Link& link) {
    epoll_event event{};
    event.events =
        (link.paused_since ? 0u : uint32_t(EPOLLIN)) | (link.wants_write ? uint32_t(EPOLLOUT) : 0u);
    event.data.ptr = &link;
    epoll_ctl(epoll_, EPOLL_CTL_MOD, link.fd, &event);
}

void TcpLinks::cancel(Request* requests, size_t count) {
    std::lock_guard lock(mutex_);
    auto is_cancelled = [&](Request* r) { return r && r >= requests && r < requests + count; };
    ledger_.cancel(requests, count);
    for (auto& link : links_) {
        if (is_cancelled(link->request)) {  // discard the rest of the payload
            link->request = nullptr;
            link->destination = nullptr;
            link->payload_kind = PayloadKind::discarded;
        }
        for (auto out = link->out.begin(); out != link->out.end();) {
            if (!is_cancelled(out->request)) {
                ++out;
            } else if (out->sent == 0) {
                out = link->out.erase(out);
            } else {  // the frame has been started: send the rest from a copy
                if (out->data) out->owned.assign(out->data, out->data + out->size);
                out->data = nullptr;
                out->request = nullptr;
                ++out;
            }
        }
        // The kernel may still read the buffer of a failed message: its pages stay, whatever they hold.
        for (auto& out : link->unreleased)
            if (is_cancelled(out.request)) out.request = nullptr;
    }
}

void TcpLinks::forget(uint64_t key) {
    std::lock_guard lock(mutex_);
    ledger_.forget(key);
}

int TcpLinks::find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) {
    std::lock_guard lock(mutex_);
    return ledger_.find_mismatch(key, sequence, check);
}

bool TcpLinks::probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) {
    std::lock_guard lock(mutex_);
    return ledger_.probe(peer, key, sequence, tag);
}

uint64_t TcpLinks::zero_copy_sends() {
    std::lock_guard lock(mutex_);
    uint64_t calls = 0;
    for (auto& link : links_) calls += link->calls;
    return calls;
}

void TcpLinks::engage(uint64_t key, uint32_t sequence, uint32_t check) {
    std::lock_guard lock(mutex_);
    ledger_.engage(key, sequence, check);
}

void TcpLinks::disengage(uint64_t key) {
    std::lock_guard lock(mutex_);
    ledger_.disengage(key);
}

}  // namespace carme

// Links over TCP: their sockets, who polls these and when, and what a caller may query about messages.
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

// Of Linux 6.15; headers may be older than the kernel that runs.
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace carme {
namespace {

// At most so long apart, where the kernel lets this be set.
void set_rto_max(int fd, int ms) { setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &ms, sizeof ms); }

}  // namespace

TcpLinks::TcpLinks(Host& host, int size, bool one_node)
    : host_(host), one_node_(one_node), peers_(size_t(size)), ledger_(host, size) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    kick_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;  // every write to it wakes a sleeper, and no thread needs to read it
    event.data.ptr = nullptr;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, kick_, &event);
}

TcpLinks::~TcpLinks() {
    stop();
    for (auto& link : links_)
        if (link->fd >= 0) close(link->fd);
    close(epoll_);
    close(kick_);
}

void TcpLinks::add_peer(int peer, const std::vector<int>& sockets) {
    for (int fd : sockets) {
        auto link = std::make_unique<Link>();
        link->fd = fd;
        link->peer = peer;
        link->buffer = std::make_unique<char[]>(buffer_size);
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        // A node that vanished is noticed by `detect_silent_peers`. TCP_USER_TIMEOUT would not do: it ends a connection,
        // too, whose other end has no room for a while, as a process has that is starved of its processor, and whose kernel
        // answers all the same. Nor would SO_KEEPALIVE: its questions come a second apart at best, and are not repeated when
        // they get lost.
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        // Older kernels probe an end without a receive window less and less often: there one that then vanishes is
        // noticed later if stream 0 is the one without a window.
        set_rto_max(fd, longest_rto_ms);
        link->uncopied = setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0;
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
        (void)!write(kick_, &wakeup, sizeof wakeup);
        thread_.join();
    }
    // What is still to be delivered when this process has gone: its kernel gives up once it would wait for so long.
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0) set_rto_max(link->fd, system_rto_max_ms);
}

void TcpLinks::run() {
    int64_t nap_ns = shortest_nap_ns;
    while (!stopping_) {
        if (driven()) {
            // The longer others wait, the longer they are likely to: each poll takes the core from a rank that computes.
            timespec nap{0, nap_ns};
            nanosleep(&nap, nullptr);
            nap_ns = std::min(2 * nap_ns, longest_nap_ns);
            continue;
        }
        nap_ns = shortest_nap_ns;
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
    epoll_event events[most_events];
    if (timeout_ms) raise_low_watermarks();
    int n = epoll_wait(epoll_, events, most_events, timeout_ms);
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
    if (ended_ && n < most_events)  // else there may be more to read
        for (auto& link : links_)
            if (link->ended_since && now - link->ended_since > longest_farewell_ns && !has_paused_stream(link->peer))
                lose(link->peer);
    if (!one_node_ && now > next_heartbeat_) send_heartbeats();
    if (awaiting_ && now > last_silence_check_ + silence_check_interval_ns) detect_silent_peers();
    wake_waiters(own_foregrounds);
}

// Each packet would wake a sleeper else, and take the core from a rank that computes.
void TcpLinks::raise_low_watermarks() {
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0 && link->in_payload && link->head == link->tail && link->remaining >= smallest_low_watermark)
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
    if (!link.leaving.empty()) release(link);
    readable(link);
    wake_waiters(1);
}

// Threads that sleep in `poll` for what is complete now.
void TcpLinks::wake_waiters(int own_foregrounds) {
    if (ledger_.completed_any && has_other_waiters(own_foregrounds)) {
        uint64_t wakeup = 1;
        (void)!write(kick_, &wakeup, sizeof wakeup);
    }
}

size_t TcpLinks::stream_of(int peer, uint32_t tag) const {
    const size_t streams = peers_[size_t(peer)].streams.size();
    return streams > 1 ? 1 + tag % (streams - 1) : 0;
}

void TcpLinks::watch(Link& link) {
    epoll_event event{};
    event.events = (link.paused_since ? 0u : uint32_t(EPOLLIN)) | (link.wants_write ? uint32_t(EPOLLOUT) : 0u);
    event.data.ptr = &link;
    epoll_ctl(epoll_, EPOLL_CTL_MOD, link.fd, &event);
}

void TcpLinks::cancel(Request* requests, size_t count) {
    std::lock_guard lock(mutex_);
    auto is_cancelled = [&](Request* r) { return r && r >= requests && r < requests + count; };
    ledger_.cancel(requests, count);
    for (auto& link : links_) {
        if (is_cancelled(link->request)) {  // take the rest off the wire, to nowhere
            link->request = nullptr;
            link->destination = nullptr;
            link->into = Into::discarded;
        }
        for (auto out = link->out.begin(); out != link->out.end();) {
            if (!is_cancelled(out->request)) {
                ++out;
            } else if (out->sent == 0) {
                out = link->out.erase(out);
            } else {  // the frame has begun: its end must follow, from a copy
                if (out->data) out->owned.assign(out->data, out->data + out->size);
                out->data = nullptr;
                out->request = nullptr;
                ++out;
            }
        }
        // What the kernel still reads of a buffer is of a message that failed: its pages stay, whatever is in them.
        for (auto& out : link->leaving)
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

uint64_t TcpLinks::sent_uncopied() {
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

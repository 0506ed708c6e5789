#include "tcp_links.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <linux/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "failure.hpp"

// Of Linux 6.15; headers may be older than the kernel that runs.
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace carme {
namespace {

constexpr const char* no_memory = "sent a message for which there is no memory";

// At most so long apart, where the kernel lets itself be told.
void try_again_within(int fd, int ms) { setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &ms, sizeof ms); }

std::string unreachable(int error) { return std::string("cannot be reached: ") + std::strerror(error); }

}  // namespace

TcpLinks::TcpLinks(Host& host, int size, bool one_node)
    : host_(host), one_node_(one_node), peers_(size_t(size)), ledger_(host, size) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    kick_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;  // every write to it wakes a sleeper, and nobody needs to read it
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
        // A node that vanished is noticed by `look_for_silence`. TCP_USER_TIMEOUT would not do: it ends a connection, too,
        // whose other end has no room for a while, as a process has that is starved of its processor, and whose kernel
        // answers all the same. Nor would SO_KEEPALIVE: its questions come a second apart at best, and are not repeated when
        // they get lost.
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        // Older kernels ask an end that has no room less and less often: one that then vanishes is noticed later there if
        // stream 0 is the one without room.
        try_again_within(fd, longest_between_tries_ms);
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
        uint64_t one = 1;
        (void)!write(kick_, &one, sizeof one);
        thread_.join();
    }
    // What is still to be delivered when this process has gone: its kernel gives up once it would wait for so long.
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0) try_again_within(link->fd, system_between_tries_ms);
}

void TcpLinks::run() {
    int64_t nap_ns = shortest_nap_ns;
    while (!stopping_) {
        if (driven()) {
            // The longer others wait, the longer they are likely to: each look takes the core from who computes.
            timespec nap{0, nap_ns};
            nanosleep(&nap, nullptr);
            nap_ns = std::min(2 * nap_ns, longest_nap_ns);
            continue;
        }
        nap_ns = shortest_nap_ns;
        poll(patience_ms());
    }
}

int TcpLinks::patience_ms() const {
    constexpr int64_t ms = 1'000'000;
    if (paused_ || ended_) return 20;
    if (awaiting_) return int(between_looks_ns / ms);
    if (one_node_) return 1000;
    return int(std::clamp((next_heartbeat_ - now_ns()) / ms + 1, int64_t(1), int64_t(1000)));
}

void TcpLinks::poll(int timeout_ms, int own) {
    if (links_.empty()) return;
    epoll_event events[most_events];
    if (timeout_ms) sleep_until_whole();
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
            if (link->ended_since && now - link->ended_since > longest_farewell_ns && !still_speaks(link->peer))
                lose(link->peer);
    if (!one_node_ && now > next_heartbeat_) send_heartbeats();
    if (awaiting_ && now > last_look_ + between_looks_ns) look_for_silence();
    wake_others(own);
}

// Each packet would wake a sleeper else, and take the core from who computes.
void TcpLinks::sleep_until_whole() {
    std::lock_guard lock(mutex_);
    for (auto& link : links_)
        if (link->fd >= 0 && link->in_payload && link->head == link->tail && link->left >= smallest_mark)
            set_mark(*link, std::min(link->left, largest_mark));
}

void TcpLinks::set_mark(Link& link, uint64_t mark) {
    if (link.mark == mark) return;
    const int bytes = int(link.mark = mark);
    setsockopt(link.fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void TcpLinks::poll_for(const Request& request) {
    for (auto* others : {&wanting_, &paused_, &ended_})
        if (others->load(std::memory_order_relaxed)) return poll(0, 1);
    std::lock_guard lock(mutex_);
    const auto& streams = peers_[size_t(request.peer)].streams;
    if (request.stream >= streams.size() || streams[request.stream]->fd < 0) return;
    ledger_.completed_any = false;
    Link& link = *streams[request.stream];
    if (!link.leaving.empty()) release(link);
    readable(link);
    wake_others(1);
}

void TcpLinks::send_heartbeats() {
    next_heartbeat_ = now_ns() + between_heartbeats_ns;
    for (size_t left = std::min(peers_.size(), most_heartbeats); left; --left) {
        Peer& peer = peers_[next_asked_++ % peers_.size()];
        if (!std::exchange(peer.spoke, false) && !peer.streams.empty()) heartbeat(*peer.streams[0]);
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
void TcpLinks::look_for_silence() {
    const int64_t now = now_ns(), passed = now - last_look_;
    last_look_ = now;
    for (auto& peer : peers_) weigh_silence(peer, passed);
}

void TcpLinks::weigh_silence(Peer& peer, int64_t passed_ns) {
    bool owed = false, heard = std::exchange(peer.heard, false);
    for (Link* link : peer.streams) {
        if (!link->awaited) continue;
        tcp_info told{};
        socklen_t size = sizeof told;
        const bool known = link->fd >= 0 && getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &told, &size) == 0;
        // What was sent again in vain may have been answered: there is no room yet. And the kernel answers one question
        // for room only where two come within half a second.
        const bool sent = told.tcpi_last_data_sent < told.tcpi_last_ack_recv;
        if (known && ((told.tcpi_unacked && sent) || told.tcpi_probes > 1)) {
            owed = true;
            heard = heard || int64_t(told.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
            continue;
        }
        // It will send again, or ask for room. To wait for room is no sign of life.
        const bool waits = known && (told.tcpi_unacked || told.tcpi_notsent_bytes || !link->out.empty());
        heard = heard || !waits || int64_t(told.tcpi_last_ack_recv) * 1'000'000 < passed_ns;
        if (waits) continue;
        link->awaited = false;
        --awaiting_;
    }
    // This process, or the machine, may have been kept from looking, and its kernel from taking answers: what passed since
    // the last look counts, but not more of it than usually passes.
    peer.silent_ns = !owed ? 0 : heard || !peer.silent_ns ? 1 : peer.silent_ns + std::min(passed_ns, 2 * between_looks_ns);
    if (peer.silent_ns > longest_silence_ns) return drop(*peer.streams[0], "has not answered for 0.7 s");
    if (peer.silent_ns > worrying_silence_ns)
        for (Link* link : peer.streams) heartbeat(*link);
}

// Threads that sleep in `poll` for what is complete now.
void TcpLinks::wake_others(int own) {
    if (ledger_.completed_any && others_wait(own)) {
        uint64_t one = 1;
        (void)!write(kick_, &one, sizeof one);
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

void TcpLinks::enqueue(Link& link, Out out) {
    if (link.fd < 0 || link.ended_since) return ledger_.complete(out.request, State::lost);
    link.out.push_back(std::move(out));
    if (link.out.size() == 1) writable(link);
}

// See the kernel's networking/msg_zerocopy documentation: each call that sends without a copy has a number, and the
// socket's queue of errors says which numbers' payloads have gone.
bool TcpLinks::writable(Link& link) {
    bool uncopied = link.uncopied;
    while (!link.out.empty()) {
        // Several frames in one call, so that small messages share segments on the wire.
        iovec parts[16];
        int n = 0, flags = MSG_NOSIGNAL | MSG_DONTWAIT;
        for (auto& out : link.out) {
            if (n + 2 > 16) break;
            if (out.sent < sizeof(Frame))
                parts[n++] = {reinterpret_cast<char*>(&out.frame) + out.sent, sizeof(Frame) - out.sent};
            uint64_t payload = out.sent > sizeof(Frame) ? out.sent - sizeof(Frame) : 0;
            const char* data = out.data ? out.data : out.owned.data();
            const bool alone = uncopied && out.size - payload >= uncopied_from;
            if (alone && n) {  // what comes before it goes first, by copy
                flags |= MSG_MORE;
                break;
            }
            if (payload < out.size) parts[n++] = {const_cast<char*>(data) + payload, out.size - payload};
            if (alone) {
                flags |= MSG_ZEROCOPY;
                break;
            }
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = size_t(n);
        ssize_t sent = sendmsg(link.fd, &message, flags);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == ENOBUFS && flags & MSG_ZEROCOPY) {  // too many pages are kept in place: not now
                uncopied = false;
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                if (!link.wants_write) {
                    link.wants_write = true;
                    ++wanting_;
                    watch(link);
                }
                return true;
            }
            if (errno == EPIPE || errno == ECONNRESET) {  // what it sent before can still be read
                forget_out(link);
                break;
            }
            drop(link, unreachable(errno));
            return false;
        }
        if (flags & MSG_ZEROCOPY) link.out.front().uncopied = link.calls++;
        if (!link.awaited && !one_node_) {
            link.awaited = true;
            ++awaiting_;
        }
        auto left = uint64_t(sent);
        while (left) {
            Out& out = link.out.front();
            uint64_t step = std::min(left, sizeof(Frame) + out.size - out.sent);
            out.sent += step;
            left -= step;
            if (out.sent == sizeof(Frame) + out.size) {
                if (out.uncopied) link.leaving.push_back(std::move(out));
                else ledger_.complete(out.request, State::done);
                link.out.pop_front();
            }
        }
        retire(link);  // of what was begun without a copy and ended with one, nothing more may be told
    }
    if (link.wants_write) {
        link.wants_write = false;
        --wanting_;
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
        if (!(message.msg_flags & MSG_ERRQUEUE)) break;  // not every kind of socket has such a queue
        for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
            sock_extended_err told;
            if (part->cmsg_len < CMSG_LEN(sizeof told)) continue;
            std::memcpy(&told, CMSG_DATA(part), sizeof told);
            if (told.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
            if (told.ee_code & SO_EE_CODE_ZEROCOPY_COPIED && !insist_on_uncopied) link.uncopied = false;
            link.passed_early[told.ee_info] = told.ee_data + 1;  // mostly, but not always, in order
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
    // Numbers begin again at 0 some day.
    while (!link.leaving.empty() && int32_t(link.passed - *link.leaving.front().uncopied) > 0) {
        ledger_.complete(link.leaving.front().request, State::done);
        link.leaving.pop_front();
    }
}

void TcpLinks::send(int peer, const Frame& frame, const void* data, Request* request) {
    send_on(0, peer, frame, data, request);
}

void TcpLinks::send_on(size_t stream, int peer, const Frame& frame, const void* data, Request* request) {
    std::lock_guard lock(mutex_);
    auto& streams = peers_[size_t(peer)].streams;
    Out out;
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
    Out out;
    out.frame = frame;
    out.size = data.size();
    out.owned = std::move(data);
    enqueue(*streams[0], std::move(out));
}

void TcpLinks::send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, const void* data,
                            uint64_t size, Request* request) {
    const size_t stream = stream_of(peer, tag);
    request->stream = stream;
    send_on(stream, peer, message_frame(key, sequence, tag, check, size), size ? data : nullptr, request);
}

void TcpLinks::receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                               uint64_t size, Request* request) {
    std::lock_guard lock(mutex_);
    request->stream = stream_of(peer, tag);
    // A payload that is still coming in goes straight to its place only if it was expected.
    if (ledger_.receive(peer, key, sequence, tag, check, into, size, request) && paused_) resume_paused();
}

void TcpLinks::ask(int peer, Frame frame, Request* request) {
    std::lock_guard lock(mutex_);
    request->peer = peer;
    auto& streams = peers_[size_t(peer)].streams;
    if (streams.empty() || ledger_.is_lost(peer)) return ledger_.complete(request, State::lost);
    frame.key = ledger_.ask(request);
    Out out;
    out.frame = frame;
    enqueue(*streams[0], std::move(out));
}

void TcpLinks::cancel(Request* requests, size_t count) {
    std::lock_guard lock(mutex_);
    auto ours = [&](Request* r) { return r && r >= requests && r < requests + count; };
    ledger_.cancel(requests, count);
    for (auto& link : links_) {
        if (ours(link->request)) {  // take the rest off the wire, to nowhere
            link->request = nullptr;
            link->destination = nullptr;
            link->into = Into::nothing;
        }
        for (auto out = link->out.begin(); out != link->out.end();) {
            if (!ours(out->request)) {
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
            if (ours(out.request)) out.request = nullptr;
    }
}

void TcpLinks::forget(uint64_t key) {
    std::lock_guard lock(mutex_);
    ledger_.forget(key);
}

int TcpLinks::who_disagrees(uint64_t key, uint32_t sequence, uint32_t check) {
    std::lock_guard lock(mutex_);
    return ledger_.who_disagrees(key, sequence, check);
}

bool TcpLinks::has_come(int peer, uint64_t key, uint32_t sequence, uint32_t tag) {
    std::lock_guard lock(mutex_);
    return ledger_.has_come(peer, key, sequence, tag);
}

uint64_t TcpLinks::sent_uncopied() {
    std::lock_guard lock(mutex_);
    uint64_t calls = 0;
    for (auto& link : links_) calls += link->calls;
    return calls;
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
    // Less than it says may be left to come, and another may sleep already.
    if (link.fd >= 0 && link.mark > 1 && (!link.in_payload || link.left < link.mark)) set_mark(link, 1);
}

void TcpLinks::take(Link& link) {
    uint64_t budget = most_at_once;  // then others have their turn
    while (link.fd >= 0 && !link.paused_since && !link.ended_since) {
        bool straight = link.in_payload && link.head == link.tail && link.destination && link.left >= smallest_straight;
        if (link.head == link.tail) link.head = link.tail = 0;
        iovec parts[2];
        size_t n = 0, payload = 0, room = 0;
        if (straight) {
            payload = size_t(link.room);
            parts[n++] = {link.destination, payload};
            // The header that follows comes with it, but little of the next payload: that shall go straight, too.
            if (link.room == link.left) parts[n++] = {link.buffer.get(), taken_with_payload};
        } else {
            if (link.tail == buffer_size) {
                std::memmove(link.buffer.get(), link.buffer.get() + link.head, link.tail - link.head);
                link.tail -= link.head;
                link.head = 0;
            }
            parts[n++] = {link.buffer.get() + link.tail, buffer_size - link.tail};
        }
        for (size_t i = 0; i < n; ++i) room += parts[i].iov_len;
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = n;
        const ssize_t got = recvmsg(link.fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got == 0 || (got < 0 && errno == ECONNRESET)) return end(link);
        if (got < 0) return drop(link, unreachable(errno));
        hear(peers_[size_t(link.peer)]);
        const size_t direct = std::min(size_t(got), payload);
        if (direct) advance(link, direct);
        link.tail += size_t(got) - direct;
        if (link.fd < 0 || (link.head != link.tail && !parse(link))) return;
        budget -= std::min(budget, uint64_t(got));
        if (size_t(got) < room || !budget) return;
    }
}

// Consumes what lies in the buffer. False: the link is paused or gone.
bool TcpLinks::parse(Link& link) {
    while (link.fd >= 0) {
        size_t have = link.tail - link.head;
        if (link.in_payload) {
            if (!have && link.left) return true;
            auto step = size_t(std::min<uint64_t>(have, link.destination ? link.room : link.left));
            if (link.destination && step) std::memcpy(link.destination, link.buffer.get() + link.head, step);
            link.head += step;
            advance(link, step);
            continue;
        }
        if (have < sizeof(Frame)) return true;
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
    link.left -= count;
    if (!link.left) return finish(link);
    if (!link.destination) return;
    link.destination += count;
    link.room -= count;
    if (link.room) return;
    // What a peer says that it will send is not believed: memory grows with what has come.
    const size_t have = link.owned.size();
    try {
        link.owned.resize(size_t(std::min<uint64_t>(link.frame.size, 2 * have)));
    } catch (const std::bad_alloc&) {
        return drop(link, no_memory);
    }
    link.destination = link.owned.data() + have;
    link.room = link.owned.size() - have;
}

bool TcpLinks::begin(Link& link) try {
    const Frame& frame = link.frame;
    if (frame.magic != Frame{}.magic) {
        drop(link, "sent something that is not a frame");
        return false;
    }
    auto expect = [&](Into into, char* destination, uint64_t size) {
        link.in_payload = true;
        link.into = into;
        link.destination = destination;
        link.left = size;
        link.room = into == Into::unexpected ? link.owned.size() : size;
        if (!size) finish(link);
        return true;
    };
    link.request = nullptr;
    switch (frame.type) {
        case FrameType::write: {
            char* at = host_.locate(frame.segment, frame.offset, frame.size, link.keep);
            if (!at) break;
            return expect(Into::segment, at, frame.size);
        }
        case FrameType::message: {
            if (frame.size > largest_message) break;
            if (const auto posted = ledger_.take(link.peer, frame)) {
                link.waited_in_vain = false;
                link.request = *posted;
                return *posted ? expect(Into::posted, (*posted)->into, frame.size)
                               : expect(Into::nothing, nullptr, frame.size);
            }
            // It waits on the wire for its receiver if it is large or its turn will come soon, but not so long that
            // others starve behind it.
            const bool soon = frame.size > kept && !link.waited_in_vain && busy_with(link.peer, frame);
            if ((frame.size > small || soon) &&
                (!link.paused_since || now_ns() - link.paused_since < longest_pause_ns))
                return false;
            if (link.paused_since) link.waited_in_vain = true;
            link.owned.resize(size_t(std::min(frame.size, first_piece)));
            return expect(Into::unexpected, link.owned.data(), frame.size);
        }
        case FrameType::passive:
            if (frame.size > largest_passive) break;
            link.owned.resize(frame.size);
            return expect(Into::passive, link.owned.data(), frame.size);
        case FrameType::read_reply:
            link.request = ledger_.take_reply(link.peer, frame);
            if (!link.request) return expect(Into::nothing, nullptr, std::min(frame.size, largest_message));
            return expect(Into::posted, link.request->into, frame.size);
        case FrameType::atomic_reply: case FrameType::register_reply:
            ledger_.replied(link.peer, frame);
            return true;
        case FrameType::read_request: case FrameType::atomic_request: case FrameType::register_segment:
        case FrameType::echo: {
            auto answer = ledger_.answer(link.peer, frame);
            if (!answer) break;
            Out out;
            out.frame = answer->frame;
            out.data = answer->data;
            out.size = answer->frame.size;
            out.keep = std::move(answer->keep);
            enqueue(link, std::move(out));
            return link.fd >= 0;
        }
        case FrameType::abort_group:
            if (frame.value >= peers_.size() || frame.size > largest_reason) break;
            link.owned.resize(frame.size);
            return expect(Into::reason, link.owned.data(), frame.size);
        case FrameType::heartbeat: return true;
        case FrameType::kill:
            host_.told_to_end(link.peer);
            return true;
    }
    drop(link, "sent a frame that is malformed or reaches outside a segment");
    return false;
} catch (const std::bad_alloc&) {
    drop(link, no_memory);
    return false;
}

void TcpLinks::engage(uint64_t key, uint32_t sequence, uint32_t check) {
    std::lock_guard lock(mutex_);
    ledger_.engage(key, sequence, check);
}

void TcpLinks::disengage(uint64_t key) {
    std::lock_guard lock(mutex_);
    ledger_.disengage(key);
}

// Whether the message's group has something under way with that peer: then it will soon be expected. Letters between two
// members come in any order.
bool TcpLinks::busy_with(int peer, const Frame& message) const {
    if (!message.check || message.check & of_letters) return false;
    if (ledger_.awaits(peer, message)) return true;
    const auto& streams = peers_[size_t(peer)].streams;
    return std::any_of(streams.begin(), streams.end(), [&](const Link* one) {
        return !one->out.empty() && one->out.front().frame.key == message.key;
    });
}

void TcpLinks::finish(Link& link) {
    link.in_payload = false;
    const Frame& frame = link.frame;
    switch (link.into) {
        case Into::segment:
            link.keep.reset();
            if (frame.value) {
                if (!host_.notify(frame.segment, frame.check, frame.value))
                    return drop(link, "sent a notification that does not exist");
                ledger_.completed_any = true;
            }
            break;
        case Into::posted:
            ledger_.complete(link.request, State::done);
            link.request = nullptr;
            break;
        case Into::unexpected:
            ledger_.arrived(link.peer, frame, std::move(link.owned));  // it may have been posted meanwhile
            link.owned = {};
            break;
        case Into::passive:
            if (!host_.passive_arrived(link.peer, std::move(link.owned)))
                return drop(link, "sent more passive messages than are taken");
            link.owned = {};
            break;
        case Into::reason:
            host_.group_aborted(frame.key, int(frame.value), {link.owned.begin(), link.owned.end()});
            ledger_.abort(frame.key);
            link.owned = {};
            break;
        case Into::nothing: break;
    }
}

void TcpLinks::forget_out(Link& link) {
    for (auto& out : link.out) ledger_.complete(out.request, State::lost);
    link.out.clear();
}

// What has come counts from now on, however long nobody looked.
void TcpLinks::hear(Peer& peer) {
    peer.spoke = peer.heard = true;
    if (!ended_) return;
    for (Link* link : peer.streams)
        if (link->ended_since) link->ended_since = now_ns();
}

// Whether something of a stream waits to be expected.
bool TcpLinks::still_speaks(int peer) const {
    const auto& streams = peers_[size_t(peer)].streams;
    return std::any_of(streams.begin(), streams.end(), [](const Link* one) { return one->paused_since; });
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
        --wanting_;
    }
    const auto& streams = peers_[size_t(link.peer)].streams;
    if (std::all_of(streams.begin(), streams.end(), [](Link* one) { return one->ended_since; })) lose(link.peer);
}

void TcpLinks::drop(Link& link, const std::string& why) {
    if (!ledger_.is_lost(link.peer))
        std::fprintf(stderr, "carme_runtime: rank %d %s; its connection was closed.\n", link.peer, why.c_str());
    lose(link.peer);
}

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
            --wanting_;
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
        link->keep.reset();
        link->owned = {};
        for (auto* left : {&link->out, &link->leaving}) {
            for (auto& out : *left) ledger_.complete(out.request, State::lost);
            left->clear();
        }
    }
    ledger_.lose(peer);
}

}  // namespace carme

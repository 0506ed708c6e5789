// Tests of the links over TCP, with a peer that the test plays.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <thread>
#include <vector>

#include <linux/filter.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "checks.hpp"
#include "context.hpp"
#include "tcp_links.hpp"

using namespace carme;

namespace {

// A peer leaves: the end of one stream arrives before the last message on another, or alone.
void messages_before_a_shutdown() {
    for (bool with_message : {true, false}) {
        Context context(0, 2);
        TcpLinks links(context, 2);  // polled only by this thread
        int peer_fds[3];
        std::vector<int> own_sockets;
        for (int& fd : peer_fds) {
            auto [out, in] = connected_pair();
            fd = out;
            own_sockets.push_back(in);
        }
        links.add_peer(1, own_sockets);
        uint64_t into = 0;
        Request request;
        links.receive_message(1, 7, 0, 0, 0, &into, sizeof into, &request);
        close(peer_fds[0]);
        links.poll(0);
        CHECK(request.state.load() == State::pending);
        if (with_message) {
            struct {
                Frame frame;
                uint64_t value = 42;
            } message;
            message.frame.type = FrameType::message;
            message.frame.key = 7;
            message.frame.size = sizeof into;
            CHECK(send(peer_fds[1], &message, sizeof message, MSG_NOSIGNAL) == sizeof message);
            links.poll(0);
            CHECK(request.state.load() == State::done && into == 42);
            for (int i : {1, 2}) close(peer_fds[i]);
        }
        while (!context.is_lost(1)) links.poll(20);
        CHECK(request.state.load() == (with_message ? State::done : State::lost));
        if (!with_message)
            for (int i : {1, 2}) close(peer_fds[i]);
    }
}

// A socket that reports an error but has no error queue, such as the fuzzer's.
void reset_without_queue() {
    Context context(0, 2);
    TcpLinks links(context, 2);
    std::vector<int> own_sockets;
    int peer_sockets[2];
    for (int& fd : peer_sockets) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
        own_sockets.push_back(pair[0]);
        fd = pair[1];
    }
    links.add_peer(1, own_sockets);
    uint64_t value = 42;
    Request sending;
    links.send_message(1, 7, 0, 0, 0, &value, sizeof value, &sending);
    for (int fd : peer_sockets) {  // before its data were read, and with unread data on this side
        CHECK(send(fd, "half a frame", 12, MSG_NOSIGNAL) == 12);
        close(fd);
    }
    const auto end = Deadline::after_ms(5'000);
    while (!end.passed() && !context.is_lost(1)) links.poll(20);
    CHECK(context.is_lost(1));
    links.cancel(&sending, 1);
}

// A peer on another node with three streams; only this thread reads ours.
struct RemotePeer {
    static constexpr size_t long_message = 16 << 20;  // larger than the kernel's buffers

    RemotePeer() : context(0, 2), links(context, 2), data(long_message) {
        for (int& fd : peer_sockets) {
            auto [out, in] = connected_pair();
            const int receive_buffer = 64 << 10;
            setsockopt(out, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
            fd = out;
            own_sockets.push_back(in);
        }
        links.add_peer(1, own_sockets);
        for (size_t i = 0; i < data.size(); ++i) data[i] = char(i * 7 + i / 1000);
    }
    ~RemotePeer() {
        links.cancel(&request, 1);
        for (int fd : peer_sockets) close(fd);
    }
    void send(uint64_t size) { links.send_message(1, 7, 0, 0, 0, data.data(), size, &request); }
    // Sends the first bytes of `data` as a message of a collective.
    void send_message(int stream, uint64_t key, uint32_t tag, uint64_t size) {
        const Frame frame = message_frame(key, 0, tag, 5, size);
        CHECK(::send(peer_sockets[stream], &frame, sizeof frame, MSG_NOSIGNAL) == sizeof frame);
        CHECK(::send(peer_sockets[stream], data.data(), size, MSG_NOSIGNAL) == ssize_t(size));
    }
    // Received bytes of a stream that nobody has read.
    int waiting(int stream) const {
        int bytes = 0;
        ioctl(own_sockets[size_t(stream)], FIONREAD, &bytes);
        return bytes;
    }
    void poll_for_ms(int64_t ms) {
        const auto end = Deadline::after_ms(ms);
        while (!end.passed() && !context.is_lost(1)) links.poll(20);
    }
    // From now on its kernel sees no packets, as if the node were gone.
    void go_silent() { drop_fraction(peer_sockets, std::numeric_limits<uint32_t>::max()); }
    // From now on one of ten packets gets lost, in both directions.
    void drop_packets() {
        drop_fraction(peer_sockets, std::numeric_limits<uint32_t>::max() / 10);
        drop_fraction(own_sockets, std::numeric_limits<uint32_t>::max() / 10);
    }
    // Drops packets whose random number is at most `fraction`.
    static void drop_fraction(std::span<const int> sockets, uint32_t fraction) {
        sock_filter steps[] = {{BPF_LD | BPF_W | BPF_ABS, 0, 0, uint32_t(SKF_AD_OFF + SKF_AD_RANDOM)},
                               {BPF_JMP | BPF_JGT | BPF_K, 1, 0, fraction},
                               {BPF_RET | BPF_K, 0, 0, 0},
                               {BPF_RET | BPF_K, 0, 0, std::numeric_limits<uint32_t>::max()}};
        sock_fprog program{uint16_t(std::size(steps)), steps};
        for (int fd : sockets)
            CHECK(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0);
    }

    Context context;
    TcpLinks links;
    std::vector<char> data;
    Request request;
    int peer_sockets[3];
    std::vector<int> own_sockets;
};

// A piece that arrives before its receive waits on the wire, without a copy, while its group is busy with
// others and about to expect it; but not so long that other groups' messages starve behind it.
void pieces_before_their_receives() {
    constexpr uint64_t size = 100'000, small_size = 8;
    constexpr uint64_t busy = 7, idle = 8, separate = 9;
    RemotePeer peer;
    Request first, second, third, separate_request;
    std::vector<char> into(size), small(small_size);
    auto finish = [&](Request& request) {
        const auto end = Deadline::after_ms(5'000);
        while (!end.passed() && request.state.load() == State::pending) peer.links.poll(1);
        CHECK(request.state.load() == State::done);
    };
    auto check = [&] {
        CHECK(std::memcmp(into.data(), peer.data.data(), size) == 0);
        std::fill(into.begin(), into.end(), 0);
    };
    peer.send_message(1, idle, 0, size);
    peer.poll_for_ms(30);
    CHECK(peer.waiting(1) == 0);  // unknown when it will be expected

    peer.links.receive_message(1, busy, 0, 1, 5, into.data(), size, &first);
    peer.send_message(1, busy, 0, size);
    for (int i = 0; i < 3; ++i) peer.links.poll(0);
    CHECK(peer.waiting(1) > int(size / 2));
    Request expected;
    peer.links.receive_message(1, busy, 0, 0, 5, into.data(), size, &expected);
    finish(expected);
    check();

    peer.send_message(1, busy, 2, size);
    peer.send_message(1, separate, 0, small_size);
    peer.links.receive_message(1, separate, 0, 0, 5, small.data(), small_size, &separate_request);
    finish(separate_request);
    CHECK(std::memcmp(small.data(), peer.data.data(), small_size) == 0);
    peer.links.receive_message(1, busy, 0, 2, 5, into.data(), size, &second);
    finish(second);
    check();
    peer.send_message(2, busy, 1, size);
    finish(first);
    check();
    peer.links.receive_message(1, idle, 0, 0, 5, into.data(), size, &third);
    finish(third);
    check();
}

// After a message has waited for the maximum time, later ones do not wait anew: that would hold up the stream
// once for each of them.
void unexpected_pieces() {
    constexpr uint64_t size = 20'000, busy = 7;
    constexpr uint32_t count = 3, awaited = 99;  // any kernel buffers them all
    constexpr int total = int(count * (sizeof(Frame) + size));
    RemotePeer peer;
    std::vector<char> into(size);
    Request another;
    peer.links.receive_message(1, busy, 0, awaited, 5, into.data(), size, &another);
    for (uint32_t tag = 0; tag < count; ++tag) peer.send_message(1, busy, tag, size);
    const auto end = Deadline::after_ms(60'000);
    while (peer.waiting(1) < total && !end.passed()) std::this_thread::yield();
    peer.links.poll(0);
    const int behind = peer.waiting(1);
    CHECK(behind > 0);
    while (peer.waiting(1) == behind && !end.passed()) peer.links.poll(1);
    for (int i = 0; i < 3; ++i) peer.links.poll(0);
    CHECK(peer.waiting(1) == 0);
    for (uint32_t tag = 0; tag < count; ++tag) {
        Request request;
        peer.links.receive_message(1, busy, 0, tag, 5, into.data(), size, &request);
        CHECK(request.state.load() == State::done && std::memcmp(into.data(), peer.data.data(), size) == 0);
    }
    peer.links.cancel(&another, 1);
}

// A rank with very many peers does not probe all of them at once, but in turn.
void heartbeats() {
    constexpr int peers = 150, at_once = 100;
    Context context(0, peers + 1);
    TcpLinks links(context, peers + 1);
    std::vector<pollfd> peer_sockets;
    for (int peer = 1; peer <= peers; ++peer) {
        auto [out, in] = connected_pair();
        peer_sockets.push_back({out, POLLIN, 0});
        links.add_peer(peer, {in});
    }
    const auto end = Deadline::after_ms(60'000);
    auto requests = [&] {
        ::poll(peer_sockets.data(), nfds_t(peers), 0);
        return std::count_if(peer_sockets.begin(), peer_sockets.end(),
                             [](const pollfd& polled) { return polled.revents & POLLIN; });
    };
    links.poll(0);
    while (requests() < at_once - 1 && !end.passed()) std::this_thread::yield();
    CHECK(requests() <= at_once);
    while (requests() < peers && !end.passed()) links.poll(20);
    CHECK(requests() == peers);
    for (auto& polled : peer_sockets) close(polled.fd);
}

// A peer leaves while nobody polls: earlier data, more than one read takes, are not lost.
void unread_messages_before_a_shutdown() {
    constexpr uint64_t size = 1'500'000;
    RemotePeer peer;
    std::vector<char> into(size);
    peer.links.receive_message(1, 7, 0, 0, 5, into.data(), size, &peer.request);
    close(peer.peer_sockets[0]);
    peer.peer_sockets[0] = -1;
    peer.links.poll(0);
    std::thread peer_fds([&] {
        peer.send_message(1, 7, 0, size);
        for (int i : {1, 2}) shutdown(peer.peer_sockets[i], SHUT_WR);
    });
    std::this_thread::sleep_for(std::chrono::nanoseconds(Links::longest_drain_ns + 100'000'000));
    peer.links.poll(0);  // reads a part
    CHECK(peer.request.state.load() == State::pending && !peer.context.is_lost(1));
    peer.poll_for_ms(5000);
    peer_fds.join();
    CHECK(peer.request.state.load() == State::done && std::memcmp(into.data(), peer.data.data(), size) == 0);
    CHECK(peer.context.is_lost(1));
}

// The longest time between retransmissions in ms; -1: unknown.
int rto_max_of(int fd) {
    constexpr int rto_max_ms = 44;  // TCP_RTO_MAX_MS, which older headers lack
    int ms = -1;
    socklen_t size = sizeof ms;
    return getsockopt(fd, IPPROTO_TCP, rto_max_ms, &ms, &size) == 0 ? ms : -1;
}

// Data that a rank handed to its kernel before its end arrive, also at a peer that was stopped meanwhile.
//
// Since Linux 6.15 the links shorten the time between retransmissions (TCP_RTO_MAX_MS) and must restore it:
// otherwise the kernel gives up unread data within seconds. Older kernels lack the option; there this tests
// only the kernel, and the test reports that.
void sent_before_exit() {
    // Together they fit into any kernel's buffer, and each of them is copied there.
    constexpr uint64_t size = 50'000, pieces = 5;
    auto [peer_socket, own_socket] = connected_pair();
    const int send_buffer = 4 << 20, receive_buffer = 64 << 10;
    setsockopt(peer_socket, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    setsockopt(own_socket, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    std::vector<char> data(size);
    for (size_t i = 0; i < size; ++i) data[i] = char(i * 7 + i / 1000);
    {
        Context context(0, 2);
        TcpLinks links(context, 2);
        links.add_peer(1, {own_socket});
        Request requests[pieces];
        for (uint32_t tag = 0; tag < pieces; ++tag)
            links.send_message(1, 7, 0, tag, 5, data.data(), size, &requests[tag]);
        const auto end = Deadline::after_ms(5000);
        for (auto& request : requests) {
            while (!end.passed() && request.state.load() == State::pending) links.poll(20);
            CHECK(request.state.load() == State::done);
        }
        links.cancel(requests, pieces);
        const int rto_max = rto_max_of(own_socket);
        links.stop();
        if (rto_max >= 0)
            CHECK(rto_max == TcpLinks::longest_rto_ms.load() && rto_max_of(own_socket) == 120'000);
        else
            std::fprintf(stderr,
                         "links: this kernel has no TCP_RTO_MAX_MS (Linux 6.15), what is left behind tests "
                         "it alone\n");
    }
    std::this_thread::sleep_for(std::chrono::seconds(6));  // no event reports that a kernel gives up
    std::vector<char> received(pieces * (sizeof(Frame) + size) + 1);
    size_t received_bytes = 0;
    auto receive = [&] {
        return recv(peer_socket, received.data() + received_bytes, received.size() - received_bytes, 0);
    };
    for (ssize_t count; (count = receive()) > 0;) received_bytes += size_t(count);
    CHECK(received_bytes == received.size() - 1);
    for (uint64_t i = 0; i < pieces; ++i)
        CHECK(std::memcmp(received.data() + i * (sizeof(Frame) + size) + sizeof(Frame), data.data(), size) ==
              0);
    close(peer_socket);
}

// A thread that sleeps for a long payload is woken by its end only, whichever thread reads its parts.
void long_payloads() {
    constexpr uint64_t size = 400'000, part = 5'000;
    RemotePeer peer;
    Request request;
    std::vector<char> into(size);
    uint64_t sent = 0;
    auto send_message = [&](uint64_t count) {
        CHECK(send(peer.peer_sockets[1], peer.data.data() + sent, count, 0) == ssize_t(count));
        sent += count;
    };
    peer.links.receive_message(1, 7, 0, 0, 5, into.data(), size, &request);
    const Frame frame = message_frame(7, 0, 0, 5, size);
    CHECK(send(peer.peer_sockets[1], &frame, sizeof frame, 0) == sizeof frame);
    send_message(part);
    peer.links.poll(20);
    CHECK(peer.waiting(1) == 0);
    std::thread talking([&] {
        for (int i = 0; i < 10; ++i) {
            send_message(part);
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    });
    peer.links.poll(100);
    talking.join();
    CHECK(peer.waiting(1) == int(10 * part));
    send_message(size - sent - part);
    peer.links.poll_for(request);
    peer.links.poll_for(request);
    CHECK(peer.waiting(1) == 0 && request.state.load() == State::pending);
    std::thread ending([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        send_message(part);
    });
    const int64_t begin = now_ns();
    while (request.state.load() == State::pending && now_ns() - begin < 5'000'000'000) peer.links.poll(1000);
    ending.join();
    CHECK(request.state.load() == State::done && now_ns() - begin < 900'000'000);
    CHECK(std::memcmp(into.data(), peer.data.data(), size) == 0);
}

// A process without CPU time reads nothing meanwhile; its kernel answers for it.
void peer_without_processor_time() {
    RemotePeer peer;
    peer.send(RemotePeer::long_message);
    peer.poll_for_ms(3000);
    CHECK(!peer.context.is_lost(1) && peer.request.state.load() == State::pending);
    std::vector<char> received;
    std::thread reading([&] {
        char part[65536];
        while (received.size() < sizeof(Frame) + RemotePeer::long_message) {
            const ssize_t count = recv(peer.peer_sockets[1], part, sizeof part, 0);
            if (count <= 0) break;
            received.insert(received.end(), part, part + count);
        }
    });
    while (peer.request.state.load() == State::pending && !peer.context.is_lost(1)) peer.links.poll(20);
    if (peer.context.is_lost(1)) shutdown(peer.peer_sockets[1], SHUT_RDWR);
    reading.join();
    CHECK(peer.request.state.load() == State::done);
    CHECK(received.size() == sizeof(Frame) + RemotePeer::long_message &&
          std::memcmp(received.data() + sizeof(Frame), peer.data.data(), RemotePeer::long_message) == 0);
}

// A lost node is silent: detected within a second, or later if its window was zero.
void silent_peer_is_lost() {
    for (auto [sent, latest_ms] :
         {std::pair<uint64_t, int64_t>{1000, 1000}, {RemotePeer::long_message, 3000}, {0, 1000}}) {
        RemotePeer peer;
        if (sent > 1000) {
            peer.send(sent);
            peer.poll_for_ms(1500);
        }
        CHECK(!peer.context.is_lost(1));
        peer.go_silent();
        const int64_t begin = now_ns();
        if (sent == 1000) peer.send(sent);
        peer.poll_for_ms(20'000);
        CHECK(peer.context.is_lost(1));
        const double took_ms = double(now_ns() - begin) / 1e6;
        // Tolerance for other load on the machine.
        if (took_ms > double(latest_ms + 500))
            std::fprintf(stderr, "%d ms of %d\n", int(took_ms), int(latest_ms));
        CHECK(took_ms <= double(latest_ms + 500));
        if (sent > 1000) CHECK(peer.request.state.load() == State::lost);
    }
}

// A stream with a zero window, whose kernel probes it ever more rarely, hides nothing: the other streams are
// not acknowledged.
void silent_peer_with_a_full_stream() {
    const int usual = TcpLinks::longest_rto_ms.exchange(120'000);
    RemotePeer peer;
    TcpLinks::longest_rto_ms = usual;
    peer.send(RemotePeer::long_message);
    peer.poll_for_ms(4500);  // by then the kernel probes every three seconds
    CHECK(!peer.context.is_lost(1));
    peer.go_silent();
    const int64_t begin = now_ns();
    peer.poll_for_ms(20'000);
    CHECK(peer.context.is_lost(1) && now_ns() - begin < 1'500'000'000);
}

// A peer whose packets get lost is not lost.
void packet_loss_is_no_failure() {
    RemotePeer peer;
    peer.poll_for_ms(200);
    peer.drop_packets();
    peer.poll_for_ms(5000);
    CHECK(!peer.context.is_lost(1));
}

}  // namespace

void links_tests() {
    pieces_before_their_receives();
    unexpected_pieces();
    long_payloads();
    heartbeats();
    messages_before_a_shutdown();
    unread_messages_before_a_shutdown();
    sent_before_exit();
    reset_without_queue();
    peer_without_processor_time();
    silent_peer_is_lost();
    silent_peer_with_a_full_stream();
    packet_loss_is_no_failure();
}

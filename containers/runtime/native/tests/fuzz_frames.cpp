// Fuzzer of the frame parser. The input is a script of valid, partial and malformed frames, with calls of our
// own between them. The host is a real context, which covers the effects of frames on segments and groups.
// tests/native/test_handshake.py covers the handshake, which is in Python.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "context.hpp"
#include "tcp_links.hpp"

using namespace carme;

namespace {

constexpr int ranks = 3, streams = 3;
constexpr uint64_t group_key = 7;
// Largest expected payload; larger than a message that waits on the wire.
constexpr uint64_t largest = 400 * 1024;

// The script, read byte by byte; zeros after its end.
struct Script {
    const uint8_t* data;
    size_t size;

    template <class T> T next() {
        T value{};
        size_t step = std::min(size, sizeof value);
        std::memcpy(&value, data, step);
        data += step;
        size -= step;
        return value;
    }
    uint64_t number(uint64_t below) { return (below <= 256 ? next<uint8_t>() : next<uint32_t>()) % below; }
    std::vector<uint8_t> bytes(size_t count) {
        count = std::min(count, size);
        std::vector<uint8_t> taken(data, data + count);
        data += count;
        size -= count;
        return taken;
    }
};

Context& context() {
    static Context* instance = [] {
        auto* c = new Context(0, ranks);
        c->segment_alloc(0, 100);
        c->segment_alloc(1, 300 * 1024);
        c->on_abort(group_key, [](int culprit, const std::string& reason) {
            // Groups use the culprit as an index.
            if (culprit < 0 || culprit >= ranks || reason.size() > Links::largest_reason) std::abort();
        });
        return c;
    }();
    return *instance;
}

struct Expected {
    std::unique_ptr<char[]> buffer;
    std::unique_ptr<Request> request = std::make_unique<Request>();
};

class Wire {
public:
    Wire() : links_(context(), ranks) {
        for (int peer = 1; peer < ranks; ++peer) {
            std::vector<int> own_sockets;
            for (int stream = 0; stream < streams; ++stream) {
                int pair[2];
                if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
                own_sockets.push_back(pair[0]);
                peer_sockets_.push_back(pair[1]);
            }
            links_.add_peer(peer, own_sockets);
        }
    }
    ~Wire() {
        for (auto& expected : expected_) links_.cancel(expected.request.get(), 1);
        for (int fd : peer_sockets_)
            if (fd >= 0) close(fd);
        links_.forget(group_key);
    }

    void play(Script& script) {
        while (script.size) step(script);
        for (int i = 0; i < 8; ++i) links_.poll(0);
    }

private:
    void put(int& fd, const void* data, size_t size) {
        auto* at = static_cast<const char*>(data);
        for (int tries = 0; size && fd >= 0 && tries < 64; ++tries) {
            ssize_t sent = ::send(fd, at, std::min<size_t>(size, 64 * 1024), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent > 0) {
                at += sent;
                size -= size_t(sent);
            } else {
                links_.poll(0);
            }
        }
    }

    Frame frame_of(Script& script) {
        Frame frame;
        frame.type = FrameType(script.next<uint8_t>() % 13);
        frame.operation = script.next<uint8_t>() % 3;
        frame.segment = script.next<uint8_t>() % 4;
        frame.key = script.number(4) ? script.number(16) : script.next<uint64_t>();
        frame.sequence = uint32_t(script.number(3));
        frame.tag = uint32_t(script.number(3));
        frame.check = script.number(8) ? uint32_t(script.number(3)) : script.next<uint32_t>();
        frame.value = script.number(4) ? uint32_t(script.number(5)) : script.next<uint32_t>();
        frame.offset = script.number(4) ? script.number(400) : script.next<uint64_t>();
        frame.size =
            script.number(16) ? script.number(script.number(4) ? 200 : largest) : script.next<uint64_t>();
        frame.operand = script.next<uint32_t>();
        return frame;
    }

    // A frame with a payload of the announced or another size.
    void put_frame(int& fd, Script& script) {
        Frame frame = frame_of(script);
        put(fd, &frame, sizeof frame);
        const bool has_payload = frame.type == FrameType::write || frame.type == FrameType::message ||
                                 frame.type == FrameType::passive || frame.type == FrameType::read_reply ||
                                 frame.type == FrameType::abort_group;
        uint64_t size = script.number(8) ? (has_payload ? frame.size : 0) : script.number(100);
        std::vector<char> payload(size_t(std::min<uint64_t>(size, largest)), 'p');
        put(fd, payload.data(), payload.size());
    }

    void receive(Script& script) {
        Expected& expected = expect();
        expected.request->size = script.number(script.number(4) ? 200 : largest);
        expected.buffer = std::make_unique<char[]>(expected.request->size);
        links_.receive_message(1 + int(script.number(2)), script.number(16), uint32_t(script.number(3)),
                               uint32_t(script.number(3)), uint32_t(script.number(3)), expected.buffer.get(),
                               expected.request->size, expected.request.get());
    }

    void send_request(Script& script) {
        Expected& expected = expect();
        Frame frame;
        frame.type = script.number(2) ? FrameType::read_request : FrameType::atomic_request;
        if (frame.type == FrameType::read_request) {
            expected.request->size = frame.size = script.number(1000);
            expected.buffer = std::make_unique<char[]>(frame.size);
            expected.request->into = expected.buffer.get();
        }
        links_.send_request(1 + int(script.number(2)), frame, expected.request.get());
    }

    void send(Script& script) {
        Expected& expected = expect();
        uint64_t size = script.number(script.number(4) ? 200 : largest);
        expected.buffer = std::make_unique<char[]>(size);
        links_.send_message(1 + int(script.number(2)), script.number(16), 0, uint32_t(script.number(3)), 0,
                            expected.buffer.get(), size, expected.request.get());
    }

    void step(Script& script) {
        int& fd = peer_sockets_[script.next<uint8_t>() % peer_sockets_.size()];
        switch (script.next<uint8_t>() % 10) {
            case 0: case 1: put_frame(fd, script); break;
            case 2: {  // arbitrary bytes
                auto raw = script.bytes(script.next<uint8_t>());
                put(fd, raw.data(), raw.size());
                break;
            }
            case 3: {  // part of a frame
                Frame frame = frame_of(script);
                put(fd, &frame, script.number(sizeof frame));
                break;
            }
            case 4:
                if (fd >= 0 && script.number(4) == 0) {
                    close(fd);
                    fd = -1;
                }
                break;
            case 5: receive(script); break;
            case 6: send_request(script); break;
            case 7:
                if (!expected_.empty()) {
                    auto entry = expected_.begin() + long(script.number(expected_.size()));
                    links_.cancel(entry->request.get(), 1);
                    expected_.erase(entry);
                }
                break;
            case 8: {  // the peer reads our data
                char sink[4096];
                if (fd >= 0)
                    for (int i = 0; i < 16 && recv(fd, sink, sizeof sink, MSG_DONTWAIT) > 0; ++i) {}
                break;
            }
            case 9: send(script); break;
        }
        if (script.number(3)) links_.poll(0);
        // Longer than a large message waits for its receive in this build.
        if (script.number(16) == 15) {
            usleep(60);
            links_.poll(0);
        }
        while (context().passive_receive(Deadline::after_ms(0))) {}
    }

    Expected& expect() { return expected_.emplace_back(); }

    TcpLinks links_;
    std::vector<int> peer_sockets_;
    std::vector<Expected> expected_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Script script{data, size};
    Wire().play(script);
    return 0;
}

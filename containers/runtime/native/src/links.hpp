// The transport between nodes: its interface and its frames.
//
// tcp_links.hpp implements it over TCP. An implementation over libfabric or verbs implements `Links` with the
// help of `Ledger`, and gives the context a factory function. The context, its groups and their algorithms
// use only this interface. tests/queued_links.hpp is a small example.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "waiting.hpp"

namespace carme {

enum class FrameType : uint8_t {
    write = 1,
    read_request,
    read_reply,
    atomic_request,
    atomic_reply,
    register_segment,
    register_reply,
    passive,
    message,
    abort_group,
    echo,
    kill,
    heartbeat
};

// Marks the checks of point-to-point messages, as opposed to collectives.
constexpr uint32_t point_to_point_flag = 1u << 31;

// The header before a payload. Both ends are little-endian; the handshake checks this.
struct Frame {
    uint32_t magic = 0xCA43E001;
    FrameType type{};
    uint8_t operation = 0;
    uint16_t segment = 0;
    uint64_t offset = 0;
    uint64_t size = 0;  // bytes of payload that follow, or that a read requests
    uint64_t key = 0;  // group of a message; request of a read or an atomic
    uint32_t sequence = 0;  // number of the collective in the group
    uint32_t tag = 0;  // part of the collective
    uint32_t check = 0;  // signature of the collective or message; id of a notification
    uint32_t value = 0;     // of a notification; 0: none
    uint64_t operand = 0, operand2 = 0;
};
static_assert(sizeof(Frame) == 64);

inline Frame message_frame(uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, uint64_t size) {
    Frame frame;
    frame.type = FrameType::message;
    frame.size = size;
    frame.key = key;
    frame.sequence = sequence;
    frame.tag = tag;
    frame.check = check;
    return frame;
}

// A notification in a segment.
struct Notification { int segment; uint32_t id, value; };

enum class State : uint32_t { pending, done, lost, mismatch, aborted };

// A pending send or receive. Its owner keeps it and the buffer until it is over or cancelled.
struct Request {
    std::atomic<State> state{State::pending};
    int peer = -1;
    size_t stream = 0;  // the stream that carries it
    char* into = nullptr;
    uint64_t size = 0;
    uint32_t check = 0;
    bool allow_shorter = false;  // accepts a shorter message
    uint64_t result = 0;  // of an atomic; bytes of a received message
    std::optional<Notification> notification = {};  // set in an own segment on completion
};

// The effects of frames on this process. The implementation of `Links` calls it, one frame at a time. It must
// not call the links.
struct Host {
    virtual ~Host() = default;
    // Memory of an own segment, or nullptr if the peer may not access it. `keep_alive` holds the mapping.
    virtual char* locate(uint16_t segment, uint64_t offset, uint64_t size,
                         std::shared_ptr<void>& keep_alive) = 0;
    virtual bool notify(uint16_t segment, uint32_t id, uint32_t value) = 0;
    virtual std::optional<uint64_t> atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a,
                                           uint64_t b) = 0;
    virtual void peer_registered(int peer, uint16_t segment, uint64_t size) = 0;
    virtual bool passive_arrived(int peer, std::vector<char> message) = 0;
    // `reason`: a sentence if members disagree, else empty.
    virtual void group_aborted(uint64_t key, int culprit, const std::string& reason) = 0;
    virtual void end_requested(int peer) = 0;
    virtual void peer_lost(int peer) = 0;
};

// Thread-safe, except that `add_peer` and `start` come first and once.
class Links {
public:
    // While waiting for one request, every eighth poll reads all streams.
    static constexpr int full_poll_interval = 8;
    static constexpr uint64_t largest_passive = 1 << 20;
    static constexpr uint64_t largest_message = uint64_t(1) << 40;
    static constexpr uint64_t largest_reason = 1023;  // bytes of the sentence about a broken group
    // How long to read on after the first stream of a peer has ended: earlier messages may still arrive on
    // other streams.
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_drain_ns = 50'000;
#else
    static constexpr int64_t longest_drain_ns = 500'000'000;
#endif

    Links() = default;
    virtual ~Links() = default;
    Links(const Links&) = delete;

    // Takes ownership of connected, authenticated and silent sockets, on which the handshake is done. An
    // implementation that does not use them for data can exchange addresses over them and learn from their
    // end that the peer is gone.
    virtual void add_peer(int peer, const std::vector<int>& sockets) = 0;
    virtual void start() = 0;
    virtual void stop() = 0;
    virtual bool empty() const = 0;  // true if no peer was added

    // Sends and requests to one peer take effect there in order; messages of collectives need not. The
    // `request` of a send is done once its payload may be changed. The loss of a peer ends all its sends,
    // requests and receives as lost, and notifies the host.
    virtual void send(int peer, const Frame& frame, const void* data, Request* request) = 0;
    virtual void send_owned(int peer, const Frame& frame, std::vector<char> data) = 0;
    // Sends a request whose reply completes `request`: with `request->size` bytes at `request->into` for a
    // read, `request->result` for an atomic. The reply to an echo confirms that all earlier sends have taken
    // effect; its `request->result` is the peer's now_ns().
    virtual void send_request(int peer, Frame frame, Request* request) = 0;
    // A message of a collective. It matches the receive of the same key, sequence and tag, whichever comes
    // first. Both must agree on the size, unless `allow_shorter` is set, and on `check`; else the receive
    // ends as a mismatch.
    virtual void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                              const void* data, uint64_t size, Request* request) = 0;
    virtual void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                                 void* into, uint64_t size, Request* request) = 0;
    // Cancels requests: their buffers are not accessed after this returns.
    virtual void cancel(Request* requests, size_t count) = 0;
    // Drops unexpected messages of this key. Receives of a key end as aborted when a peer aborts its group.
    virtual void forget(uint64_t key) = 0;
    // A peer whose message belongs to another call of this collective, so that no receive here would match
    // it; -1 if there is none.
    virtual int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) = 0;
    // Whether an unexpected message has arrived, like MPI_Iprobe.
    virtual bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) = 0;

    // While this lives, a collective is about to post receives for all messages of its key. Messages that
    // arrive earlier may then wait on the wire, which saves memory and a copy.
    struct Engaged {
        Engaged(Links& links, uint64_t key, uint32_t sequence, uint32_t check) : links(links), key(key) {
            links.engage(key, sequence, check);
        }
        Engaged(const Engaged&) = delete;
        ~Engaged() { links.disengage(key); }
        Links& links;
        const uint64_t key;
    };

    // Makes progress. Waiting threads call it; a background thread calls it when no thread waits.
    // `own_foregrounds`: 1 if the caller holds a `Foreground`.
    virtual void poll(int timeout_ms, int own_foregrounds = 0) = 0;
    // Polls only the stream of one request, if nothing else needs progress and that is faster.
    virtual void poll_for(const Request&) { poll(0, 1); }
    // Drives the links until `ready()`. Returns false at the deadline. `check` throws to end the wait.
    // `awaited`: the request that `ready` tests, if it is a single one. `busy_poll`: polls for longer before
    // sleeping, and yields the core between polls; for callers without other work.
    template <class Ready, class Check> bool drive(bool oversubscribed, Deadline deadline, Ready&& ready,
                                                   Check&& check, const Request* awaited = nullptr,
                                                   bool busy_poll = false) {
        if (ready()) return true;
        Foreground foreground(*this);
        const int64_t begin = now_ns(), end_alone = begin + (oversubscribed ? 0 : longest_spin_ns);
        const int64_t end_of_spin = std::min(begin + (oversubscribed ? 10'000
                                                      : busy_poll    ? longest_busy_poll_ns
                                                                     : longest_spin_ns),
                                             deadline.at);
        int turn = 1;
        for (int64_t now = begin;;) {
            if (awaited && turn++ % full_poll_interval) poll_for(*awaited);
            else poll(0, 1);
            if (ready()) return true;
            if (now >= end_alone) sched_yield();
            if ((now = now_ns()) >= end_of_spin) break;
        }
        int64_t next_check = now_ns() + sleep_slice_ns;
        while (!ready()) {
            if (deadline.passed()) return ready();
            poll(2, 1);
            if (now_ns() > next_check) {
                if (ready()) return true;
                check();
                next_check = now_ns() + sleep_slice_ns;
            }
        }
        return true;
    }
    // While one lives, the background thread leaves the links to its owner.
    struct Foreground {
        explicit Foreground(Links& links) : links(links) { links.foreground_.fetch_add(1); }
        ~Foreground() {
            links.last_foreground_.store(now_ns(), std::memory_order_relaxed);
            links.foreground_.fetch_sub(1);
        }
        Links& links;
    };

protected:
    virtual void engage(uint64_t, uint32_t, uint32_t) {}
    virtual void disengage(uint64_t) {}
    // Whether a thread drives the links, or did so a moment ago and is likely to do so again.
    bool driven() const {
        return foreground_.load() > 0 ||
               now_ns() - last_foreground_.load(std::memory_order_relaxed) < 1'000'000;
    }
    // Whether other threads drive the links, besides a caller that holds `own_foregrounds`.
    bool has_other_waiters(int own_foregrounds) const { return foreground_.load() > own_foregrounds; }

private:
    std::atomic<int> foreground_{0};
    std::atomic<int64_t> last_foreground_{0};
};

// Makes the links of `rank` among `size` ranks. The host outlives the links.
using MakeLinks = std::function<std::unique_ptr<Links>(Host& host, int rank, int size)>;

}  // namespace carme

// What carries operations to ranks on other nodes, and what they consist of.
//
// TCP does so (tcp_links.hpp). An implementation over libfabric or verbs implements `Links`, with the help of `Ledger`,
// and gives the context a function that makes them; the context, its groups and their ways of reducing know no more
// than what is here. tests/queued_links.hpp is a small example.
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
    write = 1, read_request, read_reply, atomic_request, atomic_reply, register_segment, register_reply, passive,
    message, abort_group, echo, kill, heartbeat
};

constexpr uint32_t of_letters = 1u << 31;  // this bit distinguishes the signatures of letters from those of collectives

// What travels before a payload. Both ends are little-endian, which the handshake checks.
struct Frame {
    uint32_t magic = 0xCA43E001;
    FrameType type{};
    uint8_t operation = 0;
    uint16_t segment = 0;
    uint64_t offset = 0;
    uint64_t size = 0;      // bytes of payload that follow, or that a read asks for
    uint64_t key = 0;       // group of a message; request of a read or an atomic
    uint32_t sequence = 0;  // which collective of the group
    uint32_t tag = 0;       // which part of it
    uint32_t check = 0;     // signature of the collective or the letter; id of a notification
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

// A notification of a segment.
struct Notice { int segment; uint32_t id, value; };

enum class State : uint32_t { pending, done, lost, mismatch, aborted };

// A send or receive that is under way. Its owner keeps it and the buffer until it is over or cancelled.
struct Request {
    std::atomic<State> state{State::pending};
    int peer = -1;
    size_t stream = 0;  // on which it travels, where there are several
    char* into = nullptr;
    uint64_t size = 0;
    uint32_t check = 0;
    bool at_most = false;  // a message of fewer bytes does as well
    uint64_t result = 0;   // of an atomic; bytes of a message that was received
    std::optional<Notice> notice = {};  // set in an own segment once it is done
};

// What frames do to this process. Called by the implementation that moves them, one frame at a time; it does not call
// the links.
struct Host {
    virtual ~Host() = default;
    // Memory of an own segment, or nullptr where the peer may not reach. `keep_alive` holds the mapping.
    virtual char* locate(uint16_t segment, uint64_t offset, uint64_t size, std::shared_ptr<void>& keep_alive) = 0;
    virtual bool notify(uint16_t segment, uint32_t id, uint32_t value) = 0;
    virtual std::optional<uint64_t> atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a,
                                           uint64_t b) = 0;
    virtual void peer_registered(int peer, uint16_t segment, uint64_t size) = 0;
    virtual bool passive_arrived(int peer, std::vector<char> message) = 0;
    // `reason`: a sentence where members disagree, else empty.
    virtual void group_aborted(uint64_t key, int culprit, const std::string& reason) = 0;
    virtual void end_requested(int peer) = 0;
    virtual void peer_lost(int peer) = 0;
};

// Any thread may call any of this, but `add_peer` and `start`, which come first and once.
class Links {
public:
    static constexpr int full_poll_interval = 8;  // turns of waiting for one request; the last one polls all streams
    static constexpr uint64_t largest_passive = 1 << 20;
    static constexpr uint64_t largest_message = uint64_t(1) << 40;
    static constexpr uint64_t largest_reason = 1023;  // bytes of a sentence about a group that broke
    // From the first sign that a peer leaves to its loss: what it sent before may still be on its way.
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_farewell_ns = 50'000;
#else
    static constexpr int64_t longest_farewell_ns = 500'000'000;
#endif

    Links() = default;
    virtual ~Links() = default;
    Links(const Links&) = delete;

    // Takes over the sockets on which the handshake was done: connected, authenticated and silent. Anyone who carries
    // nothing over them can exchange addresses on them, and learn from their end that the peer has gone.
    virtual void add_peer(int peer, const std::vector<int>& sockets) = 0;
    virtual void start() = 0;
    virtual void stop() = 0;
    virtual bool empty() const = 0;  // no peer was added

    // What is sent to one peer and requested of it takes effect there in that order, which messages of collectives need not
    // keep to. The `request` of a send is done once its payload may be changed. With a peer all that is sent to it,
    // requested of it and awaited from it is lost, and the host is notified.
    virtual void send(int peer, const Frame& frame, const void* data, Request* request) = 0;
    virtual void send_owned(int peer, const Frame& frame, std::vector<char> data) = 0;
    // Sends a request whose reply completes `request`: with `request->size` bytes at `request->into` for a read,
    // `request->result` for an atomic. The reply to an echo says that all that was sent before has taken effect, and
    // `request->result` is the peer's now_ns().
    virtual void send_request(int peer, Frame frame, Request* request) = 0;
    // A message of a collective: it goes to the receive of the same key, sequence and tag, whichever comes first. Both
    // must agree on the size, unless it is `at_most`, and on `check`, else the receive ends as a mismatch.
    virtual void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, const void* data,
                              uint64_t size, Request* request) = 0;
    virtual void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                                 uint64_t size, Request* request) = 0;
    // Forgets requests: their buffers are not touched after this returns.
    virtual void cancel(Request* requests, size_t count) = 0;
    // Forgets unexpected messages of this key. Receives of a key end as aborted when a peer aborts its group.
    virtual void forget(uint64_t key) = 0;
    // A peer whose message of this collective is of another call, which this rank may never expect; -1: there is none.
    virtual int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) = 0;
    // Whether an unexpected message is there, as MPI_Iprobe finds one.
    virtual bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) = 0;

    // While this lives a collective will soon expect all messages of its key: what comes before its receive may wait on
    // the wire instead of being kept, which costs memory and a copy.
    struct Engaged {
        Engaged(Links& links, uint64_t key, uint32_t sequence, uint32_t check) : links(links), key(key) {
            links.engage(key, sequence, check);
        }
        Engaged(const Engaged&) = delete;
        ~Engaged() { links.disengage(key); }
        Links& links;
        const uint64_t key;
    };

    // Makes progress. Waiting threads call it; a background thread does it when none of them waits.
    // `own_foregrounds`: 1 where the caller holds a `Foreground`.
    virtual void poll(int timeout_ms, int own_foregrounds = 0) = 0;
    // Looks at what a request waits for alone where nothing else is to be done, if that takes less time.
    virtual void poll_for(const Request&) { poll(0, 1); }
    // Drives the links until `ready()`. False: the deadline passed. `check` throws to end the wait.
    // `awaited`: what `ready` looks at, where that is one request. `patient`: a caller who has nothing else to do polls
    // for longer before sleeping, and yields the core between polls.
    template <class Ready, class Check>
    bool drive(bool crowded, Deadline deadline, Ready&& ready, Check&& check, const Request* awaited = nullptr,
               bool patient = false) {
        if (ready()) return true;
        Foreground foreground(*this);
        const int64_t begin = now_ns(), end_alone = begin + (crowded ? 0 : longest_spin_ns);
        const int64_t end_of_spin =
            std::min(begin + (crowded ? 10'000 : patient ? longest_patience_ns : longest_spin_ns), deadline.at);
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
    // Whether a thread drives the links, or did so just now and is likely to do so again.
    bool driven() const {
        return foreground_.load() > 0 || now_ns() - last_foreground_.load(std::memory_order_relaxed) < 1'000'000;
    }
    // Whether others do beside a caller that holds `own_foregrounds` of them.
    bool has_other_waiters(int own_foregrounds) const { return foreground_.load() > own_foregrounds; }

private:
    std::atomic<int> foreground_{0};
    std::atomic<int64_t> last_foreground_{0};
};

// Of `rank` among `size`. The host outlives the links.
using MakeLinks = std::function<std::unique_ptr<Links>(Host& host, int rank, int size)>;

}  // namespace carme

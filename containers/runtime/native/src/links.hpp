// Streams to ranks on other nodes: frames over connected sockets, received straight to where they belong.
//
// The sockets come connected and authenticated. A place for libfabric or verbs is beside this class: whatever
// offers the same sends, receives and `Host` callbacks can carry the same operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "waiting.hpp"

namespace carme {

enum class FrameType : uint8_t {
    write = 1, read_request, read_reply, atomic_request, atomic_reply, register_segment, register_reply, passive,
    message, abort_group, echo, kill
};

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
    uint32_t check = 0;     // signature of the collective; id of a notification
    uint32_t value = 0;     // of a notification; 0: none
    uint64_t operand = 0, operand2 = 0;
};
static_assert(sizeof(Frame) == 64);

// A notification of a segment.
struct Notice { int segment; uint32_t id, value; };

enum class State : uint32_t { pending, done, lost, mismatch, aborted };

// A send or receive that is under way. Its owner keeps it and the buffer until it is over or cancelled.
struct Request {
    std::atomic<State> state{State::pending};
    int peer = -1;
    size_t stream = 0;  // on which it travels
    char* into = nullptr;
    uint64_t size = 0;
    uint32_t check = 0;
    uint64_t result = 0;
    std::optional<Notice> notice = {};  // set in an own segment once it is done
};

// What frames do to this process.
struct Host {
    virtual ~Host() = default;
    // Memory of an own segment, or nullptr where the peer may not reach. `keep` holds the mapping.
    virtual char* locate(uint16_t segment, uint64_t offset, uint64_t size, std::shared_ptr<void>& keep) = 0;
    virtual bool notify(uint16_t segment, uint32_t id, uint32_t value) = 0;
    virtual std::optional<uint64_t> atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a,
                                           uint64_t b) = 0;
    virtual void peer_registered(int peer, uint16_t segment, uint64_t size) = 0;
    virtual bool passive_arrived(int peer, std::vector<char> message) = 0;
    // `reason`: a sentence where members disagree, else empty.
    virtual void group_aborted(uint64_t key, int culprit, const std::string& reason) = 0;
    virtual void told_to_end(int peer) = 0;
    virtual void peer_lost(int peer) = 0;
};

class Links {
public:
    static constexpr int turns_for_all = 8;  // of waiting for one request: in the last of them all streams are looked at
    static constexpr uint64_t largest_passive = 1 << 20;
    static constexpr uint64_t largest_message = uint64_t(1) << 40;
    static constexpr uint64_t largest_reason = 1023;  // bytes of a sentence about a group that broke
    // Bytes of a payload that the network card is to fetch from where they lie (MSG_ZEROCOPY), where it can: for fewer,
    // keeping their pages in place and being told when they have gone costs more than a copy.
    static constexpr uint64_t uncopied_from = 64 * 1024;
    // From the end of one stream of a peer to that of all.
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_farewell_ns = 50'000;
#else
    static constexpr int64_t longest_farewell_ns = 500'000'000;
#endif
    // A stream copies again once the kernel says that it copies such payloads all the same, as it does on virtual
    // devices. Tests, which have no others, let it go on.
    static inline std::atomic<bool> insist_on_uncopied{false};

    Links(Host& host, int size);
    ~Links();
    Links(const Links&) = delete;

    // Takes the sockets over. Stream 0 carries one-sided operations, the others messages of collectives.
    void add_peer(int peer, const std::vector<int>& sockets);
    void start();
    void stop();
    bool empty() const { return links_.empty(); }
    bool reaches(int peer) const { return !streams_[size_t(peer)].empty(); }

    void send(int peer, size_t stream, const Frame& frame, const void* data, Request* request);
    void send_owned(int peer, size_t stream, const Frame& frame, std::vector<char> data);
    // A message of a collective, spread over the streams by its tag.
    void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, const void* data,
                      uint64_t size, Request* request);
    void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                         uint64_t size, Request* request);
    // Sends a request whose reply completes `request`.
    void ask(int peer, Frame frame, Request* request);
    // Forgets requests: their buffers are not touched after this returns.
    void cancel(Request* requests, size_t count);
    void forget(uint64_t key);
    // A peer whose message of this collective is of another call, which nobody here may ever expect; -1: there is none.
    int who_disagrees(uint64_t key, uint32_t sequence, uint32_t check);

    // Calls that sent of a payload without a copy, so far.
    uint64_t sent_uncopied();

    // Moves what can be moved. Called by waiting threads; the background thread does it when nobody waits.
    // `own`: 1 where the caller holds a `Foreground`.
    void poll(int timeout_ms, int own = 0);
    // Looks at the stream of a request alone where nothing else is to be done, which takes a system call less.
    void poll_for(const Request& request);
    // Drives the sockets until `ready()`. False: the deadline passed. `check` throws to end the wait.
    // `awaited`: what `ready` looks at, where that is one request.
    template <class Ready, class Check>
    bool drive(bool crowded, Deadline deadline, Ready&& ready, Check&& check, const Request* awaited = nullptr) {
        if (ready()) return true;
        Foreground here(*this);
        const int64_t end_of_spin = now_ns() + (crowded ? 10'000 : longest_spin_ns);
        int turn = 1;
        do {
            if (awaited && turn++ % turns_for_all) poll_for(*awaited);
            else poll(0, 1);
            if (ready()) return true;
            if (crowded) sched_yield();
        } while (now_ns() < end_of_spin);
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
    // While one lives, the background thread leaves the sockets to its owner.
    struct Foreground {
        explicit Foreground(Links& links) : links(links) { links.foreground_.fetch_add(1); }
        ~Foreground() {
            links.last_foreground_.store(now_ns(), std::memory_order_relaxed);
            links.foreground_.fetch_sub(1);
        }
        Links& links;
    };

private:
    struct Out {
        Frame frame;
        const char* data = nullptr;
        uint64_t size = 0, sent = 0;  // sent counts the header too
        std::vector<char> owned;
        std::shared_ptr<void> keep;  // what `data` lies in
        Request* request = nullptr;
        std::optional<uint32_t> uncopied;  // the last call that sent of it without a copy
    };
    enum class Into { nothing, segment, posted, unexpected, passive, reason };
    using Match = std::tuple<int, uint64_t, uint32_t, uint32_t>;
    struct Link {
        int fd = -1;
        int peer = -1;
        std::deque<Out> out;
        bool uncopied = false;           // whether large payloads are sent without a copy
        uint32_t calls = 0, passed = 0;  // that did so, and those of them whose payload has gone
        std::unordered_map<uint32_t, uint32_t> passed_early;  // from a call to the one after the last of these
        std::deque<Out> leaving;  // sent, but the kernel still reads their payloads
        std::unique_ptr<char[]> buffer;
        size_t head = 0, tail = 0;
        bool in_payload = false, wants_write = false;
        Frame frame;
        Into into = Into::nothing;
        char* destination = nullptr;
        uint64_t left = 0;  // of the payload
        uint64_t room = 0;  // at `destination`; less than `left` while memory is only taken as the payload comes
        Request* request = nullptr;
        std::shared_ptr<void> keep;
        std::vector<char> owned;
        int64_t paused_since = 0;
        int64_t ended_since = 0;  // the peer sends nothing more
        bool awaited = false;          // something was sent that its kernel may not have answered yet
        int64_t silent_since = 0;      // the peer's kernel owes an answer; 0: none
    };
    static constexpr size_t buffer_size = 32 * 1024;
    static constexpr uint64_t smallest_straight = 2048;  // bytes of a payload that are not worth a copy
    static constexpr size_t taken_with_payload = 1024;   // of what follows it
    // Of one stream in one turn: less than may be expected of a peer, as what is not expected yet is copied.
    static constexpr uint64_t most_at_once = 512 * 1024;
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_pause_ns = 50'000;
#else
    static constexpr int64_t longest_pause_ns = 20'000'000;
#endif
    // A peer is lost whose kernel has been silent for so long, which is noticed within a second.
    static constexpr int64_t longest_silence_ns = 750'000'000, between_looks_ns = 50'000'000;
    static constexpr int64_t shortest_nap_ns = 500'000, longest_nap_ns = 2'000'000;  // while others drive the sockets
    static constexpr uint64_t small = 256 * 1024;
    static constexpr uint64_t first_piece = 1 << 20;  // of memory for a message that nobody expected

    void run();
    size_t stream_of(int peer, uint32_t tag) const;
    void wake_others(int own);
    void readable(Link& link);
    bool writable(Link& link);  // false: the link is gone
    void release(Link& link);   // learns which payloads have gone
    void retire(Link& link);    // those that have
    void watch(Link& link);
    bool begin(Link& link);     // a header is complete; false: pause
    void finish(Link& link);    // its payload is complete
    bool parse(Link& link);
    void advance(Link& link, uint64_t count);  // so much of the payload has come
    void end(Link& link);
    void forget_out(Link& link);
    void drop(Link& link, const char* why);
    void lose(int peer);
    void complete(Request* request, State state);
    void enqueue(Link& link, Out out);
    void resume_paused();
    void look_for_silence();
    void abort(uint64_t key);

    Host& host_;
    std::mutex mutex_;
    std::vector<std::vector<Link*>> streams_;
    std::vector<std::unique_ptr<Link>> links_;
    std::map<Match, Request*> posted_;
    std::map<Match, std::pair<uint32_t, std::vector<char>>> unexpected_;
    std::unordered_map<uint64_t, Request*> asked_;
    std::vector<bool> lost_;
    uint64_t next_ask_ = 1;
    std::atomic<int> paused_{0};
    std::atomic<int> wanting_{0};  // links that wait for room to send
    std::atomic<int> ended_{0};    // links that ended before others of their peer
    std::atomic<int> awaiting_{0};  // links whose peer's kernel has not answered all yet, as far as was looked
    int64_t next_look_ = 0;
    int epoll_ = -1, kick_ = -1;
    std::atomic<int> foreground_{0};
    std::atomic<int64_t> last_foreground_{0};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
    bool completed_any_ = false;
};

}  // namespace carme

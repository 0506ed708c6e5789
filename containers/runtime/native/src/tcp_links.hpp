// Links over TCP: frames over connected sockets, received straight to where they belong.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ledger.hpp"
#include "links.hpp"

struct iovec;

namespace carme {

class TcpLinks final : public Links {
public:
    // Bytes of a payload that the network card is to fetch from where they lie (MSG_ZEROCOPY), where it can: for fewer,
    // keeping their pages in place and waiting for the notice that they have gone costs more than a copy.
    static constexpr uint64_t uncopied_from = 64 * 1024;
    // A stream copies again once the kernel says that it copies such payloads all the same, as it does on virtual
    // devices. Tests, which have no others, let it go on.
    static inline std::atomic<bool> insist_on_uncopied{false};
    // Between two probes of an end without a receive window. Tests do as older kernels, which probe less and less often.
    static inline std::atomic<int> longest_rto_ms{1000};

    // `one_node`: the host itself learns when a peer's process ends, and no network lies between.
    TcpLinks(Host& host, int size, bool one_node = false);
    ~TcpLinks() override;

    // Stream 0 carries one-sided operations, the others messages of collectives, spread over them by their tags.
    void add_peer(int peer, const std::vector<int>& sockets) override;
    void start() override;
    void stop() override;
    bool empty() const override { return links_.empty(); }

    void send(int peer, const Frame& frame, const void* data, Request* request) override;
    void send_owned(int peer, const Frame& frame, std::vector<char> data) override;
    void send_request(int peer, Frame frame, Request* request) override;
    void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, const void* data,
                      uint64_t size, Request* request) override;
    void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                         uint64_t size, Request* request) override;
    void cancel(Request* requests, size_t count) override;
    void forget(uint64_t key) override;
    int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) override;
    bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) override;
    void poll(int timeout_ms, int own_foregrounds = 0) override;
    // Looks at the stream of the request alone, which takes a system call less.
    void poll_for(const Request& request) override;

    // Calls that sent of a payload without a copy, so far.
    uint64_t sent_uncopied();

private:
    struct Out {
        Frame frame;
        const char* data = nullptr;
        uint64_t size = 0, sent = 0;  // sent counts the header too
        std::vector<char> owned;
        std::shared_ptr<void> keep_alive;  // what `data` lies in
        Request* request = nullptr;
        std::optional<uint32_t> uncopied;  // the last call that sent of it without a copy
    };
    enum class Into { discarded, segment, posted, unexpected, passive, reason };
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
        Into into = Into::discarded;
        char* destination = nullptr;
        uint64_t remaining = 0;  // of the payload
        uint64_t low_watermark = 1;  // bytes without which no sleeper is woken
        uint64_t capacity = 0;  // at `destination`; less than `remaining` while memory is only taken as the payload comes
        Request* request = nullptr;
        std::shared_ptr<void> keep_alive;
        std::vector<char> owned;
        int64_t paused_since = 0;
        int64_t ended_since = 0;  // the peer sends nothing more
        bool wait_expired = false;   // a message was not expected for as long as it may wait, and none since was
        bool awaited = false;          // something was sent that its kernel may not have answered yet
    };
    struct Peer {
        std::vector<Link*> streams;
        bool active_since_heartbeat = false;  // something came since its last heartbeat
        bool active_since_check = false;      // something came since the last check for silence
        int64_t silent_ns = 0;  // for so long its kernel has owed an answer; 0: it does not
    };
    static constexpr size_t buffer_size = 32 * 1024;
    static constexpr uint64_t smallest_straight = 2048;  // bytes of a payload that are not worth a copy
    static constexpr size_t taken_with_payload = 1024;   // of what follows it
    // Of a payload whose rest is awaited asleep: at once, and at least.
    static constexpr uint64_t largest_low_watermark = 256 * 1024, smallest_low_watermark = 64 * 1024;
    // Of one stream in one turn: less than may be expected of a peer, as what is not expected yet is copied.
    static constexpr uint64_t most_at_once = 512 * 1024;
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_pause_ns = 50'000;
#else
    static constexpr int64_t longest_pause_ns = 20'000'000;
#endif
    // A peer that says nothing is sent heartbeats, which its kernel answers even if its process cannot. It is lost when
    // its kernel has been silent for so long, which is noticed within a second. A packet that is lost is no silence:
    // after less time it is probed on all streams, and each of them sends again what is not answered.
    static constexpr int64_t longest_silence_ns = 700'000'000, suspect_silence_ns = 150'000'000;
    static constexpr int64_t silence_check_interval_ns = 50'000'000;
    static constexpr int64_t heartbeat_interval_ns = 100'000'000;
    static constexpr size_t most_heartbeats = 100;  // at once: of more peers each has its turn
    static constexpr int system_rto_max_ms = 120'000;
    static constexpr int most_events = 32;
    static constexpr int64_t shortest_nap_ns = 500'000, longest_nap_ns = 2'000'000;  // while others drive the sockets
    // Bytes of messages that are kept until they are expected: always, and if their group is not busy.
    static constexpr uint64_t buffered = 16 * 1024, small = 256 * 1024;
    static constexpr uint64_t first_piece = 1 << 20;  // of memory for an unexpected message

    // In tcp_links.cpp: sockets, and who polls them.
    void engage(uint64_t key, uint32_t sequence, uint32_t check) override;
    void disengage(uint64_t key) override;
    void run();
    void raise_low_watermarks();  // for payloads whose parts are not worth waking up for
    void set_low_watermark(Link& link, uint64_t low_watermark);
    size_t stream_of(int peer, uint32_t tag) const;
    void wake_waiters(int own_foregrounds);
    void watch(Link& link);
    int poll_timeout_ms() const;  // of the thread in the background

    // In tcp_sending.cpp.
    void send_on(size_t stream, int peer, const Frame& frame, const void* data, Request* request);
    void enqueue(Link& link, Out out);
    bool writable(Link& link);  // false: the link is gone
    // What one call sends: how many parts, and with which flags.
    static int gather(Link& link, bool uncopied, iovec* parts, int& flags);
    void pass(Link& link, uint64_t count);  // so many bytes were sent
    void release(Link& link);   // learns which payloads have gone
    void retire(Link& link);    // those that have

    // In tcp_receiving.cpp.
    void readable(Link& link);
    void take(Link& link);
    bool parse(Link& link);
    bool begin(Link& link);     // a header is complete; false: pause
    bool begin_message(Link& link);  // the same, of a message
    bool expect(Link& link, Into into, char* destination, uint64_t size);  // its payload; always true
    bool answer(Link& link);    // to a request; false: it is malformed
    bool busy_with(int peer, const Frame& message) const;
    void advance(Link& link, uint64_t count);  // so much of the payload has come
    void finish(Link& link);    // its payload is complete
    void resume_paused();

    // In tcp_losses.cpp.
    void send_heartbeats();
    void heartbeat(Link& link);
    void detect_silent_peers();
    void update_silence(Peer& peer, int64_t passed_ns);
    void note_activity(Peer& peer);
    bool has_paused_stream(int peer) const;
    void end(Link& link);
    void forget_out(Link& link);
    void drop(Link& link, const std::string& reason);
    void drop(Link& link, int error);
    void lose(int peer);

    Host& host_;
    const bool one_node_;
    std::mutex mutex_;
    std::vector<Peer> peers_;
    std::vector<std::unique_ptr<Link>> links_;
    Ledger ledger_;
    std::atomic<int> paused_{0};
    std::atomic<int> write_blocked_{0};  // links that wait for room to send
    std::atomic<int> ended_{0};    // links that ended before others of their peer
    std::atomic<int> awaiting_{0};  // links whose peer's kernel had not answered all at the last check
    int64_t last_silence_check_ = 0;
    size_t heartbeat_turn_ = 0;  // the peer whose turn it is to be sent a heartbeat
    std::atomic<int64_t> next_heartbeat_{0};
    int epoll_ = -1, kick_ = -1;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace carme

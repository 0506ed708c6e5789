// Links over TCP: frames over connected sockets. Payloads are received directly at their destination.
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
    // Payloads of at least so many bytes are sent without a copy (MSG_ZEROCOPY) if possible. For smaller
    // ones, pinning pages and waiting for the completion costs more than a copy.
    static constexpr uint64_t zero_copy_from = 64 * 1024;
    // A stream returns to copying once the kernel reports that it copies anyway, as it does on virtual
    // devices. Tests, which have only these, force zero-copy sends.
    static inline std::atomic<bool> force_zero_copy{false};
    // Longest time between two probes of a peer with a zero window. Tests set it to older kernels' behaviour,
    // which back off further.
    static inline std::atomic<int> longest_rto_ms{1000};

    // `one_node`: the peers are on this node. The host itself detects the end of their processes.
    TcpLinks(Host& host, int size, bool one_node = false);
    ~TcpLinks() override;

    // Stream 0 carries one-sided operations. The others carry messages of collectives, distributed by tag.
    void add_peer(int peer, const std::vector<int>& sockets) override;
    void start() override;
    void stop() override;
    bool empty() const override { return links_.empty(); }

    void send(int peer, const Frame& frame, const void* data, Request* request) override;
    void send_owned(int peer, const Frame& frame, std::vector<char> data) override;
    void send_request(int peer, Frame frame, Request* request) override;
    void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                      const void* data, uint64_t size, Request* request) override;
    void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                         uint64_t size, Request* request) override;
    void cancel(Request* requests, size_t count) override;
    void forget(uint64_t key) override;
    int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) override;
    bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) override;
    void poll(int timeout_ms, int own_foregrounds = 0) override;
    // Polls only the stream of the request, which saves a system call.
    void poll_for(const Request& request) override;

    // The number of zero-copy send calls so far.
    uint64_t zero_copy_sends();

private:
    struct OutgoingFrame {
        Frame frame;
        const char* data = nullptr;
        uint64_t size = 0, sent = 0;  // sent counts the header too
        std::vector<char> owned;
        std::shared_ptr<void> keep_alive;  // the memory that holds `data`
        Request* request = nullptr;
        std::optional<uint32_t> zero_copy;  // number of its last zero-copy send call
    };
    enum class PayloadKind { discarded, segment, posted, unexpected, passive, reason };
    struct Link {
        int fd = -1;
        int peer = -1;
        std::deque<OutgoingFrame> out;
        bool zero_copy = false;  // whether it sends large payloads without a copy
        uint32_t calls = 0, passed = 0;  // zero-copy calls, and the completed ones among them
        // Completed out of order: from a call to the one after the last.
        std::unordered_map<uint32_t, uint32_t> passed_early;
        std::deque<OutgoingFrame> unreleased;  // sent, but still read by the kernel
        std::unique_ptr<char[]> buffer;
        size_t head = 0, tail = 0;
        bool in_payload = false, wants_write = false;
        Frame frame;
        PayloadKind payload_kind = PayloadKind::discarded;
        char* destination = nullptr;
        uint64_t remaining = 0;  // bytes of the payload
        uint64_t low_watermark = 1;  // bytes that must arrive to wake a sleeper
        uint64_t capacity = 0;  // at `destination`; less than `remaining` while memory grows with the payload
        Request* request = nullptr;
        std::shared_ptr<void> keep_alive;
        std::vector<char> owned;
        int64_t paused_since = 0;
        int64_t ended_since = 0;  // when the peer ended the stream; 0: it has not
        // A message waited for its receive for the maximum time, and none was expected since.
        bool wait_expired = false;
        bool awaited = false;  // data were sent that the peer's kernel may not have acknowledged yet
    };
    struct Peer {
        std::vector<Link*> streams;
        bool active_since_heartbeat = false;  // data arrived since its last heartbeat
        bool active_since_check = false;  // data arrived since the last check for silence
        int64_t silent_ns = 0;  // how long its kernel has owed an answer; 0: it owes none
    };
    static constexpr size_t buffer_size = 32 * 1024;
    static constexpr uint64_t smallest_direct = 2048;  // bytes of a payload from which a copy costs more
    static constexpr size_t taken_with_payload = 1024;  // bytes that are read behind a payload
    // Limits of the low watermark of a payload whose receiver sleeps.
    static constexpr uint64_t largest_low_watermark = 256 * 1024, smallest_low_watermark = 64 * 1024;
    // Bytes read from one stream per turn: less than a peer's expected pieces, because unexpected data are
    // copied.
    static constexpr uint64_t max_bytes_per_turn = 512 * 1024;
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    static constexpr int64_t longest_pause_ns = 50'000;
#else
    static constexpr int64_t longest_pause_ns = 20'000'000;
#endif
    // A silent peer is sent heartbeats, which its kernel acknowledges even if its process cannot run. The
    // peer is lost when its kernel has been silent for so long; this is detected within a second. To tell a
    // lost packet from a lost peer, a peer is probed earlier on all streams, and each of them retransmits.
    static constexpr int64_t longest_silence_ns = 700'000'000, suspect_silence_ns = 150'000'000;
    static constexpr int64_t silence_check_interval_ns = 50'000'000;
    static constexpr int64_t heartbeat_interval_ns = 100'000'000;
    static constexpr size_t max_heartbeats = 100;  // per interval; more peers take turns
    static constexpr int system_rto_max_ms = 120'000;
    static constexpr int max_events = 32;
    // While other threads drive the sockets.
    static constexpr int64_t shortest_sleep_ns = 500'000, longest_sleep_ns = 2'000'000;
    // Unexpected messages up to these sizes are buffered: always, and if their group is not busy.
    static constexpr uint64_t buffered = 16 * 1024, small = 256 * 1024;
    static constexpr uint64_t first_piece = 1 << 20;  // first memory for an unexpected message

    // In tcp_links.cpp: sockets and polling.
    void engage(uint64_t key, uint32_t sequence, uint32_t check) override;
    void disengage(uint64_t key) override;
    void run();
    void raise_low_watermarks();  // so that parts of large payloads wake no sleeper
    void set_low_watermark(Link& link, uint64_t low_watermark);
    size_t stream_of(int peer, uint32_t tag) const;
    void wake_waiters(int own_foregrounds);
    void watch(Link& link);
    int poll_timeout_ms() const;  // of the background thread

    // In tcp_sending.cpp.
    void send_on(size_t stream, int peer, const Frame& frame, const void* data, Request* request);
    void enqueue(Link& link, OutgoingFrame out);
    bool writable(Link& link);  // false: the link is gone
    // Collects the parts and flags of one send call; returns the number of parts.
    static int gather(Link& link, bool zero_copy, iovec* parts, int& flags);
    void pass(Link& link, uint64_t count);  // after `count` bytes were sent
    void release(Link& link);  // reads the kernel's zero-copy completions
    void retire(Link& link);  // completes the sends that the kernel no longer reads

    // In tcp_receiving.cpp.
    void readable(Link& link);
    void take(Link& link);
    bool parse(Link& link);
    bool begin(Link& link);  // starts a frame after its header; false: pause the stream
    bool begin_message(Link& link);  // the same for a message
    // Prepares for a payload; always true.
    bool expect(Link& link, PayloadKind payload_kind, char* destination, uint64_t size);
    bool answer(Link& link);  // replies to a request; false: it is malformed
    bool busy_with(int peer, const Frame& message) const;
    void advance(Link& link, uint64_t count);  // after `count` bytes of the payload arrived
    void finish(Link& link);  // completes a frame
    void resume_paused();

    // In tcp_losses.cpp.
    void send_heartbeats();
    void heartbeat(Link& link);
    void detect_silent_peers();
    void update_silence(Peer& peer, int64_t passed_ns);
    void record_activity(Peer& peer);
    bool has_paused_stream(int peer) const;
    void end(Link& link);
    void forget_out(Link& link);
    void drop(Link& link, const std::string& reason);
    void drop(Link& link, int error);
    void mark_lost(int peer);

    Host& host_;
    const bool one_node_;
    std::mutex mutex_;
    std::vector<Peer> peers_;
    std::vector<std::unique_ptr<Link>> links_;
    Ledger ledger_;
    std::atomic<int> paused_{0};
    std::atomic<int> write_blocked_{0};  // links with a full send buffer
    std::atomic<int> ended_{0};  // links that ended before their peer's other links
    // Links with data that the peer's kernel had not acknowledged at the last check.
    std::atomic<int> awaiting_{0};
    int64_t last_silence_check_ = 0;
    size_t heartbeat_turn_ = 0;  // the next peer to send a heartbeat to
    std::atomic<int64_t> next_heartbeat_{0};
    int epoll_ = -1, wakeup_fd_ = -1;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace carme

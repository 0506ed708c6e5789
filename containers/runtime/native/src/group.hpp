// Collectives of a group: through shared memory within a node, over the links between nodes.
//
// The order of each computation depends only on ranks and sizes, so that results are bitwise equal in every
// run and on every rank.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "context.hpp"
#include "group_area.hpp"
#include "kernels.hpp"
#include "link_model.hpp"
#include "recorder.hpp"

namespace carme {

// Size of the pieces of a buffer that travel between nodes; tests set it lower.
inline std::atomic<uint64_t> piece_bytes{256 << 10};
// Pieces with a posted receive; the second: compressed pieces between two nodes.
constexpr size_t window = 8, compressed_window = 2;
constexpr uint64_t halves_from = 512 << 10;  // bytes; from here on each of two nodes reduces one half
// Distinguishes point-to-point messages from collectives.
constexpr uint64_t message_key = 0x4C45545445520000;
constexpr uint64_t compressed_from = 16 << 10;  // bytes; smaller buffers are not compressed

// The rounding error of a compressed collective. The next run adds it (error feedback).
using Residual = std::vector<float>;

// A collective that runs in the background.
class Handle {
public:
    bool wait(Deadline deadline);  // false: not yet over; throws the collective's error
    bool done() const { return completed_.value.load(std::memory_order_acquire) != 0; }

private:
    friend class Group;
    Flag completed_;
    std::exception_ptr error_;
};

// A pending message between two members.
class PendingMessage {
public:
    PendingMessage(std::shared_ptr<Context> context, int peer) : context_(std::move(context)), peer_(peer) {}
    ~PendingMessage();
    PendingMessage(const PendingMessage&) = delete;
    bool wait(Deadline deadline);  // false: not yet over
    bool done() const {
        const bool completed = request_.state.load(std::memory_order_acquire) != State::pending;
        if (completed && !recorded_ && !seen_.load(std::memory_order_relaxed))
            seen_.store(now_ns(), std::memory_order_relaxed);
        return completed;
    }

private:
    friend class Group;
    std::shared_ptr<Context> context_;
    int peer_;
    Request request_;
    // The trace record of a receive.
    recorder::Record received_;
    mutable std::atomic<int64_t> seen_{0};  // when a caller first saw its completion
    std::atomic<bool> recorded_{true};
    void record_received();
};

class Group {
public:
    // Collective over `ranks`, which must be the same on all of them.
    Group(std::shared_ptr<Context> context, std::vector<int> ranks, Deadline deadline,
          Algorithm algorithm = Algorithm::automatic);
    ~Group();
    Group(const Group&) = delete;

    const std::vector<int>& ranks() const { return ranks_; }
    int index() const { return index_; }
    int size() const { return int(ranks_.size()); }
    uint64_t key() const { return key_; }

    // All offsets and sizes of `blocks` are in bytes. Buffers must live until the call or its handle is over.
    struct Call {
        Kind kind = Kind::barrier;
        void* buffer = nullptr;        // input and output of allreduce and broadcast
        const void* input = nullptr;  // input of all other collectives
        void* output = nullptr;
        uint64_t count = 0;  // elements; for reduce_scatter: elements of the result
        Type type = Type::u8;
        Reduction reduction = Reduction::sum;
        int root = 0;                  // index in the group
        std::vector<uint64_t> send_sizes, receive_sizes;  // bytes by member: allgather uses the latter
        std::string label;
        int64_t timeout_ms = -1;  // then the group counts as broken
        // For an allreduce between nodes: sums and means of f32 only.
        Wire wire = Wire::same;
        std::shared_ptr<Residual> residual = {};
    };
    void execute(const Call& call);
    std::shared_ptr<Handle> submit(Call call);
    // Messages between two members. Messages with the same tag arrive in the order of their sends. Both
    // members must agree on the size and on `form`, a number for the type of the contents.
    std::shared_ptr<PendingMessage> send(int member, const void* data, uint64_t size, uint32_t tag,
                                         uint32_t form = 0);
    std::shared_ptr<PendingMessage> receive(int member, void* into, uint64_t size, uint32_t tag,
                                            uint32_t form = 0);
    // Returns a member whose message with this tag has arrived without a matching receive; -1 at the
    // deadline. Members take turns. Throws if all other members are lost before that.
    int sender(uint32_t tag, Deadline deadline);

    // Collective: measures the time of messages of some sizes over the slowest link between the group's
    // nodes. Empty on a single node.
    LinkModel measure_links();

private:
    struct Range { uint64_t offset, size; };
    struct Batch;
    class PieceBuffer;
    class Halving;

    Area& area(int local_rank) const { return *areas_[size_t(local_rank)]; }
    int local_size() const { return int(local_members_.size()); }
    bool one_node() const { return nodes_.size() == 1; }

    // In group.cpp: setup and execution.
    void find_nodes();
    void open_area();
    void map_areas(Deadline deadline);
    void run(const Call& call, bool in_background);
    uint32_t check_of(const Call& call) const;
    void describe_call(recorder::Record& record, const Call& call) const;
    char* scratch(uint64_t size);
    void work();

    // In group_arrivals.cpp: synchronisation.
    void arrive(const Call& call, const void* inlined, uint64_t inlined_size);
    void compare(const Call& call);
    void post_staged() { area(local_rank_).staged.post(++staged_); }
    void await(Flag Area::* flag, uint32_t target);
    void await_peer(Flag& flag, uint32_t target, int local_rank);
    void finish(Batch& batch, size_t index);

    // In group_failures.cpp: lost members and mismatched calls.
    void check_health();
    [[noreturn]] void fail_lost(int rank);
    [[noreturn]] void fail_broken(int culprit, const std::string& reason);
    std::string call_text() const;  // the current call, for messages
    [[noreturn]] void fail_mismatch(int culprit, const std::string& reason, const char* remedy);
    [[noreturn]] void fail_call_mismatch(int rank);
    // `reason`: a sentence for all members if their calls disagree, else empty.
    void abort_group(int culprit, const std::string& reason = {});
    bool mark_broken(int culprit, const std::string& reason);  // false: it was broken before
    void throw_if_broken();

    // In within_node.cpp: through shared memory.
    std::vector<Range> even_slices(uint64_t count, uint64_t element) const;
    void allreduce_inline(const Call& call, double scale);
    void allreduce_in_segments(const Call& call, const std::vector<char*>& buffers, double scale);
    void allreduce_staged(const Call& call, double scale);
    bool all_inlined() const;
    bool peers_in_segments(uint64_t bytes, std::vector<char*>& buffers);
    void reduce_slices(const char* input, const std::vector<Range>& slices, char* own_result,
                       const Call& call);
    void allgather_within_node(char* buffer, const std::vector<std::vector<Range>>& ranges);
    void alltoall_within_node(const Call& call, const std::vector<uint64_t>& from,
                              const std::vector<uint64_t>& to);

    // In across_nodes.cpp: over the links, for allreduce. Two nodes scale the result during the reduction;
    // more nodes ignore `scale`.
    void across_nodes(const std::vector<int>& column, int position, char* data, uint64_t count,
                      const Call& call, double scale);
    Algorithm choose(size_t nodes, uint64_t count, const Call& call, bool compressed) const;
    void exchange_two(int peer, bool first, char* data, uint64_t count, const Call& call, bool compressed,
                      double scale);
    // Sends a piece of a buffer without its zero blocks.
    void send_piece(Batch& sends, size_t index, int peer, uint32_t tag, uint32_t check, const char* data,
                    uint64_t size);
    void expect_piece(Batch& receives, size_t index, int peer, uint32_t tag, uint32_t check, char* into,
                      uint64_t size);
    void exchange_halves(int peer, bool first, char* data, uint64_t count, const Call& call, double scale);
    void exchange_all(const std::vector<int>& column, int position, char* data, uint64_t count,
                      const Call& call);
    void ring(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
              bool compressed);
    void halving(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
                 bool compressed);

    // In collectives.cpp: the collectives.
    void allreduce(const Call& call);
    void broadcast(const Call& call);
    void reduce_scatter(const Call& call);
    void add_across_nodes(const Call& call, std::vector<std::vector<char>>& partial);
    void allgather(const Call& call);
    void alltoall(const Call& call);
    void barrier(const Call& call);
    [[noreturn]] void fail_alltoall(int member, uint64_t peer_size, uint64_t own_size);
    std::vector<int> column(int position) const;
    bool uniform() const;

    // In point_to_point.cpp: messages between two members.
    void describe_message(recorder::Record& record, int member, uint64_t size, uint32_t tag,
                          uint32_t number) const;

    std::shared_ptr<Context> context_;
    std::vector<int> ranks_;
    int index_ = -1;
    std::vector<std::vector<int>> nodes_;  // indices of members, by node, in ascending order
    int own_node_ = 0, local_rank_ = 0;
    std::vector<int> local_members_;
    std::vector<std::shared_ptr<Mapping>> mappings_;
    std::vector<Area*> areas_;
    uint64_t key_ = 0;
    int slot_ = -1;
    uint32_t sequence_ = 0, staged_ = 0, finished_ = 0;
    Deadline deadline_;
    bool oversubscribed_ = false, is_foreground_ = false;  // how the current collective waits
    std::string operation_;
    const Call* call_ = nullptr;  // the current collective
    std::mutex broken_mutex_;
    std::vector<char> scratch_, encoded_;
    Algorithm algorithm_;
    uint32_t recorded_as_ = 0;

    std::mutex messages_mutex_;
    // Sent and received messages by member and tag.
    std::map<std::tuple<bool, int, uint32_t>, uint32_t> message_counts_;
    int next_sender_ = 0;  // the member to probe first
    std::mutex running_;
    std::mutex jobs_mutex_;
    std::condition_variable jobs_changed_;
    std::deque<std::pair<Call, std::shared_ptr<Handle>>> jobs_;
    bool busy_ = false, ending_ = false;
    std::thread worker_;
};

// Sends and receives of one collective. The destructor cancels those that are unfinished.
struct Group::Batch {
    Batch(Links& links, size_t count) : links(links), requests(new Request[count]), count(count) {}
    Batch(const Batch&) = delete;
    ~Batch() {
        for (size_t i = 0; i < count; ++i)
            if (requests[i].state.load(std::memory_order_acquire) == State::pending) {
                links.cancel(requests.get(), count);
                return;
            }
    }
    Request& operator[](size_t i) { return requests[i]; }
    Links& links;
    std::unique_ptr<Request[]> requests;
    size_t count;
    // By request: the compacted payload that is sent instead of the buffer. The first `released` of them are
    // sent and freed.
    std::vector<std::unique_ptr<char[]>> sent = {};
    size_t released = 0;
};

}  // namespace carme

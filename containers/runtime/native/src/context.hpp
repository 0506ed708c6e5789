// One process of a run: its segments, its peers, and one-sided operations on them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <sched.h>

#include "failure.hpp"
#include "link_model.hpp"
#include "links.hpp"
#include "mapping.hpp"
#include "recorder.hpp"
#include "waiting.hpp"

namespace carme {

constexpr int max_segments = 255;
constexpr int max_groups = 1024;
constexpr int queue_count = 16;
constexpr uint32_t notification_count = 65536;
constexpr uint64_t passive_limit = Links::largest_passive;

// The head of a segment's file. Its data follow at `segment_data`.
struct SegmentHead {
    Flag notified;
    std::array<std::atomic<uint32_t>, notification_count> notifications;
};
constexpr uint64_t segment_data = 2 << 20;  // aligned to a large page
static_assert(sizeof(SegmentHead) <= segment_data);

struct SegmentEntry {
    std::atomic<uint64_t> version;  // 0: no segment; a new value for each allocation
    std::atomic<uint64_t> size;
    std::atomic<int32_t> fd;
};

// A slot for one passive message at a time from senders on this node.
struct Inbox {
    std::atomic<uint32_t> owner;  // rank + 1 of the sender that fills it; 0: free
    std::atomic<uint32_t> full;
    uint64_t size;
    Flag arrived;
    Flag freed;
    char data[passive_limit];
};

// The first pages of a process's control file. Group areas follow at `areas_offset`.
struct Control {
    std::atomic<uint64_t> magic;
    cpu_set_t cpus;  // CPUs that this rank may run on
    std::array<SegmentEntry, max_segments> segments;
    std::array<std::atomic<uint64_t>, max_groups> groups;
    Inbox inbox;
};

// Where to find a peer's memory. The caller exchanges these before `connect`.
struct Endpoint {
    int pid = 0;
    int control_fd = -1;
    int node = 0;
    std::vector<int> sockets;  // several to a rank on another node, one to a rank on this node
};

class Context : public Host {
public:
    // `make_links` makes the links between nodes. Default: TCP.
    Context(int rank, int size, const MakeLinks& make_links = {});
    ~Context() override;

    int rank() const { return rank_; }
    int size() const { return size_; }
    int control_fd() const { return control_->fd(); }
    void connect(const std::vector<Endpoint>& endpoints);
    void close();
    // Measures how this node's clock differs from the first rank's, for the recorder. Call it before peers
    // leave, because peers that have left no longer answer.
    void sync_clock();

    int node_of(int rank) const { return nodes_[size_t(rank)]; }
    bool is_local(int rank) const { return nodes_[size_t(rank)] == nodes_[size_t(rank_)]; }
    bool oversubscribed() const { return oversubscribed_; }
    // Whether a waiting background thread would take the core of the computing thread.
    bool oversubscribed_in_background() const { return oversubscribed_in_background_; }
    // The model of the links between nodes. Set it before you make groups, equally on all ranks, or on all
    // ranks of a group at once.
    void set_link_model(LinkModel model) { link_model_ = std::move(model); }
    const LinkModel& link_model() const { return link_model_; }
    int cores() const { return cores_; }  // cores of this node that its ranks may use

    // Segments, in segments.cpp.
    void segment_alloc(int id, uint64_t size);
    void segment_register(int id, int rank, Deadline deadline);
    void segment_delete(int id);
    char* segment_pointer(int id, uint64_t* size = nullptr);
    std::shared_ptr<Mapping> segment_mapping(int id);
    uint64_t remote_size(int id, int rank);
    bool find_segment(const void* at, uint64_t size, int* id, uint64_t* offset);
    // Memory of a segment of a rank on this node; nullptr if there is none.
    char* peer_segment(int rank, int id, uint64_t offset, uint64_t size);

    // One-sided operations, in one_sided.cpp.
    struct Part {
        int local_segment;
        uint64_t local_offset;
        int remote_segment;
        uint64_t remote_offset, size;
    };
    void write(int rank, const std::vector<Part>& parts, const std::optional<Notification>& notification,
               int queue);
    // `notification` belongs to an own segment. It is set when all data have arrived.
    void read(int rank, const std::vector<Part>& parts, const std::optional<Notification>& notification,
              int queue);
    // Waits until reads have arrived here and writes have arrived in the peers' memory.
    bool wait(int queue, Deadline deadline);
    int64_t notify_waitsome(int segment, uint32_t first, uint32_t count, Deadline deadline);
    uint32_t notify_reset(int segment, uint32_t id);
    std::optional<uint64_t> atomic_add(int rank, int segment, uint64_t offset, uint64_t value,
                                       Deadline deadline);
    std::optional<uint64_t> compare_swap(int rank, int segment, uint64_t offset, uint64_t expected,
                                         uint64_t value, Deadline deadline);
    bool passive_send(int rank, const void* data, uint64_t size, Deadline deadline);
    std::optional<std::pair<int, std::vector<char>>> passive_receive(Deadline deadline);

    // Liveness, and what follows, in context.cpp.
    bool is_lost(int rank) const { return lost_[size_t(rank)].load(std::memory_order_acquire); }
    void detect_failures();  // updates `is_lost` for ranks on this node
    std::vector<int> state_vector();
    bool ping(int rank);
    bool kill(int rank, Deadline deadline);  // false: the rank has not ended yet
    void throw_if_lost(int rank, const char* operation);

    // For groups.
    Links& links() { return *links_; }
    // Links for messages between two ranks. Ranks of a node use a separate stream, so that messages do not
    // delay other traffic.
    Links& message_links(int rank) { return is_local(rank) ? *local_links_ : *links_; }
    Control& control(int rank) { return *reinterpret_cast<Control*>(controls_[size_t(rank)]->data()); }
    std::shared_ptr<Mapping> group_area(int rank, int slot, uint64_t offset, uint64_t size);
    uint64_t next_generation(const std::vector<int>& ranks);  // counts groups of the same ranks
    std::unique_lock<std::mutex> forming_groups() { return std::unique_lock(groups_mutex_); }
    int claim_group_slot();  // while forming_groups is held
    void on_abort(uint64_t key, std::function<void(int, const std::string&)> action);
    void forget_abort(uint64_t key);

private:
    struct Segment {
        std::shared_ptr<Mapping> mapping;
        uint64_t size = 0;
    };
    struct PeerSegment {
        std::shared_ptr<Mapping> mapping;
        uint64_t version = 0, size = 0;
    };
    struct Queue {
        std::mutex mutex;
        std::deque<std::unique_ptr<Request>> outstanding;
        std::set<int> written;  // ranks of other nodes that have not yet confirmed the arrival of all writes
    };
    struct PassiveMessage { int from; std::vector<char> data; };

    char* locate(uint16_t segment, uint64_t offset, uint64_t size,
                 std::shared_ptr<void>& keep_alive) override;
    bool notify(uint16_t segment, uint32_t id, uint32_t value) override;
    std::optional<uint64_t> atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a,
                                   uint64_t b) override;
    void peer_registered(int peer, uint16_t segment, uint64_t size) override;
    bool passive_arrived(int peer, std::vector<char> message) override;
    void group_aborted(uint64_t key, int culprit, const std::string& reason) override;
    void end_requested(int peer) override;
    void peer_lost(int peer) override;

    void check_rank(int rank) const;
    void check_queue(int queue) const;
    void check_parts(const char* operation, int rank, const std::vector<Part>& parts);
    char* local_pointer(int id, uint64_t offset, uint64_t size);
    std::shared_ptr<Mapping> open_peer(int rank, int fd, uint64_t offset, uint64_t size);
    std::shared_ptr<Mapping> peer_mapping(int rank, int id, uint64_t* size);
    std::optional<uint64_t> remote_atomic(int rank, int segment, uint64_t offset, uint8_t operation,
                                          uint64_t a, uint64_t b, Deadline deadline);
    void follow_clock();  // at the start, and about once a second
    void measure_clock(int times, Deadline deadline);
    template <class Ready> bool wait_for(Flag& flag, Deadline deadline, Ready&& ready);

    int rank_, size_;
    bool oversubscribed_ = false, oversubscribed_in_background_ = false, follows_clock_ = false;
    int cores_ = 1;
    LinkModel link_model_;
    std::shared_ptr<Mapping> control_;
    std::vector<std::shared_ptr<Mapping>> controls_;  // by rank; empty for other nodes
    std::vector<int> nodes_, pids_, pidfds_, control_fds_;
    std::vector<std::atomic<bool>> lost_;
    std::mutex segments_mutex_;
    std::array<Segment, max_segments> segments_;
    std::vector<std::array<uint64_t, max_segments>> remote_sizes_;
    std::vector<std::vector<PeerSegment>> peer_segments_;
    uint64_t next_version_ = 1;
    std::array<Queue, queue_count> queues_;
    std::mutex passive_mutex_;
    std::deque<PassiveMessage> passive_;
    std::mutex aborts_mutex_;
    std::vector<std::pair<uint64_t, std::function<void(int, const std::string&)>>> aborts_;
    std::mutex groups_mutex_;
    std::map<std::vector<int>, uint64_t> generations_;
    int next_slot_ = 0;
    std::unique_ptr<Links> links_, local_links_;
};

constexpr uint64_t control_magic = 0x434152'4D450002;

}  // namespace carme

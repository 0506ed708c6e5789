// A process of a run: its peers, their clocks, failures and aborted groups.
#include "context.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <limits>
#include <utility>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group_area.hpp"
#include "tcp_links.hpp"

namespace carme {

static_assert(sizeof(Control) <= areas_offset);

Context::Context(int rank, int size, const MakeLinks& make_links)
    : rank_(rank), size_(size), controls_(size_t(size)), nodes_(size_t(size)), pids_(size_t(size)),
      pidfds_(size_t(size), -1), control_fds_(size_t(size), -1), lost_(size_t(size)),
      remote_sizes_(size_t(size)), peer_segments_(size_t(size), std::vector<PeerSegment>(max_segments)) {
    if (size < 1 || rank < 0 || rank >= size)
        throw invalid("Rank " + std::to_string(rank) + " of " + std::to_string(size) + " does not exist.",
                      "Start the program with carme-run, which numbers the ranks.");
    control_ = Mapping::create("carme-control", page_up(sizeof(Control)));
    // Group areas are a sparse part of the file. Each is mapped when its group is made.
    if (ftruncate(control_->fd(), off_t(areas_offset + uint64_t(max_groups) * area_stride)) != 0)
        throw Failure(FailureKind::resource,
                      "Shared memory for groups was refused: " + error_text(errno) + ".",
                      "Raise the limit on the size of files (ulimit -f).");
    controls_[size_t(rank)] = control_;
    if (sched_getaffinity(0, sizeof(cpu_set_t), &control(rank).cpus) != 0) CPU_ZERO(&control(rank).cpus);
    control(rank).magic.store(control_magic);
    links_ = make_links ? make_links(*this, rank, size) : std::make_unique<TcpLinks>(*this, size);
    local_links_ = std::make_unique<TcpLinks>(*this, size, true);
}

Context::~Context() { close(); }

void Context::measure_clock(int times, Deadline deadline) {
    int64_t shortest = std::numeric_limits<int64_t>::max(), at = 0, offset = 0;
    for (int i = 0; i < times && !is_lost(0); ++i) {
        Frame frame;
        frame.type = FrameType::echo;
        Request request;
        const int64_t requested = now_ns();
        links_->send_request(0, frame, &request);
        if (!links_->drive(true, deadline, [&] { return request.state.load() != State::pending; }, [] {}))
            links_->cancel(&request, 1);
        if (request.state.load() != State::done) break;
        const int64_t round_trip = now_ns() - requested;
        if (round_trip >= shortest) continue;
        shortest = round_trip;
        at = requested + round_trip / 2;
        offset = int64_t(request.result) - at;
    }
    if (at) recorder::clock(at, offset, shortest);
}

void Context::follow_clock() {
    follows_clock_ = recorder::on() && rank_ && !is_local(0);
    if (!follows_clock_) return;
    measure_clock(8, Deadline::after_ms(1000));
    recorder::every_second([this] { measure_clock(3, Deadline::after_ms(50)); });
}

void Context::sync_clock() {
    if (follows_clock_) measure_clock(8, Deadline::after_ms(50));
}

void Context::close() {
    if (follows_clock_) recorder::every_second(nullptr);
    sync_clock();
    follows_clock_ = false;
    links_->stop();
    local_links_->stop();
    for (int& fd : pidfds_) {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
}

void Context::connect(const std::vector<Endpoint>& endpoints) {
    if (int(endpoints.size()) != size_)
        throw invalid(std::to_string(endpoints.size()) + " endpoints were given for " +
                          std::to_string(size_) + " ranks.",
                      "Give one endpoint per rank.");
    int local_size = 0;
    for (int r = 0; r < size_; ++r) nodes_[size_t(r)] = endpoints[size_t(r)].node;
    for (int r = 0; r < size_; ++r) local_size += is_local(r);
    cpu_set_t cpus = control(rank_).cpus;
    for (int r = 0; r < size_; ++r) {
        const Endpoint& end = endpoints[size_t(r)];
        pids_[size_t(r)] = end.pid;
        control_fds_[size_t(r)] = end.control_fd;
        if (r == rank_) continue;
        if (!is_local(r)) {
            links_->add_peer(r, end.sockets);
            continue;
        }
        local_links_->add_peer(r, end.sockets);
        pidfds_[size_t(r)] = int(syscall(SYS_pidfd_open, end.pid, 0));
        if (pidfds_[size_t(r)] < 0 && errno == ESRCH) lost_[size_t(r)].store(true);
        controls_[size_t(r)] = open_peer(r, end.control_fd, 0, page_up(sizeof(Control)));
        if (control(r).magic.load() != control_magic)
            throw Failure(FailureKind::resource,
                          "Rank " + std::to_string(r) + " runs another version of carme_runtime.",
                          "Start all ranks from the same environment.");
        CPU_OR(&cpus, &cpus, &control(r).cpus);
    }
    // Equal on all ranks of a node, pinned or not.
    cores_ = CPU_COUNT(&cpus);
    oversubscribed_ = local_size > cores_;
    oversubscribed_in_background_ = 2 * local_size > cores_;
    links_->start();
    local_links_->start();
    follow_clock();
}

void Context::check_rank(int rank) const {
    if (rank < 0 || rank >= size_)
        throw invalid("There is no rank " + std::to_string(rank) + " among " + std::to_string(size_) + ".",
                      "Use a rank from 0 to " + std::to_string(size_ - 1) + ".");
}

void Context::check_queue(int queue) const {
    if (queue < 0 || queue >= queue_count)
        throw invalid("There is no queue " + std::to_string(queue) + ".",
                      "Use a queue from 0 to " + std::to_string(queue_count - 1) + ".");
}

// Effects of frames from other nodes

char* Context::locate(uint16_t segment, uint64_t offset, uint64_t size, std::shared_ptr<void>& keep_alive) {
    uint64_t limit = 0;
    auto mapping = peer_mapping(rank_, segment, &limit);
    if (!mapping || offset > limit || size > limit - offset) return nullptr;
    char* at = mapping->data() + segment_data + offset;
    keep_alive = std::move(mapping);
    return at;
}

bool Context::notify(uint16_t segment, uint32_t id, uint32_t value) {
    uint64_t size;
    auto mapping = peer_mapping(rank_, segment, &size);
    if (!mapping || id >= notification_count) return false;
    auto* head = reinterpret_cast<SegmentHead*>(mapping->data());
    head->notifications[id].store(value, std::memory_order_seq_cst);
    head->notified.raise();
    return true;
}

void Context::peer_registered(int peer, uint16_t segment, uint64_t size) {
    if (segment >= max_segments) return;
    std::lock_guard lock(segments_mutex_);
    remote_sizes_[size_t(peer)][segment] = size;
}

bool Context::passive_arrived(int peer, std::vector<char> message) {
    {
        std::lock_guard lock(passive_mutex_);
        if (passive_.size() >= 4096) return false;
        passive_.push_back({peer, std::move(message)});
    }
    control(rank_).inbox.arrived.raise();
    return true;
}

void Context::group_aborted(uint64_t key, int culprit, const std::string& reason) {
    std::lock_guard lock(aborts_mutex_);
    for (auto& [group_key, action] : aborts_)
        if (group_key == key) action(culprit, reason);
}

void Context::peer_lost(int peer) { lost_[size_t(peer)].store(true, std::memory_order_release); }

void Context::on_abort(uint64_t key, std::function<void(int, const std::string&)> action) {
    std::lock_guard lock(aborts_mutex_);
    aborts_.emplace_back(key, std::move(action));
}

void Context::forget_abort(uint64_t key) {
    std::lock_guard lock(aborts_mutex_);
    std::erase_if(aborts_, [&](auto& entry) { return entry.first == key; });
}

// Liveness

void Context::detect_failures() {
    for (int r = 0; r < size_; ++r) {
        if (pidfds_[size_t(r)] < 0 || is_lost(r)) continue;
        pollfd process{pidfds_[size_t(r)], POLLIN, 0};
        if (poll(&process, 1, 0) == 1) lost_[size_t(r)].store(true, std::memory_order_release);
    }
}

std::vector<int> Context::state_vector() {
    detect_failures();
    std::vector<int> states;
    for (int r = 0; r < size_; ++r) states.push_back(is_lost(r));
    return states;
}

bool Context::ping(int rank) {
    check_rank(rank);
    detect_failures();
    return !is_lost(rank);
}

bool Context::kill(int rank, Deadline deadline) {
    check_rank(rank);
    if (rank == rank_)
        throw invalid("Rank " + std::to_string(rank) + " is this one.",
                      "Leave the program to end this rank.");
    auto has_ended = [&] {
        detect_failures();
        return is_lost(rank);
    };
    if (has_ended()) return true;
    if (is_local(rank)) {
        // By the handle: the number may belong to another process by now.
        if (syscall(SYS_pidfd_send_signal, pidfds_[size_t(rank)], SIGKILL, nullptr, 0) != 0 && errno != ESRCH)
            throw Failure(FailureKind::resource,
                          "Rank " + std::to_string(rank) + " cannot be ended: " + error_text(errno) + ".",
                          "See whether this rank has left the run.");
        Flag tick;  // no peer wakes this thread; it polls for the end of the process
        return wait_on(tick, true, deadline, has_ended, [] {}, [] {});
    }
    Frame frame;
    frame.type = FrameType::kill;
    links_->send(rank, frame, nullptr, nullptr);
    return links_->drive(oversubscribed_, deadline, has_ended, [] {});
}

void Context::end_requested(int peer) {
    std::fprintf(stderr, "carme_runtime: rank %d has ended this rank, %d.\n", peer, rank_);
#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    ::kill(getpid(), SIGKILL);
#endif
}

void Context::throw_if_lost(int rank, const char* operation) {
    if (is_lost(rank))
        throw Failure(FailureKind::peer_lost,
                      "Rank " + std::to_string(rank) + " was lost during " + operation + ".",
                      "Form a new group without it, or start the run again.");
}

// Groups

std::shared_ptr<Mapping> Context::group_area(int rank, int slot, uint64_t offset, uint64_t size) {
    uint64_t at = areas_offset + uint64_t(slot) * area_stride + offset;
    return open_peer(rank, control_fds_[size_t(rank)], at, size);
}

uint64_t Context::next_generation(const std::vector<int>& ranks) {
    std::lock_guard lock(groups_mutex_);
    return ++generations_[ranks];
}

int Context::claim_group_slot() {
    for (int tried = 0; tried < max_groups; ++tried) {
        int slot = next_slot_;
        next_slot_ = (next_slot_ + 1) % max_groups;  // reuses the slot that was freed longest ago
        if (control(rank_).groups[size_t(slot)].load() == 0) return slot;
    }
    throw Failure(FailureKind::resource, "This rank is in " + std::to_string(max_groups) + " groups already.",
                  "Delete groups that are no longer used.");
}

}  // namespace carme

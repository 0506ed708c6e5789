#include "context.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "group_area.hpp"
#include "tcp_links.hpp"

namespace carme {
namespace {

std::string said(int error) { return std::strerror(error); }
uint64_t page_up(uint64_t size) { return (size + 4095) & ~uint64_t(4095); }
static_assert(sizeof(Control) <= areas_offset);
// What to do about what the system refused: its limit of open files has a remedy of its own.
const char* remedy_for(int error, const char* otherwise) {
    if (error == EMFILE) return "Allow this process more open files: ulimit -n 4096.";
    if (error == ENFILE) return "This host has no open files left: ask its administrators to raise fs.file-max.";
    return otherwise;
}

constexpr uint8_t add_operation = 0, swap_operation = 1;
constexpr int longest_end_ms = 500;

}  // namespace

std::shared_ptr<Mapping> Mapping::create(const char* name, uint64_t size) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) {
        int error = errno;
        throw Failure(Trouble::resource, "No shared memory can be made: " + said(error) + ".",
                      remedy_for(error, "Ask the site for a kernel with memfd_create."));
    }
    if (ftruncate(fd, off_t(size)) != 0) {
        int error = errno;
        ::close(fd);
        throw Failure(Trouble::resource,
                      "Shared memory of " + std::to_string(size) + " bytes was refused: " + said(error) + ".",
                      "Use a smaller segment, or start a job with more memory.");
    }
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        int error = errno;
        ::close(fd);
        throw Failure(Trouble::resource,
                      "Shared memory of " + std::to_string(size) + " bytes cannot be mapped: " + said(error) + ".",
                      "Use a smaller segment, or start a job with more memory.");
    }
    return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(data), size, fd));
}

std::shared_ptr<Mapping> Mapping::open(int pid, int fd, uint64_t offset, uint64_t size) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int mine = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (mine < 0) {
        int error = errno;
        throw Failure(Trouble::resource,
                      "The memory of process " + std::to_string(pid) + " cannot be opened: " + said(error) + ".",
                      remedy_for(error, "Start all ranks of a node as one user in one container."));
    }
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, mine, off_t(offset));
    int error = errno;
    ::close(mine);
    if (data == MAP_FAILED)
        throw Failure(Trouble::resource,
                      "The memory of process " + std::to_string(pid) + " cannot be mapped: " + said(error) + ".",
                      "Use smaller segments, or start a job with more memory.");
    return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(data), size, -1));
}

Mapping::~Mapping() {
    munmap(data_, size_);
    if (fd_ >= 0) ::close(fd_);
}

Context::Context(int rank, int size, const MakeLinks& make_links)
    : rank_(rank), size_(size), controls_(size_t(size)), nodes_(size_t(size)), pids_(size_t(size)),
      pidfds_(size_t(size), -1), control_fds_(size_t(size), -1), lost_(size_t(size)), remote_sizes_(size_t(size)),
      peer_segments_(size_t(size), std::vector<PeerSegment>(max_segments)) {
    if (size < 1 || rank < 0 || rank >= size)
        throw invalid("Rank " + std::to_string(rank) + " of " + std::to_string(size) + " does not exist.",
                      "Start the program with carme-run, which numbers the ranks.");
    control_ = Mapping::create("carme-control", page_up(sizeof(Control)));
    // Group areas are a sparse part of the file, mapped one by one when a group is made.
    if (ftruncate(control_->fd(), off_t(areas_offset + uint64_t(max_groups) * area_stride)) != 0)
        throw Failure(Trouble::resource, "Shared memory for groups was refused: " + said(errno) + ".",
                      "Raise the limit on the size of files (ulimit -f).");
    controls_[size_t(rank)] = control_;
    if (sched_getaffinity(0, sizeof(cpu_set_t), &control(rank).cpus) != 0) CPU_ZERO(&control(rank).cpus);
    control(rank).magic.store(control_magic);
    links_ = make_links ? make_links(*this, rank, size) : std::make_unique<TcpLinks>(*this, size);
    letters_ = std::make_unique<TcpLinks>(*this, size, true);
}

Context::~Context() { close(); }

void Context::measure_clock(int times, Deadline deadline) {
    int64_t least = std::numeric_limits<int64_t>::max(), at = 0, offset = 0;
    for (int i = 0; i < times && !is_lost(0); ++i) {
        Frame frame;
        frame.type = FrameType::echo;
        Request request;
        const int64_t asked = now_ns();
        links_->ask(0, frame, &request);
        if (!links_->drive(true, deadline, [&] { return request.state.load() != State::pending; }, [] {}))
            links_->cancel(&request, 1);
        if (request.state.load() != State::done) break;
        const int64_t took = now_ns() - asked;
        if (took >= least) continue;
        least = took;
        at = asked + took / 2;
        offset = int64_t(request.result) - at;
    }
    if (at) recorder::clock(at, offset, least);
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
    letters_->stop();
    for (int& fd : pidfds_) {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
}

void Context::connect(const std::vector<Endpoint>& endpoints) {
    if (int(endpoints.size()) != size_)
        throw invalid(std::to_string(endpoints.size()) + " endpoints were given for " + std::to_string(size_) +
                          " ranks.",
                      "Give one endpoint per rank.");
    int here = 0;
    for (int r = 0; r < size_; ++r) nodes_[size_t(r)] = endpoints[size_t(r)].node;
    for (int r = 0; r < size_; ++r) here += is_local(r);
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
        letters_->add_peer(r, end.sockets);
        pidfds_[size_t(r)] = int(syscall(SYS_pidfd_open, end.pid, 0));
        if (pidfds_[size_t(r)] < 0 && errno == ESRCH) lost_[size_t(r)].store(true);
        controls_[size_t(r)] = open_peer(r, end.control_fd, 0, page_up(sizeof(Control)));
        if (control(r).magic.load() != control_magic)
            throw Failure(Trouble::resource, "Rank " + std::to_string(r) + " runs another version of carme_runtime.",
                          "Start all ranks from the same environment.");
        CPU_OR(&cpus, &cpus, &control(r).cpus);
    }
    // Whether ranks are pinned or not, all of a node come to the same answer.
    cores_ = CPU_COUNT(&cpus);
    crowded_ = here > cores_;
    crowded_in_background_ = 2 * here > cores_;
    links_->start();
    letters_->start();
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

// Segments

void Context::segment_alloc(int id, uint64_t size) {
    if (id < 0 || id >= max_segments)
        throw invalid("Segment " + std::to_string(id) + " is out of range.",
                      "Use a number from 0 to " + std::to_string(max_segments - 1) + ".");
    if (size == 0) throw invalid("A segment of no bytes was asked for.", "Give a size of at least one byte.");
    std::lock_guard lock(segments_mutex_);
    if (segments_[size_t(id)].mapping)
        throw invalid("Segment " + std::to_string(id) + " exists already.", "Delete it first, or use another number.");
    auto mapping = Mapping::create("carme-segment", segment_data + page_up(size));
    madvise(mapping->data() + segment_data, page_up(size), MADV_HUGEPAGE);
    auto& entry = control(rank_).segments[size_t(id)];
    entry.size.store(size);
    entry.fd.store(mapping->fd());
    entry.stamp.store(next_stamp_++, std::memory_order_release);
    segments_[size_t(id)] = {std::move(mapping), size};
}

void Context::segment_register(int id, int rank, Deadline deadline) {
    check_rank(rank);
    uint64_t size;
    segment_pointer(id, &size);
    if (is_local(rank)) return;  // the entry in the control file is enough
    Frame frame;
    frame.type = FrameType::register_segment;
    frame.segment = uint16_t(id);
    frame.operand = size;
    Request request;
    links_->ask(rank, frame, &request);
    bool over = links_->drive(crowded_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
    if (!over) {
        links_->cancel(&request, 1);
        throw Failure(Trouble::timeout,
                      "Rank " + std::to_string(rank) + " did not take segment " + std::to_string(id) + " in time.",
                      "See whether it still runs, or allow more time.");
    }
    if (request.state.load() != State::done) throw_if_lost(rank, "registering a segment");
}

void Context::segment_delete(int id) {
    segment_pointer(id);
    std::lock_guard lock(segments_mutex_);
    control(rank_).segments[size_t(id)].stamp.store(0, std::memory_order_release);
    segments_[size_t(id)] = {};
}

char* Context::segment_pointer(int id, uint64_t* size) {
    std::lock_guard lock(segments_mutex_);
    if (id < 0 || id >= max_segments || !segments_[size_t(id)].mapping)
        throw invalid("There is no segment " + std::to_string(id) + " on this rank.", "Create it first.");
    if (size) *size = segments_[size_t(id)].size;
    return segments_[size_t(id)].mapping->data() + segment_data;
}

std::shared_ptr<Mapping> Context::segment_mapping(int id) {
    segment_pointer(id);
    std::lock_guard lock(segments_mutex_);
    return segments_[size_t(id)].mapping;
}

char* Context::own(int id, uint64_t offset, uint64_t size) {
    uint64_t limit;
    char* data = segment_pointer(id, &limit);
    if (offset > limit || size > limit - offset)
        throw invalid("Bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) + " lie outside segment " +
                          std::to_string(id) + ", which has " + std::to_string(limit) + ".",
                      "Keep within the segment, or make it larger.");
    return data + offset;
}

std::shared_ptr<Mapping> Context::open_peer(int rank, int fd, uint64_t offset, uint64_t size) {
    try {
        return Mapping::open(pids_[size_t(rank)], fd, offset, size);
    } catch (const Failure&) {
        // A process that ends has no open files some moments before it is seen to have ended.
        pollfd one{pidfds_[size_t(rank)], POLLIN, 0};
        if (one.fd >= 0) poll(&one, 1, longest_end_ms);
        look_for_deaths();
        throw_if_lost(rank, "the opening of its memory");
        throw;
    }
}

std::shared_ptr<Mapping> Context::peer_mapping(int rank, int id, uint64_t* size) {
    std::lock_guard lock(segments_mutex_);
    if (id < 0 || id >= max_segments) return nullptr;
    if (rank == rank_) {
        *size = segments_[size_t(id)].size;
        return segments_[size_t(id)].mapping;
    }
    auto& entry = control(rank).segments[size_t(id)];
    auto& known = peer_segments_[size_t(rank)][size_t(id)];
    uint64_t stamp = entry.stamp.load(std::memory_order_acquire);
    if (stamp != known.stamp) {
        known = {};
        if (stamp) {
            uint64_t length = entry.size.load();
            known.mapping = open_peer(rank, entry.fd.load(), 0, segment_data + page_up(length));
            known.size = length;
            known.stamp = stamp;
        }
    }
    *size = known.size;
    return known.mapping;
}

char* Context::peer_segment(int rank, int id, uint64_t offset, uint64_t size) {
    uint64_t limit = 0;
    auto mapping = peer_mapping(rank, id, &limit);
    if (!mapping || offset > limit || size > limit - offset) return nullptr;
    return mapping->data() + segment_data + offset;
}

uint64_t Context::remote_size(int id, int rank) {
    check_rank(rank);
    uint64_t size = 0;
    if (is_local(rank)) {
        peer_mapping(rank, id, &size);
    } else if (id >= 0 && id < max_segments) {
        std::lock_guard lock(segments_mutex_);
        size = remote_sizes_[size_t(rank)][size_t(id)];
    }
    return size;
}

bool Context::find_segment(const void* at, uint64_t size, int* id, uint64_t* offset) {
    auto* p = static_cast<const char*>(at);
    std::lock_guard lock(segments_mutex_);
    for (int i = 0; i < max_segments; ++i) {
        auto& segment = segments_[size_t(i)];
        if (!segment.mapping) continue;
        const char* data = segment.mapping->data() + segment_data;
        if (p >= data && p + size <= data + segment.size) {
            *id = i;
            *offset = uint64_t(p - data);
            return true;
        }
    }
    return false;
}

// One-sided operations

namespace {

// How a put or a get is recorded: all its parts together, then the notification.
struct Transfer {
    Transfer(recorder::Kind kind, int rank, const std::vector<Context::Part>& parts, const std::optional<Notice>& notice,
             uint16_t queue)
        : span(kind, kind == recorder::Kind::put ? recorder::put_name : recorder::get_name), moves(!parts.empty()),
          notice(notice) {
        if (!span) return;
        span.record.peer = rank;
        span.record.detail = queue;
        for (auto& part : parts) span.record.size += part.size;
        if (moves) span.record.object = uint32_t(parts[0].remote_segment);
    }
    void end() {
        if (!span) return;
        if (moves) span.end();
        if (!notice) return;
        recorder::Span told(recorder::Kind::notify, recorder::notify_name);
        told.record.object = uint32_t(notice->segment);
        told.record.extra = notice->id;
        told.record.peer = span.record.peer;
        told.end();
    }
    recorder::Span span;
    const bool moves;
    const std::optional<Notice> notice;  // a copy: who reads gives one that is gone at once
};

}  // namespace

static void check_notice(const std::optional<Notice>& notice) {
    if (notice && (notice->id >= notification_count || notice->value == 0))
        throw invalid("Notification " + std::to_string(notice->id) + " with value " + std::to_string(notice->value) +
                          " cannot be sent.",
                      "Use an id below 65536 and a value other than 0.");
}

void Context::write(int rank, const std::vector<Part>& parts, const std::optional<Notice>& notice, int queue) {
    check_rank(rank);
    check_queue(queue);
    throw_if_lost(rank, "a write");
    check_notice(notice);
    for (auto& part : parts) {
        own(part.local_segment, part.local_offset, part.size);
        uint64_t limit = remote_size(part.remote_segment, rank);
        if (part.remote_offset > limit || part.size > limit - part.remote_offset)
            throw invalid("The write reaches outside segment " + std::to_string(part.remote_segment) + " of rank " +
                              std::to_string(rank) + ", which has " + std::to_string(limit) + " bytes here.",
                          "Keep within the segment, and register it with this rank.");
    }
    if (notice && remote_size(notice->segment, rank) == 0)
        throw invalid("Rank " + std::to_string(rank) + " has no segment " + std::to_string(notice->segment) +
                          " to be notified in.",
                      "Create it there, and register it with this rank.");
    Transfer transfer(recorder::Kind::put, rank, parts, notice, is_local(rank) ? recorder::at_once : uint16_t(queue));
    if (is_local(rank)) {
        for (auto& part : parts)
            std::memcpy(peer_segment(rank, part.remote_segment, part.remote_offset, part.size),
                        own(part.local_segment, part.local_offset, part.size), part.size);
        if (notice) {
            uint64_t size;
            auto mapping = peer_mapping(rank, notice->segment, &size);
            auto* head = reinterpret_cast<SegmentHead*>(mapping->data());
            head->notifications[notice->id].store(notice->value, std::memory_order_seq_cst);
            head->notified.raise();
        }
        return transfer.end();
    }
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    if (!parts.empty()) q.written.insert(rank);
    for (size_t i = 0; i < parts.size() + (notice && parts.empty()); ++i) {
        Frame frame;
        frame.type = FrameType::write;
        const void* data = nullptr;
        if (i < parts.size()) {
            frame.segment = uint16_t(parts[i].remote_segment);
            frame.offset = parts[i].remote_offset;
            frame.size = parts[i].size;
            data = own(parts[i].local_segment, parts[i].local_offset, parts[i].size);
        }
        // The notification travels with the last part where it is for the same segment.
        if (notice && (parts.empty() || (i + 1 == parts.size() && notice->segment == parts[i].remote_segment))) {
            frame.segment = uint16_t(notice->segment);
            frame.check = notice->id;
            frame.value = notice->value;
        }
        q.outstanding.push_back(std::make_unique<Request>());
        links_->send(rank, frame, frame.size ? data : nullptr, q.outstanding.back().get());
    }
    if (notice && !parts.empty() && notice->segment != parts.back().remote_segment) {
        Frame frame;
        frame.type = FrameType::write;
        frame.segment = uint16_t(notice->segment);
        frame.check = notice->id;
        frame.value = notice->value;
        q.outstanding.push_back(std::make_unique<Request>());
        links_->send(rank, frame, nullptr, q.outstanding.back().get());
    }
    transfer.end();
}

void Context::read(int rank, const std::vector<Part>& parts, const std::optional<Notice>& notice, int queue) {
    check_rank(rank);
    check_queue(queue);
    throw_if_lost(rank, "a read");
    check_notice(notice);
    for (auto& part : parts) {
        own(part.local_segment, part.local_offset, part.size);
        uint64_t limit = remote_size(part.remote_segment, rank);
        if (part.remote_offset > limit || part.size > limit - part.remote_offset)
            throw invalid("The read reaches outside segment " + std::to_string(part.remote_segment) + " of rank " +
                              std::to_string(rank) + ", which has " + std::to_string(limit) + " bytes here.",
                          "Keep within the segment, and register it with this rank.");
    }
    if (notice) segment_pointer(notice->segment);
    const bool here = is_local(rank) || parts.empty();
    Transfer transfer(recorder::Kind::get, rank, parts, {}, here ? recorder::at_once : uint16_t(queue));
    if (here) {
        for (auto& part : parts)
            std::memcpy(own(part.local_segment, part.local_offset, part.size),
                        peer_segment(rank, part.remote_segment, part.remote_offset, part.size), part.size);
        if (notice) notify(uint16_t(notice->segment), notice->id, notice->value);
        return transfer.end();
    }
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    for (size_t i = 0; i < parts.size(); ++i) {
        const Part& part = parts[i];
        q.outstanding.push_back(std::make_unique<Request>());
        Request* request = q.outstanding.back().get();
        request->into = own(part.local_segment, part.local_offset, part.size);
        request->size = part.size;
        if (i + 1 == parts.size()) request->notice = notice;  // answers come in the order of the questions
        Frame frame;
        frame.type = FrameType::read_request;
        frame.segment = uint16_t(part.remote_segment);
        frame.offset = part.remote_offset;
        frame.size = part.size;
        links_->ask(rank, frame, request);
    }
    transfer.end();
}

bool Context::wait(int queue, Deadline deadline) {
    check_queue(queue);
    Queue& q = queues_[size_t(queue)];
    std::lock_guard lock(q.mutex);
    recorder::Span span(recorder::Kind::flush, recorder::flush_name);
    span.record.detail = uint16_t(queue);
    // That the kernel has taken what was written says nothing of the other side, and a barrier, on other streams, may
    // overtake it. An answer to a question that follows on the same stream does say so.
    for (int rank : q.written) {
        q.outstanding.push_back(std::make_unique<Request>());
        Frame frame;
        frame.type = FrameType::echo;
        links_->ask(rank, frame, q.outstanding.back().get());
    }
    q.written.clear();
    bool over = links_->drive(
        crowded_, deadline,
        [&] {
            return std::all_of(q.outstanding.begin(), q.outstanding.end(),
                               [](auto& r) { return r->state.load(std::memory_order_acquire) != State::pending; });
        },
        [] {});
    if (!over) return false;
    int lost = -1;
    for (auto& request : q.outstanding)
        if (request->state.load() != State::done) lost = request->peer;
    q.outstanding.clear();
    if (lost >= 0)
        throw Failure(Trouble::peer_lost, "Rank " + std::to_string(lost) + " was lost during operations of queue " +
                                              std::to_string(queue) + ".",
                      "Form a new group without it, or start the run again.");
    span.end();
    return true;
}

template <class Ready> bool Context::wait_for(Flag& flag, Deadline deadline, Ready&& ready) {
    // What another node sends is taken off its sockets while we spin; later by the background thread.
    const bool linked = !links_->empty();
    return wait_on(
        flag, crowded_, deadline, ready, [&] { if (linked) links_->poll(0); }, [&] { look_for_deaths(); });
}

int64_t Context::notify_waitsome(int segment, uint32_t first, uint32_t count, Deadline deadline) {
    if (first >= notification_count || count > notification_count - first || count == 0)
        throw invalid("Notifications " + std::to_string(first) + " and " + std::to_string(count) +
                          " following do not exist.",
                      "Use ids below 65536.");
    auto* head = reinterpret_cast<SegmentHead*>(segment_pointer(segment) - segment_data);
    int64_t found = -1;
    wait_for(head->notified, deadline, [&] {
        for (uint32_t i = first; i < first + count; ++i)
            if (head->notifications[i].load(std::memory_order_acquire)) {
                found = i;
                return true;
            }
        return false;
    });
    return found;
}

uint32_t Context::notify_reset(int segment, uint32_t id) {
    if (id >= notification_count)
        throw invalid("There is no notification " + std::to_string(id) + ".", "Use an id below 65536.");
    auto* head = reinterpret_cast<SegmentHead*>(segment_pointer(segment) - segment_data);
    const uint32_t value = head->notifications[id].exchange(0, std::memory_order_acq_rel);
    if (value && recorder::on()) {
        recorder::Span span(recorder::Kind::notified, recorder::notified_name);
        span.record.object = uint32_t(segment);
        span.record.extra = id;
        span.record.peer = rank_;
        span.end();
    }
    return value;
}

std::optional<uint64_t> Context::atomic(uint16_t segment, uint64_t offset, uint8_t operation, uint64_t a, uint64_t b) {
    std::shared_ptr<void> keep;
    char* at = locate(segment, offset, 8, keep);
    if (!at || offset % 8 || operation > swap_operation) return std::nullopt;
    std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(at));
    if (operation == add_operation) return word.fetch_add(a);
    word.compare_exchange_strong(a, b);
    return a;
}

std::optional<uint64_t> Context::remote_atomic(int rank, int segment, uint64_t offset, uint8_t operation, uint64_t a,
                                               uint64_t b, Deadline deadline) {
    check_rank(rank);
    throw_if_lost(rank, "an atomic operation");
    uint64_t limit = remote_size(segment, rank);
    if (offset % 8 || limit < 8 || offset > limit - 8)
        throw invalid("Offset " + std::to_string(offset) + " of segment " + std::to_string(segment) + " of rank " +
                          std::to_string(rank) + " holds no 8-byte value.",
                      "Use a multiple of 8 within the segment.");
    recorder::Span span(recorder::Kind::atomic, recorder::atomic_name);
    span.record.object = uint32_t(segment);
    span.record.peer = rank;
    span.record.size = 8;
    span.record.detail = recorder::at_once;
    if (is_local(rank)) {
        std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(peer_segment(rank, segment, offset, 8)));
        if (operation == add_operation) a = word.fetch_add(a);
        else word.compare_exchange_strong(a, b);
        span.end();
        return a;
    }
    Frame frame;
    frame.type = FrameType::atomic_request;
    frame.segment = uint16_t(segment);
    frame.offset = offset;
    frame.operation = operation;
    frame.operand = a;
    frame.operand2 = b;
    Request request;
    links_->ask(rank, frame, &request);
    bool over = links_->drive(crowded_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
    if (!over) {
        links_->cancel(&request, 1);
        return std::nullopt;
    }
    if (request.state.load() != State::done) throw_if_lost(rank, "an atomic operation");
    span.end();
    return request.result;
}

std::optional<uint64_t> Context::atomic_add(int rank, int segment, uint64_t offset, uint64_t value, Deadline deadline) {
    return remote_atomic(rank, segment, offset, add_operation, value, 0, deadline);
}

std::optional<uint64_t> Context::compare_swap(int rank, int segment, uint64_t offset, uint64_t expected,
                                              uint64_t value, Deadline deadline) {
    return remote_atomic(rank, segment, offset, swap_operation, expected, value, deadline);
}

bool Context::passive_send(int rank, const void* data, uint64_t size, Deadline deadline) {
    check_rank(rank);
    if (size > passive_limit)
        throw invalid("A passive message of " + std::to_string(size) + " bytes is too long.",
                      "Send at most " + std::to_string(passive_limit) + " bytes, or write into a segment.");
    throw_if_lost(rank, "a passive send");
    if (!is_local(rank)) {
        Frame frame;
        frame.type = FrameType::passive;
        frame.size = size;
        Request request;
        links_->send(rank, frame, size ? data : nullptr, &request);
        bool over = links_->drive(crowded_, deadline, [&] { return request.state.load() != State::pending; }, [] {});
        if (!over) {
            links_->cancel(&request, 1);
            return false;
        }
        if (request.state.load() != State::done) throw_if_lost(rank, "a passive send");
        return true;
    }
    Inbox& inbox = control(rank).inbox;
    bool over = wait_for(inbox.freed, deadline, [&] {
        uint32_t nobody = 0;
        if (inbox.owner.compare_exchange_strong(nobody, uint32_t(rank_) + 1)) return true;
        // A sender that died while it filled the box does not keep it.
        if (nobody && is_lost(int(nobody) - 1) && !inbox.full.load()) inbox.owner.compare_exchange_strong(nobody, 0);
        throw_if_lost(rank, "a passive send");
        return false;
    });
    if (!over) return false;
    if (size) std::memcpy(inbox.data, data, size);
    inbox.size = size;
    inbox.full.store(uint32_t(rank_) + 1, std::memory_order_release);
    inbox.arrived.raise();
    return true;
}

std::optional<std::pair<int, std::vector<char>>> Context::passive_receive(Deadline deadline) {
    Inbox& inbox = control(rank_).inbox;
    std::optional<std::pair<int, std::vector<char>>> got;
    wait_for(inbox.arrived, deadline, [&] {
        std::lock_guard lock(passive_mutex_);
        if (!passive_.empty()) {
            got.emplace(passive_.front().from, std::move(passive_.front().data));
            passive_.pop_front();
            return true;
        }
        uint32_t from = inbox.full.load(std::memory_order_acquire);
        if (!from) return false;
        uint64_t size = std::min(inbox.size, passive_limit);
        got.emplace(int(from) - 1, std::vector<char>(inbox.data, inbox.data + size));
        inbox.full.store(0, std::memory_order_release);
        inbox.owner.store(0, std::memory_order_release);
        inbox.freed.raise();
        return true;
    });
    return got;
}

// What arrives from other nodes

char* Context::locate(uint16_t segment, uint64_t offset, uint64_t size, std::shared_ptr<void>& keep) {
    uint64_t limit = 0;
    auto mapping = peer_mapping(rank_, segment, &limit);
    if (!mapping || offset > limit || size > limit - offset) return nullptr;
    char* at = mapping->data() + segment_data + offset;
    keep = std::move(mapping);
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
    for (auto& [known, action] : aborts_)
        if (known == key) action(culprit, reason);
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

// Health

void Context::look_for_deaths() {
    for (int r = 0; r < size_; ++r) {
        if (pidfds_[size_t(r)] < 0 || is_lost(r)) continue;
        pollfd one{pidfds_[size_t(r)], POLLIN, 0};
        if (poll(&one, 1, 0) == 1) lost_[size_t(r)].store(true, std::memory_order_release);
    }
}

std::vector<int> Context::state_vector() {
    look_for_deaths();
    std::vector<int> states;
    for (int r = 0; r < size_; ++r) states.push_back(is_lost(r));
    return states;
}

bool Context::ping(int rank) {
    check_rank(rank);
    look_for_deaths();
    return !is_lost(rank);
}

bool Context::kill(int rank, Deadline deadline) {
    check_rank(rank);
    if (rank == rank_)
        throw invalid("Rank " + std::to_string(rank) + " is this one.", "Leave the program to end this rank.");
    auto gone = [&] {
        look_for_deaths();
        return is_lost(rank);
    };
    if (gone()) return true;
    if (is_local(rank)) {
        // By the handle, not the number: that may belong to another process by now.
        if (syscall(SYS_pidfd_send_signal, pidfds_[size_t(rank)], SIGKILL, nullptr, 0) != 0 && errno != ESRCH)
            throw Failure(Trouble::resource, "Rank " + std::to_string(rank) + " cannot be ended: " + said(errno) + ".",
                          "See whether this rank has left the run.");
        Flag tick;  // nobody wakes us: the end of a process is looked for now and then
        return wait_on(tick, true, deadline, gone, [] {}, [] {});
    }
    Frame frame;
    frame.type = FrameType::kill;
    links_->send(rank, frame, nullptr, nullptr);
    return links_->drive(crowded_, deadline, gone, [] {});
}

void Context::told_to_end(int peer) {
    std::fprintf(stderr, "carme_runtime: rank %d has ended this rank, %d.\n", peer, rank_);
#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    ::kill(getpid(), SIGKILL);
#endif
}

void Context::throw_if_lost(int rank, const char* doing) {
    if (is_lost(rank))
        throw Failure(Trouble::peer_lost, "Rank " + std::to_string(rank) + " was lost during " + doing + ".",
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
        next_slot_ = (next_slot_ + 1) % max_groups;  // the one freed longest ago is used first
        if (control(rank_).groups[size_t(slot)].load() == 0) return slot;
    }
    throw Failure(Trouble::resource, "This rank is in " + std::to_string(max_groups) + " groups already.",
                  "Delete groups that are no longer used.");
}

}  // namespace carme

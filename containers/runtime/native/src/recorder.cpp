#include "recorder.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace carme::recorder {
namespace {

constexpr char magic[8] = {'C', 'A', 'R', 'M', 'E', 'E', 'V', '1'};
enum Block : uint32_t {
    description_block, events_block, string_block, group_block, thread_block, clock_block, end_block
};
struct BlockHead { uint32_t type, number; uint64_t size; };

constexpr const char* core_names[] = {
    "barrier", "allreduce", "broadcast", "reduce_scatter", "allgather", "alltoall", "send",
    "receive", "put",       "get",       "atomic",         "notify",    "notified", "flush"};
static_assert(std::size(core_names) == first_custom_name - 1);

constexpr auto between_writes = std::chrono::milliseconds(200);
constexpr int64_t between_clocks_ns = 1'000'000'000;

// One thread writes at `head`, the background thread reads at `tail`.
struct Ring {
    explicit Ring(uint32_t number) : number(number) {
        void* memory = mmap(nullptr, ring_records * sizeof(Record), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        records = memory == MAP_FAILED ? nullptr : static_cast<Record*>(memory);
    }
    ~Ring() { if (records) munmap(records, ring_records * sizeof(Record)); }
    Ring(const Ring&) = delete;

    Record* records;
    const uint32_t number;
    const pid_t thread = pid_t(syscall(SYS_gettid));
    alignas(128) std::atomic<uint64_t> head{0};
    uint64_t seen_tail = 0;  // the writing thread's copy
    std::atomic<uint64_t> dropped{0};
    alignas(128) std::atomic<uint64_t> tail{0};
    std::atomic<bool> thread_ended{false};
};

struct State {
    std::mutex mutex;  // guards all following members but `wake`
    std::vector<std::shared_ptr<Ring>> rings;
    std::map<std::string, uint32_t> names;
    std::string definitions;  // unwritten blocks
    uint32_t next_name = first_custom_name, next_group = 0, next_thread = 0;
    uint64_t dropped = 0;  // by rings of threads that ended
    std::atomic<uint64_t> generation{0};  // counts recordings: rings of earlier ones are not used

    std::mutex clock_mutex;
    std::function<void()> clock_action;

    std::mutex wake_mutex;
    std::condition_variable wake;
    bool ending = false, half_full = false;

    int file = -1;
    uint64_t limit = 0, size = 0;  // bytes
    std::atomic<uint64_t> written{0};
    std::atomic<int> error{0};
    std::atomic<bool> full{false};
    std::thread writer;
};

State& state() {
    static State* instance = new State;  // never destroyed: outlives threads that still record
    return *instance;
}

struct Local {
    std::shared_ptr<Ring> ring;
    uint64_t generation = 0;
    ~Local() { if (ring) ring->thread_ended.store(true, std::memory_order_release); }
};
thread_local Local local;

std::string block(Block type, uint32_t number, const void* data, size_t size) {
    const BlockHead head{type, number, size};
    std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
    bytes.append(static_cast<const char*>(data), size);
    return bytes;
}

std::string block(Block type, uint32_t number, const std::string& text) {
    return block(type, number, text.data(), text.size());
}

int write_all(int file, const char* data, size_t size) {
    while (size) {
        const ssize_t count = ::write(file, data, size);
        if (count < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        data += count;
        size -= size_t(count);
    }
    return 0;
}

// Readers accept the complete records of a partly written block. Nothing follows it.
bool append(State& s, const std::string& data) {
    if (data.empty()) return true;
    if (s.error.load()) return false;
    if (const int error = write_all(s.file, data.data(), data.size())) {
        s.error.store(error);
        s.full.store(true);
        return false;
    }
    s.size += data.size();
    return true;
}

void drain(State& s, Ring& ring) {
    for (;;) {
        const uint64_t head = ring.head.load(std::memory_order_acquire),
                       tail = ring.tail.load(std::memory_order_relaxed);
        if (head == tail) return;
        const uint64_t at = tail % ring_records, count = std::min(head - tail, ring_records - at);
        const uint64_t remaining = s.limit - std::min(s.limit, s.size + sizeof(BlockHead));
        uint64_t fit = s.full.load() ? 0 : std::min(count, remaining / sizeof(Record));
        if (fit < count) s.full.store(true);
        if (fit && !append(s, block(events_block, ring.number, ring.records + at, fit * sizeof(Record))))
            fit = 0;
        ring.dropped.fetch_add(count - fit);
        s.written.fetch_add(fit);
        ring.tail.store(tail + count, std::memory_order_release);
    }
}

// Call it with `s.mutex` held. Records may precede the definitions that they refer to.
void append_definitions(State& s) {
    std::string definitions;
    definitions.swap(s.definitions);
    append(s, definitions);
}

void drain_all(State& s) {
    std::vector<std::shared_ptr<Ring>> rings;
    std::vector<bool> ended;
    {
        std::lock_guard lock(s.mutex);
        append_definitions(s);
        rings = s.rings;
        for (auto& ring : rings) ended.push_back(ring->thread_ended.load(std::memory_order_acquire));
    }
    for (auto& ring : rings) drain(s, *ring);
    std::lock_guard lock(s.mutex);
    append_definitions(s);
    for (size_t i = 0; i < rings.size(); ++i)
        if (ended[i]) {
            s.dropped += rings[i]->dropped.load();
            std::erase(s.rings, rings[i]);
        }
}

void run_writer(State& s) {
    pthread_setname_np(pthread_self(), "carme-recorder");
    int64_t next_clock = now_ns() + between_clocks_ns;
    std::unique_lock lock(s.wake_mutex);
    while (!s.ending) {
        s.wake.wait_for(lock, between_writes, [&] { return s.ending || s.half_full; });
        s.half_full = false;
        lock.unlock();
        drain_all(s);
        if (now_ns() >= next_clock) {
            std::lock_guard clock(s.clock_mutex);
            if (s.clock_action) s.clock_action();
            next_clock = now_ns() + between_clocks_ns;
        }
        lock.lock();
    }
}

Ring* own_ring() {
    State& s = state();
    std::lock_guard lock(s.mutex);
    local.generation = s.generation;
    local.ring = std::make_shared<Ring>(s.next_thread++);
    if (!local.ring->records) return nullptr;
    s.rings.push_back(local.ring);
    if (getpid() == local.ring->thread)
        s.definitions += block(thread_block, local.ring->number, std::string("main thread"));
    return local.ring.get();
}

std::atomic<bool> forked{false};

// A forked child has no background thread; its memory is a copy.
void forget_in_child() {
    recording.store(false);
    forked.store(true);
}

}  // namespace

int start(const std::string& path, const std::string& description, uint64_t limit) {
    State& s = state();
    if (s.file >= 0) return EBUSY;
    static const int at_fork = pthread_atfork(nullptr, nullptr, forget_in_child);
    if (at_fork) return at_fork;
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return errno;
    std::string begin(magic, sizeof magic);
    begin += block(description_block, 0, description);
    for (uint32_t i = 1; i < first_custom_name; ++i) begin += block(string_block, i, core_names[i - 1]);
    if (const int error = write_all(file, begin.data(), begin.size())) {
        ::close(file);
        unlink(path.c_str());
        return error;
    }
    {
        std::lock_guard lock(s.mutex);
        s.rings.clear();
        s.names.clear();
        s.definitions.clear();
        s.next_name = first_custom_name;
        s.next_group = s.next_thread = 0;
        s.dropped = 0;
        ++s.generation;
    }
    s.file = file;
    s.limit = limit;
    s.size = begin.size();
    s.written = 0;
    s.error = 0;
    s.full = false;
    s.ending = s.half_full = false;
    s.writer = std::thread([&s] { run_writer(s); });
    recording.store(true);
    return 0;
}

Result progress() {
    State& s = state();
    std::lock_guard lock(s.mutex);
    uint64_t dropped = s.dropped;
    for (auto& ring : s.rings) dropped += ring->dropped.load();
    return {s.written.load(), dropped, s.error.load()};
}

Result stop() {
    State& s = state();
    if (s.file < 0 || !recording.exchange(false)) return {};
    {
        std::lock_guard lock(s.wake_mutex);
        s.ending = true;
    }
    s.wake.notify_all();
    s.writer.join();
    drain_all(s);
    Result result = progress();
    const uint64_t counts[] = {result.written, result.dropped};
    append(s, block(end_block, 0, counts, sizeof counts));
    if (::close(s.file) != 0 && !s.error.load()) s.error.store(errno);
    s.file = -1;
    result.error = s.error.load();
    return result;
}

// In a forked child, threads that no longer exist may hold the locks: nothing below takes them.

uint32_t name(const std::string& text) {
    if (!on()) return 0;
    State& s = state();
    std::lock_guard lock(s.mutex);
    auto [found, inserted] = s.names.try_emplace(text, s.next_name);
    if (inserted) s.definitions += block(string_block, s.next_name++, text);
    return found->second;
}

uint32_t group(uint64_t key, const std::vector<int>& ranks) {
    State& s = state();
    if (!on()) return 0;
    std::vector<uint32_t> data{uint32_t(key), uint32_t(key >> 32)};
    data.insert(data.end(), ranks.begin(), ranks.end());
    std::lock_guard lock(s.mutex);
    s.definitions += block(group_block, s.next_group, data.data(), data.size() * sizeof(uint32_t));
    return s.next_group++;
}

void name_thread(const std::string& text) {
    if (!on()) return;
    State& s = state();
    if (!local.ring || local.generation != s.generation) own_ring();
    std::lock_guard lock(s.mutex);
    s.definitions += block(thread_block, local.ring->number, text);
}

void name_thread(pid_t thread, const std::string& text) {
    if (!on()) return;
    State& s = state();
    std::lock_guard lock(s.mutex);
    for (auto& ring : s.rings)
        if (ring->thread == thread) s.definitions += block(thread_block, ring->number, text);
}

void clock(int64_t at, int64_t offset, int64_t round_trip) {
    if (!on()) return;
    const int64_t data[] = {at, offset, round_trip};
    State& s = state();
    std::lock_guard lock(s.mutex);
    s.definitions += block(clock_block, 0, data, sizeof data);
}

void every_second(std::function<void()> action) {
    if (forked.load()) return;
    State& s = state();
    std::lock_guard lock(s.clock_mutex);
    s.clock_action = std::move(action);
}

void add(const Record& record) {
    if (!on()) return;  // a span that began before the stop or before a fork
    State& s = state();
    Ring* ring = local.ring.get();
    if (!ring || local.generation != s.generation) {
        ring = own_ring();
        if (!ring) return;
    }
    if (!ring->records) return;
    const uint64_t head = ring->head.load(std::memory_order_relaxed);
    if (head - ring->seen_tail >= ring_records) {
        ring->seen_tail = ring->tail.load(std::memory_order_acquire);
        if (head - ring->seen_tail >= ring_records) {
            ring->dropped.fetch_add(1, std::memory_order_relaxed);
            return;
        }
    }
    ring->records[head % ring_records] = record;
    ring->head.store(head + 1, std::memory_order_release);
    if ((head + 1) % (ring_records / 2) == 0) {
        {
            std::lock_guard lock(s.wake_mutex);
            s.half_full = true;
        }
        s.wake.notify_one();
    }
}

}  // namespace carme::recorder

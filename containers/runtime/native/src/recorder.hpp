// What a rank does, and when: events of all its threads, for traces and profiles.
//
// A thread writes into a ring of its own, which takes no lock; a thread in the background moves what is in the rings to
// a file. What does not fit, into a ring or below the limit of the file, is dropped and counted. Python reads the file
// (carme_runtime/traces/files.py), which consists of blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "waiting.hpp"

namespace carme::recorder {

enum class Kind : uint16_t {
    waiting = 1, loading, pipeline, phase, firing, transfer,
    collective = 16, send, receive,
    put = 32, get, atomic, notify, notified, flush,
};

// Times are of now_ns(). What else there is depends on the kind:
struct Record {
    int64_t begin = 0, end = 0;
    uint64_t size = 0;    // bytes; of a collective: that this rank sends
    uint64_t extra = 0;   // bytes that it receives; tag << 32 | number of a message; micro-batch; id of a notification
    uint32_t name = 0;    // of `name()`
    uint32_t object = 0;  // a group, a segment, a stage
    int32_t peer = -1;    // member of the group, or rank; of a collective: its root
    Kind kind{};
    uint16_t detail = 0;  // which collective; of one-sided operations: the queue, `at_once` where it was over at once
};
static_assert(sizeof(Record) == 48);
constexpr uint16_t at_once = 0xFFFF;

// Names that the core uses, in this order.
enum Name : uint32_t {
    barrier = 1, allreduce, broadcast, reduce_scatter, allgather, alltoall,  // as `Kind` of collectives
    send_name, receive_name, put_name, get_name, atomic_name, notify_name, notified_name, flush_name,
    first_custom_name
};

constexpr uint64_t ring_records = 1 << 16;  // of each thread

inline std::atomic<bool> recording{false};

// Begins a file; `description` is what it says of this process. Returns an errno, 0: done. Once for a process at a time.
int start(const std::string& path, const std::string& description, uint64_t limit);
struct Result { uint64_t written, dropped; int error; };
// Writes all that is left. What other threads record meanwhile may be lost.
Result stop();
Result so_far();

uint32_t name(const std::string& text);
uint32_t group(uint64_t key, const std::vector<int>& ranks);
void name_thread(const std::string& text);  // this one
void name_thread(pid_t thread, const std::string& text);  // one that has recorded
// `corrected = local + offset` is the time of the first rank. `round_trip`: how long it took to learn that.
void clock(int64_t local, int64_t offset, int64_t round_trip);
// Called about once a second by the background thread, nullptr: nothing. Returns after a call that runs.
void every_second(std::function<void()> action);

void add(const Record& record);  // nothing where it is not on

inline bool on() { return recording.load(std::memory_order_relaxed); }

// Records a span from its making to its end; not what throws.
class Span {
public:
    explicit Span(Kind kind, uint32_t name) : on_(on()) {
        if (!on_) return;
        record.kind = kind;
        record.name = name;
        record.begin = now_ns();
    }
    Span(const Span&) = delete;
    explicit operator bool() const { return on_; }
    void end() {
        if (!on_) return;
        record.end = now_ns();
        add(record);
    }
    Record record;

private:
    const bool on_;
};

}  // namespace carme::recorder

// Records events of all threads of a rank, for traces and profiles.
//
// Each thread writes to its own lock-free ring buffer. A background thread moves the records to a file.
// Records that do not fit into a ring or under the file's size limit are dropped and counted. Python
// (carme_runtime/traces/files.py) reads the file, which consists of blocks.
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

// Times are from now_ns(). The other fields depend on the kind:
struct Record {
    int64_t begin = 0, end = 0;
    uint64_t size = 0;  // bytes; for a collective: bytes that this rank sends
    // Bytes that it receives; tag << 32 | number of a message; micro-batch; id of a notification.
    uint64_t extra = 0;
    uint32_t name = 0;  // from `name()`
    uint32_t object = 0;  // a group, a segment, a stage
    int32_t peer = -1;  // member of the group, or rank; for a collective: its root
    Kind kind{};
    // Kind of the collective; for one-sided operations: the queue, or `at_once` if it completed immediately.
    uint16_t detail = 0;
};
static_assert(sizeof(Record) == 48);
constexpr uint16_t at_once = 0xFFFF;

// Names of the core, in this order.
enum Name : uint32_t {
    barrier = 1, allreduce, broadcast, reduce_scatter, allgather, alltoall,  // as `Kind` of collectives
    send_name, receive_name, put_name, get_name, atomic_name, notify_name, notified_name, flush_name,
    first_custom_name
};

constexpr uint64_t ring_records = 1 << 16;  // per thread

inline std::atomic<bool> recording{false};

// Starts a file; `description` describes this process. Returns 0 or an errno. One recording per process at a
// time.
int start(const std::string& path, const std::string& description, uint64_t limit);
struct Result { uint64_t written, dropped; int error; };
// Writes all remaining records. Records that other threads add meanwhile may be lost.
Result stop();
Result progress();

uint32_t name(const std::string& text);
uint32_t group(uint64_t key, const std::vector<int>& ranks);
void name_thread(const std::string& text);  // the calling thread
void name_thread(pid_t thread, const std::string& text);  // a thread that has recorded
// `corrected = local + offset` is the first rank's time. `round_trip`: duration of the measurement.
void clock(int64_t local, int64_t offset, int64_t round_trip);
// The background thread calls `action` about once a second; nullptr: none. Returns after a running call.
void every_second(std::function<void()> action);

void add(const Record& record);  // does nothing while the recorder is off

inline bool on() { return recording.load(std::memory_order_relaxed); }

// Records a span from its construction to `end()`. A span that ends by an exception is not recorded.
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

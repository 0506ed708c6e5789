// Writes the records of a thread as OTF2 events.
//
// Python (carme_runtime/traces/archive.py) finds libotf2, opens the archive, writes the definitions and
// passes the addresses of its functions, so that the core builds without OTF2.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "recorder.hpp"

namespace carme::otf2 {

// Functions by name without "OTF2_".
using Functions = std::map<std::string, uintptr_t>;

// Numbers of the definitions in the archive, by the numbers in the recording.
struct Numbers {
    std::map<uint64_t, uint32_t> regions;        // by `region_key`
    std::map<uint32_t, uint32_t> communicators;  // by group
    std::map<uint32_t, uint32_t> windows;        // by segment
    uint32_t stage = 0, micro_batch = 0, message = 0, notification = 0, bytes = 0;  // attributes
    uint32_t metrics = 0;                        // class of bytes and nanoseconds
};

inline uint64_t region_key(const recorder::Record& record) {
    return uint64_t(record.kind) << 32 | record.name;
}

// The events of one thread in call-stack order. Spans that overlap without nesting, such as background work,
// get separate lanes.
class Thread {
public:
    // `records`: in the order of recording, which is the order of their ends.
    explicit Thread(std::vector<recorder::Record> records);

    uint32_t lanes() const { return uint32_t(lanes_.size()); }
    uint64_t records() const { return records_.size(); }
    int64_t first() const { return first_; }
    int64_t last() const { return last_; }
    std::vector<std::pair<uint32_t, uint32_t>> regions() const;  // kinds and names
    std::vector<uint32_t> segments() const;
    // Returns the number of events. Throws std::runtime_error with libotf2's error number.
    uint64_t write(uint32_t lane, uintptr_t writer, uintptr_t attributes, const Functions& functions,
                   const Numbers& numbers) const;

private:
    std::vector<recorder::Record> records_;
    std::vector<std::vector<uint32_t>> lanes_;  // indices of records in the order of their begins
    int64_t first_ = 0, last_ = 0;
};

}  // namespace carme::otf2

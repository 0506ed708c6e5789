#include "otf2_events.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>

namespace carme::otf2 {
namespace {

using recorder::Kind;
using recorder::Record;

// From OTF2's headers: enumerations of one byte, and others.
using Code = int;
constexpr uint8_t type_uint64 = 4;
constexpr uint8_t notify_in = 1, notify_out = 2;  // OTF2_RmaSyncType; 0 is memory
constexpr uint32_t fetch_and_add = 5;             // OTF2_RmaAtomicType
constexpr uint32_t no_root = std::numeric_limits<uint32_t>::max();
// OTF2_CollectiveOp by kind of collective: barrier, allreduce, broadcast, reduce_scatter, allgather,
// alltoall.
constexpr uint8_t collective_ops[] = {0, 0, 11, 1, 16, 6, 9};

constexpr size_t max_lanes = 64;  // spans that overlap more are shortened

struct Open { const Record* record; int64_t end; };

class Writer {
public:
    Writer(uintptr_t writer, uintptr_t attributes, const Functions& functions, const Numbers& numbers)
        : writer_(reinterpret_cast<void*>(writer)), attributes_(reinterpret_cast<void*>(attributes)),
          functions_(functions), numbers_(numbers) {
        find(enter_, "EvtWriter_Enter");
        find(leave_, "EvtWriter_Leave");
        find(send_, "EvtWriter_MpiSend");
        find(receive_, "EvtWriter_MpiRecv");
        find(collective_begin_, "EvtWriter_MpiCollectiveBegin");
        find(collective_end_, "EvtWriter_MpiCollectiveEnd");
        find(put_, "EvtWriter_RmaPut");
        find(get_, "EvtWriter_RmaGet");
        find(atomic_, "EvtWriter_RmaAtomic");
        find(sync_, "EvtWriter_RmaSync");
        find(complete_, "EvtWriter_RmaOpCompleteBlocking");
        find(complete_later_, "EvtWriter_RmaOpCompleteNonBlocking");
        find(metric_, "EvtWriter_Metric");
        find(add_, "AttributeList_AddUint64");
    }

    void begin(const Record& r) {
        void* list = nullptr;
        if (r.kind == Kind::pipeline) {
            add(numbers_.stage, r.object);
            list = add(numbers_.micro_batch, r.extra);
        } else if (r.kind == Kind::firing && r.extra) {
            list = add(numbers_.micro_batch, r.extra - 1);
        } else if (r.kind == Kind::transfer) {
            list = add(numbers_.bytes, r.size);
        }
        event(enter_(writer_, list, time(r.begin), region(r)));
        switch (r.kind) {
            case Kind::collective:
                if (is_defined(r)) event(collective_begin_(writer_, nullptr, time(r.begin)));
                break;
            case Kind::send:
                if (!is_defined(r)) break;
                list = add(numbers_.message, uint32_t(r.extra));
                event(send_(writer_, list, time(r.begin), uint32_t(r.peer), communicator(r),
                            uint32_t(r.extra >> 32), r.size));
                break;
            case Kind::put:
                event(
                    put_(writer_, nullptr, time(r.begin), window(r), uint32_t(r.peer), r.size, ++operation_));
                open(r);
                break;
            case Kind::get:
                event(
                    get_(writer_, nullptr, time(r.begin), window(r), uint32_t(r.peer), r.size, ++operation_));
                open(r);
                break;
            case Kind::atomic:
                event(atomic_(writer_, nullptr, time(r.begin), window(r), uint32_t(r.peer), fetch_and_add,
                              r.size, r.size, ++operation_));
                open(r);
                break;
            case Kind::notify:
            case Kind::notified:
                list = add(numbers_.notification, r.extra);
                event(sync_(writer_, list, time(r.begin), window(r), uint32_t(r.peer),
                            r.kind == Kind::notify ? notify_out : notify_in));
                break;
            default: break;
        }
    }

    void end(const Record& r, int64_t at) {
        switch (r.kind) {
            case Kind::collective:
                if (!is_defined(r)) break;
                event(collective_end_(writer_, nullptr, time(at),
                                      collective_ops[std::min<uint16_t>(r.detail, 6)], communicator(r),
                                      r.peer < 0 ? no_root : uint32_t(r.peer), r.size, r.extra));
                break;
            case Kind::receive: {
                if (!is_defined(r)) break;
                void* list = add(numbers_.message, uint32_t(r.extra));
                event(receive_(writer_, list, time(at), uint32_t(r.peer), communicator(r),
                               uint32_t(r.extra >> 32), r.size));
                break;
            }
            case Kind::put:
            case Kind::get:
            case Kind::atomic:
                if (r.detail == recorder::at_once) {
                    event(complete_(writer_, nullptr, time(at), window(r), opened_.back().id));
                    opened_.pop_back();
                }
                break;
            case Kind::flush:
                std::erase_if(opened_, [&](const Operation& o) {
                    if (o.queue != r.detail) return false;
                    event(complete_later_(writer_, nullptr, time(at), o.window, o.id));
                    return true;
                });
                break;
            default: break;
        }
        count(r, at);
        event(leave_(writer_, nullptr, time(at), region(r)));
    }

    // Operations without a wait count as complete at the end.
    void finish(int64_t at) {
        for (auto& o : opened_) event(complete_later_(writer_, nullptr, time(at), o.window, o.id));
    }

    uint64_t events() const { return events_; }

private:
    struct Operation { uint64_t id; uint32_t window; uint16_t queue; };
    using List = void*;

    template <class Function> void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(functions_.at(name));
    }
    static uint64_t time(int64_t at) { return uint64_t(at); }
    uint32_t region(const Record& r) const { return numbers_.regions.at(region_key(r)); }
    uint32_t window(const Record& r) const { return numbers_.windows.at(r.object); }
    // Other transports' collectives have no group, nor have those of a process that was killed before it
    // wrote its groups.
    bool is_defined(const Record& r) const { return numbers_.communicators.count(r.object) != 0; }
    uint32_t communicator(const Record& r) const { return numbers_.communicators.at(r.object); }
    void event(Code code) {
        if (code != 0) throw std::runtime_error(std::to_string(code));
        ++events_;
    }
    void open(const Record& r) { opened_.push_back({operation_, window(r), r.detail}); }
    List add(uint32_t attribute, uint64_t value) {
        add_(attributes_, attribute, value);
        return attributes_;
    }
    // Totals of this thread so far: bytes that were sent or moved, and nanoseconds of waiting.
    void count(const Record& r, int64_t at) {
        if (r.kind == Kind::waiting || r.kind == Kind::loading)
            waited_ += uint64_t(at - r.begin);
        else if (r.size && r.kind != Kind::receive && uint16_t(r.kind) > uint16_t(Kind::firing))
            moved_ += r.size;
        else
            return;
        const uint8_t types[] = {type_uint64, type_uint64};
        const uint64_t values[] = {moved_, waited_};
        event(metric_(writer_, nullptr, time(at), numbers_.metrics, 2, types, values));
    }

    void* writer_;
    void* attributes_;
    const Functions& functions_;
    const Numbers& numbers_;
    uint64_t events_ = 0, operation_ = 0, moved_ = 0, waited_ = 0;
    std::vector<Operation> opened_;

    Code (*enter_)(void*, List, uint64_t, uint32_t);
    Code (*leave_)(void*, List, uint64_t, uint32_t);
    Code (*send_)(void*, List, uint64_t, uint32_t, uint32_t, uint32_t, uint64_t);
    Code (*receive_)(void*, List, uint64_t, uint32_t, uint32_t, uint32_t, uint64_t);
    Code (*collective_begin_)(void*, List, uint64_t);
    Code (*collective_end_)(void*, List, uint64_t, uint8_t, uint32_t, uint32_t, uint64_t, uint64_t);
    Code (*put_)(void*, List, uint64_t, uint32_t, uint32_t, uint64_t, uint64_t);
    Code (*get_)(void*, List, uint64_t, uint32_t, uint32_t, uint64_t, uint64_t);
    Code (*atomic_)(void*, List, uint64_t, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t, uint64_t);
    Code (*sync_)(void*, List, uint64_t, uint32_t, uint32_t, uint32_t);
    Code (*complete_)(void*, List, uint64_t, uint32_t, uint64_t);
    Code (*complete_later_)(void*, List, uint64_t, uint32_t, uint64_t);
    Code (*metric_)(void*, List, uint64_t, uint32_t, uint8_t, const uint8_t*, const uint64_t*);
    Code (*add_)(List, uint32_t, uint64_t);
};

}  // namespace

Thread::Thread(std::vector<Record> records) : records_(std::move(records)) {
    std::vector<uint32_t> order(records_.size());
    std::iota(order.begin(), order.end(), 0u);
    // Records are in the order of their ends: a later one encloses an earlier one with the same end.
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        const Record &x = records_[a], &y = records_[b];
        return std::tuple(x.begin, -x.end, -int64_t(a)) < std::tuple(y.begin, -y.end, -int64_t(b));
    });
    std::vector<std::vector<int64_t>> stacks;  // ends of open spans, by lane
    for (uint32_t index : order) {
        const Record& r = records_[index];
        if (lanes_.empty() || r.begin < first_) first_ = r.begin;
        last_ = std::max(last_, r.end);
        size_t lane = 0;
        for (;; ++lane) {
            if (lane == stacks.size()) {
                stacks.emplace_back();
                lanes_.emplace_back();
            }
            auto& stack = stacks[lane];
            while (!stack.empty() && stack.back() <= r.begin) stack.pop_back();
            if (stack.empty() || r.end <= stack.back() || lane + 1 == max_lanes) break;
        }
        auto& stack = stacks[lane];
        stack.push_back(stack.empty() ? r.end : std::min(r.end, stack.back()));
        lanes_[lane].push_back(index);
    }
}

std::vector<std::pair<uint32_t, uint32_t>> Thread::regions() const {
    std::set<uint64_t> keys;
    for (auto& record : records_) keys.insert(region_key(record));
    std::vector<std::pair<uint32_t, uint32_t>> found;
    for (uint64_t key : keys) found.emplace_back(uint32_t(key >> 32), uint32_t(key));
    return found;
}

std::vector<uint32_t> Thread::segments() const {
    std::set<uint32_t> found;
    for (auto& record : records_)
        if (record.kind >= Kind::put && record.kind <= Kind::notified) found.insert(record.object);
    return {found.begin(), found.end()};
}

uint64_t Thread::write(uint32_t lane, uintptr_t writer, uintptr_t attributes, const Functions& functions,
                       const Numbers& numbers) const {
    Writer out(writer, attributes, functions, numbers);
    std::vector<Open> stack;
    int64_t last = 0;
    auto close_until = [&](int64_t until) {
        while (!stack.empty() && stack.back().end <= until) {
            out.end(*stack.back().record, last = stack.back().end);
            stack.pop_back();
        }
    };
    for (uint32_t index : lanes_.at(lane)) {
        const Record& r = records_[index];
        close_until(r.begin);
        out.begin(r);
        stack.push_back({&r, stack.empty() ? r.end : std::min(r.end, stack.back().end)});
    }
    close_until(std::numeric_limits<int64_t>::max());
    out.finish(last);
    return out.events();
}

}  // namespace carme::otf2

// A group: its setup and end, and its collectives, which run one after another in the caller or in the
// background.
#include "group.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <numeric>

#include "calls.hpp"

namespace carme {
namespace {

uint64_t mix(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    return h ^ (h >> 29);
}

}  // namespace

bool Handle::wait(Deadline deadline) {
    bool completed = wait_on(completed_, true, deadline, [&] { return done(); }, [] {}, [] {});
    if (completed && error_) std::rethrow_exception(error_);
    return completed;
}

Group::Group(std::shared_ptr<Context> context, std::vector<int> ranks, Deadline deadline, Algorithm algorithm)
    : context_(std::move(context)), ranks_(std::move(ranks)), deadline_(deadline),
      operation_("the forming of a group"), algorithm_(algorithm) {
    std::sort(ranks_.begin(), ranks_.end());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        if (ranks_[i] < 0 || ranks_[i] >= context_->size() || (i && ranks_[i] == ranks_[i - 1]))
            throw invalid("A group cannot hold rank " + std::to_string(ranks_[i]) + " (again).",
                          "Name each rank once, from 0 to " + std::to_string(context_->size() - 1) + ".");
        if (ranks_[i] == context_->rank()) index_ = int(i);
    }
    if (index_ < 0) throw invalid("This rank is not in the group.", "Form a group on its members only.");
    find_nodes();
    // All members count groups of the same ranks equally, so they agree on the key without a message.
    key_ = mix(0x6361726D65ull, context_->next_generation(ranks_));
    for (int r : ranks_) key_ = mix(key_, uint64_t(r) + 1);
    key_ |= 1;
    if (recorder::on()) recorded_as_ = recorder::group(key_, ranks_);
    open_area();
    context_->on_abort(key_,
                       [this](int culprit, const std::string& reason) { mark_broken(culprit, reason); });
    try {
        map_areas(deadline);
        Call first;
        // Members with different algorithms would wait for each other, so they compare this.
        first.label = std::string("a group that uses ") + name_of(algorithm_) + ", links " +
                      std::to_string(context_->link_model().fingerprint());
        first.timeout_ms = deadline.at == std::numeric_limits<int64_t>::max()
                               ? -1
                               : std::max<int64_t>((deadline.at - now_ns()) / 1'000'000, 1);
        execute(first);
    } catch (...) {
        context_->forget_abort(key_);
        context_->links().forget(key_);
        context_->control(context_->rank()).groups[size_t(slot_)].store(0);
        throw;
    }
}

// Finds the members of each node.
void Group::find_nodes() {
    std::map<int, std::vector<int>> by_node;
    for (int i = 0; i < size(); ++i) by_node[context_->node_of(ranks_[size_t(i)])].push_back(i);
    for (auto& [node, members] : by_node) nodes_.push_back(members);
    // In the order of their first ranks, which is equal everywhere.
    std::sort(nodes_.begin(), nodes_.end());
    for (size_t n = 0; n < nodes_.size(); ++n)
        for (size_t l = 0; l < nodes_[n].size(); ++l)
            if (nodes_[n][l] == index_) {
                own_node_ = int(n);
                local_rank_ = int(l);
            }
    local_members_ = nodes_[size_t(own_node_)];
}

// Makes this member's area, which announces it to the other members on its node.
void Group::open_area() {
    auto forming = context_->forming_groups();
    slot_ = context_->claim_group_slot();
    auto own_area = context_->group_area(context_->rank(), slot_, 0, area_stride);
    auto* a = reinterpret_cast<Area*>(own_area->data());
    a->arrived.value = a->staged.value = a->finished.value = 0;
    a->arrived.sleepers = a->staged.sleepers = a->finished.sleepers = 0;
    a->broken = 0;
    a->reason[0] = 0;
    context_->control(context_->rank()).groups[size_t(slot_)].store(key_, std::memory_order_release);
}

// Maps the areas of all members on this node.
void Group::map_areas(Deadline deadline) {
    mappings_.resize(local_members_.size());
    std::vector<Area*> found;
    for (size_t l = 0; l < local_members_.size(); ++l) {
        int rank = ranks_[size_t(local_members_[l])];
        auto& groups = context_->control(rank).groups;
        int slot = -1;
        // No peer wakes this thread; it polls, once per group.
        Flag tick;
        wait_on(
            tick, true, deadline,
            [&] {
                for (int s = 0; s < max_groups && slot < 0; ++s)
                    if (groups[size_t(s)].load(std::memory_order_acquire) == key_) slot = s;
                return slot >= 0;
            },
            [] {},
            [&] {
                context_->detect_failures();
                for (int r : ranks_) context_->throw_if_lost(r, "the forming of a group");
            });
        if (slot < 0)
            throw Failure(FailureKind::timeout,
                          "Rank " + std::to_string(rank) + " did not join the group in time.",
                          "Form the group on all its members, or allow more time.");
        mappings_[l] = context_->group_area(rank, slot, 0, area_stride);
        found.push_back(reinterpret_cast<Area*>(mappings_[l]->data()));
    }
    std::lock_guard lock(broken_mutex_);
    areas_ = std::move(found);
}

Group::~Group() {
    {
        std::lock_guard lock(jobs_mutex_);
        ending_ = true;
        if (busy_) abort_group(context_->rank());  // ends the wait of a running thread
    }
    jobs_changed_.notify_all();
    if (worker_.joinable()) worker_.join();
    context_->forget_abort(key_);
    context_->links().forget(key_);
    context_->links().forget(key_ ^ message_key);
    context_->control(context_->rank()).groups[size_t(slot_)].store(0, std::memory_order_release);
}

// Execution

void Group::execute(const Call& call) {
    {
        std::unique_lock lock(jobs_mutex_);
        if (busy_ || !jobs_.empty()) {  // collectives run in the order of their calls
            lock.unlock();
            submit(call)->wait({});
            return;
        }
        busy_ = true;
    }
    struct Free {
        Group& g;
        ~Free() {
            std::lock_guard lock(g.jobs_mutex_);
            g.busy_ = false;
            if (!g.jobs_.empty()) g.jobs_changed_.notify_all();
        }
    } free{*this};
    run(call, false);
}

std::shared_ptr<Handle> Group::submit(Call call) {
    auto handle = std::make_shared<Handle>();
    {
        std::lock_guard lock(jobs_mutex_);
        if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
        jobs_.emplace_back(std::move(call), handle);
    }
    jobs_changed_.notify_all();
    return handle;
}

void Group::work() {
    recorder::name_thread("collectives");
    std::unique_lock lock(jobs_mutex_);
    while (true) {
        jobs_changed_.wait(lock, [&] { return ending_ || (!busy_ && !jobs_.empty()); });
        if (ending_) {
            for (auto& [call, handle] : jobs_) {
                handle->error_ = std::make_exception_ptr(
                    Failure(FailureKind::invalid, "The group was deleted before its collective began.",
                            "Wait for all handles before a group is deleted."));
                handle->completed_.post(1);
            }
            return;
        }
        auto [call, handle] = std::move(jobs_.front());
        jobs_.pop_front();
        busy_ = true;
        lock.unlock();
        try {
            run(call, true);
        } catch (...) {
            handle->error_ = std::current_exception();
        }
        lock.lock();
        busy_ = false;
        handle->completed_.post(1);
    }
}

void Group::describe_call(recorder::Record& record, const Call& call) const {
    auto sum = [](const std::vector<uint64_t>& sizes) {
        return std::accumulate(sizes.begin(), sizes.end(), uint64_t(0));
    };
    const uint64_t bytes = call.count * size_of(call.type);
    record.object = recorded_as_;
    record.detail = uint16_t(call.kind);
    record.size = record.extra = bytes;
    switch (call.kind) {
        case Kind::barrier: record.size = record.extra = 0; break;
        case Kind::allreduce: break;
        case Kind::broadcast:
            record.peer = call.root;
            (call.root == index_ ? record.extra : record.size) = 0;
            break;
        case Kind::reduce_scatter: record.size = bytes * ranks_.size(); break;
        case Kind::allgather:
            record.size = call.receive_sizes[size_t(index_)];
            record.extra = sum(call.receive_sizes);
            break;
        case Kind::alltoall:
            record.size = sum(call.send_sizes);
            record.extra = sum(call.receive_sizes);
            break;
    }
}

void Group::run(const Call& call, bool in_background) {
    std::lock_guard lock(running_);
    oversubscribed_ = in_background ? context_->oversubscribed_in_background() : context_->oversubscribed();
    is_foreground_ = !in_background;
    deadline_ = Deadline::after_ms(call.timeout_ms);
    operation_ = name_of(call.kind);
    if (!call.label.empty()) operation_ += " '" + call.label + "'";
    throw_if_broken();
    struct Calling {
        const Call*& running;
        ~Calling() { running = nullptr; }
    } calling{call_};
    call_ = &call;
    if (call.reduction == Reduction::mean && !is_floating(call.type) && call.kind != Kind::barrier)
        throw invalid(std::string("The mean of ") + name_of(call.type) + " is not an integer.",
                      "Use sum, or a floating type.");
    if (is_of_bits(call.reduction) && is_floating(call.type))
        throw invalid(std::string("The bits of ") + name_of(call.type) + " cannot be reduced with " +
                          name_of(call.reduction) + ".",
                      "Use integers.");
    if (call.wire != Wire::same && (call.kind != Kind::allreduce || call.type != Type::f32 ||
                                    (call.reduction != Reduction::sum && call.reduction != Reduction::mean)))
        throw invalid(std::string("Only a sum or mean of float32 travels as ") + name_of(call.wire) + ".",
                      "Leave the wire type out.");
    try {
        recorder::Span span(recorder::Kind::collective, uint32_t(call.kind));
        if (span) describe_call(span.record, call);
        switch (call.kind) {
            case Kind::barrier:
                arrive(call, nullptr, 0);
                barrier(call);
                break;
            case Kind::allreduce: allreduce(call); break;
            case Kind::broadcast: broadcast(call); break;
            case Kind::reduce_scatter: reduce_scatter(call); break;
            case Kind::allgather: allgather(call); break;
            case Kind::alltoall: alltoall(call); break;
        }
        span.end();
    } catch (const std::bad_alloc&) {  // peers would wait for this member's data
        abort_group(context_->rank());
        throw;
    }
}

uint32_t Group::check_of(const Call& call) const {
    uint64_t h = mix(uint64_t(call.kind), uint64_t(call.type));
    h = mix(mix(h, uint64_t(call.reduction)), uint64_t(call.root));
    h = mix(mix(h, call.count), uint64_t(call.wire));
    if (call.kind == Kind::allgather)
        for (uint64_t s : call.receive_sizes) h = mix(h, s);
    for (char c : call.label) h = mix(h, uint64_t(c));
    return uint32_t(h >> 16) & ~point_to_point_flag;
}

char* Group::scratch(uint64_t size) {
    if (scratch_.size() < size) scratch_.resize(size);
    return scratch_.data();
}

}  // namespace carme

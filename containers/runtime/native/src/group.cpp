#include "group.hpp"
#include "zeros.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

namespace carme {
namespace {

constexpr uint64_t letter_key = 0x4C45545445520000;  // keeps letters apart from collectives
constexpr const char* same_calls =
    "Call the same collectives with the same shapes and types in the same order on all ranks.";
constexpr uint64_t smallest_in_place = 2048;  // below it a copy is cheaper than a second wait

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::barrier: return "barrier";
        case Kind::allreduce: return "allreduce";
        case Kind::broadcast: return "broadcast";
        case Kind::reduce_scatter: return "reduce_scatter";
        case Kind::allgather: return "allgather";
        case Kind::alltoall: return "alltoall";
    }
    return "collective";
}

const char* name_of(Type type) {
    static const char* names[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"};
    return uint32_t(type) < 7 ? names[uint32_t(type)] : "unknown";
}

const char* name_of(Reduction reduction) {
    static const char* names[] = {"sum", "mean", "min", "max", "product", "band", "bor", "bxor"};
    return uint32_t(reduction) < 8 ? names[uint32_t(reduction)] : "unknown";
}

const char* name_of(Wire wire) {
    static const char* names[] = {"as it is", "bf16", "int8"};
    return uint32_t(wire) < 3 ? names[uint32_t(wire)] : "unknown";
}

uint64_t mix(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    return h ^ (h >> 29);
}

// `Described` is a call, or what another member has said of one.
template <class Described> std::string describe(const Described& d, const std::string& label) {
    std::string text = name_of(d.kind);
    if (d.kind == Kind::allreduce || d.kind == Kind::reduce_scatter)
        text += std::string(" (") + name_of(Reduction(d.reduction)) + ")";
    if (d.kind == Kind::broadcast) text += " from member " + std::to_string(d.root);
    if (d.kind != Kind::barrier && d.kind != Kind::alltoall)
        text += " of " + std::to_string(d.count) + " x " + name_of(Type(d.type));
    if (Wire(d.wire) != Wire::same) text += std::string(" on a wire of ") + name_of(Wire(d.wire));
    if (!label.empty()) text += " '" + label + "'";
    return text;
}

std::string describe(const Descriptor& d) {
    return describe(d, std::string(d.label, strnlen(d.label, sizeof d.label)));
}

// At most `limit` bytes of a text in UTF-8.
std::string cut(std::string text, uint64_t limit) {
    if (text.size() <= limit) return text;
    while (limit && (text[limit] & 0xC0) == 0x80) --limit;  // not within a character
    text.resize(limit);
    return text;
}

uint64_t align_up(uint64_t v, uint64_t to) { return (v + to - 1) / to * to; }

}  // namespace

bool Handle::wait(Deadline deadline) {
    bool over = wait_on(over_, true, deadline, [&] { return done(); }, [] {}, [] {});
    if (over && error_) std::rethrow_exception(error_);
    return over;
}

Group::Group(std::shared_ptr<Context> context, std::vector<int> ranks, Deadline deadline, Algorithm algorithm)
    : context_(std::move(context)), ranks_(std::move(ranks)), deadline_(deadline), doing_("the forming of a group"),
      algorithm_(algorithm) {
    std::sort(ranks_.begin(), ranks_.end());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        if (ranks_[i] < 0 || ranks_[i] >= context_->size() || (i && ranks_[i] == ranks_[i - 1]))
            throw invalid("A group cannot hold rank " + std::to_string(ranks_[i]) + " (again).",
                          "Name each rank once, from 0 to " + std::to_string(context_->size() - 1) + ".");
        if (ranks_[i] == context_->rank()) me_ = int(i);
    }
    if (me_ < 0) throw invalid("This rank is not in the group.", "Form a group on its members only.");

    std::map<int, std::vector<int>> by_node;
    for (int i = 0; i < size(); ++i) by_node[context_->node_of(ranks_[size_t(i)])].push_back(i);
    for (auto& [node, members] : by_node) nodes_.push_back(members);
    // In the order of their first ranks, which is the same everywhere.
    std::sort(nodes_.begin(), nodes_.end());
    for (size_t n = 0; n < nodes_.size(); ++n)
        for (size_t l = 0; l < nodes_[n].size(); ++l)
            if (nodes_[n][l] == me_) {
                my_node_ = int(n);
                my_local_ = int(l);
            }
    local_members_ = nodes_[size_t(my_node_)];

    // Members count the groups of the same ranks alike, so they agree on the key without a message.
    key_ = mix(0x6361726D65ull, context_->next_generation(ranks_));
    for (int r : ranks_) key_ = mix(key_, uint64_t(r) + 1);
    key_ |= 1;
    if (recorder::on()) recorded_as_ = recorder::group(key_, ranks_);
    {
        auto forming = context_->forming_groups();
        slot_ = context_->claim_group_slot();
        auto mine = context_->group_area(context_->rank(), slot_, 0, area_stride);
        auto* a = reinterpret_cast<Area*>(mine->data());
        a->arrived.value = a->staged.value = a->finished.value = 0;
        a->arrived.sleepers = a->staged.sleepers = a->finished.sleepers = 0;
        a->broken = 0;
        a->reason[0] = 0;
        context_->control(context_->rank()).groups[size_t(slot_)].store(key_, std::memory_order_release);
    }
    context_->on_abort(key_, [this](int culprit, const std::string& reason) { note_broken(culprit, reason); });
    try {
        mappings_.resize(local_members_.size());
        std::vector<Area*> found;
        for (size_t l = 0; l < local_members_.size(); ++l) {
            int rank = ranks_[size_t(local_members_[l])];
            auto& groups = context_->control(rank).groups;
            int slot = -1;
            Flag tick;  // nobody wakes us: the peer may be a second late, and this happens once per group
            wait_on(
                tick, true, deadline,
                [&] {
                    for (int s = 0; s < max_groups && slot < 0; ++s)
                        if (groups[size_t(s)].load(std::memory_order_acquire) == key_) slot = s;
                    return slot >= 0;
                },
                [] {},
                [&] {
                    context_->look_for_deaths();
                    for (int r : ranks_) context_->throw_if_lost(r, "the forming of a group");
                });
            if (slot < 0)
                throw Failure(Trouble::timeout, "Rank " + std::to_string(rank) + " did not join the group in time.",
                              "Form the group on all its members, or allow more time.");
            mappings_[l] = context_->group_area(rank, slot, 0, area_stride);
            found.push_back(reinterpret_cast<Area*>(mappings_[l]->data()));
        }
        {
            std::lock_guard lock(breaking_);
            areas_ = std::move(found);
        }
        Call first;
        // Members that choose differently would wait for each other: they compare this.
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

Group::~Group() {
    {
        std::lock_guard lock(jobs_mutex_);
        ending_ = true;
        if (busy_) break_up(context_->rank());  // whoever waits inside gives up
    }
    jobs_changed_.notify_all();
    if (worker_.joinable()) worker_.join();
    context_->forget_abort(key_);
    context_->links().forget(key_);
    context_->links().forget(key_ ^ letter_key);
    context_->control(context_->rank()).groups[size_t(slot_)].store(0, std::memory_order_release);
}

// Running

void Group::execute(const Call& call) {
    {
        std::unique_lock lock(jobs_mutex_);
        if (busy_ || !jobs_.empty()) {  // collectives run in the order in which they were called
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
                    Failure(Trouble::invalid, "The group was deleted before its collective began.",
                            "Wait for all handles before a group is deleted."));
                handle->over_.post(1);
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
        handle->over_.post(1);
    }
}

// Between two members

std::shared_ptr<Letter> Group::send(int member, const void* data, uint64_t size, uint32_t tag, uint32_t form) {
    if (member < 0 || member >= this->size() || member == me_)
        throw invalid("A message cannot go to member " + std::to_string(member) + ".", "Name another member.");
    int peer = ranks_[size_t(member)];
    std::lock_guard lock(letters_mutex_);
    auto letter = std::make_shared<Letter>(context_, peer);
    recorder::Span span(recorder::Kind::send, recorder::send_name);
    const uint32_t number = letters_[{true, member, tag}]++;
    if (span) describe_letter(span.record, member, size, tag, number);
    context_->letters(peer).send_message(peer, key_ ^ letter_key, number, tag, form | of_letters, data, size,
                                         &letter->request_);
    span.end();
    return letter;
}

std::shared_ptr<Letter> Group::receive(int member, void* into, uint64_t size, uint32_t tag, uint32_t form) {
    if (member < 0 || member >= this->size() || member == me_)
        throw invalid("A message cannot come from member " + std::to_string(member) + ".", "Name another member.");
    int peer = ranks_[size_t(member)];
    std::lock_guard lock(letters_mutex_);
    auto letter = std::make_shared<Letter>(context_, peer);
    const uint32_t number = letters_[{false, member, tag}]++;
    if (recorder::on()) {
        letter->recorded_ = false;
        letter->received_.kind = recorder::Kind::receive;
        letter->received_.name = recorder::receive_name;
        describe_letter(letter->received_, member, size, tag, number);
    }
    context_->letters(peer).receive_message(peer, key_ ^ letter_key, number, tag, form | of_letters, into, size,
                                            &letter->request_);
    return letter;
}

int Group::sender(uint32_t tag, Deadline deadline) {
    constexpr timespec nap{0, 200'000};  // the links' own threads move what comes meanwhile
    for (;;) {
        bool alive = false;
        context_->look_for_deaths();
        {
            std::lock_guard lock(letters_mutex_);
            for (int i = 0; i < size(); ++i) {
                const int member = (next_sender_ + i) % size(), peer = ranks_[size_t(member)];
                if (member == me_) continue;
                const bool lost = context_->is_lost(peer);  // what it said before counts
                const auto received = letters_.find({false, member, tag});
                const uint32_t sequence = received == letters_.end() ? 0 : received->second;
                if (context_->letters(peer).has_come(peer, key_ ^ letter_key, sequence, tag)) {
                    next_sender_ = (member + 1) % size();
                    return member;
                }
                alive = alive || !lost;
            }
        }
        if (!alive)
            throw Failure(Trouble::peer_lost, "All other members were lost before one of them sent a message.",
                          "Form a new group without them, or start the run again.");
        if (deadline.passed()) return -1;
        nanosleep(&nap, nullptr);
    }
}

void Group::describe_letter(recorder::Record& record, int member, uint64_t size, uint32_t tag, uint32_t number) const {
    record.object = recorded_as_;
    record.peer = member;
    record.size = size;
    record.extra = uint64_t(tag) << 32 | number;
}

Letter::~Letter() {
    // Who only asks whether it is over has it, too.
    if (!recorded_ && request_.state.load() == State::done) {
        try {
            record_received();
        } catch (...) {  // no memory for a ring: a trace lacks it
        }
    }
    context_->letters(peer_).cancel(&request_, 1);
}

void Letter::record_received() {
    recorded_ = true;
    const int64_t seen = seen_.load(std::memory_order_relaxed);
    received_.end = std::max(seen ? seen : now_ns(), received_.begin);
    if (!received_.begin) received_.begin = received_.end;
    if (recorder::on()) recorder::add(received_);
}

bool Letter::wait(Deadline deadline) {
    if (!recorded_ && !received_.begin) received_.begin = now_ns();
    bool over = context_->letters(peer_).drive(
        true, deadline, [&] { return done(); },
        [&] {
            context_->look_for_deaths();
            if (!done()) context_->throw_if_lost(peer_, "a message");
        });
    if (!over) return false;
    if (request_.state.load() == State::mismatch)
        throw Failure(Trouble::mismatch, "Rank " + std::to_string(peer_) + " sent a message of another size or type.",
                      "Send and receive the same number of elements of the same type.");
    if (request_.state.load() != State::done)
        throw Failure(Trouble::peer_lost, "Rank " + std::to_string(peer_) + " was lost during a message.",
                      "Form a new group without it, or start the run again.");
    if (!recorded_) record_received();
    return true;
}

void Group::describe_call(recorder::Record& record, const Call& call) const {
    auto sum = [](const std::vector<uint64_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), uint64_t(0)); };
    const uint64_t bytes = call.count * size_of(call.type);
    record.object = recorded_as_;
    record.detail = uint16_t(call.kind);
    record.size = record.extra = bytes;
    switch (call.kind) {
        case Kind::barrier: record.size = record.extra = 0; break;
        case Kind::allreduce: break;
        case Kind::broadcast:
            record.peer = call.root;
            (call.root == me_ ? record.extra : record.size) = 0;
            break;
        case Kind::reduce_scatter: record.size = bytes * ranks_.size(); break;
        case Kind::allgather:
            record.size = call.receive_sizes[size_t(me_)];
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
    crowded_ = in_background ? context_->crowded_in_background() : context_->crowded();
    patient_ = !in_background;
    deadline_ = Deadline::after_ms(call.timeout_ms);
    doing_ = name_of(call.kind);
    if (!call.label.empty()) doing_ += " '" + call.label + "'";
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
    } catch (const std::bad_alloc&) {  // others would wait for what this member no longer sends
        break_up(context_->rank());
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
    return uint32_t(h >> 16) & ~of_letters;
}

char* Group::scratch(uint64_t size) {
    if (scratch_.size() < size) scratch_.resize(size);
    return scratch_.data();
}

// Announces what this member is about to do, waits until all on this node have, and compares.
void Group::arrive(const Call& call, const void* inlined, uint64_t inlined_size) {
    ++sequence_;
    if (locals() == 1) return;
    Area& mine = area(my_local_);
    Descriptor& d = mine.descriptors[sequence_ & 1];
    d.kind = call.kind;
    d.type = uint32_t(call.type);
    d.reduction = uint32_t(call.reduction);
    d.root = call.root;
    d.count = call.count;
    d.wire = uint32_t(call.wire);
    d.segment = -1;
    std::memset(d.label, 0, sizeof d.label);
    std::memcpy(d.label, call.label.data(), std::min(call.label.size(), sizeof d.label));
    const bool scatters = call.kind == Kind::reduce_scatter;
    if (scatters || (call.kind == Kind::allreduce && (!inlined || inlined_size > smallest_in_place))) {
        int id;
        const uint64_t bytes = call.count * size_of(call.type) * uint64_t(scatters ? size() : 1);
        if (context_->find_segment(scatters ? call.input : call.buffer, bytes, &id, &d.offset)) {
            d.segment = id;
            inlined_size = 0;
        }
    }
    d.inlined = inlined && inlined_size;
    if (inlined_size) std::memcpy(mine.inlined[sequence_ & 1], inlined, inlined_size);
    mine.arrived.post(sequence_);
    await(&Area::arrived, sequence_);
    compare(call);
}

void Group::compare(const Call&) {
    const Descriptor& mine = area(my_local_).descriptors[sequence_ & 1];
    for (int l = 0; l < locals(); ++l) {
        const Descriptor& theirs = area(l).descriptors[sequence_ & 1];
        if (mine.kind == theirs.kind && mine.type == theirs.type && mine.reduction == theirs.reduction &&
            mine.root == theirs.root && mine.count == theirs.count && mine.wire == theirs.wire &&
            std::memcmp(mine.label, theirs.label, sizeof mine.label) == 0)
            continue;
        int other = ranks_[size_t(local_members_[size_t(l)])], self = context_->rank();
        const std::string reason = "Rank " + std::to_string(self) + " called " + describe(mine) + ", but rank " +
                                   std::to_string(other) + " called " + describe(theirs) + ".";
        // On one node all members notice at the same point and may go on; else others wait in vain.
        if (!one_node()) fail_mismatch(other, reason, same_calls);
        throw Failure(Trouble::mismatch, reason, same_calls);
    }
}

void Group::await(Flag Area::* flag, uint32_t target) {
    for (int l = 0; l < locals(); ++l)
        if (l != my_local_) await_one(area(l).*flag, target, l);
}

void Group::await_one(Flag& flag, uint32_t target, int local) {
    bool over = wait_on(
        flag, crowded_, deadline_, [&] { return flag.reached(target); }, [] {}, [&] { health(); });
    if (over) return;
    int rank = ranks_[size_t(local_members_[size_t(local)])];
    break_up(rank);
    throw Failure(Trouble::timeout, "Rank " + std::to_string(rank) + " did not come to " + doing_ + " in time.",
                  "See what that rank does; the group can no longer be used.");
}

void Group::health() {
    context_->look_for_deaths();
    throw_if_broken();
    for (int r : ranks_)
        if (context_->is_lost(r)) fail_lost(r);
}

void Group::throw_if_broken() {
    for (Area* a : areas_) {
        if (!a->broken.load(std::memory_order_acquire)) continue;
        // Another one may say more: that members disagree, and not just that one of them has left.
        for (Area* b : areas_)
            if (b->broken.load(std::memory_order_acquire) && b->reason[0]) a = b;
        fail_broken(int(a->broken.load()) - 1, {a->reason, strnlen(a->reason, largest_reason)});
    }
}

std::string Group::called() const { return call_ ? describe(*call_, call_->label) : doing_; }

bool Group::note_broken(int culprit, const std::string& reason) {
    std::lock_guard lock(breaking_);
    if (areas_.empty()) return false;
    Area& mine = area(my_local_);
    if (mine.broken.load()) return false;
    std::memcpy(mine.reason, reason.c_str(), reason.size() + 1);
    mine.broken.store(uint32_t(culprit) + 1);
    return true;
}

void Group::break_up(int culprit, const std::string& reason) {
    if (!note_broken(culprit, reason)) return;
    for (int r : ranks_) {
        if (context_->is_local(r) || context_->is_lost(r)) continue;
        Frame frame;
        frame.type = FrameType::abort_group;
        frame.key = key_;
        frame.value = uint32_t(culprit);
        frame.size = reason.size();
        context_->links().send_owned(r, frame, {reason.begin(), reason.end()});
    }
}

void Group::fail_mismatch(int culprit, const std::string& reason, const char* remedy) {
    break_up(culprit, cut(reason, largest_reason));
    throw Failure(Trouble::mismatch, reason, remedy);
}

void Group::fail_other_call(int rank) {
    fail_mismatch(rank,
                  "Rank " + std::to_string(context_->rank()) + " called " + called() + ", but rank " +
                      std::to_string(rank) + " called something else, or another size or type.",
                  same_calls);
}

void Group::fail_lost(int rank) {
    // One that found members to disagree, and left, has said so on another stream than the one whose end was seen first.
    if (!context_->is_local(rank))
        context_->links().drive(
            crowded_, Deadline::after_ms(Links::longest_farewell_ns / 1'000'000 + 100),
            [&] { return context_->is_lost(rank); }, [] {});
    for (Area* a : areas_)
        if (explains(*a, rank)) throw_if_broken();
    break_up(rank);
    throw Failure(Trouble::peer_lost, "Rank " + std::to_string(rank) + " was lost during " + doing_ + ".",
                  "Form a new group without it, or start the run again.");
}

void Group::fail_broken(int culprit, const std::string& reason) {
    break_up(culprit, reason);
    if (!reason.empty()) {
        const bool mine = call_ && culprit == context_->rank();
        throw Failure(Trouble::mismatch,
                      mine ? reason + " Rank " + std::to_string(culprit) + " called " + called() + "." : reason,
                      same_calls);
    }
    bool lost = context_->is_lost(culprit);
    throw Failure(Trouble::peer_lost,
                  "The group broke at " + doing_ + ": rank " + std::to_string(culprit) +
                      (lost ? " was lost."
                             : " was lost, did not answer in time, had no memory for it, or called something else."),
                  "Form a new group without it, or start the run again.");
}

void Group::finish(Batch& batch, size_t index) {
    Request& request = batch[index];
    auto ready = [&] { return request.state.load(std::memory_order_acquire) != State::pending; };
    auto look = [&] {
        health();
        if (!request.check) return;  // not a message that is to come
        // Of calls of another kind messages may differ in their tags, and wait for ever, as this one does.
        const int other = context_->links().who_disagrees(key_, sequence_, request.check);
        if (other >= 0) fail_other_call(other);
    };
    bool over = context_->links().drive(crowded_, deadline_, ready, look, &request, patient_);
    if (!over) {
        break_up(request.peer);
        throw Failure(Trouble::timeout,
                      "Rank " + std::to_string(request.peer) + " did not come to " + doing_ + " in time.",
                      "See what that rank does; the group can no longer be used.");
    }
    switch (request.state.load()) {
        case State::done:
            if (!request.at_most || request.result == request.size) return;
            request.at_most = false;
            if (!with_zeros(request.into, request.result, request.size)) fail_other_call(request.peer);
            return;
        case State::pending: return;
        case State::lost: fail_lost(request.peer);
        case State::aborted: {
            throw_if_broken();
            fail_broken(request.peer, {});
        }
        case State::mismatch:
            fail_other_call(request.peer);
    }
}

// Allreduce

std::vector<Group::Range> Group::even_slices(uint64_t count, uint64_t element) const {
    auto n = uint64_t(locals());
    uint64_t line = std::max<uint64_t>(1, 128 / element), each = align_up((count + n - 1) / n, line);
    std::vector<Range> slices;
    for (uint64_t l = 0; l < n; ++l) {
        uint64_t begin = std::min(l * each, count), end = std::min(begin + each, count);
        slices.push_back({begin * element, (end - begin) * element});
    }
    return slices;
}

bool Group::uniform() const {
    return std::all_of(nodes_.begin(), nodes_.end(), [&](auto& n) { return n.size() == nodes_[0].size(); });
}

std::vector<int> Group::column(int position) const {
    std::vector<int> ranks;
    for (auto& node : nodes_) ranks.push_back(ranks_[size_t(node[size_t(position)])]);
    return ranks;
}

void Group::allreduce(const Call& call) {
    const uint64_t element = size_of(call.type), bytes = call.count * element;
    const double scale = call.reduction == Reduction::mean ? 1.0 / size() : 1.0;
    char* data = static_cast<char*>(call.buffer);
    if (one_node()) {
        const bool small = bytes * uint64_t(locals()) <= 2 * inline_size && bytes <= inline_size;
        arrive(call, small ? data : nullptr, small ? bytes : 0);
        if (locals() == 1 || bytes == 0) return;
        if (small && all_inlined()) return allreduce_inline(call, scale);
        std::vector<char*> buffers;
        if (peers_in_segments(bytes, buffers)) return allreduce_in_segments(call, buffers, scale);
        return allreduce_staged(call, scale);
    }
    arrive(call, nullptr, 0);
    if (bytes == 0) return;
    if (uniform() && locals() == 1) {
        across_nodes(column(0), my_node_, data, call.count, call, scale);
    } else {
        // Sum within each node first. Where nodes are alike every member carries a slice between them.
        std::vector<Range> slices = even_slices(call.count, element);
        const bool spread = uniform() && bytes > 64 * 1024;
        if (!spread) {
            std::fill(slices.begin(), slices.end(), Range{0, 0});
            slices[0] = {0, bytes};
        }
        char* own = data + slices[size_t(my_local_)].offset;
        if (locals() > 1) reduce_slices(data, slices, own, call);
        if (slices[size_t(my_local_)].size)
            across_nodes(column(spread ? my_local_ : 0), my_node_, own, slices[size_t(my_local_)].size / element, call,
                         scale);
        if (locals() > 1) {
            std::vector<std::vector<Range>> shares;
            for (auto& slice : slices) shares.push_back({slice});
            share(data, shares);
        }
    }
    if (scale != 1.0 && nodes_.size() != 2) {
        const void* source = data;
        void* destination = data;
        reduce(call.type, call.reduction, &source, 1, &destination, 1, call.count, scale);
    }
}

void Group::allreduce_inline(const Call& call, double scale) {
    const void* sources[256];
    std::vector<const void*> many;
    const void** list = sources;
    if (locals() > 256) {
        many.resize(size_t(locals()));
        list = many.data();
    }
    for (int l = 0; l < locals(); ++l) list[l] = area(l).inlined[sequence_ & 1];
    void* destination = call.buffer;
    reduce(call.type, call.reduction, list, locals(), &destination, 1, call.count, scale);
}

bool Group::all_inlined() const {
    for (int l = 0; l < locals(); ++l)
        if (!area(l).descriptors[sequence_ & 1].inlined) return false;
    return true;
}

bool Group::peers_in_segments(uint64_t bytes, std::vector<char*>& buffers) {
    for (int l = 0; l < locals(); ++l)
        if (area(l).descriptors[sequence_ & 1].segment < 0) return false;
    for (int l = 0; l < locals(); ++l) {
        const Descriptor& d = area(l).descriptors[sequence_ & 1];
        char* at = context_->peer_segment(ranks_[size_t(local_members_[size_t(l)])], d.segment, d.offset, bytes);
        if (!at) fail_lost(ranks_[size_t(local_members_[size_t(l)])]);
        buffers.push_back(at);
    }
    return true;
}

// Every member reduces its slice of all buffers, and writes the result into all of them.
void Group::allreduce_in_segments(const Call& call, const std::vector<char*>& buffers, double scale) {
    const uint64_t element = size_of(call.type);
    Range slice = even_slices(call.count, element)[size_t(my_local_)];
    std::vector<const void*> sources;
    std::vector<void*> destinations;
    for (char* buffer : buffers) {
        sources.push_back(buffer + slice.offset);
        destinations.push_back(buffer + slice.offset);
    }
    reduce(call.type, call.reduction, sources.data(), locals(), destinations.data(), locals(), slice.size / element,
           scale);
    area(my_local_).finished.post(++finished_);
    await(&Area::finished, finished_);
}

// Chunks of private buffers pass through shared memory: only what another member needs is copied. Three chunks
// are on their way, so a slot is reused only after all have posted a step that follows its last use.
void Group::allreduce_staged(const Call& call, double scale) {
    const uint64_t element = size_of(call.type);
    const auto n = uint64_t(locals());
    char* data = static_cast<char*>(call.buffer);
    // Fewer, larger chunks where every wait is a change of process.
    const uint64_t chunk_bytes = context_->crowded() ? chunk_size : chunk_size / 2;
    const uint64_t piece = chunk_bytes / n / 128 * 128;  // bytes of each member's slice in one chunk
    const uint64_t bytes = call.count * element, stride = piece * n;
    const uint64_t chunks = (bytes + stride - 1) / stride;
    const uint32_t staged = staged_, finished = finished_;
    auto at = [&](uint64_t chunk, uint64_t member) {
        // The last chunk is divided anew, so that all have a part of it.
        uint64_t begin = chunk * stride, length = std::min(stride, bytes - begin);
        uint64_t each = align_up((length + n - 1) / n, 128);
        uint64_t from = std::min(member * each, length), to = std::min(from + each, length);
        return Range{begin + from, to - from};
    };
    Area& mine = area(my_local_);
    const auto self = uint64_t(my_local_);
    std::vector<const void*> sources(n);
    for (uint64_t step = 0; step < chunks + 2; ++step) {
        if (step < chunks) {
            char* slot = mine.staging[(staged + step) % depth];
            for (uint64_t m = 0; m < n; ++m) {
                Range part = at(step, m);
                if (m != self) std::memcpy(slot + m * piece, data + part.offset, part.size);
            }
            mine.staged.post(staged + uint32_t(step) + 1);
        }
        if (step >= 1 && step - 1 < chunks) {
            uint64_t chunk = step - 1;
            await(&Area::staged, staged + uint32_t(chunk) + 1);
            Range part = at(chunk, self);
            for (uint64_t m = 0; m < n; ++m)
                sources[m] = m == self ? data + part.offset
                                       : area(int(m)).staging[(staged + chunk) % depth] + self * piece;
            void* destinations[2] = {data + part.offset, mine.results[(finished + chunk) % depth]};
            reduce(call.type, call.reduction, sources.data(), int(n), destinations, 2, part.size / element, scale);
            mine.finished.post(finished + uint32_t(chunk) + 1);
        }
        if (step >= 2) {
            uint64_t chunk = step - 2;
            await(&Area::finished, finished + uint32_t(chunk) + 1);
            for (uint64_t m = 0; m < n; ++m) {
                Range part = at(chunk, m);
                if (m != self)
                    std::memcpy(data + part.offset, area(int(m)).results[(finished + chunk) % depth], part.size);
            }
        }
    }
    staged_ = staged + uint32_t(chunks);
    finished_ = finished + uint32_t(chunks);
}

// Each local member gets the reduction of its slice over all local inputs. Lockstep: whoever has posted a round
// has consumed the round before it, so two slots would do.
void Group::reduce_slices(const char* input, const std::vector<Range>& slices, char* own_result, const Call& call) {
    const uint64_t element = size_of(call.type), n = uint64_t(locals());
    const uint64_t piece = chunk_size / n / 128 * 128, self = uint64_t(my_local_);
    uint64_t longest = 0;
    for (auto& slice : slices) longest = std::max(longest, slice.size);
    std::vector<const void*> sources(n);
    for (uint64_t done = 0; done < longest; done += piece) {
        const uint32_t slot = staged_ % depth;
        for (uint64_t m = 0; m < n; ++m) {
            if (m == self || slices[m].size <= done) continue;
            std::memcpy(area(my_local_).staging[slot] + m * piece, input + slices[m].offset + done,
                        std::min(piece, slices[m].size - done));
        }
        post_staged();
        await(&Area::staged, staged_);
        if (slices[self].size <= done) continue;
        uint64_t length = std::min(piece, slices[self].size - done);
        for (uint64_t m = 0; m < n; ++m)
            sources[m] = m == self ? input + slices[self].offset + done : area(int(m)).staging[slot] + self * piece;
        void* destination = own_result + done;
        reduce(call.type, call.reduction, sources.data(), int(n), &destination, 1, length / element);
    }
}

// Every local member holds the ranges of `buffer` that are listed for it; afterwards all hold all.
void Group::share(char* buffer, const std::vector<std::vector<Range>>& ranges) {
    uint64_t longest = 0;
    for (auto& list : ranges) {
        uint64_t total = 0;
        for (auto& range : list) total += range.size;
        longest = std::max(longest, total);
    }
    // Bytes [done, done + chunk) of a member's ranges laid end to end.
    auto each = [&](const std::vector<Range>& list, uint64_t done, auto&& copy) {
        uint64_t position = 0;
        for (auto& range : list) {
            uint64_t from = std::max(position, done), to = std::min(position + range.size, done + chunk_size);
            if (from < to) copy(buffer + range.offset + (from - position), from - done, to - from);
            position += range.size;
        }
    };
    for (uint64_t done = 0; done < longest; done += chunk_size) {
        const uint32_t slot = staged_ % depth;
        char* mine = area(my_local_).staging[slot];
        each(ranges[size_t(my_local_)], done,
             [&](char* at, uint64_t offset, uint64_t size) { std::memcpy(mine + offset, at, size); });
        post_staged();
        await(&Area::staged, staged_);
        for (int l = 0; l < locals(); ++l) {
            if (l == my_local_) continue;
            const char* theirs = area(l).staging[slot];
            each(ranges[size_t(l)], done,
                 [&](char* at, uint64_t offset, uint64_t size) { std::memcpy(at, theirs + offset, size); });
        }
    }
}

// The others

void Group::broadcast(const Call& call) {
    arrive(call, nullptr, 0);
    const uint64_t bytes = call.count * size_of(call.type);
    char* data = static_cast<char*>(call.buffer);
    if (size() == 1 || bytes == 0) return;
    // One member per node takes part between nodes: the root, and the first member elsewhere.
    int root_node = 0;
    for (size_t n = 0; n < nodes_.size(); ++n)
        if (std::count(nodes_[n].begin(), nodes_[n].end(), call.root)) root_node = int(n);
    auto speaker = [&](int node) { return node == root_node ? call.root : nodes_[size_t(node)][0]; };
    const int m = int(nodes_.size()), place = (my_node_ - root_node + m) % m;
    const bool speaking = speaker(my_node_) == me_;
    int local_speaker = 0;
    for (int l = 0; l < locals(); ++l)
        if (local_members_[size_t(l)] == speaker(my_node_)) local_speaker = l;
    auto rank_at = [&](int p) { return ranks_[size_t(speaker((p + root_node) % m))]; };
    std::vector<int> children;  // of a binomial tree
    int parent = -1;
    for (int bit = 1; bit < m; bit <<= 1) {
        if (place & bit) {
            parent = place - bit;
            break;
        }
        if (place + bit < m) children.push_back(place + bit);
    }
    std::reverse(children.begin(), children.end());

    Links& links = context_->links();
    const uint32_t check = check_of(call);
    const size_t pieces = size_t((bytes + chunk_size - 1) / chunk_size);
    const bool linked = m > 1 && speaking;
    Batch receives(links, linked && parent >= 0 ? pieces : 0), sends(links, linked ? pieces * children.size() : 0);
    auto size_at = [&](size_t p) { return std::min(chunk_size, bytes - p * chunk_size); };
    for (size_t p = 0; p < receives.count; ++p)
        links.receive_message(rank_at(parent), key_, sequence_, uint32_t(p), check, data + p * chunk_size, size_at(p),
                              &receives[p]);
    for (size_t p = 0; p < pieces; ++p) {
        char* at = data + p * chunk_size;
        if (linked) {
            if (parent >= 0) finish(receives, p);
            for (size_t c = 0; c < children.size(); ++c)
                links.send_message(rank_at(children[c]), key_, sequence_, uint32_t(p), check, at, size_at(p),
                                   &sends[p * children.size() + c]);
        }
        if (locals() == 1) continue;
        const uint32_t slot = staged_ % depth;
        if (speaking) std::memcpy(area(my_local_).staging[slot], at, size_at(p));
        post_staged();
        await(&Area::staged, staged_);
        if (!speaking) std::memcpy(at, area(local_speaker).staging[slot], size_at(p));
    }
    for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
}

void Group::reduce_scatter(const Call& call) {
    const uint64_t element = size_of(call.type), block = call.count * element;
    const double scale = call.reduction == Reduction::mean ? 1.0 / size() : 1.0;
    const char* input = static_cast<const char*>(call.input);
    char* output = static_cast<char*>(call.output);
    if (!one_node() && !uniform()) {
        // Nodes that differ: reduce everything, keep what is ours.
        std::vector<char> all(input, input + block * uint64_t(size()));
        Call whole = call;
        whole.kind = Kind::allreduce;
        whole.buffer = all.data();
        whole.count = call.count * uint64_t(size());
        allreduce(whole);
        std::memcpy(output, all.data() + block * uint64_t(me_), block);
        return;
    }
    arrive(call, nullptr, 0);
    if (block == 0) return;
    std::vector<char*> inputs;
    if (one_node() && locals() > 1 && peers_in_segments(block * uint64_t(size()), inputs)) {
        // Every member reads its block of all inputs where they lie.
        std::vector<const void*> sources;
        for (char* theirs : inputs) sources.push_back(theirs + uint64_t(me_) * block);
        void* destination = output;
        reduce(call.type, call.reduction, sources.data(), locals(), &destination, 1, call.count, scale);
        area(my_local_).finished.post(++finished_);
        await(&Area::finished, finished_);
        return;
    }
    const size_t m = nodes_.size();
    std::vector<std::vector<char>> partial(m);
    for (size_t n = 0; n < m; ++n) {
        std::vector<Range> slices;
        for (int member : nodes_[n]) slices.push_back({uint64_t(member) * block, block});
        const bool ours = int(n) == my_node_;
        if (m > 1 && !ours) partial[n].resize(block);
        char* into = ours ? output : partial[n].data();
        if (locals() > 1) reduce_slices(input, slices, into, call);
        else std::memmove(into, input + slices[0].offset, block);
    }
    if (m > 1) {
        Links& links = context_->links();
        const uint32_t check = check_of(call);
        auto ranks = column(my_local_);
        std::vector<char> room(block * m);
        Batch receives(links, m), sends(links, m);
        for (size_t n = 0; n < m; ++n) {
            if (int(n) == my_node_) {
                receives[n].state = sends[n].state = State::done;
                continue;
            }
            links.receive_message(ranks[n], key_, sequence_, 0, check, room.data() + n * block, block, &receives[n]);
        }
        for (size_t n = 0; n < m; ++n)
            if (int(n) != my_node_)
                links.send_message(ranks[n], key_, sequence_, 0, check, partial[n].data(), block, &sends[n]);
        std::vector<const void*> sources(m);
        for (size_t n = 0; n < m; ++n) {
            finish(receives, n);
            sources[n] = int(n) == my_node_ ? output : room.data() + n * block;
        }
        void* destination = output;
        reduce(call.type, call.reduction, sources.data(), int(m), &destination, 1, call.count);
        for (size_t n = 0; n < m; ++n) finish(sends, n);
    }
    if (scale != 1.0) {
        const void* source = output;
        void* destination = output;
        reduce(call.type, call.reduction, &source, 1, &destination, 1, call.count, scale);
    }
}

void Group::allgather(const Call& call) {
    arrive(call, nullptr, 0);
    char* output = static_cast<char*>(call.output);
    std::vector<uint64_t> offsets(size_t(size()) + 1, 0);
    for (size_t i = 0; i < size_t(size()); ++i) offsets[i + 1] = offsets[i] + call.receive_sizes[i];
    auto range = [&](int member) { return Range{offsets[size_t(member)], call.receive_sizes[size_t(member)]}; };
    if (range(me_).size) std::memmove(output + range(me_).offset, call.input, range(me_).size);
    if (size() == 1) return;

    // One member of each node receives a block from elsewhere: in turn, so that all carry alike.
    std::vector<std::vector<Range>> held((size_t(locals())));
    for (int l = 0; l < locals(); ++l) held[size_t(l)].push_back(range(local_members_[size_t(l)]));
    if (!one_node()) {
        Links& links = context_->links();
        const uint32_t check = check_of(call);
        Batch receives(links, size_t(size())), sends(links, nodes_.size());
        for (size_t n = 0; n < nodes_.size(); ++n) {
            if (int(n) == my_node_) continue;
            for (size_t i = 0; i < nodes_[n].size(); ++i) {
                int member = nodes_[n][i];
                size_t holder = i % size_t(locals());
                held[holder].push_back(range(member));
                if (int(holder) == my_local_)
                    links.receive_message(ranks_[size_t(member)], key_, sequence_, 0, check,
                                          output + range(member).offset, range(member).size, &receives[size_t(member)]);
                else
                    receives[size_t(member)].state = State::done;
            }
        }
        for (int member : local_members_) receives[size_t(member)].state = State::done;
        for (size_t n = 0; n < nodes_.size(); ++n) {
            if (int(n) == my_node_) {
                sends[n].state = State::done;
                continue;
            }
            int holder = nodes_[n][size_t(my_local_) % nodes_[n].size()];
            links.send_message(ranks_[size_t(holder)], key_, sequence_, 0, check, output + range(me_).offset,
                               range(me_).size, &sends[n]);
        }
        for (size_t i = 0; i < receives.count; ++i) finish(receives, i);
        for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
    }
    if (locals() > 1) share(output, held);
}

void Group::alltoall(const Call& call) {
    const auto n = uint64_t(locals());
    if (uint64_t(size()) * 8 > inline_size)
        throw invalid("An alltoall over " + std::to_string(size()) + " ranks is too wide.",
                      "Use groups of at most " + std::to_string(inline_size / 8) + " ranks.");
    arrive(call, call.send_sizes.data(), uint64_t(size()) * 8);
    const char* input = static_cast<const char*>(call.input);
    char* output = static_cast<char*>(call.output);
    std::vector<uint64_t> from(size_t(size()) + 1, 0), to(size_t(size()) + 1, 0);
    for (size_t i = 0; i < size_t(size()); ++i) {
        from[i + 1] = from[i] + call.send_sizes[i];
        to[i + 1] = to[i] + call.receive_sizes[i];
    }
    auto disagree = [&](int member, uint64_t theirs, uint64_t mine) {
        const int rank = ranks_[size_t(member)];
        fail_mismatch(rank,
                      "Rank " + std::to_string(rank) + " sends " + std::to_string(theirs) + " bytes to rank " +
                          std::to_string(context_->rank()) + ", which expects " + std::to_string(mine) + ".",
                      "Give matching sizes on both ranks.");
    };
    Links& links = context_->links();
    Batch receives(links, one_node() ? 0 : size_t(size())), sends(links, one_node() ? 0 : size_t(size()));
    uint32_t check = check_of(call);
    for (size_t i = 0; i < receives.count; ++i) {
        if (context_->is_local(ranks_[i])) {
            receives[i].state = sends[i].state = State::done;
            continue;
        }
        links.receive_message(ranks_[i], key_, sequence_, 0, check, output + to[i], call.receive_sizes[i],
                              &receives[i]);
    }
    for (size_t i = 0; i < sends.count; ++i)
        if (!context_->is_local(ranks_[i]))
            links.send_message(ranks_[i], key_, sequence_, 0, check, input + from[i], call.send_sizes[i], &sends[i]);

    if (call.send_sizes[size_t(me_)] != call.receive_sizes[size_t(me_)])
        disagree(me_, call.send_sizes[size_t(me_)], call.receive_sizes[size_t(me_)]);
    if (call.send_sizes[size_t(me_)])
        std::memmove(output + to[size_t(me_)], input + from[size_t(me_)], call.send_sizes[size_t(me_)]);
    if (n > 1) {
        uint64_t longest = 0;
        auto sizes_of = [&](int l) { return reinterpret_cast<uint64_t*>(area(l).inlined[sequence_ & 1]); };
        for (int l = 0; l < locals(); ++l)
            for (int other = 0; other < locals(); ++other)
                if (l != other) longest = std::max(longest, sizes_of(l)[local_members_[size_t(other)]]);
        for (int l = 0; l < locals(); ++l) {
            int member = local_members_[size_t(l)];
            if (l != my_local_ && sizes_of(l)[me_] != call.receive_sizes[size_t(member)])
                disagree(member, sizes_of(l)[me_], call.receive_sizes[size_t(member)]);
        }
        const uint64_t piece = chunk_size / n / 128 * 128;
        for (uint64_t done = 0; done < longest; done += piece) {
            const uint32_t slot = staged_ % depth;
            for (int l = 0; l < locals(); ++l) {
                auto member = size_t(local_members_[size_t(l)]);
                if (l == my_local_ || call.send_sizes[member] <= done) continue;
                std::memcpy(area(my_local_).staging[slot] + uint64_t(l) * piece, input + from[member] + done,
                            std::min(piece, call.send_sizes[member] - done));
            }
            post_staged();
            await(&Area::staged, staged_);
            for (int l = 0; l < locals(); ++l) {
                auto member = size_t(local_members_[size_t(l)]);
                if (l == my_local_ || call.receive_sizes[member] <= done) continue;
                std::memcpy(output + to[member] + done, area(l).staging[slot] + uint64_t(my_local_) * piece,
                            std::min(piece, call.receive_sizes[member] - done));
            }
        }
    }
    for (size_t i = 0; i < receives.count; ++i) finish(receives, i);
    for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
}

// All on this node have arrived. First members tell each other so, then the rest.
void Group::barrier(const Call& call) {
    if (one_node()) return;
    const size_t m = nodes_.size();
    if (my_local_ == 0) {
        Links& links = context_->links();
        auto ranks = column(0);
        const uint32_t check = check_of(call);
        for (size_t distance = 1, round = 0; distance < m; distance <<= 1, ++round) {
            Batch two(links, 2);
            links.receive_message(ranks[(size_t(my_node_) + m - distance) % m], key_, sequence_, uint32_t(round), check,
                                  nullptr, 0, &two[0]);
            links.send_message(ranks[(size_t(my_node_) + distance) % m], key_, sequence_, uint32_t(round), check, nullptr,
                               0, &two[1]);
            finish(two, 0);
            finish(two, 1);
        }
    }
    ++finished_;
    if (locals() == 1) return;
    area(my_local_).finished.post(finished_);
    if (my_local_ != 0) await_one(area(0).finished, finished_, 0);
}

}  // namespace carme

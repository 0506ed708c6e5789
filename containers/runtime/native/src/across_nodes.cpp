// Allreduce between nodes: directly, around a ring, or by recursive halving and doubling.
//
// Ring: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009. Halving and
// doubling: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "group.hpp"
#include "zeros.hpp"

namespace carme {
namespace {

constexpr uint64_t calibrated_sizes[] = {1 << 10, 16 << 10, 256 << 10, 2 << 20};
constexpr int calibration_turns = 5;
constexpr size_t calibrated_distances = 4;
constexpr uint32_t calibration_tag = 0xCA11B000;

// Elements of a piece: as many as have `piece_bytes` on their way. Smaller ones cost more calls and interrupts.
uint64_t elements_of_piece(Wire wire, uint64_t element) {
    switch (wire) {
        case Wire::bf16: return piece_bytes / 2;
        case Wire::int8: return piece_bytes;
        default: return piece_bytes / element;
    }
}

}  // namespace

// A buffer in blocks, and these in pieces: as elements in memory, and as they travel. Where elements travel in fewer
// bits every rank brings each element to that form at most once, so one place for each piece and one residual for
// each element do; a result is what all others decode too, so that all ranks have the same bits.
class Group::Transit {
public:
    // `places`: for so many pieces on their way there is memory, the next one gets that of the first; 0: for all.
    Transit(const Call& call, bool compressed, char* data, uint64_t count, uint64_t blocks, std::vector<char>& memory,
            uint64_t places = 0)
        : call_(call), wire_(compressed ? call.wire : Wire::same), element_(size_of(call.type)), data_(data),
          count_(count), each_((count + blocks - 1) / blocks),
          in_piece_(std::clamp(each_, uint64_t(1), elements_of_piece(wire_, element_))),
          pieces_((each_ + in_piece_ - 1) / in_piece_), places_(places ? places : blocks * pieces_),
          piece_size_(wire_size(wire_, element_, in_piece_)) {
        if (wire_ == Wire::same) return;
        uint64_t needed = places_ * piece_size_;
        if (memory.size() < needed) memory.resize(needed);
        travelling_ = memory.data();
        if (!call.residual) return;
        if (call.residual->size() != count) call.residual->assign(count, 0.0f);
        residual_ = call.residual->data();
    }

    uint64_t pieces() const { return pieces_; }
    uint64_t piece_size() const { return piece_size_; }  // bytes of a piece on its way
    uint64_t size(uint64_t block, uint64_t piece) const { return wire_size(wire_, element_, length(block, piece)); }
    // Where a piece is sent from, and where a finished one is received.
    char* at(uint64_t block, uint64_t piece) const {
        return wire_ == Wire::same ? data_ + begin(block, piece) * element_
                                   : travelling_ + (block * pieces_ + piece) % places_ * piece_size_;
    }
    // Before a piece is sent.
    void prepare(uint64_t block, uint64_t piece) const {
        if (wire_ == Wire::same) return;
        kernels().encode(wire_, floats(block, piece), residual_ ? residual_ + begin(block, piece) : nullptr,
                         at(block, piece), length(block, piece));
    }
    // After a finished piece has come, or was prepared.
    void settle(uint64_t block, uint64_t piece) const {
        if (wire_ != Wire::same)
            kernels().decode(wire_, at(block, piece), floats(block, piece), length(block, piece), false);
    }
    // Adds a piece that has come. `before`: it is of a member before this one.
    void absorb(uint64_t block, uint64_t piece, const char* received, bool before) const {
        if (wire_ != Wire::same) {
            kernels().decode(wire_, received, floats(block, piece), length(block, piece), true);
            return;
        }
        char* own_data = at(block, piece);
        const void* sources[2] = {before ? received : own_data, before ? own_data : received};
        void* destination = own_data;
        reduce(call_.type, call_.reduction, sources, 2, &destination, 1, length(block, piece));
    }

    // The piece of this member, which was prepared, and that of the only other one, which has come: the result,
    // times `scale`.
    void unite(uint64_t block, uint64_t piece, const char* received, bool before, double scale) const {
        const char* own_data = at(block, piece);
        const uint64_t count = length(block, piece);
        if (wire_ == Wire::same) {
            const void* sources[2] = {before ? received : own_data, before ? own_data : received};
            void* destination = at(block, piece);
            reduce(call_.type, call_.reduction, sources, 2, &destination, 1, count, scale);
            return;
        }
        for (uint64_t done = 0; done < count; done += in_cache) {  // so that the second step finds what the first left
            const uint64_t step = std::min(in_cache, count - done), offset = wire_size(wire_, element_, done);
            float* out = floats(block, piece) + done;
            kernels().decode(wire_, own_data + offset, out, step, false);
            kernels().decode(wire_, received + offset, out, step, true);
            if (scale == 1.0) continue;
            const void* source = out;
            void* destination = out;
            reduce(call_.type, call_.reduction, &source, 1, &destination, 1, step, scale);
        }
    }

private:
    uint64_t begin(uint64_t block, uint64_t piece) const {
        return std::min({block * each_ + piece * in_piece_, (block + 1) * each_, count_});
    }
    uint64_t length(uint64_t block, uint64_t piece) const {
        return std::min({begin(block, piece) + in_piece_, (block + 1) * each_, count_}) - begin(block, piece);
    }
    float* floats(uint64_t block, uint64_t piece) const {
        return reinterpret_cast<float*>(data_) + begin(block, piece);
    }

    static constexpr uint64_t in_cache = 4096;  // elements
    static_assert(in_cache % wire_block == 0);

    const Call& call_;
    Wire wire_;
    uint64_t element_;
    char* data_;
    uint64_t count_, each_, in_piece_, pieces_, places_, piece_size_;
    char* travelling_ = nullptr;
    float* residual_ = nullptr;
};

Algorithm Group::choose(size_t nodes, uint64_t count, const Call& call, bool compressed) const {
    if (count < nodes) return Algorithm::direct;
    if (algorithm_ != Algorithm::automatic) return algorithm_;
    const Wire wire = compressed ? call.wire : Wire::same;
    Algorithm best = context_->link_model().best(nodes, double(wire_size(wire, size_of(call.type), count)));
    return best == Algorithm::direct && compressed ? Algorithm::ring : best;
}

void Group::across_nodes(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
                         double scale) {
    const bool compressed = call.wire != Wire::same && count * size_of(call.type) > compressed_from;
    std::optional<Links::Engaged> engaged;
    if (count * size_of(call.type) > piece_bytes) engaged.emplace(context_->links(), key_, sequence_, check_of(call));
    // A caller who has nothing else to do drives the links between two polls, too: the thread in the background would
    // only take the core from it.
    std::optional<Links::Foreground> driving;
    if (engaged && patient_) driving.emplace(context_->links());
    if (column.size() == 2)
        return exchange_two(column[size_t(1 - position)], position == 0, data, count, call, compressed, scale);
    switch (choose(column.size(), count, call, compressed)) {
        case Algorithm::halving: return halving(column, position, data, count, call, compressed);
        case Algorithm::ring: return ring(column, position, data, count, call, compressed);
        default: return exchange_all(column, position, data, count, call);
    }
}

void Group::send_piece(Batch& sends, size_t index, int peer, uint32_t tag, uint32_t check, const char* data,
                       uint64_t size) {
    if (auto compact = without_zeros(data, size); compact.size) {
        sends.sent.resize(sends.count);
        sends.sent[index] = std::move(compact.data);
        while (sends.released < index && sends[sends.released].state.load(std::memory_order_acquire) == State::done)
            sends.sent[sends.released++].reset();
        data = sends.sent[index].get();
        size = compact.size;
    }
    context_->links().send_message(peer, key_, sequence_, tag, check, data, size, &sends[index]);
}

void Group::expect_piece(Batch& receives, size_t index, int peer, uint32_t tag, uint32_t check, char* into,
                         uint64_t size) {
    receives[index].at_most = true;
    context_->links().receive_message(peer, key_, sequence_, tag, check, into, size, &receives[index]);
}

// Two nodes send each other everything: as much as a ring would, in one step instead of two.
void Group::exchange_two(int peer, bool first, char* data, uint64_t count, const Call& call, bool compressed,
                         double scale) {
    if (!compressed && count * size_of(call.type) >= halves_from)
        return exchange_halves(peer, first, data, count, call, scale);
    // What is brought to fewer bits, and taken back, stays in the cache. A thread in the background comes late, and
    // needs more that is under way.
    const uint64_t most_ahead = compressed && patient_ ? compressed_window : window;
    Transit transit(call, compressed, data, count, 1, travelling_, most_ahead);
    const uint64_t pieces = transit.pieces(), ahead = std::min(most_ahead, pieces);
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(ahead * transit.piece_size());
    Batch receives(links, pieces), sends(links, pieces);
    auto place = [&](uint64_t p) { return receive_buffer + p % ahead * transit.piece_size(); };
    auto expect = [&](uint64_t p) {
        expect_piece(receives, p, peer, uint32_t(p), check, place(p), transit.size(0, p));
    };
    auto send = [&](uint64_t p) {
        transit.prepare(0, p);
        send_piece(sends, p, peer, uint32_t(p), check, transit.at(0, p), transit.size(0, p));
    };
    uint64_t sent = 0;
    while (sent < (compressed ? std::min<uint64_t>(1, pieces) : pieces)) send(sent++);
    for (uint64_t p = 0; p < ahead; ++p) expect(p);
    // Bringing pieces to how they travel takes time, in which those that have come are not to wait.
    for (; sent < ahead; send(sent++))
        if (patient_) links.poll(0, 1);
    for (uint64_t p = 0; p < pieces; ++p) {
        finish(receives, p);
        finish(sends, p);  // the result, or a later piece, takes the place of what was sent
        transit.unite(0, p, place(p), !first, scale);
        if (p + ahead < pieces) expect(p + ahead);
        if (sent < pieces) send(sent++);
    }
}

// Two nodes with many bytes: each adds one half and sends the sums back, which is as many bytes and half the adding. The
// sums of the first pieces travel behind the last pieces of the other half, so that the link is never idle.
void Group::exchange_halves(int peer, bool first, char* data, uint64_t count, const Call& call, double scale) {
    Transit transit(call, false, data, count, 2, travelling_);
    const uint64_t pieces = transit.pieces(), ahead = std::min<uint64_t>(window, pieces);
    const uint64_t own_block = first ? 0 : 1, peer_block = 1 - own_block;
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(ahead * transit.piece_size());
    Batch receives(links, 2 * pieces), sends(links, 2 * pieces);
    auto place = [&](uint64_t p) { return receive_buffer + p % ahead * transit.piece_size(); };
    auto expect = [&](uint64_t tag, char* into, uint64_t size) {
        expect_piece(receives, tag, peer, uint32_t(tag), check, into, size);
    };
    auto send = [&](uint64_t tag, uint64_t block, uint64_t p) {
        send_piece(sends, tag, peer, uint32_t(tag), check, transit.at(block, p), transit.size(block, p));
    };
    uint64_t sums = 0;  // that are expected
    auto expect_sum = [&] {
        expect(pieces + sums, transit.at(peer_block, sums), transit.size(peer_block, sums));
        ++sums;
    };
    for (uint64_t p = 0; p < ahead; ++p) expect(p, place(p), transit.size(own_block, p));
    for (uint64_t p = 0; p < pieces; ++p) send(p, peer_block, p);
    for (uint64_t p = 0; p < pieces; ++p) {
        finish(receives, p);
        transit.unite(own_block, p, place(p), !first, scale);
        send(pieces + p, own_block, p);
        if (p + ahead < pieces) expect(p + ahead, place(p + ahead), transit.size(own_block, p + ahead));
        // A sum takes the place of what was sent.
        while (sums <= p && sends[sums].state.load(std::memory_order_acquire) == State::done) expect_sum();
    }
    while (sums < pieces) {
        finish(sends, sums);
        expect_sum();
    }
    for (uint64_t p = pieces; p < 2 * pieces; ++p) finish(receives, p);
    for (uint64_t p = pieces; p < 2 * pieces; ++p) finish(sends, p);
}

// Few bytes: everybody sends to everybody, one step.
void Group::exchange_all(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call) {
    const uint64_t bytes = count * size_of(call.type), step = (bytes + 127) / 128 * 128;
    const size_t m = column.size();
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(step * m);
    Batch receives(links, m), sends(links, m);
    for (size_t i = 0; i < m; ++i)
        if (int(i) != position)
            links.receive_message(column[i], key_, sequence_, 0, check, receive_buffer + i * step, bytes, &receives[i]);
    for (size_t i = 0; i < m; ++i)
        if (int(i) != position) links.send_message(column[i], key_, sequence_, 0, check, data, bytes, &sends[i]);
    std::vector<const void*> sources(m);
    for (size_t i = 0; i < m; ++i) {
        sources[i] = int(i) == position ? data : receive_buffer + i * step;
        receives[size_t(position)].state = sends[size_t(position)].state = State::done;
        finish(receives, i);
        finish(sends, i);
    }
    void* destination = data;
    reduce(call.type, call.reduction, sources.data(), int(m), &destination, 1, count);
}

// Blocks travel around in pieces; each is passed on as soon as it is there.
void Group::ring(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
                 bool compressed) {
    const uint64_t m = column.size(), own_position = uint64_t(position);
    const int next = column[(own_position + 1) % m], previous = column[(own_position + m - 1) % m];
    Transit transit(call, compressed, data, count, m, travelling_);
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    const uint64_t pieces = transit.pieces(), steps = 2 * (m - 1);
    // Block that is received in a step: sums until step m - 2, finished ones after it.
    auto block_at = [&](uint64_t step) { return (own_position + 2 * m - 1 - step) % m; };
    char* receive_buffer = scratch(2 * pieces * transit.piece_size());
    auto place = [&](uint64_t step, uint64_t p) {
        return receive_buffer + (step % 2 * pieces + p) * transit.piece_size();
    };
    Batch receives(links, size_t(steps * pieces)), sends(links, size_t(steps * pieces));
    auto expect = [&](uint64_t step) {
        for (uint64_t p = 0; p < pieces; ++p) {
            const uint64_t block = block_at(step);
            expect_piece(receives, step * pieces + p, previous, uint32_t(step * pieces + p), check,
                         step < m - 1 ? place(step, p) : transit.at(block, p), transit.size(block, p));
        }
    };
    auto send = [&](uint64_t step, uint64_t p) {
        const uint64_t block = (own_position + 2 * m - step) % m;
        if (step < m) transit.prepare(block, p);
        if (step == m - 1) transit.settle(block, p);
        send_piece(sends, step * pieces + p, next, uint32_t(step * pieces + p), check, transit.at(block, p),
                   transit.size(block, p));
    };
    expect(0);
    for (uint64_t p = 0; p < pieces; ++p) send(0, p);
    for (uint64_t step = 0; step < steps; ++step) {
        // A finished block overwrites one whose own sending, m steps before, must be over.
        if (step + 1 < steps) {
            if (step + 1 >= m - 1)
                for (uint64_t p = 0; p < pieces; ++p) finish(sends, (step + 1 - (m - 1)) * pieces + p);
            expect(step + 1);
        }
        for (uint64_t p = 0; p < pieces; ++p) {
            finish(receives, step * pieces + p);
            if (step < m - 1) transit.absorb(block_at(step), p, place(step, p), true);
            else transit.settle(block_at(step), p);
            if (step + 1 < steps) send(step + 1, p);
        }
    }
    for (uint64_t i = 0; i < steps * pieces; ++i) finish(sends, i);
}

// Pairs exchange halves of what they still have to reduce, then the other way around what they have. Where the
// number of nodes is no power of two, some lean on their neighbour.
class Group::Halving {
public:
    Halving(Group& group, const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
            bool compressed)
        : group_(group), column_(column), own_position_(uint64_t(position)),
          power_(std::bit_floor(uint64_t(column.size()))),
          leaning_(column.size() - power_), transit_(call, compressed, data, count, power_, group.travelling_),
          pieces_(transit_.pieces()), check_(group.check_of(call)) {}

    void run() {
        const uint64_t total = power_ * pieces_;
        if (own_position_ < 2 * leaning_ && own_position_ % 2 == 0) {
            trade(own_position_ + 1, 0, 0, 0, total);
            step_ = last;
            return swap(own_position_ + 1, 0, total, 0, 0);
        }
        if (own_position_ < 2 * leaning_) trade(own_position_ - 1, 0, total, 0, 0);
        reduce_and_share(own_position_ < 2 * leaning_ ? own_position_ / 2 : own_position_ - leaning_);
        step_ = last;
        if (own_position_ < 2 * leaning_) swap(own_position_ - 1, 0, 0, 0, total);
    }

private:
    // Of this member by its number among those that do not lean.
    void reduce_and_share(uint64_t number) {
        auto member = [&](uint64_t n) { return n < leaning_ ? 2 * n + 1 : n + leaning_; };
        for (uint64_t distance = power_ / 2; distance; distance /= 2) {
            ++step_;
            const uint64_t own_block = number & ~(distance - 1), peer_block = own_block ^ distance;
            trade(member(number ^ distance), own_block * pieces_, (own_block + distance) * pieces_,
                  peer_block * pieces_, (peer_block + distance) * pieces_);
        }
        for (uint64_t p = 0; p < pieces_; ++p) {
            transit_.prepare(number, p);
            transit_.settle(number, p);
        }
        for (uint64_t distance = 1; distance < power_; distance *= 2) {
            ++step_;
            const uint64_t own_block = number & ~(distance - 1), peer_block = own_block ^ distance;
            swap(member(number ^ distance), peer_block * pieces_, (peer_block + distance) * pieces_,
                 own_block * pieces_, (own_block + distance) * pieces_);
        }
    }

    // Sends some pieces and adds others, [begin, end) by number, that the peer sends.
    void trade(uint64_t peer, uint64_t begin, uint64_t end, uint64_t send_begin, uint64_t send_end) {
        const uint64_t number = end - begin, ahead = std::min<uint64_t>(window, number);
        char* receive_buffer = group_.scratch(ahead * transit_.piece_size());
        Links& links = group_.context_->links();
        Batch receives(links, number), sends(links, send_end - send_begin);
        auto place = [&](uint64_t i) { return receive_buffer + i % ahead * transit_.piece_size(); };
        for (uint64_t i = 0; i < ahead; ++i) expect(peer, begin + i, receives, i, place(i));
        for (uint64_t i = send_begin; i < send_end; ++i) {
            transit_.prepare(i / pieces_, i % pieces_);
            send(peer, i, sends, i - send_begin);
        }
        for (uint64_t i = 0; i < number; ++i) {
            group_.finish(receives, i);
            transit_.absorb((begin + i) / pieces_, (begin + i) % pieces_, place(i), peer < own_position_);
            if (i + ahead < number) expect(peer, begin + i + ahead, receives, i + ahead, place(i + ahead));
        }
        finish_all(sends);  // finished pieces will take the place of these
    }

    // Sends finished pieces for others, [begin, end) by number.
    void swap(uint64_t peer, uint64_t begin, uint64_t end, uint64_t send_begin, uint64_t send_end) {
        Links& links = group_.context_->links();
        Batch receives(links, end - begin), sends(links, send_end - send_begin);
        for (uint64_t i = begin; i < end; ++i)
            expect(peer, i, receives, i - begin, transit_.at(i / pieces_, i % pieces_));
        for (uint64_t i = send_begin; i < send_end; ++i) send(peer, i, sends, i - send_begin);
        for (uint64_t i = begin; i < end; ++i) {
            group_.finish(receives, i - begin);
            transit_.settle(i / pieces_, i % pieces_);
        }
        finish_all(sends);
    }

    void send(uint64_t to, uint64_t i, Batch& batch, uint64_t place) {
        group_.send_piece(batch, place, column_[to], tag(i), check_, transit_.at(i / pieces_, i % pieces_),
                          transit_.size(i / pieces_, i % pieces_));
    }
    void expect(uint64_t from, uint64_t i, Batch& batch, uint64_t place, char* into) {
        group_.expect_piece(batch, place, column_[from], tag(i), check_, into,
                            transit_.size(i / pieces_, i % pieces_));
    }
    void finish_all(Batch& batch) {
        for (size_t i = 0; i < batch.count; ++i) group_.finish(batch, i);
    }
    uint32_t tag(uint64_t i) const { return uint32_t(step_ << 26 | i); }

    static constexpr uint64_t last = 63;  // step in which those that lean get the result

    Group& group_;
    const std::vector<int>& column_;
    const uint64_t own_position_, power_, leaning_;
    Transit transit_;
    const uint64_t pieces_;
    const uint32_t check_;
    uint64_t step_ = 0;
};

void Group::halving(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
                    bool compressed) {
    Halving(*this, column, position, data, count, call, compressed).run();
}

LinkModel Group::measure_links() {
    LinkModel model;
    model.points.clear();
    if (one_node()) return model;
    const size_t m = nodes_.size(), sizes = std::size(calibrated_sizes);
    std::vector<double> slowest(sizes, 0.0);
    std::vector<char> out(calibrated_sizes[sizes - 1]), in(out.size());
    Call barrier_call;
    execute(barrier_call);
    if (local_rank_ == 0)
        for (size_t distance = 1; distance <= std::min(m - 1, calibrated_distances); ++distance) {
            const int right = nodes_[(size_t(own_node_) + distance) % m][0];
            const int left = nodes_[(size_t(own_node_) + m - distance) % m][0];
            for (size_t s = 0; s < sizes; ++s) {
                double shortest = 1e12;
                for (int turn = 0; turn < calibration_turns; ++turn) {
                    const int64_t begin = now_ns();
                    auto receiving = receive(left, in.data(), calibrated_sizes[s], calibration_tag);
                    auto sending = send(right, out.data(), calibrated_sizes[s], calibration_tag);
                    receiving->wait({});
                    sending->wait({});
                    shortest = std::min(shortest, double(now_ns() - begin) / 1000);
                }
                slowest[s] = std::max(slowest[s], shortest);
            }
        }
    Call maximum_call;
    maximum_call.kind = Kind::allreduce;
    maximum_call.buffer = slowest.data();
    maximum_call.count = sizes;
    maximum_call.type = Type::f64;
    maximum_call.reduction = Reduction::maximum;
    execute(maximum_call);
    for (size_t s = 0; s < sizes; ++s) model.points.emplace_back(calibrated_sizes[s], slowest[s]);
    return model;
}

}  // namespace carme

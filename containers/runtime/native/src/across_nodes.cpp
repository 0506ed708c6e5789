// Allreduce between nodes: directly, around a ring, or by recursive halving and doubling.
//
// Ring: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
// Halving and doubling: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations
// in MPICH, 2005.
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

// Elements of a piece, from its encoded size `piece_bytes`. Smaller pieces cost more calls and interrupts.
uint64_t elements_of_piece(Wire wire, uint64_t element) {
    switch (wire) {
        case Wire::bf16: return piece_bytes / 2;
        case Wire::int8: return piece_bytes;
        default: return piece_bytes / element;
    }
}

}  // namespace

// A buffer, divided into blocks and these into pieces, in memory and encoded for the wire. With a compressed
// wire type each rank encodes each element at most once, so one slot per piece and one residual per element
// suffice. All ranks decode the same encoded result, so that results are bitwise equal.
class Group::PieceBuffer {
public:
    // `slots`: the number of encoded pieces in memory, used in turn; 0: one for each piece.
    PieceBuffer(const Call& call, bool compressed, char* data, uint64_t count, uint64_t blocks,
                std::vector<char>& memory, uint64_t slots = 0)
        : call_(call), wire_(compressed ? call.wire : Wire::same), element_(size_of(call.type)), data_(data),
          count_(count), elements_per_block_((count + blocks - 1) / blocks),
          elements_per_piece_(
              std::clamp(elements_per_block_, uint64_t(1), elements_of_piece(wire_, element_))),
          pieces_((elements_per_block_ + elements_per_piece_ - 1) / elements_per_piece_),
          slots_(slots ? slots : blocks * pieces_),
          piece_size_(wire_size(wire_, element_, elements_per_piece_)) {
        if (wire_ == Wire::same) return;
        uint64_t needed = slots_ * piece_size_;
        if (memory.size() < needed) memory.resize(needed);
        encoded_ = memory.data();
        if (!call.residual) return;
        if (call.residual->size() != count) call.residual->assign(count, 0.0f);
        residual_ = call.residual->data();
    }

    uint64_t pieces() const { return pieces_; }
    uint64_t piece_size() const { return piece_size_; }  // encoded size
    uint64_t size(uint64_t block, uint64_t piece) const {
        return wire_size(wire_, element_, length(block, piece));
    }
    // Where a piece is sent from, and where a final one is received.
    char* at(uint64_t block, uint64_t piece) const {
        return wire_ == Wire::same ? data_ + begin(block, piece) * element_
                                   : encoded_ + (block * pieces_ + piece) % slots_ * piece_size_;
    }
    // Call it before a piece is sent.
    void encode_piece(uint64_t block, uint64_t piece) const {
        if (wire_ == Wire::same) return;
        kernels().encode(wire_, floats(block, piece), residual_ ? residual_ + begin(block, piece) : nullptr,
                         at(block, piece), length(block, piece));
    }
    // Call it after a final piece arrived or was encoded.
    void decode_piece(uint64_t block, uint64_t piece) const {
        if (wire_ != Wire::same)
            kernels().decode(wire_, at(block, piece), floats(block, piece), length(block, piece), false);
    }
    // Reduces a received piece into the own one. `before`: its sender precedes this member.
    void accumulate(uint64_t block, uint64_t piece, const char* received, bool before) const {
        if (wire_ != Wire::same) {
            kernels().decode(wire_, received, floats(block, piece), length(block, piece), true);
            return;
        }
        char* own_data = at(block, piece);
        const void* sources[2] = {before ? received : own_data, before ? own_data : received};
        void* destination = own_data;
        reduce(call_.type, call_.reduction, sources, 2, &destination, 1, length(block, piece));
    }

    // Reduces the own encoded piece and the received one of the only peer, times `scale`.
    void reduce_pair(uint64_t block, uint64_t piece, const char* received, bool before, double scale) const {
        const char* own_data = at(block, piece);
        const uint64_t count = length(block, piece);
        if (wire_ == Wire::same) {
            const void* sources[2] = {before ? received : own_data, before ? own_data : received};
            void* destination = at(block, piece);
            reduce(call_.type, call_.reduction, sources, 2, &destination, 1, count, scale);
            return;
        }
        // In blocks that stay in the cache between both steps.
        for (uint64_t done = 0; done < count; done += in_cache) {
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
        return std::min({block * elements_per_block_ + piece * elements_per_piece_,
                         (block + 1) * elements_per_block_, count_});
    }
    uint64_t length(uint64_t block, uint64_t piece) const {
        return std::min(
                   {begin(block, piece) + elements_per_piece_, (block + 1) * elements_per_block_, count_}) -
               begin(block, piece);
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
    uint64_t count_, elements_per_block_, elements_per_piece_, pieces_, slots_, piece_size_;
    char* encoded_ = nullptr;
    float* residual_ = nullptr;
};

Algorithm Group::choose(size_t nodes, uint64_t count, const Call& call, bool compressed) const {
    if (count < nodes) return Algorithm::direct;
    if (algorithm_ != Algorithm::automatic) return algorithm_;
    const Wire wire = compressed ? call.wire : Wire::same;
    Algorithm best = context_->link_model().best(nodes, double(wire_size(wire, size_of(call.type), count)));
    return best == Algorithm::direct && compressed ? Algorithm::ring : best;
}

void Group::across_nodes(const std::vector<int>& column, int position, char* data, uint64_t count,
                         const Call& call, double scale) {
    const bool compressed = call.wire != Wire::same && count * size_of(call.type) > compressed_from;
    std::optional<Links::Engaged> engaged;
    if (count * size_of(call.type) > piece_bytes)
        engaged.emplace(context_->links(), key_, sequence_, check_of(call));
    // A waiting caller drives the links itself between two polls: the background thread would only take its
    // core.
    std::optional<Links::Foreground> driving;
    if (engaged && is_foreground_) driving.emplace(context_->links());
    if (column.size() == 2)
        return exchange_two(column[size_t(1 - position)], position == 0, data, count, call, compressed,
                            scale);
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
        while (sends.released < index &&
               sends[sends.released].state.load(std::memory_order_acquire) == State::done)
            sends.sent[sends.released++].reset();
        data = sends.sent[index].get();
        size = compact.size;
    }
    context_->links().send_message(peer, key_, sequence_, tag, check, data, size, &sends[index]);
}

void Group::expect_piece(Batch& receives, size_t index, int peer, uint32_t tag, uint32_t check, char* into,
                         uint64_t size) {
    receives[index].allow_shorter = true;
    context_->links().receive_message(peer, key_, sequence_, tag, check, into, size, &receives[index]);
}

// Two nodes exchange their whole buffers: as many bytes as a ring, in one step instead of two.
void Group::exchange_two(int peer, bool first, char* data, uint64_t count, const Call& call, bool compressed,
                         double scale) {
    if (!compressed && count * size_of(call.type) >= halves_from)
        return exchange_halves(peer, first, data, count, call, scale);
    // A small window keeps encoded pieces in the cache. A background thread is scheduled late and needs more
    // pieces in flight.
    const uint64_t max_ahead = compressed && is_foreground_ ? compressed_window : window;
    PieceBuffer buffer(call, compressed, data, count, 1, encoded_, max_ahead);
    const uint64_t pieces = buffer.pieces(), ahead = std::min(max_ahead, pieces);
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(ahead * buffer.piece_size());
    Batch receives(links, pieces), sends(links, pieces);
    auto place = [&](uint64_t p) { return receive_buffer + p % ahead * buffer.piece_size(); };
    auto expect = [&](uint64_t p) {
        expect_piece(receives, p, peer, uint32_t(p), check, place(p), buffer.size(0, p));
    };
    auto send = [&](uint64_t p) {
        buffer.encode_piece(0, p);
        send_piece(sends, p, peer, uint32_t(p), check, buffer.at(0, p), buffer.size(0, p));
    };
    uint64_t sent = 0;
    while (sent < (compressed ? std::min<uint64_t>(1, pieces) : pieces)) send(sent++);
    for (uint64_t p = 0; p < ahead; ++p) expect(p);
    // Encoding takes time. Poll meanwhile, so that received pieces do not wait.
    for (; sent < ahead; send(sent++))
        if (is_foreground_) links.poll(0, 1);
    for (uint64_t p = 0; p < pieces; ++p) {
        finish(receives, p);
        finish(sends, p);  // the result, or a later piece, overwrites the sent piece
        buffer.reduce_pair(0, p, place(p), !first, scale);
        if (p + ahead < pieces) expect(p + ahead);
        if (sent < pieces) send(sent++);
    }
}

// Large buffers of two nodes: each node reduces one half and sends the result back, which is as many bytes
// and half the computation. The results of the first pieces follow the last pieces of the other half, so that
// the link is never idle.
void Group::exchange_halves(int peer, bool first, char* data, uint64_t count, const Call& call,
                            double scale) {
    PieceBuffer buffer(call, false, data, count, 2, encoded_);
    const uint64_t pieces = buffer.pieces(), ahead = std::min<uint64_t>(window, pieces);
    const uint64_t own_block = first ? 0 : 1, peer_block = 1 - own_block;
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(ahead * buffer.piece_size());
    Batch receives(links, 2 * pieces), sends(links, 2 * pieces);
    auto place = [&](uint64_t p) { return receive_buffer + p % ahead * buffer.piece_size(); };
    auto expect = [&](uint64_t tag, char* into, uint64_t size) {
        expect_piece(receives, tag, peer, uint32_t(tag), check, into, size);
    };
    auto send = [&](uint64_t tag, uint64_t block, uint64_t p) {
        send_piece(sends, tag, peer, uint32_t(tag), check, buffer.at(block, p), buffer.size(block, p));
    };
    uint64_t sums = 0;  // posted receives of results
    auto expect_sum = [&] {
        expect(pieces + sums, buffer.at(peer_block, sums), buffer.size(peer_block, sums));
        ++sums;
    };
    for (uint64_t p = 0; p < ahead; ++p) expect(p, place(p), buffer.size(own_block, p));
    for (uint64_t p = 0; p < pieces; ++p) send(p, peer_block, p);
    for (uint64_t p = 0; p < pieces; ++p) {
        finish(receives, p);
        buffer.reduce_pair(own_block, p, place(p), !first, scale);
        send(pieces + p, own_block, p);
        if (p + ahead < pieces) expect(p + ahead, place(p + ahead), buffer.size(own_block, p + ahead));
        // A result overwrites the piece that was sent.
        while (sums <= p && sends[sums].state.load(std::memory_order_acquire) == State::done) expect_sum();
    }
    while (sums < pieces) {
        finish(sends, sums);
        expect_sum();
    }
    for (uint64_t p = pieces; p < 2 * pieces; ++p) finish(receives, p);
    for (uint64_t p = pieces; p < 2 * pieces; ++p) finish(sends, p);
}

// Small buffers: all nodes send to all nodes in one step.
void Group::exchange_all(const std::vector<int>& column, int position, char* data, uint64_t count,
                         const Call& call) {
    const uint64_t bytes = count * size_of(call.type), step = (bytes + 127) / 128 * 128;
    const size_t m = column.size();
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    char* receive_buffer = scratch(step * m);
    Batch receives(links, m), sends(links, m);
    for (size_t i = 0; i < m; ++i)
        if (int(i) != position)
            links.receive_message(column[i], key_, sequence_, 0, check, receive_buffer + i * step, bytes,
                                  &receives[i]);
    for (size_t i = 0; i < m; ++i)
        if (int(i) != position)
            links.send_message(column[i], key_, sequence_, 0, check, data, bytes, &sends[i]);
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

// A ring. Each piece of a block is passed on as soon as it arrives.
void Group::ring(const std::vector<int>& column, int position, char* data, uint64_t count, const Call& call,
                 bool compressed) {
    const uint64_t m = column.size(), own_position = uint64_t(position);
    const int next = column[(own_position + 1) % m], previous = column[(own_position + m - 1) % m];
    PieceBuffer buffer(call, compressed, data, count, m, encoded_);
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    const uint64_t pieces = buffer.pieces(), steps = 2 * (m - 1);
    // The block received in a step: a partial result until step m - 2, then a final one.
    auto block_at = [&](uint64_t step) { return (own_position + 2 * m - 1 - step) % m; };
    char* receive_buffer = scratch(2 * pieces * buffer.piece_size());
    auto place = [&](uint64_t step, uint64_t p) {
        return receive_buffer + (step % 2 * pieces + p) * buffer.piece_size();
    };
    Batch receives(links, size_t(steps * pieces)), sends(links, size_t(steps * pieces));
    auto expect = [&](uint64_t step) {
        for (uint64_t p = 0; p < pieces; ++p) {
            const uint64_t block = block_at(step);
            expect_piece(receives, step * pieces + p, previous, uint32_t(step * pieces + p), check,
                         step < m - 1 ? place(step, p) : buffer.at(block, p), buffer.size(block, p));
        }
    };
    auto send = [&](uint64_t step, uint64_t p) {
        const uint64_t block = (own_position + 2 * m - step) % m;
        if (step < m) buffer.encode_piece(block, p);
        if (step == m - 1) buffer.decode_piece(block, p);
        send_piece(sends, step * pieces + p, next, uint32_t(step * pieces + p), check, buffer.at(block, p),
                   buffer.size(block, p));
    };
    expect(0);
    for (uint64_t p = 0; p < pieces; ++p) send(0, p);
    for (uint64_t step = 0; step < steps; ++step) {
        // A final block overwrites one whose own send, m steps before, must be complete.
        if (step + 1 < steps) {
            if (step + 1 >= m - 1)
                for (uint64_t p = 0; p < pieces; ++p) finish(sends, (step + 1 - (m - 1)) * pieces + p);
            expect(step + 1);
        }
        for (uint64_t p = 0; p < pieces; ++p) {
            finish(receives, step * pieces + p);
            if (step < m - 1) buffer.accumulate(block_at(step), p, place(step, p), true);
            else buffer.decode_piece(block_at(step), p);
            if (step + 1 < steps) send(step + 1, p);
        }
    }
    for (uint64_t i = 0; i < steps * pieces; ++i) finish(sends, i);
}

// Recursive halving and doubling. Where the number of nodes is not a power of two, the first 2 * remainder
// nodes form pairs, and each even one lets its neighbour take part for both.
class Group::Halving {
public:
    Halving(Group& group, const std::vector<int>& column, int position, char* data, uint64_t count,
            const Call& call, bool compressed)
        : group_(group), column_(column), own_position_(uint64_t(position)),
          power_(std::bit_floor(uint64_t(column.size()))), remainder_(column.size() - power_),
          buffer_(call, compressed, data, count, power_, group.encoded_), pieces_(buffer_.pieces()),
          check_(group.check_of(call)) {}

    void run() {
        const uint64_t total = power_ * pieces_;
        if (own_position_ < 2 * remainder_ && own_position_ % 2 == 0) {
            exchange_and_reduce(own_position_ + 1, 0, 0, 0, total);
            step_ = last;
            return swap(own_position_ + 1, 0, total, 0, 0);
        }
        if (own_position_ < 2 * remainder_) exchange_and_reduce(own_position_ - 1, 0, total, 0, 0);
        reduce_and_gather(own_position_ < 2 * remainder_ ? own_position_ / 2 : own_position_ - remainder_);
        step_ = last;
        if (own_position_ < 2 * remainder_) swap(own_position_ - 1, 0, 0, 0, total);
    }

private:
    // `number`: the position among the nodes that take part.
    void reduce_and_gather(uint64_t number) {
        auto member = [&](uint64_t n) { return n < remainder_ ? 2 * n + 1 : n + remainder_; };
        for (uint64_t distance = power_ / 2; distance; distance /= 2) {
            ++step_;
            const uint64_t own_block = number & ~(distance - 1), peer_block = own_block ^ distance;
            exchange_and_reduce(member(number ^ distance), own_block * pieces_,
                                (own_block + distance) * pieces_, peer_block * pieces_,
                                (peer_block + distance) * pieces_);
        }
        for (uint64_t p = 0; p < pieces_; ++p) {
            buffer_.encode_piece(number, p);
            buffer_.decode_piece(number, p);
        }
        for (uint64_t distance = 1; distance < power_; distance *= 2) {
            ++step_;
            const uint64_t own_block = number & ~(distance - 1), peer_block = own_block ^ distance;
            swap(member(number ^ distance), peer_block * pieces_, (peer_block + distance) * pieces_,
                 own_block * pieces_, (own_block + distance) * pieces_);
        }
    }

    // Sends pieces and reduces the peer's pieces [begin, end).
    void exchange_and_reduce(uint64_t peer, uint64_t begin, uint64_t end, uint64_t send_begin,
                             uint64_t send_end) {
        const uint64_t number = end - begin, ahead = std::min<uint64_t>(window, number);
        char* receive_buffer = group_.scratch(ahead * buffer_.piece_size());
        Links& links = group_.context_->links();
        Batch receives(links, number), sends(links, send_end - send_begin);
        auto place = [&](uint64_t i) { return receive_buffer + i % ahead * buffer_.piece_size(); };
        for (uint64_t i = 0; i < ahead; ++i) expect(peer, begin + i, receives, i, place(i));
        for (uint64_t i = send_begin; i < send_end; ++i) {
            buffer_.encode_piece(i / pieces_, i % pieces_);
            send(peer, i, sends, i - send_begin);
        }
        for (uint64_t i = 0; i < number; ++i) {
            group_.finish(receives, i);
            buffer_.accumulate((begin + i) / pieces_, (begin + i) % pieces_, place(i), peer < own_position_);
            if (i + ahead < number) expect(peer, begin + i + ahead, receives, i + ahead, place(i + ahead));
        }
        finish_all(sends);  // final pieces will overwrite these
    }

    // Sends final pieces and receives the peer's final pieces [begin, end).
    void swap(uint64_t peer, uint64_t begin, uint64_t end, uint64_t send_begin, uint64_t send_end) {
        Links& links = group_.context_->links();
        Batch receives(links, end - begin), sends(links, send_end - send_begin);
        for (uint64_t i = begin; i < end; ++i)
            expect(peer, i, receives, i - begin, buffer_.at(i / pieces_, i % pieces_));
        for (uint64_t i = send_begin; i < send_end; ++i) send(peer, i, sends, i - send_begin);
        for (uint64_t i = begin; i < end; ++i) {
            group_.finish(receives, i - begin);
            buffer_.decode_piece(i / pieces_, i % pieces_);
        }
        finish_all(sends);
    }

    void send(uint64_t to, uint64_t i, Batch& batch, uint64_t place) {
        group_.send_piece(batch, place, column_[to], tag(i), check_, buffer_.at(i / pieces_, i % pieces_),
                          buffer_.size(i / pieces_, i % pieces_));
    }
    void expect(uint64_t from, uint64_t i, Batch& batch, uint64_t place, char* into) {
        group_.expect_piece(batch, place, column_[from], tag(i), check_, into,
                            buffer_.size(i / pieces_, i % pieces_));
    }
    void finish_all(Batch& batch) {
        for (size_t i = 0; i < batch.count; ++i) group_.finish(batch, i);
    }
    uint32_t tag(uint64_t i) const { return uint32_t(step_ << 26 | i); }

    static constexpr uint64_t last = 63;  // the step in which the even nodes of the pairs receive the result

    Group& group_;
    const std::vector<int>& column_;
    const uint64_t own_position_, power_, remainder_;
    PieceBuffer buffer_;
    const uint64_t pieces_;
    const uint32_t check_;
    uint64_t step_ = 0;
};

void Group::halving(const std::vector<int>& column, int position, char* data, uint64_t count,
                    const Call& call, bool compressed) {
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

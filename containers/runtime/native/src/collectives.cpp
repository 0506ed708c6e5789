// The collectives: their parts in shared memory and over the links between nodes.
#include "group.hpp"

#include <algorithm>
#include <cstring>

namespace carme {

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
        const bool small = bytes * uint64_t(local_size()) <= 2 * inline_size && bytes <= inline_size;
        arrive(call, small ? data : nullptr, small ? bytes : 0);
        if (local_size() == 1 || bytes == 0) return;
        if (small && all_inlined()) return allreduce_inline(call, scale);
        std::vector<char*> buffers;
        if (peers_in_segments(bytes, buffers)) return allreduce_in_segments(call, buffers, scale);
        return allreduce_staged(call, scale);
    }
    arrive(call, nullptr, 0);
    if (bytes == 0) return;
    if (uniform() && local_size() == 1) {
        across_nodes(column(0), own_node_, data, call.count, call, scale);
    } else {
        // First reduce within each node. If nodes have equal sizes, each member reduces one slice between the
        // nodes.
        std::vector<Range> slices = even_slices(call.count, element);
        const bool sliced = uniform() && bytes > 64 * 1024;
        if (!sliced) {
            std::fill(slices.begin(), slices.end(), Range{0, 0});
            slices[0] = {0, bytes};
        }
        char* own_slice = data + slices[size_t(local_rank_)].offset;
        if (local_size() > 1) reduce_slices(data, slices, own_slice, call);
        if (slices[size_t(local_rank_)].size)
            across_nodes(column(sliced ? local_rank_ : 0), own_node_, own_slice,
                         slices[size_t(local_rank_)].size / element, call, scale);
        if (local_size() > 1) {
            std::vector<std::vector<Range>> shares;
            for (auto& slice : slices) shares.push_back({slice});
            allgather_within_node(data, shares);
        }
    }
    if (scale != 1.0 && nodes_.size() != 2) {
        const void* source = data;
        void* destination = data;
        reduce(call.type, call.reduction, &source, 1, &destination, 1, call.count, scale);
    }
}

void Group::broadcast(const Call& call) {
    arrive(call, nullptr, 0);
    const uint64_t bytes = call.count * size_of(call.type);
    char* data = static_cast<char*>(call.buffer);
    if (size() == 1 || bytes == 0) return;
    // One member per node takes part between nodes: the root, and the first member of each other node.
    int root_node = 0;
    for (size_t n = 0; n < nodes_.size(); ++n)
        if (std::count(nodes_[n].begin(), nodes_[n].end(), call.root)) root_node = int(n);
    auto leader = [&](int node) { return node == root_node ? call.root : nodes_[size_t(node)][0]; };
    const int m = int(nodes_.size()), relative_node = (own_node_ - root_node + m) % m;
    const bool is_leader = leader(own_node_) == index_;
    int local_leader = 0;
    for (int l = 0; l < local_size(); ++l)
        if (local_members_[size_t(l)] == leader(own_node_)) local_leader = l;
    auto rank_at = [&](int p) { return ranks_[size_t(leader((p + root_node) % m))]; };
    std::vector<int> children;  // of a binomial tree
    int parent = -1;
    for (int bit = 1; bit < m; bit <<= 1) {
        if (relative_node & bit) {
            parent = relative_node - bit;
            break;
        }
        if (relative_node + bit < m) children.push_back(relative_node + bit);
    }
    std::reverse(children.begin(), children.end());

    Links& links = context_->links();
    const uint32_t check = check_of(call);
    const size_t pieces = size_t((bytes + chunk_size - 1) / chunk_size);
    const bool linked = m > 1 && is_leader;
    Batch receives(links, linked && parent >= 0 ? pieces : 0),
        sends(links, linked ? pieces * children.size() : 0);
    auto size_at = [&](size_t p) { return std::min(chunk_size, bytes - p * chunk_size); };
    for (size_t p = 0; p < receives.count; ++p)
        links.receive_message(rank_at(parent), key_, sequence_, uint32_t(p), check, data + p * chunk_size,
                              size_at(p), &receives[p]);
    for (size_t p = 0; p < pieces; ++p) {
        char* at = data + p * chunk_size;
        if (linked) {
            if (parent >= 0) finish(receives, p);
            for (size_t c = 0; c < children.size(); ++c)
                links.send_message(rank_at(children[c]), key_, sequence_, uint32_t(p), check, at, size_at(p),
                                   &sends[p * children.size() + c]);
        }
        if (local_size() == 1) continue;
        const uint32_t slot = staged_ % depth;
        if (is_leader) std::memcpy(area(local_rank_).staging[slot], at, size_at(p));
        post_staged();
        await(&Area::staged, staged_);
        if (!is_leader) std::memcpy(at, area(local_leader).staging[slot], size_at(p));
    }
    for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
}

void Group::reduce_scatter(const Call& call) {
    const uint64_t element = size_of(call.type), block = call.count * element;
    const double scale = call.reduction == Reduction::mean ? 1.0 / size() : 1.0;
    const char* input = static_cast<const char*>(call.input);
    char* output = static_cast<char*>(call.output);
    if (!one_node() && !uniform()) {
        // Nodes of different sizes: reduce everything, keep the own block.
        std::vector<char> reduced(input, input + block * uint64_t(size()));
        Call full_call = call;
        full_call.kind = Kind::allreduce;
        full_call.buffer = reduced.data();
        full_call.count = call.count * uint64_t(size());
        allreduce(full_call);
        std::memcpy(output, reduced.data() + block * uint64_t(index_), block);
        return;
    }
    arrive(call, nullptr, 0);
    if (block == 0) return;
    std::vector<char*> inputs;
    if (one_node() && local_size() > 1 && peers_in_segments(block * uint64_t(size()), inputs)) {
        // Each member reads its block directly from all inputs.
        std::vector<const void*> sources;
        for (char* peer_input : inputs) sources.push_back(peer_input + uint64_t(index_) * block);
        void* destination = output;
        reduce(call.type, call.reduction, sources.data(), local_size(), &destination, 1, call.count, scale);
        area(local_rank_).finished.post(++finished_);
        await(&Area::finished, finished_);
        return;
    }
    const size_t m = nodes_.size();
    std::vector<std::vector<char>> partial(m);
    for (size_t n = 0; n < m; ++n) {
        std::vector<Range> slices;
        for (int member : nodes_[n]) slices.push_back({uint64_t(member) * block, block});
        const bool is_own_node = int(n) == own_node_;
        if (m > 1 && !is_own_node) partial[n].resize(block);
        char* into = is_own_node ? output : partial[n].data();
        if (local_size() > 1) reduce_slices(input, slices, into, call);
        else std::memmove(into, input + slices[0].offset, block);
    }
    if (m > 1) add_across_nodes(call, partial);
    if (scale != 1.0) {
        const void* source = output;
        void* destination = output;
        reduce(call.type, call.reduction, &source, 1, &destination, 1, call.count, scale);
    }
}

// Reduces this member's block with those of other nodes, and sends them theirs. `partial`: by node.
void Group::add_across_nodes(const Call& call, std::vector<std::vector<char>>& partial) {
    const size_t m = nodes_.size();
    const uint64_t block = call.count * size_of(call.type);
    char* output = static_cast<char*>(call.output);
    Links& links = context_->links();
    const uint32_t check = check_of(call);
    auto ranks = column(local_rank_);
    std::vector<char> receive_buffer(block * m);
    Batch receives(links, m), sends(links, m);
    for (size_t n = 0; n < m; ++n) {
        if (int(n) == own_node_) {
            receives[n].state = sends[n].state = State::done;
            continue;
        }
        links.receive_message(ranks[n], key_, sequence_, 0, check, receive_buffer.data() + n * block, block,
                              &receives[n]);
    }
    for (size_t n = 0; n < m; ++n)
        if (int(n) != own_node_)
            links.send_message(ranks[n], key_, sequence_, 0, check, partial[n].data(), block, &sends[n]);
    std::vector<const void*> sources(m);
    for (size_t n = 0; n < m; ++n) {
        finish(receives, n);
        sources[n] = int(n) == own_node_ ? output : receive_buffer.data() + n * block;
    }
    void* destination = output;
    reduce(call.type, call.reduction, sources.data(), int(m), &destination, 1, call.count);
    for (size_t n = 0; n < m; ++n) finish(sends, n);
}

void Group::allgather(const Call& call) {
    arrive(call, nullptr, 0);
    char* output = static_cast<char*>(call.output);
    std::vector<uint64_t> offsets(size_t(size()) + 1, 0);
    for (size_t i = 0; i < size_t(size()); ++i) offsets[i + 1] = offsets[i] + call.receive_sizes[i];
    auto range = [&](int member) {
        return Range{offsets[size_t(member)], call.receive_sizes[size_t(member)]};
    };
    if (range(index_).size) std::memmove(output + range(index_).offset, call.input, range(index_).size);
    if (size() == 1) return;

    // One member of each node receives a block from another node: in turn, which balances the load.
    std::vector<std::vector<Range>> held_ranges((size_t(local_size())));
    for (int l = 0; l < local_size(); ++l) held_ranges[size_t(l)].push_back(range(local_members_[size_t(l)]));
    if (!one_node()) {
        Links& links = context_->links();
        const uint32_t check = check_of(call);
        Batch receives(links, size_t(size())), sends(links, nodes_.size());
        for (size_t n = 0; n < nodes_.size(); ++n) {
            if (int(n) == own_node_) continue;
            for (size_t i = 0; i < nodes_[n].size(); ++i) {
                int member = nodes_[n][i];
                size_t holder = i % size_t(local_size());
                held_ranges[holder].push_back(range(member));
                if (int(holder) == local_rank_)
                    links.receive_message(ranks_[size_t(member)], key_, sequence_, 0, check,
                                          output + range(member).offset, range(member).size,
                                          &receives[size_t(member)]);
                else
                    receives[size_t(member)].state = State::done;
            }
        }
        for (int member : local_members_) receives[size_t(member)].state = State::done;
        for (size_t n = 0; n < nodes_.size(); ++n) {
            if (int(n) == own_node_) {
                sends[n].state = State::done;
                continue;
            }
            int holder = nodes_[n][size_t(local_rank_) % nodes_[n].size()];
            links.send_message(ranks_[size_t(holder)], key_, sequence_, 0, check,
                               output + range(index_).offset, range(index_).size, &sends[n]);
        }
        for (size_t i = 0; i < receives.count; ++i) finish(receives, i);
        for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
    }
    if (local_size() > 1) allgather_within_node(output, held_ranges);
}

void Group::fail_alltoall(int member, uint64_t peer_size, uint64_t own_size) {
    const int rank = ranks_[size_t(member)];
    fail_mismatch(rank,
                  "Rank " + std::to_string(rank) + " sends " + std::to_string(peer_size) + " bytes to rank " +
                      std::to_string(context_->rank()) + ", which expects " + std::to_string(own_size) + ".",
                  "Give matching sizes on both ranks.");
}

void Group::alltoall(const Call& call) {
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
            links.send_message(ranks_[i], key_, sequence_, 0, check, input + from[i], call.send_sizes[i],
                               &sends[i]);

    if (call.send_sizes[size_t(index_)] != call.receive_sizes[size_t(index_)])
        fail_alltoall(index_, call.send_sizes[size_t(index_)], call.receive_sizes[size_t(index_)]);
    if (call.send_sizes[size_t(index_)])
        std::memmove(output + to[size_t(index_)], input + from[size_t(index_)],
                     call.send_sizes[size_t(index_)]);
    if (local_size() > 1) alltoall_within_node(call, from, to);
    for (size_t i = 0; i < receives.count; ++i) finish(receives, i);
    for (size_t i = 0; i < sends.count; ++i) finish(sends, i);
}

// All members on this node have arrived. First the members of other nodes, then the rest are notified.
void Group::barrier(const Call& call) {
    if (one_node()) return;
    const size_t m = nodes_.size();
    if (local_rank_ == 0) {
        Links& links = context_->links();
        auto ranks = column(0);
        const uint32_t check = check_of(call);
        for (size_t distance = 1, round = 0; distance < m; distance <<= 1, ++round) {
            Batch exchange(links, 2);
            links.receive_message(ranks[(size_t(own_node_) + m - distance) % m], key_, sequence_,
                                  uint32_t(round), check, nullptr, 0, &exchange[0]);
            links.send_message(ranks[(size_t(own_node_) + distance) % m], key_, sequence_, uint32_t(round),
                               check, nullptr, 0, &exchange[1]);
            finish(exchange, 0);
            finish(exchange, 1);
        }
    }
    ++finished_;
    if (local_size() == 1) return;
    area(local_rank_).finished.post(finished_);
    if (local_rank_ != 0) await_peer(area(0).finished, finished_, 0);
}

}  // namespace carme

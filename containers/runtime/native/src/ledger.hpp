// Pending operations of a `Links` implementation: receives, messages that arrived before their receives, and
// requests. Used under a lock of the implementation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "links.hpp"

namespace carme {

class Ledger {
public:
    Ledger(Host& host, int size) : host_(host), lost_(size_t(size), false) {}
    Ledger(const Ledger&) = delete;

    void complete(Request* request, State state) {
        if (!request) return;
        if (request->notification && state == State::done)
            host_.notify(uint16_t(request->notification->segment), request->notification->id,
                         request->notification->value);
        request->state.store(state, std::memory_order_release);
        completed_any = true;
    }
    bool completed_any = false;  // the implementation clears it

    // Messages. True: the receive is posted. False: it is over, because its message arrived before or its
    // peer is lost.
    bool receive(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                 uint64_t size, Request* request);
    // The posted receive that matches a message, to be completed after it. nullptr: sizes or checks
    // disagreed, and the receive has ended. No value: no receive is posted yet.
    std::optional<Request*> take(int peer, const Frame& message);
    // Whether the message's group is engaged in a collective, or awaits other messages of this collective
    // (and of no other) from that peer.
    bool awaits(int peer, const Frame& message) const;
    void engage(uint64_t key, uint32_t sequence, uint32_t check) { engaged_[key] = {sequence, check}; }
    void disengage(uint64_t key) { engaged_.erase(key); }
    // Keeps a complete message without a matching receive.
    void arrived(int peer, const Frame& message, std::vector<char> data);
    void forget(uint64_t key);
    int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) const;
    bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) const {
        return unexpected_.contains({peer, key, sequence, tag});
    }
    void abort(uint64_t key);

    // Requests to peers.
    uint64_t add_request(Request* request);  // the key of the request
    // The request whose bytes follow a reply to a read or an echo, to be completed after them; nullptr if
    // there is none.
    Request* take_reply(int peer, const Frame& reply);
    void replied(int peer, const Frame& reply);  // any other reply

    // The reply to a peer's request; no value if it is malformed or reaches outside a segment.
    struct Answer {
        Frame frame = {};
        const char* data = nullptr;  // `frame.size` bytes
        std::shared_ptr<void> keep_alive = {};  // the memory that holds them
    };
    std::optional<Answer> answer(int peer, const Frame& request);

    void cancel(Request* requests, size_t count);
    bool is_lost(int peer) const { return lost_[size_t(peer)]; }
    void mark_lost(int peer);

private:
    using Match = std::tuple<int, uint64_t, uint32_t, uint32_t>;
    static Match match_of(int peer, const Frame& message) {
        return {peer, message.key, message.sequence, message.tag};
    }

    Host& host_;
    std::vector<bool> lost_;
    std::map<Match, Request*> posted_;
    std::map<Match, std::pair<uint32_t, std::vector<char>>> unexpected_;
    std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>> engaged_;  // sequence and check by key
    std::unordered_map<uint64_t, Request*> open_requests_;
    uint64_t next_request_key_ = 1;
};

}  // namespace carme

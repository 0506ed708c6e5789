// What every implementation of `Links` has to keep of what is under way: receives, messages that came before them, and
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
        if (request->notice && state == State::done)
            host_.notify(uint16_t(request->notice->segment), request->notice->id, request->notice->value);
        request->state.store(state, std::memory_order_release);
        completed_any = true;
    }
    bool completed_any = false;  // for the implementation to clear

    // Messages. A receive is awaited from now on (true), or over: its message came before, or its peer is lost.
    bool receive(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into, uint64_t size,
                 Request* request);
    // The receive to which a message goes, to be completed after it. nullptr: they disagreed, and the receive has
    // ended. Nothing: there is none yet.
    std::optional<Request*> take(int peer, const Frame& message);
    // Whether its group is engaged in a collective, or other messages of its group are awaited from that peer, and no
    // other collective in its place.
    bool awaits(int peer, const Frame& message) const;
    void engage(uint64_t key, uint32_t sequence, uint32_t check) { engaged_[key] = {sequence, check}; }
    void disengage(uint64_t key) { engaged_.erase(key); }
    // All of a message has come whose receive was not taken.
    void arrived(int peer, const Frame& message, std::vector<char> data);
    void forget(uint64_t key);
    int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) const;
    bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) const {
        return unexpected_.contains({peer, key, sequence, tag});
    }
    void abort(uint64_t key);

    // Requests to peers.
    uint64_t add_request(Request* request);  // the key of the request
    // The request whose bytes follow a reply to a read or an echo, to be completed after them; nullptr: none.
    Request* take_reply(int peer, const Frame& reply);
    void replied(int peer, const Frame& reply);  // any other reply

    // The reply to a peer's request; nothing: it is malformed or reaches outside a segment.
    struct Answer {
        Frame frame = {};
        const char* data = nullptr;  // `frame.size` bytes
        std::shared_ptr<void> keep_alive = {};  // what they lie in
    };
    std::optional<Answer> answer(int peer, const Frame& request);

    void cancel(Request* requests, size_t count);
    bool is_lost(int peer) const { return lost_[size_t(peer)]; }
    void lose(int peer);

private:
    using Match = std::tuple<int, uint64_t, uint32_t, uint32_t>;
    static Match match_of(int peer, const Frame& message) { return {peer, message.key, message.sequence, message.tag}; }

    Host& host_;
    std::vector<bool> lost_;
    std::map<Match, Request*> posted_;
    std::map<Match, std::pair<uint32_t, std::vector<char>>> unexpected_;
    std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>> engaged_;  // sequence and check, by key
    std::unordered_map<uint64_t, Request*> open_requests_;
    uint64_t next_request_key_ = 1;
};

}  // namespace carme

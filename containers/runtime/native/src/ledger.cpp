#include "ledger.hpp"

#include <cstring>

namespace carme {

namespace {

bool fits(const Request& request, uint64_t size) {
    return size == request.size || (request.allow_shorter && size < request.size);
}

}  // namespace

bool Ledger::receive(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                     uint64_t size, Request* request) {
    request->peer = peer;
    request->into = static_cast<char*>(into);
    request->size = size;
    request->check = check;
    Match match{peer, key, sequence, tag};
    auto early = unexpected_.find(match);
    if (early != unexpected_.end()) {
        auto& [peer_check, data] = early->second;
        const bool matches = fits(*request, data.size()) && peer_check == check;
        request->result = data.size();
        if (matches && !data.empty()) std::memcpy(into, data.data(), data.size());
        unexpected_.erase(early);
        complete(request, matches ? State::done : State::mismatch);
        return false;
    }
    if (is_lost(peer)) {
        complete(request, State::lost);
        return false;
    }
    posted_[match] = request;
    return true;
}

std::optional<Request*> Ledger::take(int peer, const Frame& message) {
    auto posted = posted_.find(match_of(peer, message));
    if (posted == posted_.end()) return std::nullopt;
    Request* request = posted->second;
    posted_.erase(posted);
    request->result = message.size;
    if (fits(*request, message.size) && request->check == message.check) return request;
    complete(request, State::mismatch);
    return nullptr;
}

bool Ledger::awaits(int peer, const Frame& message) const {
    if (const auto now = engaged_.find(message.key); now != engaged_.end())
        return now->second.first != message.sequence || now->second.second == message.check;
    const auto entry = posted_.lower_bound({peer, message.key, 0, 0});
    if (entry == posted_.end()) return false;
    auto& [from, key, sequence, tag] = entry->first;
    return from == peer && key == message.key &&
           (sequence != message.sequence || entry->second->check == message.check);
}

void Ledger::arrived(int peer, const Frame& message, std::vector<char> data) {
    auto posted = take(peer, message);
    if (!posted) {
        unexpected_[match_of(peer, message)] = {message.check, std::move(data)};
    } else if (Request* request = *posted) {
        if (message.size) std::memcpy(request->into, data.data(), message.size);
        complete(request, State::done);
    }
}

void Ledger::forget(uint64_t key) {
    std::erase_if(unexpected_, [&](auto& entry) { return std::get<1>(entry.first) == key; });
}

int Ledger::find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) const {
    for (int peer = 0; peer < int(lost_.size()); ++peer)
        for (auto entry = unexpected_.lower_bound({peer, key, sequence, 0}); entry != unexpected_.end();
             ++entry) {
            auto& [from, group, entry_sequence, tag] = entry->first;
            if (from != peer || group != key || entry_sequence != sequence) break;
            if (entry->second.first != check) return peer;
        }
    return -1;
}

void Ledger::abort(uint64_t key) {
    std::erase_if(posted_, [&](auto& entry) {
        if (std::get<1>(entry.first) != key) return false;
        complete(entry.second, State::aborted);
        return true;
    });
}

uint64_t Ledger::add_request(Request* request) {
    open_requests_[next_request_key_] = request;
    return next_request_key_++;
}

Request* Ledger::take_reply(int peer, const Frame& reply) {
    auto open = open_requests_.find(reply.key);
    if (open == open_requests_.end()) return nullptr;
    Request* request = open->second;
    open_requests_.erase(open);
    if (request->size == reply.size && request->peer == peer) {
        if (!reply.size) request->result = reply.operand;
        return request;
    }
    complete(request, State::mismatch);
    return nullptr;
}

void Ledger::replied(int peer, const Frame& reply) {
    auto open = open_requests_.find(reply.key);
    if (open == open_requests_.end() || open->second->peer != peer) return;
    open->second->result = reply.operand;
    complete(open->second, State::done);
    open_requests_.erase(open);
}

std::optional<Ledger::Answer> Ledger::answer(int peer, const Frame& request) {
    Answer answer;
    answer.frame.key = request.key;
    switch (request.type) {
        case FrameType::read_request:
            answer.data = host_.locate(request.segment, request.offset, request.size, answer.keep_alive);
            if (!answer.data) return std::nullopt;
            answer.frame.type = FrameType::read_reply;
            answer.frame.size = request.size;
            return answer;
        case FrameType::echo:
            answer.frame.type = FrameType::read_reply;
            answer.frame.operand = uint64_t(now_ns());
            return answer;
        case FrameType::atomic_request: {
            auto old = host_.atomic(request.segment, request.offset, request.operation, request.operand,
                                    request.operand2);
            if (!old) return std::nullopt;
            answer.frame.type = FrameType::atomic_reply;
            answer.frame.operand = *old;
            return answer;
        }
        case FrameType::register_segment:
            host_.peer_registered(peer, request.segment, request.operand);
            answer.frame.type = FrameType::register_reply;
            return answer;
        default:
            return std::nullopt;
    }
}

void Ledger::cancel(Request* requests, size_t count) {
    auto is_cancelled = [&](auto& entry) {
        return entry.second >= requests && entry.second < requests + count;
    };
    std::erase_if(posted_, is_cancelled);
    std::erase_if(open_requests_, is_cancelled);
}

void Ledger::mark_lost(int peer) {
    lost_[size_t(peer)] = true;
    auto complete_lost = [&](auto& entry) {
        if (entry.second->peer != peer) return false;
        complete(entry.second, State::lost);
        return true;
    };
    std::erase_if(posted_, complete_lost);
    std::erase_if(open_requests_, complete_lost);
    host_.peer_lost(peer);
}

}  // namespace carme

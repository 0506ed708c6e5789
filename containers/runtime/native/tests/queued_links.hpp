// Links between contexts of one process by queues: a small implementation, and a proof that the layers above
// use only `Links`. Peers are trusted.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "ledger.hpp"
#include "links.hpp"

namespace carme {

class QueuedLinks final : public Links {
public:
    struct QueuedFrame {
        int from;
        Frame frame;  // without a type if the sender has left
        std::vector<char> data;
    };
    struct Mailbox {
        std::mutex mutex;
        std::deque<QueuedFrame> entries;
        Flag filled;
    };
    using Mailboxes = std::shared_ptr<std::vector<Mailbox>>;  // outlive the links: peers may still deliver

    static MakeLinks factory(size_t ranks) {
        return [boxes = std::make_shared<std::vector<Mailbox>>(ranks)](Host& host, int rank, int) {
            return std::make_unique<QueuedLinks>(host, rank, boxes);
        };
    }
    QueuedLinks(Host& host, int rank, Mailboxes boxes)
        : host_(host), rank_(rank), boxes_(std::move(boxes)), ledger_(host, int(boxes_->size())) {}
    ~QueuedLinks() override { stop(); }

    void add_peer(int peer, const std::vector<int>& sockets) override {
        peers_.insert(peer);
        for (int fd : sockets) close(fd);
    }
    void start() override {
        thread_ = std::thread([this] {
            constexpr timespec interval{0, 1'000'000};
            while (!stopping_)
                if (driven()) nanosleep(&interval, nullptr);
                else poll(5);
        });
    }
    void stop() override {
        if (stopping_.exchange(true)) return;
        if (thread_.joinable()) thread_.join();
        for (int peer : peers_) send_owned(peer, {}, {});
    }
    bool empty() const override { return peers_.empty(); }

    void send(int peer, const Frame& frame, const void* data, Request* request) override {
        std::lock_guard lock(mutex_);
        auto* bytes = static_cast<const char*>(data);
        if (request) request->peer = peer;
        deliver(peer, frame, data ? std::vector<char>(bytes, bytes + frame.size) : std::vector<char>());
        ledger_.complete(request, ledger_.is_lost(peer) ? State::lost : State::done);
    }
    void send_owned(int peer, const Frame& frame, std::vector<char> data) override {
        std::lock_guard lock(mutex_);
        deliver(peer, frame, std::move(data));
    }
    void send_request(int peer, Frame frame, Request* request) override {
        std::lock_guard lock(mutex_);
        request->peer = peer;
        if (ledger_.is_lost(peer)) return ledger_.complete(request, State::lost);
        frame.key = ledger_.add_request(request);
        deliver(peer, frame, {});
    }
    void send_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check,
                      const void* data, uint64_t size, Request* request) override {
        send(peer, message_frame(key, sequence, tag, check, size), size ? data : nullptr, request);
    }
    void receive_message(int peer, uint64_t key, uint32_t sequence, uint32_t tag, uint32_t check, void* into,
                         uint64_t size, Request* request) override {
        std::lock_guard lock(mutex_);
        ledger_.receive(peer, key, sequence, tag, check, into, size, request);
    }
    void cancel(Request* requests, size_t count) override {
        std::lock_guard lock(mutex_);
        ledger_.cancel(requests, count);
    }
    void forget(uint64_t key) override {
        std::lock_guard lock(mutex_);
        ledger_.forget(key);
    }
    int find_mismatch(uint64_t key, uint32_t sequence, uint32_t check) override {
        std::lock_guard lock(mutex_);
        return ledger_.find_mismatch(key, sequence, check);
    }
    bool probe(int peer, uint64_t key, uint32_t sequence, uint32_t tag) override {
        std::lock_guard lock(mutex_);
        return ledger_.probe(peer, key, sequence, tag);
    }
    void poll(int timeout_ms, int = 0) override {
        Mailbox& box = (*boxes_)[size_t(rank_)];
        auto has_entries = [&] {
            std::lock_guard lock(box.mutex);
            return !box.entries.empty();
        };
        if (timeout_ms &&
            !wait_on(box.filled, true, Deadline::after_ms(timeout_ms), has_entries, [] {}, [] {}))
            return;
        std::lock_guard lock(mutex_);  // held while entries are removed, so that two threads keep their order
        std::deque<QueuedFrame> received;
        {
            std::lock_guard taking(box.mutex);
            received.swap(box.entries);
        }
        for (auto& entry : received) arrived(entry);
    }

private:
    void deliver(int peer, const Frame& frame, std::vector<char> data) {
        Mailbox& box = (*boxes_)[size_t(peer)];
        {
            std::lock_guard lock(box.mutex);
            box.entries.push_back({rank_, frame, std::move(data)});
        }
        box.filled.raise();
    }
    void arrived(QueuedFrame& entry) {
        auto& [from, frame, data] = entry;
        std::shared_ptr<void> keep_alive;
        switch (frame.type) {
            case FrameType::write:
                std::copy(data.begin(), data.end(),
                          host_.locate(frame.segment, frame.offset, frame.size, keep_alive));
                if (frame.value) host_.notify(frame.segment, frame.check, frame.value);
                break;
            case FrameType::message: ledger_.arrived(from, frame, std::move(data)); break;
            case FrameType::passive: host_.passive_arrived(from, std::move(data)); break;
            case FrameType::abort_group:
                host_.group_aborted(frame.key, int(frame.value), {data.begin(), data.end()});
                ledger_.abort(frame.key);
                break;
            case FrameType::kill: host_.end_requested(from); break;
            case FrameType::read_reply:
                if (Request* request = ledger_.take_reply(from, frame)) {
                    std::copy(data.begin(), data.end(), request->into);
                    ledger_.complete(request, State::done);
                }
                break;
            case FrameType::atomic_reply: case FrameType::register_reply: ledger_.replied(from, frame); break;
            case FrameType::read_request: case FrameType::atomic_request: case FrameType::register_segment:
            case FrameType::echo:
                if (auto answer = ledger_.answer(from, frame))
                    deliver(from, answer->frame, {answer->data, answer->data + answer->frame.size});
                break;
            default: ledger_.mark_lost(from);
        }
    }

    Host& host_;
    const int rank_;
    const Mailboxes boxes_;
    std::set<int> peers_;
    std::mutex mutex_;
    Ledger ledger_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace carme

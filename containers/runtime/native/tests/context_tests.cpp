// Tests of one-sided operations, point-to-point messages, and the detection of members that end.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include "as_ranks.hpp"
#include "checks.hpp"
#include "group.hpp"
#include "group_area.hpp"
#include "queued_links.hpp"
#include "tcp_links.hpp"

using namespace carme;

namespace {

void one_sided(const std::vector<int>& nodes, const MakeLinks& make_links = {}) {
    as_ranks(nodes, [](std::shared_ptr<Context> context) {
        const int n = context->size(), right = (context->rank() + 1) % n;
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        context->segment_alloc(0, 1 << 20);
        for (int r = 0; r < n; ++r)
            if (r != context->rank()) context->segment_register(0, r, Deadline::after_ms(60'000));
        group.execute({});
        char* data = context->segment_pointer(0);
        std::memset(data, context->rank() + 1, 1000);
        context->write(right, {{0, 0, 0, 4096, 1000}}, Notification{0, 3, 9}, 0);
        CHECK(context->notify_waitsome(0, 0, 8, Deadline::after_ms(60'000)) == 3);
        CHECK(context->notify_reset(0, 3) == 9);
        CHECK(data[4096] == (context->rank() + n - 1) % n + 1 && data[5095] == data[4096]);
        CHECK(context->wait(0, Deadline::after_ms(60'000)));
        group.execute({});
        context->read(right, {{0, 8192, 0, 0, 500}}, std::nullopt, 1);
        CHECK(context->wait(1, Deadline::after_ms(60'000)));
        CHECK(data[8192] == right + 1);
        context->read(right, {{0, 8700, 0, 0, 100}, {0, 8800, 0, 100, 100}}, Notification{0, 4, 2}, 1);
        CHECK(context->notify_waitsome(0, 4, 1, Deadline::after_ms(60'000)) == 4 &&
              context->notify_reset(0, 4) == 2);
        CHECK(data[8700] == right + 1 && data[8899] == right + 1);
        CHECK(context->wait(1, Deadline::after_ms(60'000)));
        // Written data have arrived after the wait, even if a barrier overtakes them.
        for (int turn = 1; turn < 20; ++turn) {
            std::memset(data + 100'000, turn, 300'000);
            context->write(right, {{0, 100'000, 0, 500'000, 300'000}}, std::nullopt, 2);
            CHECK(context->wait(2, Deadline::after_ms(60'000)));
            group.execute({});
            CHECK(data[500'000] == turn && data[799'999] == turn);
            group.execute({});
        }
        for (int i = 0; i < 100; ++i) context->atomic_add(0, 0, 16384, 1, Deadline::after_ms(60'000));
        group.execute({});
        if (context->rank() == 0) CHECK(*reinterpret_cast<uint64_t*>(data + 16384) == uint64_t(100 * n));
        if (context->rank() == 0) {
            for (int i = 0; i < 3 * (n - 1); ++i) CHECK(context->passive_receive(Deadline::after_ms(60'000)));
        } else {
            for (int i = 0; i < 3; ++i)
                CHECK(context->passive_send(0, "hello", 5, Deadline::after_ms(60'000)));
        }
        group.execute({});
    }, make_links);
}

void point_to_point_messages() {
    as_ranks({0, 0, 1}, [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        const int n = group.size(), index = group.index();
        std::vector<char> out(600'000, char(index)), in(600'000);
        auto receiving = group.receive((index + n - 1) % n, in.data(), in.size(), 4);
        auto sending = group.send((index + 1) % n, out.data(), out.size(), 4);
        CHECK(receiving->wait(Deadline::after_ms(60'000)) && sending->wait(Deadline::after_ms(60'000)));
        CHECK(in[0] == (index + n - 1) % n && in[599'999] == in[0]);
        // Cancelled: no later access.
        { auto never = group.receive((index + 1) % n, in.data(), in.size(), 5); }
        group.execute({});
    });
}

// Receives from any sender, in order of arrival; messages that a sender sent before its end arrive.
void messages_from_any_sender(const std::vector<int>& nodes, const MakeLinks& make_links = {}) {
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        const int index = group.index();
        if (index) {
            for (int i = 0; i < 2; ++i)
                CHECK(group.send(0, &index, sizeof index, 4)->wait(Deadline::after_ms(60'000)));
            group.execute({});
            return context->close();
        }
        CHECK(group.sender(9, Deadline::after_ms(0)) == -1);
        group.execute({});
        int from[3] = {};
        for (int i = 0; i < 4; ++i) {
            const int member = group.sender(4, Deadline::after_ms(60'000));
            int received = 0;
            CHECK(group.receive(member, &received, sizeof received, 4)->wait(Deadline::after_ms(60'000)));
            CHECK(received == member);
            ++from[received];
        }
        CHECK(from[1] == 2 && from[2] == 2);
        if (!make_links) return;  // only TCP reports a lost rank by the end of its streams
        bool reported = false;
        try {
            group.sender(4, Deadline::after_ms(60'000));
        } catch (const Failure& failure) {
            reported = failure.kind == FailureKind::peer_lost;
        }
        CHECK(reported);
    }, make_links);
}

// Other implementations may carry the traffic between nodes.
void alternative_links() {
    for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1}, {0, 1, 2}}) {
        collectives(nodes, QueuedLinks::factory(nodes.size()));
        one_sided(nodes, QueuedLinks::factory(nodes.size()));
    }
    auto leave_early = [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        if (context->rank() == 1) return context->close();
        bool reported = false;
        try {
            std::vector<float> data(5000);
            group.execute(allreduce_of(data));
        } catch (const Failure& failure) {
            reported = failure.kind == FailureKind::peer_lost;
        }
        CHECK(reported && context->is_lost(1));
    };
    as_ranks({0, 1}, leave_early, QueuedLinks::factory(2));
}

// An earlier recorded loss takes precedence over a loss that is detected now.
void noted_culprits() {
    auto area = std::make_unique<Area>();
    CHECK(!has_earlier_cause(*area, 1));
    area->broken = 2 + 1;
    CHECK(has_earlier_cause(*area, 1) && !has_earlier_cause(*area, 2));
    area->reason[0] = 'x';  // members disagree, and one of them has left since
    CHECK(has_earlier_cause(*area, 1) && has_earlier_cause(*area, 2));
}

// A member leaves because another one was lost: all members name the lost one.
void first_culprit() {
    for (auto& nodes : std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2, 2}})
        as_ranks(nodes, [](std::shared_ptr<Context> context) {
            const int culprit = context->size() - 1;
            Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
            std::vector<float> data(5000);
            if (context->rank() == culprit) return context->close();
            if (context->rank() == 0)  // sees the ends of other members, and their earlier messages, in turn
                while (!context->is_lost(1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            std::string text;
            try {
                group.execute(allreduce_of(data));
            } catch (const Failure& failure) {
                text = failure.what();
            }
            CHECK(text.find("ank " + std::to_string(culprit) + " was lost") != std::string::npos);
            if (context->rank()) context->close();
        }, QueuedLinks::factory(nodes.size()));
}

// Messages that arrive long before their receives: memory grows with them.
void many_unexpected_messages() {
    as_ranks({0, 1}, [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(20'000));
        const std::vector<size_t> sizes{1, 300 << 10, 1 << 20, (1 << 20) + 1, 5'000'001};
        std::vector<std::vector<char>> data;
        for (size_t size : sizes) {
            data.emplace_back(size);
            for (size_t i = 0; i < size; ++i) data.back()[i] = char(i * 7 + i / 1000);
        }
        if (context->rank() == 1) {
            std::vector<std::shared_ptr<PendingMessage>> sent;
            for (size_t i = 0; i < sizes.size(); ++i)
                sent.push_back(group.send(0, data[i].data(), sizes[i], uint32_t(i)));
            for (auto& message : sent) CHECK(message->wait(Deadline::after_ms(60'000)));
        }
        // Rank 0 has posted no receive yet; all messages have arrived or are on their way.
        group.execute({});
        if (context->rank() == 0)
            for (size_t i = 0; i < sizes.size(); ++i) {
                std::vector<char> into(sizes[i]);
                CHECK(group.receive(1, into.data(), sizes[i], uint32_t(i))->wait(Deadline::after_ms(60'000)));
                CHECK(into == data[i]);
            }
        group.execute({});
    });
}

// Malicious frames: no crash, and no write outside of segments.
void garbage() {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        auto context = std::make_shared<Context>(0, 2);
        std::vector<Endpoint> ends(2);
        ends[0] = {getpid(), context->control_fd(), 0, {}};
        ends[1] = {getpid(), -1, 1, {}};
        int peer_sockets[3];
        for (int& fd : peer_sockets) {
            auto [out, in] = connected_pair();
            fd = out;
            ends[1].sockets.push_back(in);
        }
        context->segment_alloc(0, 4096);
        context->connect(ends);
        for (int i = 0; i < 30; ++i) {
            Frame frame;
            const auto type = FrameType(random() % 13);
            frame.type = type == FrameType::kill ? FrameType::heartbeat : type;
            frame.segment = uint16_t(random() % 3);
            frame.offset = random() % 2 ? random() % 5000 : ~uint64_t(0) - random() % 64;
            frame.size = random() % 3 ? random() % 2000 : uint64_t(random()) << 20;
            frame.key = random() % 4;
            frame.sequence = random() % 3;
            frame.check = random() % 100'000;
            frame.value = random() % 3;
            if (random() % 8 == 0) frame.magic = random();
            std::vector<char> bytes(sizeof frame + random() % 4000);
            std::memcpy(bytes.data(), &frame, sizeof frame);
            if (send(peer_sockets[random() % 3], bytes.data(),
                     bytes.size() - (random() % 4 == 0 ? random() % 64 : 0), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
                break;
        }
        for (int fd : peer_sockets) close(fd);
        for (int i = 0; i < 3000 && !context->is_lost(1); ++i) {
            timespec interval{0, 1'000'000};
            nanosleep(&interval, nullptr);
        }
        CHECK(context->is_lost(1));
        bool refused = false;
        try {
            context->write(1, {}, Notification{0, 1, 1}, 0);
        } catch (const Failure&) {
            refused = true;
        }
        CHECK(refused);
    }
}

}  // namespace

void context_tests() {
    TcpLinks::force_zero_copy = true;
    one_sided({0, 1});
    TcpLinks::force_zero_copy = false;
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}}) one_sided(nodes);
    alternative_links();
    point_to_point_messages();
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0, 1}, {0, 1, 2}}) messages_from_any_sender(nodes);
    messages_from_any_sender({0, 1, 2}, QueuedLinks::factory(3));
    noted_culprits();
    first_culprit();
    many_unexpected_messages();
    garbage();
}

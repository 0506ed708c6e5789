// Tests of the core inside one process: ranks are threads, nodes are what their endpoints say. Made for the
// sanitizers, which see one process only.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include <sys/socket.h>
#include <unistd.h>

#include "checks.hpp"
#include "group.hpp"
#include "group_area.hpp"
#include "queued_links.hpp"
#include "tcp_links.hpp"
#include "zeros.hpp"

using namespace carme;

namespace {

// Runs `body` as every rank; `nodes` says where each of them is.
void as_ranks(const std::vector<int>& nodes, const std::function<void(std::shared_ptr<Context>)>& body,
              const MakeLinks& make_links = {}) {
    const int n = int(nodes.size());
    std::vector<std::shared_ptr<Context>> contexts;
    for (int r = 0; r < n; ++r) contexts.push_back(std::make_shared<Context>(r, n, make_links));
    std::vector<std::vector<Endpoint>> ends;
    ends.resize(size_t(n), std::vector<Endpoint>(size_t(n)));
    for (int a = 0; a < n; ++a)
        for (int b = 0; b < n; ++b) {
            auto& end = ends[size_t(a)][size_t(b)];
            end.pid = getpid();
            end.control_fd = contexts[size_t(b)]->control_fd();
            end.node = nodes[size_t(b)];
            if (b <= a) continue;
            for (int stream = 0; stream < (nodes[size_t(a)] == nodes[size_t(b)] ? 1 : 3); ++stream) {
                auto [out, in] = connected_pair();
                ends[size_t(a)][size_t(b)].sockets.push_back(out);
                ends[size_t(b)][size_t(a)].sockets.push_back(in);
            }
        }
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
        threads.emplace_back([&, r] {
            try {
                contexts[size_t(r)]->connect(ends[size_t(r)]);
                body(contexts[size_t(r)]);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "rank %d: %s\n", r, error.what());
                CHECK(false);
            }
        });
    for (auto& thread : threads) thread.join();
}

std::vector<int> everyone(const Context& context) {
    std::vector<int> ranks;
    for (int r = 0; r < context.size(); ++r) ranks.push_back(r);
    return ranks;
}

Group::Call allreduce_of(std::vector<float>& data) {
    Group::Call call;
    call.kind = Kind::allreduce;
    call.buffer = data.data();
    call.count = data.size();
    call.type = Type::f32;
    call.timeout_ms = 60'000;
    return call;
}

void collectives(const std::vector<int>& nodes, const MakeLinks& make_links = {}) {
    as_ranks(nodes, [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        const int n = group.size(), me = group.index();
        for (uint64_t count : {uint64_t(1), uint64_t(5000), uint64_t(200'000)}) {
            std::vector<float> data(count, float(me + 1));
            group.execute(allreduce_of(data));
            CHECK(data[0] == float(n * (n + 1) / 2) && data[count - 1] == data[0]);

            std::vector<uint8_t> bytes(count, uint8_t(me));
            Group::Call call;
            call.kind = Kind::broadcast;
            call.buffer = bytes.data();
            call.count = count;
            call.root = n - 1;
            group.execute(call);
            CHECK(bytes[0] == n - 1 && bytes[count - 1] == n - 1);

            std::vector<uint64_t> sizes(size_t(n), count);
            std::vector<uint8_t> mine(count * uint64_t(n), uint8_t(me)), out(count * uint64_t(n));
            call = {};
            call.kind = Kind::alltoall;
            call.input = mine.data();
            call.output = out.data();
            call.send_sizes = call.receive_sizes = sizes;
            group.execute(call);
            for (int r = 0; r < n; ++r) CHECK(out[count * uint64_t(r)] == r);
            call.kind = Kind::allgather;
            call.count = out.size();
            group.execute(call);
            for (int r = 0; r < n; ++r) CHECK(out[count * uint64_t(r + 1) - 1] == r);

            std::vector<float> whole(count * uint64_t(n), 1.0f), part(count);
            call = {};
            call.kind = Kind::reduce_scatter;
            call.input = whole.data();
            call.output = part.data();
            call.count = count;
            call.type = Type::f32;
            group.execute(call);
            CHECK(part[0] == float(n) && part[count - 1] == float(n));
        }
        std::vector<std::vector<float>> many(8, std::vector<float>(3000, 1.0f));
        std::vector<std::shared_ptr<Handle>> handles;
        for (auto& data : many) handles.push_back(group.submit(allreduce_of(data)));
        for (auto& handle : handles) CHECK(handle->wait(Deadline::after_ms(60'000)));
        for (auto& data : many) CHECK(data[2999] == float(n));
        Group::Call barrier;
        group.execute(barrier);
    }, make_links);
}

// Every way over several nodes: right where sums are exact, and the same bits on all ranks where they are not.
void between_nodes(const std::vector<int>& nodes, Algorithm algorithm) {
    const size_t n = nodes.size();
    for (uint64_t count : {uint64_t(1), uint64_t(50'000), uint64_t(300'001)}) {
        std::vector<std::vector<float>> inputs(n), results(n);
        std::vector<double> exact(count, 0.0);
        float largest = 0;
        for (size_t r = 0; r < n; ++r) {
            std::mt19937 random{unsigned(r)};
            std::normal_distribution<float> normal;
            for (uint64_t i = 0; i < count; ++i) inputs[r].push_back(normal(random));
            for (uint64_t i = 0; i < count; ++i) {
                exact[i] += double(inputs[r][i]);
                largest = std::max(largest, std::fabs(inputs[r][i]));
            }
        }
        for (Wire wire : {Wire::same, Wire::bf16, Wire::int8}) {
            as_ranks(nodes, [&](std::shared_ptr<Context> context) {
                Group group(context, everyone(*context), Deadline::after_ms(60'000), algorithm);
                auto me = size_t(context->rank());
                std::vector<float> whole(count, float(me + 1));
                group.execute(allreduce_of(whole));
                CHECK(whole[0] == float(n * (n + 1) / 2) && whole[count - 1] == whole[0]);
                results[me] = inputs[me];
                auto call = allreduce_of(results[me]);
                call.wire = wire;
                group.execute(call);
            });
            // A number is rounded at most once on each rank, and never larger than the sum of all.
            const double step = wire == Wire::same ? 1e-6 : wire == Wire::bf16 ? 1.0 / 256 : 1.0 / 254;
            double worst = 0;
            for (uint64_t i = 0; i < count; ++i) worst = std::max(worst, std::fabs(double(results[0][i]) - exact[i]));
            CHECK(worst <= 1.01 * step * double(n) * double(n) * double(largest));
            for (auto& result : results) CHECK(std::memcmp(result.data(), results[0].data(), count * 4) == 0);
        }
    }
}

// A ring of blocks that have more pieces than 16 bits can count, as those of 16 GiB have: none is taken for another one.
void ring_of_many_pieces() {
    constexpr uint64_t count = 3 * 65'600;
    const uint64_t usual = piece_bytes.exchange(sizeof(float));
    as_ranks({0, 1, 2}, [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000), Algorithm::ring);
        std::vector<float> data(count);
        for (uint64_t i = 0; i < count; ++i) data[i] = float(i % 1009) + float(group.index());
        auto call = allreduce_of(data);
        call.timeout_ms = 300'000;
        group.execute(call);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < count; ++i) wrong += data[i] != 3 * float(i % 1009) + 3;
        CHECK(wrong == 0);
    });
    piece_bytes = usual;
}

// Buffers of more pieces than are expected at once, and means, which two nodes take on the way.
void long_ones(const std::vector<int>& nodes, Wire wire) {
    as_ranks(nodes, [wire](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        const int n = group.size(), me = group.index();
        for (uint64_t count : {uint64_t(900'000), uint64_t(2'500'003)}) {
            std::vector<float> data(count);
            auto call = allreduce_of(data);
            call.wire = wire;
            call.reduction = Reduction::mean;
            for (int run = 0; run < 2; ++run) {
                for (uint64_t i = 0; i < count; ++i) data[i] = float(i % 31) + float(me);  // exact in bfloat16, too
                group.execute(call);
                uint64_t wrong = 0;
                for (uint64_t i = 0; i < count; ++i) wrong += data[i] != float(i % 31) + 0.5f * float(n - 1);
                CHECK(wrong == 0);
            }
        }
        if (TcpLinks::insist_on_uncopied) CHECK(dynamic_cast<TcpLinks&>(context->links()).sent_uncopied() > 4);
    });
}

// What travels of a payload of which much is zero gives the same bytes again, and nothing else is taken for such.
void zeros() {
    std::mt19937 random(11);
    for (uint64_t size : {zeros_from, zeros_from + 1, uint64_t(100'003), uint64_t(256 << 10)})
        for (unsigned every : {2u, 5u, 40u, 5000u}) {  // one in so many blocks is not zero
            std::vector<char> data(size, 0), into(size, 1);
            for (uint64_t i = 0; i < size; ++i)
                if (i / zero_block * 2654435761u % every == 0 || (i >= size / zero_block * zero_block)) data[i] = char(random());
            const auto less = without_zeros(data.data(), size);
            if (every == 2 && less.size == 0) continue;
            CHECK(less.size && less.size <= size / 4 * 3);
            std::memcpy(into.data(), less.data.get(), less.size);
            CHECK(with_zeros(into.data(), less.size, size));
            CHECK(into == data);
            for (uint64_t wrong : {uint64_t(0), uint64_t(5), less.size - 1, less.size + 1, less.size - zero_block}) {
                std::vector<char> spoiled(size, char(0x5A));
                std::memcpy(spoiled.data(), less.data.get(), less.size);
                if (wrong < size) CHECK(!with_zeros(spoiled.data(), wrong, size));
            }
        }
    std::vector<char> dense(256 << 10, 1), empty(256 << 10, 0), few(zeros_from - 1, 0);
    CHECK(!without_zeros(dense.data(), dense.size()).size && !without_zeros(few.data(), few.size()).size);
    CHECK(without_zeros(empty.data(), empty.size()).size == empty.size() / zero_block / 8);
    for (uint64_t i = 0; i < empty.size(); i += 4) empty[i + 3] = char(0x80);  // -0.0 is not nothing
    CHECK(!without_zeros(empty.data(), empty.size()).size);
}

// Gradients of embeddings: rows of which each rank has a few.
void rows(const std::vector<int>& nodes, Algorithm algorithm, Wire wire) {
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000), algorithm);
        const int n = group.size(), me = group.index();
        for (auto [count, row] : {std::pair<uint64_t, uint64_t>{60'000, 64}, {400'000, 250}, {1'500'001, 1024}}) {
            std::vector<float> data(count);
            auto value = [&, row = row](int rank, uint64_t i) {
                const uint64_t which = i / row;
                return which % 11 == uint64_t(rank) || which % 37 == 5 ? float(i % 29) - 14.0f + float(rank) : 0.0f;
            };
            auto call = allreduce_of(data);
            call.wire = wire;
            for (int run = 0; run < 2; ++run) {
                for (uint64_t i = 0; i < count; ++i) data[i] = value(me, i);
                group.execute(call);
                uint64_t wrong = 0;
                for (uint64_t i = 0; i < count; ++i) {
                    float expected = 0;
                    for (int r = 0; r < n; ++r) expected += value(r, i);
                    wrong += data[i] != expected;  // exact in bfloat16, too
                }
                CHECK(wrong == 0);
            }
        }
    });
}

// What one run loses on the wire the next one adds: the sum over many runs stays as near as that of one.
void feedback(const std::vector<int>& nodes, Algorithm algorithm, Wire wire) {
    constexpr uint64_t count = 70'000;
    constexpr int runs = 40;
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000), algorithm);
        const int n = group.size(), me = group.index();
        auto value = [](int rank, uint64_t i) { return std::sin(float(i * 7 % 1001) + float(rank)); };
        std::vector<float> data(count);
        std::vector<double> total(count, 0.0), plain(count, 0.0);
        auto call = allreduce_of(data);
        call.wire = wire;
        for (auto residual : {std::make_shared<Residual>(), std::shared_ptr<Residual>()}) {
            call.residual = residual;
            for (int run = 0; run < runs; ++run) {
                for (uint64_t i = 0; i < count; ++i) data[i] = value(me, i);
                group.execute(call);
                for (uint64_t i = 0; i < count; ++i) (residual ? total : plain)[i] += double(data[i]);
            }
        }
        double worst = 0, without = 0;
        for (uint64_t i = 0; i < count; ++i) {
            double exact = 0;
            for (int r = 0; r < n; ++r) exact += double(value(r, i));
            worst = std::max(worst, std::fabs(total[i] - runs * exact));
            without = std::max(without, std::fabs(plain[i] - runs * exact));
        }
        const double one_run = 1.01 / (wire == Wire::bf16 ? 256 : 254) * n * n;
        CHECK(worst <= one_run + 1e-4 * runs);
        CHECK(without > 2 * worst);  // else feedback would do nothing
        // What is not finite does not stay.
        data[5] = std::numeric_limits<float>::infinity();
        call.residual = std::make_shared<Residual>();
        group.execute(call);
        CHECK(!std::isfinite(data[5]));
        std::fill(data.begin(), data.end(), 1.0f);
        group.execute(call);
        CHECK(std::isfinite(data[5]) && std::fabs(data[5] - float(n)) < 0.5f * float(n));
    });
}

void link_models() {
    LinkModel model;
    // One step for few bytes, whatever it carries; and no detour over neighbours for many.
    CHECK(model.best(3, 64) == Algorithm::direct && model.best(8, 64) == Algorithm::direct);
    CHECK(model.best(8, 64 << 20) == Algorithm::halving);
    CHECK(model.best(3, 64 << 20) == Algorithm::ring && model.best(6, 64 << 20) == Algorithm::ring);
    CHECK(model.microseconds(2 << 20) > 1.9 * model.microseconds(1 << 20));
    LinkModel slow_start{{{0, 10'000.0}, {1 << 20, 10'001.0}}};
    CHECK(slow_start.best(7, 1 << 20) == Algorithm::direct);
    CHECK(slow_start.fingerprint() != model.fingerprint());
    as_ranks({0, 1, 1, 2}, [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        auto measured = group.measure_links();
        CHECK(measured.points.size() >= 2);
        for (auto& [bytes, time] : measured.points) CHECK(bytes > 0 && time > 0 && time < 1e12);
    });
    // Members that would reduce in different ways are told, and do not wait for each other.
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
        as_ranks(nodes, [](std::shared_ptr<Context> context) {
            bool refused = false;
            try {
                Group group(context, everyone(*context), Deadline::after_ms(60'000),
                            context->rank() ? Algorithm::ring : Algorithm::halving);
            } catch (const Failure& failure) {
                refused = failure.trouble == Trouble::mismatch || failure.trouble == Trouble::peer_lost;
            }
            CHECK(refused);
        });
    }
}

void one_sided(const std::vector<int>& nodes, const MakeLinks& make_links = {}) {
    as_ranks(nodes, [](std::shared_ptr<Context> context) {
        const int n = context->size(), right = (context->rank() + 1) % n;
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        context->segment_alloc(0, 1 << 20);
        for (int r = 0; r < n; ++r)
            if (r != context->rank()) context->segment_register(0, r, Deadline::after_ms(60'000));
        group.execute({});
        char* data = context->segment_pointer(0);
        std::memset(data, context->rank() + 1, 1000);
        context->write(right, {{0, 0, 0, 4096, 1000}}, Notice{0, 3, 9}, 0);
        CHECK(context->notify_waitsome(0, 0, 8, Deadline::after_ms(60'000)) == 3);
        CHECK(context->notify_reset(0, 3) == 9);
        CHECK(data[4096] == (context->rank() + n - 1) % n + 1 && data[5095] == data[4096]);
        CHECK(context->wait(0, Deadline::after_ms(60'000)));
        group.execute({});
        context->read(right, {{0, 8192, 0, 0, 500}}, std::nullopt, 1);
        CHECK(context->wait(1, Deadline::after_ms(60'000)));
        CHECK(data[8192] == right + 1);
        context->read(right, {{0, 8700, 0, 0, 100}, {0, 8800, 0, 100, 100}}, Notice{0, 4, 2}, 1);
        CHECK(context->notify_waitsome(0, 4, 1, Deadline::after_ms(60'000)) == 4 && context->notify_reset(0, 4) == 2);
        CHECK(data[8700] == right + 1 && data[8899] == right + 1);
        CHECK(context->wait(1, Deadline::after_ms(60'000)));
        // What was written is there after the wait, whatever a barrier overtakes.
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
            for (int i = 0; i < 3; ++i) CHECK(context->passive_send(0, "hello", 5, Deadline::after_ms(60'000)));
        }
        group.execute({});
    }, make_links);
}

void letters() {
    as_ranks({0, 0, 1}, [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        const int n = group.size(), me = group.index();
        std::vector<char> out(600'000, char(me)), in(600'000);
        auto receiving = group.receive((me + n - 1) % n, in.data(), in.size(), 4);
        auto sending = group.send((me + 1) % n, out.data(), out.size(), 4);
        CHECK(receiving->wait(Deadline::after_ms(60'000)) && sending->wait(Deadline::after_ms(60'000)));
        CHECK(in[0] == (me + n - 1) % n && in[599'999] == in[0]);
        { auto never = group.receive((me + 1) % n, in.data(), in.size(), 5); }  // given up: nothing may follow
        group.execute({});
    });
}

// Whoever sends first; what one of them said before its end is there.
void letters_of_anybody(const std::vector<int>& nodes, const MakeLinks& make_links = {}) {
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        const int me = group.index();
        if (me) {
            for (int i = 0; i < 2; ++i) CHECK(group.send(0, &me, sizeof me, 4)->wait(Deadline::after_ms(60'000)));
            group.execute({});
            return context->close();
        }
        CHECK(group.sender(9, Deadline::after_ms(0)) == -1);
        group.execute({});
        int from[3] = {};
        for (int i = 0; i < 4; ++i) {
            const int member = group.sender(4, Deadline::after_ms(60'000));
            int said = 0;
            CHECK(group.receive(member, &said, sizeof said, 4)->wait(Deadline::after_ms(60'000)));
            CHECK(said == member);
            ++from[said];
        }
        CHECK(from[1] == 2 && from[2] == 2);
        if (!make_links) return;  // where a rank is lost with its process, as TCP's streams end with it
        bool told = false;
        try {
            group.sender(4, Deadline::after_ms(60'000));
        } catch (const Failure& failure) {
            told = failure.trouble == Trouble::peer_lost;
        }
        CHECK(told);
    }, make_links);
}

// Others may carry what goes between nodes.
void other_links() {
    for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1}, {0, 1, 2}}) {
        collectives(nodes, QueuedLinks::among(nodes.size()));
        one_sided(nodes, QueuedLinks::among(nodes.size()));
    }
    auto leaving = [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        if (context->rank() == 1) return context->close();
        bool told = false;
        try {
            std::vector<float> data(5000);
            group.execute(allreduce_of(data));
        } catch (const Failure& failure) {
            told = failure.trouble == Trouble::peer_lost;
        }
        CHECK(told && context->is_lost(1));
    };
    as_ranks({0, 1}, leaving, QueuedLinks::among(2));
}

// Of what members have noted, an earlier loss counts before the one that is seen now.
void noted_culprits() {
    auto area = std::make_unique<Area>();
    CHECK(!explains(*area, 1));
    area->broken = 2 + 1;
    CHECK(explains(*area, 1) && !explains(*area, 2));
    area->reason[0] = 'x';  // members disagree, and one of them has left since
    CHECK(explains(*area, 1) && explains(*area, 2));
}

// One leaves because another one was lost: that other one is named by all.
void first_culprit() {
    for (auto& nodes : std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2, 2}})
        as_ranks(nodes, [](std::shared_ptr<Context> context) {
            const int culprit = context->size() - 1;
            Group group(context, everyone(*context), Deadline::after_ms(60'000));
            std::vector<float> data(5000);
            if (context->rank() == culprit) return context->close();
            if (context->rank() == 0)  // meets the others' ends, and what they said before, at a time
                while (!context->is_lost(1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            std::string said;
            try {
                group.execute(allreduce_of(data));
            } catch (const Failure& failure) {
                said = failure.what();
            }
            CHECK(said.find("ank " + std::to_string(culprit) + " was lost") != std::string::npos);
            if (context->rank()) context->close();
        }, QueuedLinks::among(nodes.size()));
}

// Messages that come long before somebody wants them: memory grows with them.
void early_letters() {
    as_ranks({0, 1}, [](std::shared_ptr<Context> context) {
        Group group(context, everyone(*context), Deadline::after_ms(20'000));
        const std::vector<size_t> sizes{1, 300 << 10, 1 << 20, (1 << 20) + 1, 5'000'001};
        std::vector<std::vector<char>> data;
        for (size_t size : sizes) {
            data.emplace_back(size);
            for (size_t i = 0; i < size; ++i) data.back()[i] = char(i * 7 + i / 1000);
        }
        if (context->rank() == 1) {
            std::vector<std::shared_ptr<Letter>> sent;
            for (size_t i = 0; i < sizes.size(); ++i) sent.push_back(group.send(0, data[i].data(), sizes[i], uint32_t(i)));
            for (auto& letter : sent) CHECK(letter->wait(Deadline::after_ms(60'000)));
        }
        group.execute({});  // rank 0 has not asked for one of them yet, and all of them are there or on their way
        if (context->rank() == 0)
            for (size_t i = 0; i < sizes.size(); ++i) {
                std::vector<char> into(sizes[i]);
                CHECK(group.receive(1, into.data(), sizes[i], uint32_t(i))->wait(Deadline::after_ms(60'000)));
                CHECK(into == data[i]);
            }
        group.execute({});
    });
}

// What a peer that went mad could send: nothing may crash, and nothing outside segments may be written.
void garbage() {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        auto context = std::make_shared<Context>(0, 2);
        std::vector<Endpoint> ends(2);
        ends[0] = {getpid(), context->control_fd(), 0, {}};
        ends[1] = {getpid(), -1, 1, {}};
        int mad[3];
        for (int& fd : mad) {
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
            if (send(mad[random() % 3], bytes.data(), bytes.size() - (random() % 4 == 0 ? random() % 64 : 0),
                     MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
                break;
        }
        for (int fd : mad) close(fd);
        for (int i = 0; i < 3000 && !context->is_lost(1); ++i) {
            timespec nap{0, 1'000'000};
            nanosleep(&nap, nullptr);
        }
        CHECK(context->is_lost(1));
        bool refused = false;
        try {
            context->write(1, {}, Notice{0, 1, 1}, 0);
        } catch (const Failure&) {
            refused = true;
        }
        CHECK(refused);
    }
}

void arithmetic() {
    // Halves and brain floats: every value survives, ties go to even.
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        for (Type type : {Type::f16, Type::bf16}) {
            uint16_t value = uint16_t(bits), one = value, out = 0;
            const void* sources[1] = {&one};
            void* destination = &out;
            reduce(type, Reduction::sum, sources, 1, &destination, 1, 1);
            bool nan = type == Type::f16 ? (bits & 0x7FFF) > 0x7C00 : (bits & 0x7FFF) > 0x7F80;
            if (!nan) CHECK(out == value);
        }
    }
    for (size_t count : {1, 255, 257, 5001}) {
        std::mt19937 random(3);
        std::uniform_real_distribution<float> uniform(-3, 3);
        std::vector<float> values(count), back(count);
        for (auto& value : values) value = uniform(random);
        for (Wire wire : {Wire::bf16, Wire::int8}) {
            std::vector<char> travelling(wire_size(wire, 4, count));
            std::vector<float> residual(count, 0.0f);
            carme::kernels().encode(wire, values.data(), residual.data(), travelling.data(), count);
            carme::kernels().decode(wire, travelling.data(), back.data(), count, false);
            for (size_t i = 0; i < count; ++i) {
                float bound = wire == Wire::bf16 ? std::fabs(values[i]) / 256 : 3.0f / 254;
                CHECK(std::fabs(back[i] - values[i]) <= 1.001f * bound);
                CHECK(std::fabs(back[i] + residual[i] - values[i]) <= 1e-6f);
            }
            carme::kernels().decode(wire, travelling.data(), values.data(), count, true);
            CHECK(std::fabs(values[count - 1] - 2 * back[count - 1]) <= 0.05f);
            values[0] = std::numeric_limits<float>::quiet_NaN();
            carme::kernels().encode(wire, values.data(), nullptr, travelling.data(), count);
            carme::kernels().decode(wire, travelling.data(), back.data(), count, false);
            CHECK(std::isnan(back[0]));
            for (auto& value : values) value = uniform(random);
        }
    }
    for (size_t count : {1, 15, 1024, 5001}) {
        std::vector<int32_t> a(count, 2'000'000'000), b(count, 2'000'000'000), c(count, 1), out(count);
        const void* sources[3] = {a.data(), b.data(), c.data()};
        void* destination = out.data();
        reduce(Type::i32, Reduction::sum, sources, 3, &destination, 1, count);  // wraps around
        CHECK(out[0] == int32_t(4'000'000'001u) && out[count - 1] == out[0]);
        reduce(Type::i32, Reduction::minimum, sources, 3, &destination, 1, count);
        CHECK(out[count - 1] == 1);
        void* both[2] = {a.data(), b.data()};
        reduce(Type::i32, Reduction::maximum, sources, 2, both, 2, count);
        CHECK(a[count - 1] == 2'000'000'000 && b[0] == 2'000'000'000);
    }
}

}  // namespace

int main() {
    recorder_tests();
    arithmetic();
    for (auto& nodes : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1}})
        collectives(nodes);
    between_nodes({0, 1}, Algorithm::automatic);
    for (auto& nodes : std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}})
        for (Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::halving, Algorithm::automatic})
            between_nodes(nodes, algorithm);
    for (Wire wire : {Wire::same, Wire::bf16})
        for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}}) long_ones(nodes, wire);
    ring_of_many_pieces();
    zeros();
    for (Wire wire : {Wire::same, Wire::bf16}) {
        rows({0, 1}, Algorithm::automatic, wire);
        for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving}) rows({0, 0, 1, 2, 2}, algorithm, wire);
    }
    feedback({0, 1}, Algorithm::automatic, Wire::bf16);
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving}) feedback({0, 1, 2}, algorithm, Wire::int8);
    // Here the kernel says at once that it copies.
    TcpLinks::insist_on_uncopied = true;
    for (Wire wire : {Wire::same, Wire::bf16})
        for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}}) long_ones(nodes, wire);
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving}) between_nodes({0, 1, 2}, algorithm);
    one_sided({0, 1});
    TcpLinks::insist_on_uncopied = false;
    link_models();
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}}) one_sided(nodes);
    other_links();
    letters();
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0, 1}, {0, 1, 2}}) letters_of_anybody(nodes);
    letters_of_anybody({0, 1, 2}, QueuedLinks::among(3));
    noted_culprits();
    first_culprit();
    early_letters();
    garbage();
    links_tests();
    if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
    else std::puts("all checks passed");
    return failures != 0;
}

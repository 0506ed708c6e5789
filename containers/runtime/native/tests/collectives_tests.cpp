// Tests of collectives: results on one and several nodes, by every algorithm.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "as_ranks.hpp"
#include "checks.hpp"
#include "group.hpp"
#include "tcp_links.hpp"

using namespace carme;

void collectives(const std::vector<int>& nodes, const MakeLinks& make_links) {
    as_ranks(nodes, [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        const int n = group.size(), index = group.index();
        for (uint64_t count : {uint64_t(1), uint64_t(5000), uint64_t(200'000)}) {
            std::vector<float> data(count, float(index + 1));
            group.execute(allreduce_of(data));
            CHECK(data[0] == float(n * (n + 1) / 2) && data[count - 1] == data[0]);

            std::vector<uint8_t> bytes(count, uint8_t(index));
            Group::Call call;
            call.kind = Kind::broadcast;
            call.buffer = bytes.data();
            call.count = count;
            call.root = n - 1;
            group.execute(call);
            CHECK(bytes[0] == n - 1 && bytes[count - 1] == n - 1);

            std::vector<uint64_t> sizes(size_t(n), count);
            std::vector<uint8_t> input(count * uint64_t(n), uint8_t(index)), out(count * uint64_t(n));
            call = {};
            call.kind = Kind::alltoall;
            call.input = input.data();
            call.output = out.data();
            call.send_sizes = call.receive_sizes = sizes;
            group.execute(call);
            for (int r = 0; r < n; ++r) CHECK(out[count * uint64_t(r)] == r);
            call.kind = Kind::allgather;
            call.count = out.size();
            group.execute(call);
            for (int r = 0; r < n; ++r) CHECK(out[count * uint64_t(r + 1) - 1] == r);

            std::vector<float> full_input(count * uint64_t(n), 1.0f), part(count);
            call = {};
            call.kind = Kind::reduce_scatter;
            call.input = full_input.data();
            call.output = part.data();
            call.count = count;
            call.type = Type::f32;
            group.execute(call);
            CHECK(part[0] == float(n) && part[count - 1] == float(n));
        }
        std::vector<std::vector<float>> buffers(8, std::vector<float>(3000, 1.0f));
        std::vector<std::shared_ptr<Handle>> handles;
        for (auto& data : buffers) handles.push_back(group.submit(allreduce_of(data)));
        for (auto& handle : handles) CHECK(handle->wait(Deadline::after_ms(60'000)));
        for (auto& data : buffers) CHECK(data[2999] == float(n));
        Group::Call barrier;
        group.execute(barrier);
    }, make_links);
}

namespace {

// Every algorithm over several nodes: correct where sums are exact, and bitwise equal on all ranks where they
// are not.
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
                Group group(context, all_ranks(*context), Deadline::after_ms(60'000), algorithm);
                auto rank = size_t(context->rank());
                std::vector<float> full_input(count, float(rank + 1));
                group.execute(allreduce_of(full_input));
                CHECK(full_input[0] == float(n * (n + 1) / 2) && full_input[count - 1] == full_input[0]);
                results[rank] = inputs[rank];
                auto call = allreduce_of(results[rank]);
                call.wire = wire;
                group.execute(call);
            });
            // Each rank rounds a number at most once, and no number exceeds the sum of all.
            const double step = wire == Wire::same ? 1e-6 : wire == Wire::bf16 ? 1.0 / 256 : 1.0 / 254;
            double worst = 0;
            for (uint64_t i = 0; i < count; ++i)
                worst = std::max(worst, std::fabs(double(results[0][i]) - exact[i]));
            CHECK(worst <= 1.01 * step * double(n) * double(n) * double(largest));
            for (auto& result : results) CHECK(std::memcmp(result.data(), results[0].data(), count * 4) == 0);
        }
    }
}

// A ring with blocks of more pieces than 16 bits can count, as blocks of 16 GiB have: no piece is mistaken
// for another.
void ring_of_many_pieces() {
    constexpr uint64_t count = 3 * 65'600;
    const uint64_t usual = piece_bytes.exchange(sizeof(float));
    as_ranks({0, 1, 2}, [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000), Algorithm::ring);
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

// Buffers of more pieces than posted receives, and means, which two nodes compute during the reduction.
void long_ones(const std::vector<int>& nodes, Wire wire) {
    as_ranks(nodes, [wire](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        const int n = group.size(), index = group.index();
        for (uint64_t count : {uint64_t(900'000), uint64_t(2'500'003)}) {
            std::vector<float> data(count);
            auto call = allreduce_of(data);
            call.wire = wire;
            call.reduction = Reduction::mean;
            for (int run = 0; run < 2; ++run) {
                // Exact in bfloat16, too.
                for (uint64_t i = 0; i < count; ++i) data[i] = float(i % 31) + float(index);
                group.execute(call);
                uint64_t wrong = 0;
                for (uint64_t i = 0; i < count; ++i) wrong += data[i] != float(i % 31) + 0.5f * float(n - 1);
                CHECK(wrong == 0);
            }
        }
        if (TcpLinks::force_zero_copy) CHECK(dynamic_cast<TcpLinks&>(context->links()).zero_copy_sends() > 4);
    });
}

// Gradients of embeddings: each rank has a few non-zero rows.
void rows(const std::vector<int>& nodes, Algorithm algorithm, Wire wire) {
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000), algorithm);
        const int n = group.size(), index = group.index();
        for (auto [count, row] :
             {std::pair<uint64_t, uint64_t>{60'000, 64}, {400'000, 250}, {1'500'001, 1024}}) {
            std::vector<float> data(count);
            auto value = [&, row = row](int rank, uint64_t i) {
                const uint64_t row_index = i / row;
                const bool is_nonzero = row_index % 11 == uint64_t(rank) || row_index % 37 == 5;
                return is_nonzero ? float(i % 29) - 14.0f + float(rank) : 0.0f;
            };
            auto call = allreduce_of(data);
            call.wire = wire;
            for (int run = 0; run < 2; ++run) {
                for (uint64_t i = 0; i < count; ++i) data[i] = value(index, i);
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

// The next run adds the rounding error of the last one: the error of the sum over many runs stays that of one
// run.
void error_feedback(const std::vector<int>& nodes, Algorithm algorithm, Wire wire) {
    constexpr uint64_t count = 70'000;
    constexpr int runs = 40;
    as_ranks(nodes, [&](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000), algorithm);
        const int n = group.size(), index = group.index();
        auto value = [](int rank, uint64_t i) { return std::sin(float(i * 7 % 1001) + float(rank)); };
        std::vector<float> data(count);
        std::vector<double> total(count, 0.0), plain(count, 0.0);
        auto call = allreduce_of(data);
        call.wire = wire;
        for (auto residual : {std::make_shared<Residual>(), std::shared_ptr<Residual>()}) {
            call.residual = residual;
            for (int run = 0; run < runs; ++run) {
                for (uint64_t i = 0; i < count; ++i) data[i] = value(index, i);
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
        const double single_run_error = 1.01 / (wire == Wire::bf16 ? 256 : 254) * n * n;
        CHECK(worst <= single_run_error + 1e-4 * runs);
        CHECK(without > 2 * worst);  // otherwise the feedback has no effect
        // Values that are not finite leave no residual.
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
    // One step for small buffers. For large ones no algorithm with a detour over neighbours.
    CHECK(model.best(3, 64) == Algorithm::direct && model.best(8, 64) == Algorithm::direct);
    CHECK(model.best(8, 64 << 20) == Algorithm::halving);
    CHECK(model.best(3, 64 << 20) == Algorithm::ring && model.best(6, 64 << 20) == Algorithm::ring);
    CHECK(model.microseconds(2 << 20) > 1.9 * model.microseconds(1 << 20));
    LinkModel slow_start{{{0, 10'000.0}, {1 << 20, 10'001.0}}};
    CHECK(slow_start.best(7, 1 << 20) == Algorithm::direct);
    CHECK(slow_start.fingerprint() != model.fingerprint());
    as_ranks({0, 1, 1, 2}, [](std::shared_ptr<Context> context) {
        Group group(context, all_ranks(*context), Deadline::after_ms(60'000));
        auto measured = group.measure_links();
        CHECK(measured.points.size() >= 2);
        for (auto& [bytes, time] : measured.points) CHECK(bytes > 0 && time > 0 && time < 1e12);
    });
    // Members with different algorithms get an error instead of a hang.
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
        as_ranks(nodes, [](std::shared_ptr<Context> context) {
            bool refused = false;
            try {
                Group group(context, all_ranks(*context), Deadline::after_ms(60'000),
                            context->rank() ? Algorithm::ring : Algorithm::halving);
            } catch (const Failure& failure) {
                refused = failure.kind == FailureKind::mismatch || failure.kind == FailureKind::peer_lost;
            }
            CHECK(refused);
        });
    }
}

}  // namespace

void collectives_tests() {
    for (auto& nodes :
         std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1}})
        collectives(nodes);
    between_nodes({0, 1}, Algorithm::automatic);
    for (auto& nodes :
         std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}})
        for (Algorithm algorithm :
             {Algorithm::direct, Algorithm::ring, Algorithm::halving, Algorithm::automatic})
            between_nodes(nodes, algorithm);
    for (Wire wire : {Wire::same, Wire::bf16})
        for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}})
            long_ones(nodes, wire);
    ring_of_many_pieces();
    for (Wire wire : {Wire::same, Wire::bf16}) {
        rows({0, 1}, Algorithm::automatic, wire);
        for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving})
            rows({0, 0, 1, 2, 2}, algorithm, wire);
    }
    error_feedback({0, 1}, Algorithm::automatic, Wire::bf16);
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving})
        error_feedback({0, 1, 2}, algorithm, Wire::int8);
    // The loopback device makes the kernel report copies at once.
    TcpLinks::force_zero_copy = true;
    for (Wire wire : {Wire::same, Wire::bf16})
        for (auto& nodes : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}}) long_ones(nodes, wire);
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::halving}) between_nodes({0, 1, 2}, algorithm);
    TcpLinks::force_zero_copy = false;
    link_models();
}

// Ranks of a run as threads of one process, for the core's tests.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <unistd.h>

#include "checks.hpp"
#include "group.hpp"

// Runs `body` as every rank. `nodes`: the node of each rank.
inline void as_ranks(const std::vector<int>& nodes,
                     const std::function<void(std::shared_ptr<carme::Context>)>& body,
                     const carme::MakeLinks& make_links = {}) {
    const int n = int(nodes.size());
    std::vector<std::shared_ptr<carme::Context>> contexts;
    for (int r = 0; r < n; ++r) contexts.push_back(std::make_shared<carme::Context>(r, n, make_links));
    std::vector<std::vector<carme::Endpoint>> ends;
    ends.resize(size_t(n), std::vector<carme::Endpoint>(size_t(n)));
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

inline std::vector<int> all_ranks(const carme::Context& context) {
    std::vector<int> ranks;
    for (int r = 0; r < context.size(); ++r) ranks.push_back(r);
    return ranks;
}

inline carme::Group::Call allreduce_of(std::vector<float>& data) {
    carme::Group::Call call;
    call.kind = carme::Kind::allreduce;
    call.buffer = data.data();
    call.count = data.size();
    call.type = carme::Type::f32;
    call.timeout_ms = 60'000;
    return call;
}

// In collectives_tests.cpp. Tests of other links use it, too.
void collectives(const std::vector<int>& nodes, const carme::MakeLinks& make_links = {});

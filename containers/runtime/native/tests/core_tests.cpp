// Tests of the core inside one process: ranks are threads, nodes are what their endpoints say. Made for the
// sanitizers, which see one process only.
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "group.hpp"

using namespace carme;

namespace {

int failures = 0;

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);       \
            __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);                                \
        }                                                                                      \
    } while (0)

std::pair<int, int> connected_pair() {
    int listener = socket(AF_INET, SOCK_STREAM, 0), out = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address);
    listen(listener, 1);
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
    if (connect(out, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::abort();
    int in = accept(listener, nullptr, nullptr);
    close(listener);
    return {out, in};
}

// Runs `body` as every rank; `nodes` says where each of them is.
void as_ranks(const std::vector<int>& nodes, const std::function<void(std::shared_ptr<Context>)>& body) {
    const int n = int(nodes.size());
    std::vector<std::shared_ptr<Context>> contexts;
    for (int r = 0; r < n; ++r) contexts.push_back(std::make_shared<Context>(r, n));
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

void collectives(const std::vector<int>& nodes) {
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
    });
}

void one_sided(const std::vector<int>& nodes) {
    as_ranks(nodes, [](std::shared_ptr<Context> context) {
        const int n = context->size(), right = (context->rank() + 1) % n;
        Group group(context, everyone(*context), Deadline::after_ms(60'000));
        context->segment_alloc(0, 1 << 20);
        for (int r = 0; r < n; ++r)
            if (r != context->rank()) context->segment_register(0, r, Deadline::after_ms(60'000));
        group.execute({});
        char* data = context->segment_pointer(0);
        std::memset(data, context->rank() + 1, 1000);
        context->write(right, {{0, 0, 0, 4096, 1000}}, Context::Notice{0, 3, 9}, 0);
        CHECK(context->notify_waitsome(0, 0, 8, Deadline::after_ms(60'000)) == 3);
        CHECK(context->notify_reset(0, 3) == 9);
        CHECK(data[4096] == (context->rank() + n - 1) % n + 1 && data[5095] == data[4096]);
        CHECK(context->wait(0, Deadline::after_ms(60'000)));
        group.execute({});
        context->read(right, {{0, 8192, 0, 0, 500}}, 1);
        CHECK(context->wait(1, Deadline::after_ms(60'000)));
        CHECK(data[8192] == right + 1);
        for (int i = 0; i < 100; ++i) context->atomic_add(0, 0, 16384, 1, Deadline::after_ms(60'000));
        group.execute({});
        if (context->rank() == 0) CHECK(*reinterpret_cast<uint64_t*>(data + 16384) == uint64_t(100 * n));
        if (context->rank() == 0) {
            for (int i = 0; i < 3 * (n - 1); ++i) CHECK(context->passive_receive(Deadline::after_ms(60'000)));
        } else {
            for (int i = 0; i < 3; ++i) CHECK(context->passive_send(0, "hello", 5, Deadline::after_ms(60'000)));
        }
        group.execute({});
    });
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
            frame.type = FrameType(random() % 12);
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
            context->write(1, {}, Context::Notice{0, 1, 1}, 0);
        } catch (const Failure&) {
            refused = true;
        }
        CHECK(refused);
    }
}

void kernels() {
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
    kernels();
    for (auto& nodes : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1}})
        collectives(nodes);
    for (auto& nodes : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}}) one_sided(nodes);
    letters();
    garbage();
    if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
    else std::puts("all checks passed");
    return failures != 0;
}

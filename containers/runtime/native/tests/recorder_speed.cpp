// Prints the cost of an event in nanoseconds of CPU time: recorder_speed FILE [MILLIONS]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <unistd.h>

#include "recorder.hpp"

using namespace carme;

static double used() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) * 1e9 + double(t.tv_nsec);
}

int main(int count, char** arguments) {
    if (count < 2) {
        std::fprintf(stderr, "Usage: recorder_speed FILE [MILLIONS]\n");
        return 2;
    }
    unlink(arguments[1]);
    if (const int error = recorder::start(arguments[1], "{}", uint64_t(4) << 30)) {
        std::fprintf(stderr, "recorder_speed: %s: %s\n", arguments[1], std::strerror(error));
        return 1;
    }
    const long events = (count > 2 ? std::atol(arguments[2]) : 2) * 1'000'000, part = 20'000;
    double recorded = 0, bare = 0;
    int64_t sum = 0;
    // In parts that fit into the ring, because programs do other work between events.
    for (long done = 0; done < events; done += part) {
        double begin = used();
        for (long i = 0; i < part; ++i) {
            recorder::Span span(recorder::Kind::put, recorder::put_name);
            span.record.size = uint64_t(i);
            span.end();
        }
        recorded += used() - begin;
        begin = used();
        for (long i = 0; i < part; ++i) sum += now_ns() - now_ns();
        bare += used() - begin;
        while (recorder::progress().written + recorder::progress().dropped < uint64_t(done + part))
            usleep(1000);
    }
    const auto result = recorder::stop();
    std::printf(
        "%.1f ns an event with its two times, %.1f ns of them for the times; %llu written, %llu dropped\n",
        recorded / double(events), bare / double(events), static_cast<unsigned long long>(result.written),
        static_cast<unsigned long long>(result.dropped));
    return result.dropped || result.error || sum > 0;
}

// Tests of the recorder: no lost or duplicate records, the size limit, forks, and threads that end.
#include "recorder.hpp"

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "checks.hpp"
#include "otf2_events.hpp"

using namespace carme;

namespace {

struct Recording {
    std::map<uint32_t, std::vector<recorder::Record>> events;  // by thread
    std::map<uint32_t, std::string> names;
    uint64_t written = 0, dropped = 0, total = 0, bytes = 0;
};

Recording read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string data(std::istreambuf_iterator<char>(file), {});
    Recording recording;
    recording.bytes = data.size();
    CHECK(data.compare(0, 8, "CARMEEV1") == 0);
    for (size_t at = 8; at + 16 <= data.size();) {
        uint32_t type, number;
        uint64_t size;
        std::memcpy(&type, &data[at], 4);
        std::memcpy(&number, &data[at + 4], 4);
        std::memcpy(&size, &data[at + 8], 8);
        const char* payload = data.data() + at + 16;
        if (type == 1) {
            auto& events = recording.events[number];
            const size_t before = events.size(), count = size / sizeof(recorder::Record);
            events.resize(before + count);
            std::memcpy(&events[before], payload, count * sizeof(recorder::Record));
            recording.total += count;
        } else if (type == 2) {
            recording.names[number] = std::string(payload, size);
        } else if (type == 6) {
            std::memcpy(&recording.written, payload, 8);
            std::memcpy(&recording.dropped, payload + 8, 8);
        }
        at += 16 + size;
    }
    return recording;
}

void record(uint32_t name, uint64_t size) {
    recorder::Span span(recorder::Kind::phase, name);
    span.record.size = size;
    span.end();
}

void several_threads(const std::string& path) {
    unlink(path.c_str());
    CHECK(recorder::start(path, "{}", uint64_t(1) << 30) == 0);
    CHECK(recorder::start(path, "{}", uint64_t(1) << 30) == EBUSY);
    constexpr uint64_t each = 50'000;
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t)
        threads.emplace_back([t] {
            const uint32_t name = recorder::name("thread " + std::to_string(t));
            for (uint64_t i = 0; i < each; ++i) record(name, i);
        });
    for (auto& thread : threads) thread.join();
    if (const pid_t child = fork(); child == 0) {
        CHECK(!recorder::on());
        _exit(failures ? 1 : 0);
    } else {
        int status = 1;
        waitpid(child, &status, 0);
        CHECK(status == 0);
    }
    record(recorder::barrier, 7);
    const auto result = recorder::stop();
    CHECK(result.error == 0 && result.written + result.dropped == 4 * each + 1);
    const Recording recording = read(path);
    CHECK(recording.total == result.written && recording.written == result.written);
    CHECK(recording.dropped == result.dropped);
    CHECK(recording.names.at(recorder::barrier) == "barrier");
    CHECK(recording.events.size() == 5);
    for (auto& [thread, events] : recording.events) {
        std::set<uint64_t> sizes;
        for (auto& event : events) {
            CHECK(event.end >= event.begin &&
                  recording.names.at(event.name) == recording.names.at(events[0].name));
            CHECK(sizes.insert(event.size).second);
        }
    }
    record(recorder::barrier, 7);  // the recorder is off
}

void limited(const std::string& path) {
    unlink(path.c_str());
    constexpr uint64_t limit = 100'000;
    CHECK(recorder::start(path, "{}", limit) == 0);
    for (uint64_t i = 0; i < 10'000; ++i) record(recorder::put_name, i);
    const auto result = recorder::stop();
    CHECK(result.dropped > 0 && result.written + result.dropped == 10'000);
    const Recording recording = read(path);
    CHECK(recording.bytes <= limit + 1024 && recording.dropped == result.dropped);
    CHECK(recorder::start(path, "{}", limit) == EEXIST);
    CHECK(recorder::start("/no/such/folder/file", "{}", limit) == ENOENT);
}

// Overlapping spans get separate lanes; nested ones do not.
void lanes() {
    auto span = [](int64_t begin, int64_t end) {
        recorder::Record record;
        record.kind = recorder::Kind::firing;
        record.begin = begin;
        record.end = end;
        return record;
    };
    CHECK(otf2::Thread({span(2, 3), span(4, 5), span(1, 6), span(7, 8)}).lanes() == 1);
    CHECK(otf2::Thread({span(1, 3), span(2, 4), span(3, 5)}).lanes() == 2);
    CHECK(otf2::Thread({}).lanes() == 0);
    std::vector<recorder::Record> overlapping;
    for (int64_t i = 0; i < 100; ++i) overlapping.push_back(span(i, 200 + i));
    const otf2::Thread thread(overlapping);
    CHECK(thread.lanes() == 64 && thread.first() == 0 && thread.last() == 299);
}

}  // namespace

void recorder_tests() {
    const std::string path = "/tmp/carme-recorder-" + std::to_string(getpid());
    several_threads(path);
    limited(path);
    lanes();
    unlink(path.c_str());
}

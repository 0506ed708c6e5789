// The Python bindings of the recorder and of the OTF2 writer. Use carme_runtime.profile and
// carme_runtime.traces.
#include <cstring>
#include <stdexcept>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "otf2_events.hpp"
#include "recorder.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace carme;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

std::tuple<uint64_t, uint64_t, int> tuple_of(const recorder::Result& r) {
    return {r.written, r.dropped, r.error};
}

otf2::Numbers numbers_of(std::map<std::pair<uint32_t, uint32_t>, uint32_t> regions,
                         std::map<uint32_t, uint32_t> communicators, std::map<uint32_t, uint32_t> windows,
                         std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t> attributes,
                         uint32_t metrics) {
    otf2::Numbers numbers;
    for (auto& [key, region] : regions) numbers.regions[uint64_t(key.first) << 32 | key.second] = region;
    numbers.communicators = std::move(communicators);
    numbers.windows = std::move(windows);
    std::tie(numbers.stage, numbers.micro_batch, numbers.message, numbers.notification, numbers.bytes) =
        attributes;
    numbers.metrics = metrics;
    return numbers;
}

}  // namespace

void bind_recorder(nb::module_& m) {
    m.def("recorder_start", &recorder::start, "path"_a, "about"_a, "limit"_a);
    m.def("recorder_stop", [] { return tuple_of(recorder::stop()); }, Released());
    m.def("recorder_progress", [] { return tuple_of(recorder::progress()); });
    m.def("recorder_name", &recorder::name);
    m.def("recorder_name_thread",
          [](int thread, const std::string& text) { recorder::name_thread(thread, text); });
    m.def("recorder_add", [](uint16_t kind, uint32_t name, int64_t begin, int64_t end, uint64_t size,
                             uint64_t extra, uint32_t object) {
        if (!recorder::on()) return;
        recorder::Record record;
        record.kind = recorder::Kind(kind);
        record.name = name;
        record.begin = begin;
        record.end = end;
        record.size = size;
        record.extra = extra;
        record.object = object;
        recorder::add(record);
    });

    nb::class_<otf2::Numbers>(m, "Otf2Numbers")
        .def("__init__",
             [](otf2::Numbers* self, std::map<std::pair<uint32_t, uint32_t>, uint32_t> regions,
                std::map<uint32_t, uint32_t> communicators, std::map<uint32_t, uint32_t> windows,
                std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t> attributes, uint32_t metrics) {
                 new (self) otf2::Numbers(numbers_of(std::move(regions), std::move(communicators),
                                                     std::move(windows), attributes, metrics));
             });
    nb::class_<otf2::Thread>(m, "Otf2Thread")
        .def("__init__",
             [](otf2::Thread* self, const std::vector<nb::bytes>& blocks) {
                 size_t bytes = 0;
                 for (auto& block : blocks) bytes += block.size();
                 std::vector<recorder::Record> records(bytes / sizeof(recorder::Record));
                 char* at = reinterpret_cast<char*>(records.data());
                 for (auto& block : blocks) {
                     const size_t complete_size =
                         block.size() / sizeof(recorder::Record) * sizeof(recorder::Record);
                     std::memcpy(at, block.c_str(), complete_size);
                     at += complete_size;
                 }
                 new (self) otf2::Thread(std::move(records));
             })
        .def_prop_ro("lanes", &otf2::Thread::lanes)
        .def_prop_ro("records", &otf2::Thread::records)
        .def_prop_ro("first", &otf2::Thread::first)
        .def_prop_ro("last", &otf2::Thread::last)
        .def_prop_ro("regions", &otf2::Thread::regions)
        .def_prop_ro("segments", &otf2::Thread::segments)
        .def("write", &otf2::Thread::write, Released());
}

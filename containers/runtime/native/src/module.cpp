// The Python bindings of the core. Buffers are passed as addresses; the Python API handles arrays and
// tensors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "context.hpp"
#include "group.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace carme;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using PartTuple = std::tuple<int, uint64_t, int, uint64_t, uint64_t>;
using NotificationTuple = std::tuple<int, uint32_t, uint32_t>;

std::vector<Context::Part> parts_of(const std::vector<PartTuple>& tuples) {
    std::vector<Context::Part> parts;
    for (auto& [a, b, c, d, e] : tuples) parts.push_back({a, b, c, d, e});
    return parts;
}

std::optional<Notification> notification_of(const std::optional<NotificationTuple>& tuple) {
    if (!tuple) return std::nullopt;
    auto& [segment, id, value] = *tuple;
    return Notification{segment, id, value};
}

Group::Call call_of(uint32_t kind, uintptr_t input, uintptr_t output, uint64_t count, uint32_t type,
                    uint32_t reduction, int root, std::vector<uint64_t> send_sizes,
                    std::vector<uint64_t> receive_sizes, std::string label, int64_t timeout_ms,
                    uint32_t wire) {
    Group::Call call;
    call.wire = Wire(wire);
    call.kind = Kind(kind);
    call.buffer = reinterpret_cast<void*>(output);
    call.input = reinterpret_cast<const void*>(input);
    call.output = call.buffer;
    call.count = count;
    call.type = Type(type);
    call.reduction = Reduction(reduction);
    call.root = root;
    call.send_sizes = std::move(send_sizes);
    call.receive_sizes = std::move(receive_sizes);
    call.label = std::move(label);
    call.timeout_ms = timeout_ms;
    return call;
}

// A persistent allreduce on one buffer.
struct Plan {
    std::shared_ptr<Group> group;
    Group::Call call;
};

// Failures of the core become the exceptions of carme_runtime.collectives.errors.
void bind_failures() {
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const Failure& failure) {
            static const char* names[] = {"InvalidCall", "Timeout", "PeerLost", "Mismatch", "OutOfResources"};
            try {
                nb::object kind =
                    nb::module_::import_("carme_runtime.collectives.errors").attr(names[int(failure.kind)]);
                nb::object error = kind(failure.message, failure.remedy);
                PyErr_SetObject(kind.ptr(), error.ptr());
            } catch (nb::python_error& e) {
                e.restore();
            }
        }
    });
}

void bind_segments(nb::class_<Context>& context) {
    context.def("segment_alloc", &Context::segment_alloc, Released())
        .def(
            "segment_register",
            [](Context& c, int id, int rank, int64_t ms) {
                c.segment_register(id, rank, Deadline::after_ms(ms));
            },
            Released())
        .def("segment_delete", &Context::segment_delete)
        .def("segment_size", [](Context& c, int id, int rank) { return c.remote_size(id, rank); })
        .def("segment_array", [](Context& c, int id) {
            auto* mapping = new std::shared_ptr<Mapping>(c.segment_mapping(id));
            uint64_t size;
            char* data = c.segment_pointer(id, &size);
            nb::capsule owner(mapping,
                              [](void* p) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size}, owner);
        });
}

void bind_one_sided(nb::class_<Context>& context) {
    context
        .def(
            "write",
            [](Context& c, int rank, const std::vector<PartTuple>& parts,
               const std::optional<NotificationTuple>& notification,
               int queue) { c.write(rank, parts_of(parts), notification_of(notification), queue); },
            "rank"_a, "parts"_a, "notification"_a.none(), "queue"_a, Released())
        .def(
            "read",
            [](Context& c, int rank, const std::vector<PartTuple>& parts,
               const std::optional<NotificationTuple>& notification,
               int queue) { c.read(rank, parts_of(parts), notification_of(notification), queue); },
            "rank"_a, "parts"_a, "notification"_a.none(), "queue"_a, Released())
        .def(
            "wait", [](Context& c, int queue, int64_t ms) { return c.wait(queue, Deadline::after_ms(ms)); },
            Released())
        .def(
            "notify_waitsome",
            [](Context& c, int segment, uint32_t first, uint32_t count, int64_t ms) {
                return c.notify_waitsome(segment, first, count, Deadline::after_ms(ms));
            },
            Released())
        .def("notify_reset", &Context::notify_reset)
        .def(
            "fetch_add",
            [](Context& c, int rank, int segment, uint64_t offset, uint64_t value, int64_t ms) {
                return c.atomic_add(rank, segment, offset, value, Deadline::after_ms(ms));
            },
            Released())
        .def(
            "compare_swap",
            [](Context& c, int rank, int segment, uint64_t offset, uint64_t expected, uint64_t value,
               int64_t ms) {
                return c.compare_swap(rank, segment, offset, expected, value, Deadline::after_ms(ms));
            },
            Released());
}

void bind_messages(nb::class_<Context>& context) {
    context
        .def("passive_send",
             [](Context& c, int rank, nb::bytes data, int64_t ms) {
                 nb::gil_scoped_release released;
                 return c.passive_send(rank, data.c_str(), data.size(), Deadline::after_ms(ms));
             })
        .def("passive_receive",
             [](Context& c, int64_t ms) -> std::optional<std::pair<int, nb::bytes>> {
                 std::optional<std::pair<int, std::vector<char>>> message;
                 {
                     nb::gil_scoped_release released;
                     message = c.passive_receive(Deadline::after_ms(ms));
                 }
                 if (!message) return std::nullopt;
                 return std::pair(message->first, nb::bytes(message->second.data(), message->second.size()));
             })
        .def("state_vector", &Context::state_vector)
        .def("ping", &Context::ping)
        .def("kill", [](Context& c, int rank, int64_t ms) { return c.kill(rank, Deadline::after_ms(ms)); },
             Released());
}

void bind_context(nb::module_& m) {
    nb::class_<Context> context(m, "Context", nb::is_weak_referenceable());
    context.def(nb::init<int, int>(), "rank"_a, "size"_a)
        .def_prop_ro("rank", &Context::rank)
        .def_prop_ro("size", &Context::size)
        .def_prop_ro("cores", &Context::cores)
        .def("set_link_times",
             [](Context& c, std::vector<std::pair<uint64_t, double>> points) {
                 c.set_link_model({std::move(points)});
             })
        .def_prop_ro("control_fd", &Context::control_fd)
        .def("node_of", &Context::node_of)
        .def("connect",
             [](Context& c, const std::vector<std::tuple<int, int, int, std::vector<int>>>& ends) {
                 std::vector<Endpoint> endpoints;
                 for (auto& [pid, fd, node, sockets] : ends) endpoints.push_back({pid, fd, node, sockets});
                 c.connect(endpoints);
             })
        .def("close", &Context::close, Released())
        .def("sync_clock", &Context::sync_clock, Released());
    bind_segments(context);
    bind_one_sided(context);
    bind_messages(context);
}

void bind_group(nb::module_& m) {
    nb::class_<Handle>(m, "Handle")
        .def("wait", [](Handle& h, int64_t ms) { return h.wait(Deadline::after_ms(ms)); }, Released())
        .def("done", &Handle::done);

    nb::class_<Group>(m, "Group")
        .def("__init__",
             [](Group* self, std::shared_ptr<Context> context, std::vector<int> ranks, int64_t ms,
                uint32_t algorithm) {
                 nb::gil_scoped_release released;
                 new (self) Group(std::move(context), std::move(ranks), Deadline::after_ms(ms),
                                 Algorithm(algorithm));
             })
        .def_prop_ro("ranks", &Group::ranks)
        .def_prop_ro("index", &Group::index)
        .def_prop_ro("size", &Group::size)
        .def(
            "execute",
            [](Group& g, uint32_t kind, uintptr_t input, uintptr_t output, uint64_t count, uint32_t type,
               uint32_t reduction, int root, std::vector<uint64_t> send_sizes,
               std::vector<uint64_t> receive_sizes, std::string label, int64_t ms, uint32_t wire) {
                g.execute(call_of(kind, input, output, count, type, reduction, root, std::move(send_sizes),
                                  std::move(receive_sizes), std::move(label), ms, wire));
            },
            Released())
        .def(
            "send",
            [](Group& g, int member, uintptr_t at, uint64_t size, uint32_t tag, uint32_t form) {
                return g.send(member, reinterpret_cast<const void*>(at), size, tag, form);
            },
            Released())
        .def(
            "receive",
            [](Group& g, int member, uintptr_t at, uint64_t size, uint32_t tag, uint32_t form) {
                return g.receive(member, reinterpret_cast<void*>(at), size, tag, form);
            },
            Released())
        .def(
            "sender",
            [](Group& g, uint32_t tag, int64_t ms) { return g.sender(tag, Deadline::after_ms(ms)); },
            Released())
        .def(
            "submit",
            [](Group& g, uint32_t kind, uintptr_t input, uintptr_t output, uint64_t count, uint32_t type,
               uint32_t reduction, int root, std::vector<uint64_t> send_sizes,
               std::vector<uint64_t> receive_sizes, std::string label, int64_t ms, uint32_t wire) {
                return g.submit(call_of(kind, input, output, count, type, reduction, root,
                                        std::move(send_sizes), std::move(receive_sizes), std::move(label), ms,
                                        wire));
            },
            Released())
        .def("measure_links", [](Group& g) { return g.measure_links().points; }, Released());

    nb::class_<PendingMessage>(m, "Letter")
        .def("wait", [](PendingMessage& l, int64_t ms) { return l.wait(Deadline::after_ms(ms)); }, Released())
        .def("done", &PendingMessage::done);
}

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan")
        .def(
            "__init__",
            [](Plan* self, std::shared_ptr<Group> group, uintptr_t data, uint64_t count, uint32_t type,
               uint32_t reduction, int64_t ms, uint32_t wire, nb::object) {
                auto call = call_of(uint32_t(Kind::allreduce), 0, data, count, type, reduction, 0, {}, {}, {},
                                    ms, wire);
                if (call.wire != Wire::same) call.residual = std::make_shared<Residual>();
                new (self) Plan{std::move(group), std::move(call)};
            },
            nb::keep_alive<1, 9>())  // the object whose memory `data` is
        .def(
            "run", [](Plan& p) { p.group->execute(p.call); }, Released())
        .def("start", [](Plan& p) { return p.group->submit(p.call); }, Released());
}

}  // namespace

void bind_recorder(nb::module_& m);

NB_MODULE(_core, m) {
    m.doc() = "The transport and the collectives of carme_runtime. Use carme_runtime.gaspi.";
    nb::set_leak_warnings(false);  // the context lives until the process ends
    m.attr("QUEUES") = queue_count;
    m.attr("SEGMENTS") = max_segments;
    m.attr("NOTIFICATIONS") = notification_count;
    m.attr("PASSIVE_LIMIT") = passive_limit;
    bind_failures();
    bind_recorder(m);
    bind_context(m);
    bind_group(m);
    bind_plan(m);
}

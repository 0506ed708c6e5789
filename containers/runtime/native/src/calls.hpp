// Names of collective calls for messages, and the advice to members whose calls disagree.
#pragma once

#include <cstring>
#include <string>

#include "group_area.hpp"
#include "kernels.hpp"

namespace carme {

constexpr const char* same_calls =
    "Call the same collectives with the same shapes and types in the same order on all ranks.";

inline const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::barrier: return "barrier";
        case Kind::allreduce: return "allreduce";
        case Kind::broadcast: return "broadcast";
        case Kind::reduce_scatter: return "reduce_scatter";
        case Kind::allgather: return "allgather";
        case Kind::alltoall: return "alltoall";
    }
    return "collective";
}

inline const char* name_of(Type type) {
    static const char* names[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"};
    return uint32_t(type) < 7 ? names[uint32_t(type)] : "unknown";
}

inline const char* name_of(Reduction reduction) {
    static const char* names[] = {"sum", "mean", "min", "max", "product", "band", "bor", "bxor"};
    return uint32_t(reduction) < 8 ? names[uint32_t(reduction)] : "unknown";
}

inline const char* name_of(Wire wire) {
    static const char* names[] = {"as it is", "bf16", "int8"};
    return uint32_t(wire) < 3 ? names[uint32_t(wire)] : "unknown";
}

// `Described` is a call, or another member's description of one.
template <class Described> std::string describe(const Described& d, const std::string& label) {
    std::string text = name_of(d.kind);
    if (d.kind == Kind::allreduce || d.kind == Kind::reduce_scatter)
        text += std::string(" (") + name_of(Reduction(d.reduction)) + ")";
    if (d.kind == Kind::broadcast) text += " from member " + std::to_string(d.root);
    if (d.kind != Kind::barrier && d.kind != Kind::alltoall)
        text += " of " + std::to_string(d.count) + " x " + name_of(Type(d.type));
    if (Wire(d.wire) != Wire::same) text += std::string(" on a wire of ") + name_of(Wire(d.wire));
    if (!label.empty()) text += " '" + label + "'";
    return text;
}

inline std::string describe(const Descriptor& d) {
    return describe(d, std::string(d.label, strnlen(d.label, sizeof d.label)));
}

}  // namespace carme

// Failures. Each becomes a Python exception with the same message.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace carme {

enum class FailureKind { invalid, timeout, peer_lost, mismatch, resource };

// `message` states what went wrong; `remedy` states what to do.
struct Failure : std::runtime_error {
    Failure(FailureKind kind, std::string message, std::string remedy)
        : std::runtime_error(message), kind(kind), message(std::move(message)), remedy(std::move(remedy)) {}

    FailureKind kind;
    std::string message;
    std::string remedy;
};

inline Failure invalid(std::string message, std::string remedy) {
    return {FailureKind::invalid, std::move(message), std::move(remedy)};
}

// The system's message for an error number.
inline std::string error_text(int error) { return std::strerror(error); }

}  // namespace carme

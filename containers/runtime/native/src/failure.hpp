// What can go wrong, in a form that becomes a Python exception with the same words.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace carme {

enum class Trouble { invalid, timeout, peer_lost, mismatch, resource };

// One sentence that says what was wrong, and one that says what to do.
struct Failure : std::runtime_error {
    Failure(Trouble kind, std::string message, std::string remedy)
        : std::runtime_error(message), trouble(kind), message(std::move(message)), remedy(std::move(remedy)) {}

    Trouble trouble;
    std::string message;
    std::string remedy;
};

inline Failure invalid(std::string message, std::string remedy) {
    return {Trouble::invalid, std::move(message), std::move(remedy)};
}

// What the system says of a number that errno had.
inline std::string error_text(int error) { return std::strerror(error); }

}  // namespace carme

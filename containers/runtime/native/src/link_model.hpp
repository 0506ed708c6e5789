// A model of message times between two nodes, and the choice of the fastest allreduce algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace carme {

enum class Algorithm : uint32_t { automatic, direct, ring, halving };

inline const char* name_of(Algorithm algorithm) {
    static const char* names[] = {"auto", "direct", "ring", "halving"};
    return uint32_t(algorithm) < 4 ? names[uint32_t(algorithm)] : "unknown";
}

// Message times by size: linear between two points, and extrapolated from the last two points beyond them.
struct LinkModel {
    // Bytes and microseconds. Default: Ethernet of 10 Gbit/s. Only the ratios matter.
    std::vector<std::pair<uint64_t, double>> points{{0, 25.0}, {16 << 10, 38.0}, {1 << 20, 870.0}};

    double microseconds(double bytes) const {
        if (points.size() < 2) return points.empty() ? 0.0 : points[0].second;
        size_t upper = 1;
        while (upper + 1 < points.size() && bytes > double(points[upper].first)) ++upper;
        auto [from, at] = points[upper - 1];
        auto [to, until] = points[upper];
        double result = at + (bytes - double(from)) * (until - at) / double(to - from);
        return result > 0 ? result : 0;
    }

    // The algorithm that reduces `bytes` over `nodes` fastest. Links are assumed to be full duplex.
    Algorithm best(size_t nodes, double bytes) const {
        const double n = double(nodes);
        const double direct = microseconds((n - 1) * bytes);
        const double ring = 2 * (n - 1) * microseconds(bytes / n);
        size_t power = 1;
        double halving = 0, part = bytes;
        while (power * 2 <= nodes) {
            power *= 2;
            part /= 2;
            halving += 2 * microseconds(part);
        }
        if (power != nodes) halving += 2 * microseconds(bytes);
        if (direct <= ring && direct <= halving) return Algorithm::direct;
        return halving < ring ? Algorithm::halving : Algorithm::ring;
    }

    uint64_t fingerprint() const {
        uint64_t h = 1469598103934665603ull;
        for (auto& [bytes, time] : points) {
            uint64_t bits;
            std::memcpy(&bits, &time, sizeof bits);
            for (uint64_t v : {bytes, bits}) h = (h ^ v) * 1099511628211ull;
        }
        return h >> 32;
    }
};

}  // namespace carme

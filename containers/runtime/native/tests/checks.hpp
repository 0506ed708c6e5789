// Helpers of the core's tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

inline int failures = 0;

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);       \
            __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);                                \
        }                                                                                      \
    } while (0)

inline std::pair<int, int> connected_pair() {
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

// The entry point of each test file.
void collectives_tests();
void context_tests();
void kernels_tests();
void links_tests();
void recorder_tests();

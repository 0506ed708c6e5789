// Flags in shared memory, and waiting for them: spin briefly, then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <limits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace carme {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// When a call times out. Negative milliseconds: never. Zero: test once.
struct Deadline {
    int64_t at = std::numeric_limits<int64_t>::max();

    static Deadline after_ms(int64_t ms) {
        const int64_t now = now_ns();
        if (ms < 0 || ms > (std::numeric_limits<int64_t>::max() - now) / 1'000'000) return {};
        return {now + ms * 1'000'000};
    }
    bool passed() const { return at != std::numeric_limits<int64_t>::max() && now_ns() >= at; }
};

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
    timespec t{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &t, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

// A counter that one side raises and others wait for. It takes two cache lines because processors prefetch
// pairs.
struct alignas(128) Flag {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    // Sequentially consistent: either the sleeper sees the new value, or this thread sees the sleeper.
    void post(uint32_t v) {
        value.store(v, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) futex_wake(value);
    }
    void raise() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) futex_wake(value);
    }
    // Counters wrap around, so compare their difference.
    bool reached(uint32_t target) const {
        return int32_t(value.load(std::memory_order_acquire) - target) >= 0;
    }
};

// Longer than a wake-up takes. Otherwise two ranks that slept once would wake each other forever.
constexpr int64_t longest_spin_ns = 300'000;
// An idle core wakes up late, above all under a hypervisor. A piece of a large buffer takes 2 ms over a link
// of 1 Gbit/s, and may queue behind others.
constexpr int64_t longest_busy_poll_ns = 10'000'000;
constexpr int64_t sleep_slice_ns = 20'000'000;  // between two checks for lost peers

// Waits until `ready()`. Sleeps on `flag`, whose value changes whenever `ready` may have become true. Calls
// `spin_turn()` while spinning and `check()` between sleeps; `check` throws to end the wait. Returns false at
// the deadline.
template <class Ready, class Turn, class Check> bool wait_on(Flag& flag, bool oversubscribed,
                                                             Deadline deadline, Ready&& ready,
                                                             Turn&& spin_turn, Check&& check) {
    if (ready()) return true;
    if (oversubscribed) {  // ranks share cores: yield at once
        for (int i = 0; i < 40; ++i) {
            sched_yield();
            spin_turn();
            if (ready()) return true;
        }
    } else {
        for (const int64_t end = now_ns() + longest_spin_ns; now_ns() < end;)
            for (int i = 0; i < 32; ++i) {
                pause_cpu();
                spin_turn();
                if (ready()) return true;
            }
    }
    while (true) {
        if (deadline.passed()) return ready();
        int64_t slice = sleep_slice_ns;
        if (deadline.at != std::numeric_limits<int64_t>::max()) {
            int64_t remaining = deadline.at - now_ns();
            if (remaining < slice) slice = remaining > 0 ? remaining : 0;
        }
        flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = flag.value.load(std::memory_order_seq_cst);
        const bool is_ready = ready();  // may have side effects: not called again once it is true
        if (!is_ready) futex_wait(flag.value, seen, slice);
        flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (is_ready || ready()) return true;
        check();
    }
}

}  // namespace carme

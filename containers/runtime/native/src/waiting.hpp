// Flags in shared memory, and how to wait for them: spin shortly, then sleep in the kernel.
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

// When a call must give up. Negative milliseconds: never. Zero: test once.
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

// A counter that one side raises and others wait for. Two cache lines, because processors fetch pairs.
struct alignas(128) Flag {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    // Sequentially consistent, so that either the sleeper sees the new value or this thread sees the sleeper.
    void post(uint32_t v) {
        value.store(v, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) futex_wake(value);
    }
    void raise() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) futex_wake(value);
    }
    // Counters wrap around: compare by distance.
    bool reached(uint32_t target) const {
        return int32_t(value.load(std::memory_order_acquire) - target) >= 0;
    }
};

// Longer than it takes to wake a sleeper: else two ranks that once slept would wake each other for ever.
constexpr int64_t longest_spin_ns = 300'000;
// A core that sleeps is woken late, by a hypervisor above all. A piece of a large buffer takes 2 ms on a link of 1
// Gbit/s, and may come behind others.
constexpr int64_t longest_patience_ns = 10'000'000;
constexpr int64_t sleep_slice_ns = 20'000'000;  // between two checks that peers still live

// Waits until `ready()`; sleeps on `flag`, whose value changes whenever `ready` may have become true.
// `spin_turn()` is called while spinning, `check()` between sleeps: it throws to end the wait.
// Returns false when the deadline passed first.
template <class Ready, class Turn, class Check>
bool wait_on(Flag& flag, bool crowded, Deadline deadline, Ready&& ready, Turn&& spin_turn, Check&& check) {
    if (ready()) return true;
    if (crowded) {  // ranks share cores: give the core away at once
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
        const bool is_ready = ready();  // which may take something: once it is true it is not called again
        if (!is_ready) futex_wait(flag.value, seen, slice);
        flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (is_ready || ready()) return true;
        check();
    }
}

}  // namespace carme

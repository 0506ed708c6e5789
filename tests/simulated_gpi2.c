/* A simulation of GPI-2 (libGPI2.so), which is in no package registry: its public C interface between
 * processes of one host.
 *
 * Ranks find each other like GPI-2's, by GASPI_RANK, GASPI_NRANKS, GASPI_SOCKET, GASPI_MFILE and the port
 * of the configuration, which here names a file in /dev/shm. That file holds the addresses of segments and
 * the notifications; data move between processes by process_vm_writev. Where GPI-2 leaves behaviour open,
 * this takes the most demanding one: queues are short and must be waited for when full, and notifications
 * arrive in any order. Interface: GASPI standard 17.1, and the header of GPI-2 1.5 for values and widths.
 *
 * Pitfalls of GPI-2 1.6 over Ethernet are reproduced: a thread of the process executes posted operations,
 * and those that it has not reached are lost when the process ends or calls gaspi_proc_term. That call
 * first releases the segments, so that a process dies if a peer still writes to them, and then waits
 * without limit for ranks with lower numbers. gaspi_proc_ping waits without limit for a rank that is
 * stopped or in gaspi_proc_term. An operation on a full queue counts as an error of its rank, each part of
 * a list takes a queue entry, and nothing starts again after gaspi_proc_term. While a stopped rank cannot
 * accept more, nothing is sent to others either (here from the start), and reads from a killed rank never
 * complete.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    FAILED = -1,
    SUCCESS = 0,
    TIMEOUT = 1,
    BAD_ENV = 3,
    NOT_INITED = 6,
    INITED = 7,
    BAD_SEG = 10,
    BAD_RANK = 12,
    BAD_QUEUE = 13,
    BAD_OFFSET = 15,
    BAD_VALUE = 17,
    BAD_ID = 18,
    BAD_NUM = 19,
    QUEUE_FULL = 23,
    UNALIGNED = 24
};
enum { MAX_RANKS = 64, SEGMENTS = 32, NOTIFICATIONS = 65536, QUEUES = 8, DEPTH = 64, LONGEST_LIST = 255 };

typedef unsigned char Byte;
typedef unsigned short Rank;
typedef unsigned int Number;
typedef unsigned long Size;

typedef struct { Number logger, sn_port, rest[40]; } Config;
typedef struct { atomic_ulong address, size, known[(MAX_RANKS + 63) / 64]; } Segment;
typedef struct {
    atomic_int pid, terminated, described[SEGMENTS];
    Segment segments[SEGMENTS];
    atomic_uint notifications[SEGMENTS][NOTIFICATIONS];
} Member;
typedef struct {
    pthread_mutex_t lock;
    atomic_int ready;
    atomic_uint arrived;
    Member members[MAX_RANKS];
} World;

static Config config = {.sn_port = 10840};
static World* world;
static int own_rank, ranks;
static _Atomic Byte states[MAX_RANKS];

/* A posted operation: NOTIFY sets a notification, the others move bytes. */
typedef enum { OUT, IN, NOTIFY } Kind;
typedef struct {
    Kind kind;
    Byte queue, own_segment, remote_segment;
    Rank rank;
    Size own_offset, remote_offset, size;
    Number id, value;
} Operation;
static Operation operations[QUEUES * DEPTH];
static Number first, last; /* the next to execute, and the next to post */
static Number posted[QUEUES], unfinished[QUEUES];
static int failed[QUEUES], stopping;
static pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted_signal = PTHREAD_COND_INITIALIZER;
static pthread_t device_thread;
static void* work(void*);

static Size now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (Size)t.tv_sec * 1000000 + (Size)t.tv_nsec / 1000;
}

static Size end_of(Size ms) { return ms > 1ul << 40 ? ~0ul : now() + ms * 1000; }

/* Sleeps, longer each time; returns 0 after the deadline. */
static int pause_until(Size end, Size* pause_us) {
    if (now() >= end) return 0;
    usleep((useconds_t)*pause_us);
    if (*pause_us < 500) *pause_us *= 2;
    return 1;
}

static int is_dead(int rank) {
    int fd = (int)syscall(SYS_pidfd_open, world->members[rank].pid, 0);
    if (fd < 0) return 1;
    struct pollfd process = {fd, POLLIN, 0};
    int dead = poll(&process, 1, 0) == 1;
    close(fd);
    return dead;
}

static int is_stopped(int rank) {
    char name[64], line[512] = "";
    snprintf(name, sizeof name, "/proc/%d/stat", world->members[rank].pid);
    FILE* file = fopen(name, "r");
    if (!file) return 0;
    char* text = fgets(line, sizeof line, file);
    fclose(file);
    char* after = text ? strrchr(line, ')') : NULL;
    return after && after[2] == 'T';
}

int gaspi_config_get(Config* out) { *out = config; return SUCCESS; }
int gaspi_config_set(Config in) { config = in; return SUCCESS; }

int gaspi_proc_init(Size ms) {
    static int started;
    const char *rank = getenv("GASPI_RANK"), *count = getenv("GASPI_NRANKS"), *mfile = getenv("GASPI_MFILE");
    if (world) return INITED;
    if (started) return FAILED;
    if (!rank || !count || !mfile || !getenv("GASPI_SOCKET")) return BAD_ENV;
    own_rank = atoi(rank), ranks = atoi(count);
    FILE* file = fopen(mfile, "r");
    int lines = 0;
    for (char line[512]; file && fgets(line, sizeof line, file);) ++lines;
    if (file) fclose(file);
    if (lines < ranks || ranks > MAX_RANKS || own_rank < 0 || own_rank >= ranks) return BAD_ENV;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* lets peers access this process's memory */
    char name[64];
    snprintf(name, sizeof name, "/dev/shm/simulated-gpi2-%u-%u", getuid(), config.sn_port);
    Size end = end_of(ms), pause_us = 100;
    int fd = -1;
    if (own_rank == 0) {
        unlink(name);
        fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(World))) return FAILED;
    }
    while (fd < 0 && (fd = open(name, O_RDWR)) < 0)
        if (!pause_until(end, &pause_us)) return TIMEOUT;
    /* Rank 0 creates the file, then sets its size. */
    for (struct stat status; fstat(fd, &status) == 0 && status.st_size < (off_t)sizeof(World);)
        if (!pause_until(end, &pause_us)) {
            close(fd);
            return TIMEOUT;
        }
    World* found = mmap(NULL, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (found == MAP_FAILED) return FAILED;
    world = found;
    if (own_rank == 0) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&world->lock, &kind);
        world->ready = 1;
    }
    world->members[own_rank].pid = getpid();
    for (int r = 0; r < ranks; ++r)
        while (!world->members[r].pid || !world->ready)
            if (!pause_until(end, &pause_us)) {
                if (own_rank == 0) unlink(name);
                return TIMEOUT;
            }
    if (own_rank == 0) unlink(name); /* all ranks have opened it, so it is not left behind */
    started = 1;
    return pthread_create(&device_thread, NULL, work, NULL) ? FAILED : SUCCESS;
}

int gaspi_proc_term(Size ms) {
    (void)ms;
    if (!world) return NOT_INITED;
    world->members[own_rank].terminated = 1;
    pthread_mutex_lock(&device);
    stopping = 1;
    pthread_cond_signal(&posted_signal);
    pthread_mutex_unlock(&device);
    pthread_join(device_thread, NULL);
    for (int r = 0; r < own_rank; ++r)
        while (!world->members[r].terminated && !is_dead(r)) usleep(1000);
    munmap(world, sizeof(World));
    world = NULL;
    return SUCCESS;
}

int gaspi_proc_rank(Rank* out) { *out = (Rank)own_rank; return SUCCESS; }
int gaspi_proc_num(Rank* out) { *out = (Rank)ranks; return SUCCESS; }
int gaspi_proc_kill(Rank rank, Size ms) {
    (void)ms;
    return rank < ranks && !kill(world->members[rank].pid, SIGKILL) ? SUCCESS : FAILED;
}
int gaspi_proc_ping(Rank rank, Size ms) {
    (void)ms;
    if (!world) return NOT_INITED;
    if (rank >= ranks) return BAD_RANK;
    while (!is_dead(rank)) {
        if (!is_stopped(rank) && !world->members[rank].terminated) return SUCCESS;
        usleep(1000);
    }
    states[rank] = 1;
    return FAILED;
}
int gaspi_state_vec_get(int* out) {
    for (int r = 0; r < ranks; ++r) out[r] = states[r];
    return SUCCESS;
}
const char* gaspi_error_str(int code) {
    return code == QUEUE_FULL ? "queue full" : code < 0 ? "general error" : "see the header";
}

/* A barrier of all ranks; a call after a time-out continues it. */
int gaspi_barrier(Byte group, Size ms) {
    static Number round;
    static int entered;
    if (group) return FAILED;
    if (!entered) entered = 1, ++round, atomic_fetch_add(&world->arrived, 1);
    Size end = end_of(ms), pause_us = 10;
    while (world->arrived < round * (Number)ranks)
        if (!pause_until(end, &pause_us)) return TIMEOUT;
    entered = 0;
    return SUCCESS;
}

int gaspi_segment_max(Number* out) { *out = SEGMENTS; return SUCCESS; }
int gaspi_queue_num(Number* out) { *out = QUEUES; return SUCCESS; }

int gaspi_segment_bind(Byte id, void* address, Size size, int description) {
    (void)description;
    if (id >= SEGMENTS || !size) return BAD_SEG;
    Segment* segment = &world->members[own_rank].segments[id];
    if (segment->size) return BAD_SEG;
    memset(world->members[own_rank].notifications[id], 0, sizeof world->members[own_rank].notifications[id]);
    world->members[own_rank].described[id] = 1;
    segment->address = (Size)address;
    segment->size = size;
    segment->known[own_rank / 64] |= 1ul << own_rank % 64;
    return SUCCESS;
}
int gaspi_segment_register(Byte id, Rank rank, Size ms) {
    (void)ms;
    if (rank >= ranks || !world->members[own_rank].segments[id].size) return BAD_SEG;
    if (is_dead(rank)) return FAILED;
    world->members[rank].described[id] = 1;
    world->members[own_rank].segments[id].known[rank / 64] |= 1ul << rank % 64;
    return SUCCESS;
}
int gaspi_segment_delete(Byte id) {
    Segment* segment = &world->members[own_rank].segments[id];
    if (!segment->size) return BAD_SEG;
    segment->size = 0;
    for (int i = 0; i < (MAX_RANKS + 63) / 64; ++i) segment->known[i] = 0;
    return SUCCESS;
}
/* Like the production build of GPI-2, which checks nothing: it follows a null pointer if this rank never
   bound the segment number and no peer registered it here, and otherwise reports segments of 0 bytes. */
static Segment* known(int rank, Byte id) {
    if (rank >= ranks || id >= SEGMENTS) return NULL;
    if (!world->members[own_rank].described[id]) abort();
    Segment* segment = &world->members[rank].segments[id];
    return segment->size && segment->known[own_rank / 64] >> own_rank % 64 & 1 ? segment : NULL;
}
int gaspi_segment_size(Byte id, Rank rank, Size* out) {
    Segment* segment = known(rank, id);
    *out = segment ? segment->size : 0;
    return SUCCESS;
}

/* Moves bytes between this process and a peer. */
static int move(const Operation* o) {
    World* current = world;
    const Segment *own = &current->members[own_rank].segments[o->own_segment],
                  *remote = &current->members[o->rank].segments[o->remote_segment];
    struct iovec near = {(char*)own->address + o->own_offset, o->size},
                 far = {(char*)remote->address + o->remote_offset, o->size};
    pid_t pid = current->members[o->rank].pid;
    if (o->rank == own_rank) {
        memmove(o->kind == OUT ? far.iov_base : near.iov_base, o->kind == OUT ? near.iov_base : far.iov_base,
                o->size);
        return SUCCESS;
    }
    while (near.iov_len) {
        ssize_t done = o->kind == OUT ? process_vm_writev(pid, &near, 1, &far, 1, 0)
                                      : process_vm_readv(pid, &near, 1, &far, 1, 0);
        if (done <= 0) return FAILED;
        near.iov_base = (char*)near.iov_base + done, near.iov_len -= (Size)done;
        far.iov_base = (char*)far.iov_base + done, far.iov_len -= (Size)done;
    }
    return SUCCESS;
}

static int execute(const Operation* o) {
    Member* member = &world->members[o->rank];
    while (o->rank != own_rank && is_stopped(o->rank) && !is_dead(o->rank)) usleep(1000);
    if (is_dead(o->rank)) return FAILED;
    if (member->terminated) {
        kill(member->pid, SIGSEGV); /* its segments are released */
        return FAILED;
    }
    if (o->kind != NOTIFY) return move(o);
    atomic_store(&member->notifications[o->remote_segment][o->id], o->value);
    return SUCCESS;
}

static void* work(void* unused) {
    pthread_mutex_lock(&device);
    while (!stopping) {
        if (first == last) {
            pthread_cond_wait(&posted_signal, &device);
            continue;
        }
        Operation next = operations[first % (QUEUES * DEPTH)];
        ++first;
        pthread_mutex_unlock(&device);
        int code = execute(&next);
        pthread_mutex_lock(&device);
        if (code && next.kind == IN) continue; /* no reply arrives */
        --unfinished[next.queue];
        if (code) {
            states[next.rank] = 1;
            failed[next.queue] = 1;
        }
    }
    pthread_mutex_unlock(&device);
    return unused;
}

/* Posts all operations, or none if the queue is full. */
static int post(Byte queue, Rank rank, const Operation* batch, Number count) {
    if (queue >= QUEUES) return BAD_QUEUE;
    pthread_mutex_lock(&device);
    int full = posted[queue] + count > DEPTH;
    if (full) states[rank] = 1;
    for (Number i = 0; i < count && !full; ++i) {
        Operation* o = &operations[last++ % (QUEUES * DEPTH)];
        *o = batch[i], o->queue = queue, o->rank = o->kind == NOTIFY ? batch[i].rank : rank;
        ++posted[queue], ++unfinished[queue];
    }
    pthread_cond_signal(&posted_signal);
    pthread_mutex_unlock(&device);
    return full ? QUEUE_FULL : SUCCESS;
}

static int checked_move(Operation* o, Kind kind, Byte own_segment, Size own_offset, Rank rank,
                        Byte remote_segment, Size remote_offset, Size size) {
    Segment *own = known(own_rank, own_segment), *remote = known(rank, remote_segment);
    if (!own || !remote) return BAD_SEG;
    if (!size || own_offset + size > own->size || remote_offset + size > remote->size) return BAD_OFFSET;
    *o = (Operation){.kind = kind,
                     .own_segment = own_segment,
                     .remote_segment = remote_segment,
                     .rank = rank,
                     .own_offset = own_offset,
                     .remote_offset = remote_offset,
                     .size = size};
    return SUCCESS;
}

static int checked_notification(Operation* o, Byte segment, Rank rank, Number id, Number value) {
    if (!known(rank, segment)) return BAD_SEG;
    if (id >= NOTIFICATIONS) return BAD_ID;
    if (!value) return BAD_VALUE;
    *o = (Operation){.kind = NOTIFY, .remote_segment = segment, .rank = rank, .id = id, .value = value};
    return SUCCESS;
}

#define TRY(call) do { (void)ms; int code = call; if (code) return code; } while (0)

int gaspi_write(Byte own_segment, Size own_offset, Rank rank, Byte remote_segment, Size remote_offset,
                Size size, Byte queue, Size ms) {
    Operation o;
    TRY(checked_move(&o, OUT, own_segment, own_offset, rank, remote_segment, remote_offset, size));
    return post(queue, rank, &o, 1);
}
int gaspi_read(Byte own_segment, Size own_offset, Rank rank, Byte remote_segment, Size remote_offset,
               Size size, Byte queue, Size ms) {
    Operation o;
    TRY(checked_move(&o, IN, own_segment, own_offset, rank, remote_segment, remote_offset, size));
    return post(queue, rank, &o, 1);
}
int gaspi_notify(Byte segment, Rank rank, Number id, Number value, Byte queue, Size ms) {
    Operation o;
    TRY(checked_notification(&o, segment, rank, id, value));
    return post(queue, rank, &o, 1);
}
int gaspi_write_notify(Byte own_segment, Size own_offset, Rank rank, Byte remote_segment, Size remote_offset,
                       Size size, Number id, Number value, Byte queue, Size ms) {
    Operation o[2];
    TRY(checked_move(&o[0], OUT, own_segment, own_offset, rank, remote_segment, remote_offset, size));
    TRY(checked_notification(&o[1], remote_segment, rank, id, value));
    return post(queue, rank, o, 2);
}
static int list(Operation* o, Kind kind, Number count, Byte* own_segment, Size* own_offset, Rank rank,
                Byte* remote_segment, Size* remote_offset, Size* sizes) {
    if (!count || count > LONGEST_LIST) return BAD_NUM;
    for (Number i = 0; i < count; ++i) {
        int code = checked_move(&o[i], kind, own_segment[i], own_offset[i], rank, remote_segment[i],
                                remote_offset[i], sizes[i]);
        if (code) return code;
    }
    return SUCCESS;
}
int gaspi_write_list(Number count, Byte* own_segment, Size* own_offset, Rank rank, Byte* remote_segment,
                     Size* remote_offset, Size* sizes, Byte queue, Size ms) {
    Operation o[LONGEST_LIST];
    TRY(list(o, OUT, count, own_segment, own_offset, rank, remote_segment, remote_offset, sizes));
    return post(queue, rank, o, count);
}
int gaspi_read_list(Number count, Byte* own_segment, Size* own_offset, Rank rank, Byte* remote_segment,
                    Size* remote_offset, Size* sizes, Byte queue, Size ms) {
    Operation o[LONGEST_LIST];
    TRY(list(o, IN, count, own_segment, own_offset, rank, remote_segment, remote_offset, sizes));
    return post(queue, rank, o, count);
}
int gaspi_read_list_notify(Number count, Byte* own_segment, Size* own_offset, Rank rank, Byte* remote_segment,
                           Size* remote_offset, Size* sizes, Byte segment, Number id, Byte queue, Size ms) {
    Operation o[LONGEST_LIST + 1];
    TRY(list(o, IN, count, own_segment, own_offset, rank, remote_segment, remote_offset, sizes));
    TRY(checked_notification(&o[count], segment, (Rank)own_rank, id, 1));
    return post(queue, rank, o, count + 1);
}
int gaspi_write_list_notify(Number count, Byte* own_segment, Size* own_offset, Rank rank,
                            Byte* remote_segment, Size* remote_offset, Size* sizes, Byte segment, Number id,
                            Number value, Byte queue, Size ms) {
    Operation o[LONGEST_LIST + 1];
    TRY(list(o, OUT, count, own_segment, own_offset, rank, remote_segment, remote_offset, sizes));
    TRY(checked_notification(&o[count], segment, rank, id, value));
    return post(queue, rank, o, count + 1);
}
int gaspi_queue_size(Byte queue, Number* out) {
    if (queue >= QUEUES) return BAD_QUEUE;
    *out = posted[queue];
    return SUCCESS;
}
int gaspi_queue_size_max(Number* out) { *out = DEPTH; return SUCCESS; }
int gaspi_wait(Byte queue, Size ms) {
    if (queue >= QUEUES) return BAD_QUEUE;
    Size end = end_of(ms), pause_us = 1;
    while (1) {
        pthread_mutex_lock(&device);
        int complete = !unfinished[queue], error = failed[queue];
        posted[queue] = unfinished[queue];
        if (complete || error) failed[queue] = 0;
        pthread_mutex_unlock(&device);
        if (error) return FAILED;
        if (complete) return SUCCESS;
        if (!pause_until(end, &pause_us)) return TIMEOUT;
    }
}

int gaspi_notify_waitsome(Byte segment, Number first, Number count, Number* found, Size ms) {
    if (!world) return NOT_INITED;
    if (!world->members[own_rank].segments[segment].size) return BAD_SEG;
    Size end = end_of(ms), pause_us = 10;
    static atomic_uint turn; /* starts anywhere, so that callers do not rely on an order */
    do {
        Number from = atomic_fetch_add(&turn, 7);
        for (Number i = 0; i < count; ++i) {
            Number id = first + (from + i) % count;
            if (atomic_load(&world->members[own_rank].notifications[segment][id])) {
                *found = id;
                return SUCCESS;
            }
        }
    } while (pause_until(end, &pause_us));
    return TIMEOUT;
}
int gaspi_notify_reset(Byte segment, Number id, Number* previous) {
    if (id >= NOTIFICATIONS) return BAD_ID;
    *previous = atomic_exchange(&world->members[own_rank].notifications[segment][id], 0);
    return SUCCESS;
}

static int atomic_operation(Byte segment, Size offset, Rank rank, int compare, Size expected, Size value,
                            Size* previous) {
    Segment* target = known(rank, segment);
    if (!target) return BAD_SEG;
    if (offset % 8) return UNALIGNED;
    if (offset + 8 > target->size) return BAD_OFFSET;
    if (pthread_mutex_lock(&world->lock) == EOWNERDEAD) pthread_mutex_consistent(&world->lock);
    Size changed;
    struct iovec current = {previous, 8}, new = {&changed, 8}, far = {(char*)target->address + offset, 8};
    pid_t pid = world->members[rank].pid;
    int code = process_vm_readv(pid, &current, 1, &far, 1, 0) == 8 ? SUCCESS : FAILED;
    if (!code && (!compare || *previous == expected)) {
        changed = compare ? value : *previous + value;
        code = process_vm_writev(pid, &new, 1, &far, 1, 0) == 8 ? SUCCESS : FAILED;
    }
    pthread_mutex_unlock(&world->lock);
    return code;
}
int gaspi_atomic_fetch_add(Byte segment, Size offset, Rank rank, Size value, Size* previous, Size ms) {
    (void)ms;
    return atomic_operation(segment, offset, rank, 0, 0, value, previous);
}
int gaspi_atomic_compare_swap(Byte segment, Size offset, Rank rank, Size expected, Size value, Size* previous,
                              Size ms) {
    (void)ms;
    return atomic_operation(segment, offset, rank, 1, expected, value, previous);
}

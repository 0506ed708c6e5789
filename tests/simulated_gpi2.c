/* A stand-in for GPI-2 (libGPI2.so), which is in no package registry: its public C interface between processes of one host.
 *
 * Ranks find each other, as GPI-2's do, by GASPI_RANK, GASPI_NRANKS, GASPI_SOCKET and GASPI_MFILE and a port of the
 * configuration, which here names a file in /dev/shm. That file holds segments' places and notifications; data go from
 * process to process by process_vm_writev. What GPI-2 leaves open is done here in the way that asks most of a caller:
 * queues are short and must be waited for when they are full, and notifications may be found in any order.
 * Interface: GASPI standard 17.1, and the header of GPI-2 1.5 for values and widths.
 *
 * What asks for care with GPI-2 1.6 itself over Ethernet is as there: a thread of the process carries out what was
 * posted, and what it has not come to is lost when the process ends or calls gaspi_proc_term. That call gives up the
 * segments first, so that a process dies to which somebody still writes; and it waits without limit for ranks with lower
 * numbers. gaspi_proc_ping waits without limit for the answer of a rank that was stopped or is in gaspi_proc_term. An
 * operation that finds its queue full counts as an error of its rank, each part of a list takes an entry of the queue,
 * and after gaspi_proc_term nothing starts again. While a rank is stopped that has no room for more, nothing is sent to others
 * either (here from the beginning), and what a rank was to answer that was killed is never over.
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

enum { FAILED = -1, SUCCESS = 0, TIMEOUT = 1, BAD_ENV = 3, NOT_INITED = 6, INITED = 7, BAD_SEG = 10, BAD_RANK = 12,
       BAD_QUEUE = 13, BAD_OFFSET = 15, BAD_VALUE = 17, BAD_ID = 18, BAD_NUM = 19, QUEUE_FULL = 23, UNALIGNED = 24 };
enum { MOST_RANKS = 64, SEGMENTS = 32, NOTES = 65536, QUEUES = 8, DEPTH = 64, LONGEST_LIST = 255 };

typedef unsigned char Byte;
typedef unsigned short Rank;
typedef unsigned int Number;
typedef unsigned long Size;

typedef struct { Number logger, sn_port, rest[40]; } Config;
typedef struct { atomic_ulong at, size, known[(MOST_RANKS + 63) / 64]; } Segment;
typedef struct {
    atomic_int pid, over, described[SEGMENTS];
    Segment segments[SEGMENTS];
    atomic_uint notes[SEGMENTS][NOTES];
} Member;
typedef struct { pthread_mutex_t lock; atomic_int ready; atomic_uint come; Member members[MOST_RANKS]; } World;

static Config config = {.sn_port = 10840};
static World* world;
static int me, ranks;
static _Atomic Byte states[MOST_RANKS];

/* What was posted: `note` sets a notification, the others move bytes. */
typedef enum { OUT, IN, NOTE } Kind;
typedef struct { Kind kind; Byte queue, mine, theirs; Rank rank; Size at, there, size; Number id, value; } Operation;
static Operation operations[QUEUES * DEPTH];
static Number first, last; /* the next to be carried out, and the next to be posted */
static Number posted[QUEUES], unfinished[QUEUES];
static int failed[QUEUES], stopping;
static pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static pthread_t device_thread;
static void* work(void*);

static Size now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (Size)t.tv_sec * 1000000 + (Size)t.tv_nsec / 1000;
}

static Size end_of(Size ms) { return ms > 1ul << 40 ? ~0ul : now() + ms * 1000; }

/* Sleeps, longer every time; 0 when the time is over. */
static int pause_until(Size end, Size* each) {
    if (now() >= end) return 0;
    usleep((useconds_t)*each);
    if (*each < 500) *each *= 2;
    return 1;
}

static int is_dead(int rank) {
    int fd = (int)syscall(SYS_pidfd_open, world->members[rank].pid, 0);
    if (fd < 0) return 1;
    struct pollfd one = {fd, POLLIN, 0};
    int dead = poll(&one, 1, 0) == 1;
    close(fd);
    return dead;
}

static int is_stopped(int rank) {
    char name[64], line[512] = "";
    snprintf(name, sizeof name, "/proc/%d/stat", world->members[rank].pid);
    FILE* file = fopen(name, "r");
    if (!file) return 0;
    char* got = fgets(line, sizeof line, file);
    fclose(file);
    char* after = got ? strrchr(line, ')') : NULL;
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
    me = atoi(rank), ranks = atoi(count);
    FILE* file = fopen(mfile, "r");
    int lines = 0;
    for (char line[512]; file && fgets(line, sizeof line, file);) ++lines;
    if (file) fclose(file);
    if (lines < ranks || ranks > MOST_RANKS || me < 0 || me >= ranks) return BAD_ENV;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* lets the others reach this one's memory */
    char name[64];
    snprintf(name, sizeof name, "/dev/shm/simulated-gpi2-%u-%u", getuid(), config.sn_port);
    Size end = end_of(ms), each = 100;
    int fd = -1;
    if (me == 0) {
        unlink(name);
        fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(World))) return FAILED;
    }
    while (fd < 0 && (fd = open(name, O_RDWR)) < 0)
        if (!pause_until(end, &each)) return TIMEOUT;
    /* Rank 0 makes the file, then gives it its size. */
    for (struct stat seen; fstat(fd, &seen) == 0 && seen.st_size < (off_t)sizeof(World);)
        if (!pause_until(end, &each)) {
            close(fd);
            return TIMEOUT;
        }
    World* found = mmap(NULL, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (found == MAP_FAILED) return FAILED;
    world = found;
    if (me == 0) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&world->lock, &kind);
        world->ready = 1;
    }
    world->members[me].pid = getpid();
    for (int r = 0; r < ranks; ++r)
        while (!world->members[r].pid || !world->ready)
            if (!pause_until(end, &each)) {
                if (me == 0) unlink(name);
                return TIMEOUT;
            }
    if (me == 0) unlink(name); /* all are here, and nothing is left behind whatever becomes of them */
    started = 1;
    return pthread_create(&device_thread, NULL, work, NULL) ? FAILED : SUCCESS;
}

int gaspi_proc_term(Size ms) {
    (void)ms;
    if (!world) return NOT_INITED;
    world->members[me].over = 1;
    pthread_mutex_lock(&device);
    stopping = 1;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&device);
    pthread_join(device_thread, NULL);
    for (int r = 0; r < me; ++r)
        while (!world->members[r].over && !is_dead(r)) usleep(1000);
    munmap(world, sizeof(World));
    world = NULL;
    return SUCCESS;
}

int gaspi_proc_rank(Rank* out) { *out = (Rank)me; return SUCCESS; }
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
        if (!is_stopped(rank) && !world->members[rank].over) return SUCCESS;
        usleep(1000);
    }
    states[rank] = 1;
    return FAILED;
}
int gaspi_state_vec_get(int* out) {
    for (int r = 0; r < ranks; ++r) out[r] = states[r];
    return SUCCESS;
}
const char* gaspi_error_str(int code) { return code == QUEUE_FULL ? "queue full" : code < 0 ? "general error" : "see the header"; }

/* Of all ranks; called again after a time-out, it goes on. */
int gaspi_barrier(Byte group, Size ms) {
    static Number round;
    static int entered;
    if (group) return FAILED;
    if (!entered) entered = 1, ++round, atomic_fetch_add(&world->come, 1);
    Size end = end_of(ms), each = 10;
    while (world->come < round * (Number)ranks)
        if (!pause_until(end, &each)) return TIMEOUT;
    entered = 0;
    return SUCCESS;
}

int gaspi_segment_max(Number* out) { *out = SEGMENTS; return SUCCESS; }
int gaspi_queue_num(Number* out) { *out = QUEUES; return SUCCESS; }

int gaspi_segment_bind(Byte id, void* at, Size size, int description) {
    (void)description;
    if (id >= SEGMENTS || !size) return BAD_SEG;
    Segment* segment = &world->members[me].segments[id];
    if (segment->size) return BAD_SEG;
    memset(world->members[me].notes[id], 0, sizeof world->members[me].notes[id]);
    world->members[me].described[id] = 1;
    segment->at = (Size)at;
    segment->size = size;
    segment->known[me / 64] |= 1ul << me % 64;
    return SUCCESS;
}
int gaspi_segment_register(Byte id, Rank rank, Size ms) {
    (void)ms;
    if (rank >= ranks || !world->members[me].segments[id].size) return BAD_SEG;
    if (is_dead(rank)) return FAILED;
    world->members[rank].described[id] = 1;
    world->members[me].segments[id].known[rank / 64] |= 1ul << rank % 64;
    return SUCCESS;
}
int gaspi_segment_delete(Byte id) {
    Segment* segment = &world->members[me].segments[id];
    if (!segment->size) return BAD_SEG;
    segment->size = 0;
    for (int i = 0; i < (MOST_RANKS + 63) / 64; ++i) segment->known[i] = 0;
    return SUCCESS;
}
/* As the production build of GPI-2, which checks nothing: it follows a null pointer where this rank never bound the number
 * and nobody registered it here, and knows segments of 0 bytes otherwise. */
static Segment* known(int rank, Byte id) {
    if (rank >= ranks || id >= SEGMENTS) return NULL;
    if (!world->members[me].described[id]) abort();
    Segment* segment = &world->members[rank].segments[id];
    return segment->size && segment->known[me / 64] >> me % 64 & 1 ? segment : NULL;
}
int gaspi_segment_size(Byte id, Rank rank, Size* out) {
    Segment* segment = known(rank, id);
    *out = segment ? segment->size : 0;
    return SUCCESS;
}

/* Moves bytes between this process and another one. */
static int move(const Operation* o) {
    World* here = world;
    const Segment *own = &here->members[me].segments[o->mine], *other = &here->members[o->rank].segments[o->theirs];
    struct iovec near = {(char*)own->at + o->at, o->size}, far = {(char*)other->at + o->there, o->size};
    pid_t pid = here->members[o->rank].pid;
    if (o->rank == me) {
        memmove(o->kind == OUT ? far.iov_base : near.iov_base, o->kind == OUT ? near.iov_base : far.iov_base, o->size);
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

static int carry_out(const Operation* o) {
    Member* member = &world->members[o->rank];
    while (o->rank != me && is_stopped(o->rank) && !is_dead(o->rank)) usleep(1000);
    if (is_dead(o->rank)) return FAILED;
    if (member->over) {
        kill(member->pid, SIGSEGV); /* its segments are gone */
        return FAILED;
    }
    if (o->kind != NOTE) return move(o);
    atomic_store(&member->notes[o->theirs][o->id], o->value);
    return SUCCESS;
}

static void* work(void* unused) {
    pthread_mutex_lock(&device);
    while (!stopping) {
        if (first == last) {
            pthread_cond_wait(&more, &device);
            continue;
        }
        Operation next = operations[first % (QUEUES * DEPTH)];
        ++first;
        pthread_mutex_unlock(&device);
        int code = carry_out(&next);
        pthread_mutex_lock(&device);
        if (code && next.kind == IN) continue; /* nobody answers */
        --unfinished[next.queue];
        if (code) {
            states[next.rank] = 1;
            failed[next.queue] = 1;
        }
    }
    pthread_mutex_unlock(&device);
    return unused;
}

/* All of them, or none where the queue has no room. */
static int post(Byte queue, Rank rank, const Operation* some, Number count) {
    if (queue >= QUEUES) return BAD_QUEUE;
    pthread_mutex_lock(&device);
    int full = posted[queue] + count > DEPTH;
    if (full) states[rank] = 1;
    for (Number i = 0; i < count && !full; ++i) {
        Operation* o = &operations[last++ % (QUEUES * DEPTH)];
        *o = some[i], o->queue = queue, o->rank = o->kind == NOTE ? some[i].rank : rank;
        ++posted[queue], ++unfinished[queue];
    }
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&device);
    return full ? QUEUE_FULL : SUCCESS;
}

static int checked_move(Operation* o, Kind kind, Byte mine, Size at, Rank rank, Byte theirs, Size there, Size size) {
    Segment *own = known(me, mine), *other = known(rank, theirs);
    if (!own || !other) return BAD_SEG;
    if (!size || at + size > own->size || there + size > other->size) return BAD_OFFSET;
    *o = (Operation){.kind = kind, .mine = mine, .theirs = theirs, .rank = rank, .at = at, .there = there, .size = size};
    return SUCCESS;
}

static int checked_note(Operation* o, Byte segment, Rank rank, Number id, Number value) {
    if (!known(rank, segment)) return BAD_SEG;
    if (id >= NOTES) return BAD_ID;
    if (!value) return BAD_VALUE;
    *o = (Operation){.kind = NOTE, .theirs = segment, .rank = rank, .id = id, .value = value};
    return SUCCESS;
}

#define TRY(call) do { (void)ms; int code = call; if (code) return code; } while (0)

int gaspi_write(Byte mine, Size at, Rank rank, Byte theirs, Size there, Size size, Byte queue, Size ms) {
    Operation o;
    TRY(checked_move(&o, OUT, mine, at, rank, theirs, there, size));
    return post(queue, rank, &o, 1);
}
int gaspi_read(Byte mine, Size at, Rank rank, Byte theirs, Size there, Size size, Byte queue, Size ms) {
    Operation o;
    TRY(checked_move(&o, IN, mine, at, rank, theirs, there, size));
    return post(queue, rank, &o, 1);
}
int gaspi_notify(Byte segment, Rank rank, Number id, Number value, Byte queue, Size ms) {
    Operation o;
    TRY(checked_note(&o, segment, rank, id, value));
    return post(queue, rank, &o, 1);
}
int gaspi_write_notify(Byte mine, Size at, Rank rank, Byte theirs, Size there, Size size, Number id, Number value,
                       Byte queue, Size ms) {
    Operation o[2];
    TRY(checked_move(&o[0], OUT, mine, at, rank, theirs, there, size));
    TRY(checked_note(&o[1], theirs, rank, id, value));
    return post(queue, rank, o, 2);
}
static int list(Operation* o, Kind kind, Number count, Byte* mine, Size* at, Rank rank, Byte* theirs, Size* there,
                Size* sizes) {
    if (!count || count > LONGEST_LIST) return BAD_NUM;
    for (Number i = 0; i < count; ++i) {
        int code = checked_move(&o[i], kind, mine[i], at[i], rank, theirs[i], there[i], sizes[i]);
        if (code) return code;
    }
    return SUCCESS;
}
int gaspi_write_list(Number count, Byte* mine, Size* at, Rank rank, Byte* theirs, Size* there, Size* sizes, Byte queue,
                     Size ms) {
    Operation o[LONGEST_LIST];
    TRY(list(o, OUT, count, mine, at, rank, theirs, there, sizes));
    return post(queue, rank, o, count);
}
int gaspi_read_list(Number count, Byte* mine, Size* at, Rank rank, Byte* theirs, Size* there, Size* sizes, Byte queue,
                    Size ms) {
    Operation o[LONGEST_LIST];
    TRY(list(o, IN, count, mine, at, rank, theirs, there, sizes));
    return post(queue, rank, o, count);
}
int gaspi_read_list_notify(Number count, Byte* mine, Size* at, Rank rank, Byte* theirs, Size* there, Size* sizes,
                           Byte segment, Number id, Byte queue, Size ms) {
    Operation o[LONGEST_LIST + 1];
    TRY(list(o, IN, count, mine, at, rank, theirs, there, sizes));
    TRY(checked_note(&o[count], segment, (Rank)me, id, 1));
    return post(queue, rank, o, count + 1);
}
int gaspi_write_list_notify(Number count, Byte* mine, Size* at, Rank rank, Byte* theirs, Size* there, Size* sizes,
                            Byte segment, Number id, Number value, Byte queue, Size ms) {
    Operation o[LONGEST_LIST + 1];
    TRY(list(o, OUT, count, mine, at, rank, theirs, there, sizes));
    TRY(checked_note(&o[count], segment, rank, id, value));
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
    Size end = end_of(ms), each = 1;
    while (1) {
        pthread_mutex_lock(&device);
        int over = !unfinished[queue], error = failed[queue];
        posted[queue] = unfinished[queue];
        if (over || error) failed[queue] = 0;
        pthread_mutex_unlock(&device);
        if (error) return FAILED;
        if (over) return SUCCESS;
        if (!pause_until(end, &each)) return TIMEOUT;
    }
}

int gaspi_notify_waitsome(Byte segment, Number first, Number count, Number* found, Size ms) {
    if (!world) return NOT_INITED;
    if (!world->members[me].segments[segment].size) return BAD_SEG;
    Size end = end_of(ms), each = 10;
    static atomic_uint turn; /* begins anywhere, so that nobody counts on an order */
    do {
        Number from = atomic_fetch_add(&turn, 7);
        for (Number i = 0; i < count; ++i) {
            Number id = first + (from + i) % count;
            if (atomic_load(&world->members[me].notes[segment][id])) {
                *found = id;
                return SUCCESS;
            }
        }
    } while (pause_until(end, &each));
    return TIMEOUT;
}
int gaspi_notify_reset(Byte segment, Number id, Number* old) {
    if (id >= NOTES) return BAD_ID;
    *old = atomic_exchange(&world->members[me].notes[segment][id], 0);
    return SUCCESS;
}

static int atomic_operation(Byte segment, Size offset, Rank rank, int compare, Size expected, Size value, Size* old) {
    Segment* there = known(rank, segment);
    if (!there) return BAD_SEG;
    if (offset % 8) return UNALIGNED;
    if (offset + 8 > there->size) return BAD_OFFSET;
    if (pthread_mutex_lock(&world->lock) == EOWNERDEAD) pthread_mutex_consistent(&world->lock);
    Size changed;
    struct iovec here = {old, 8}, new = {&changed, 8}, far = {(char*)there->at + offset, 8};
    pid_t pid = world->members[rank].pid;
    int code = process_vm_readv(pid, &here, 1, &far, 1, 0) == 8 ? SUCCESS : FAILED;
    if (!code && (!compare || *old == expected)) {
        changed = compare ? value : *old + value;
        code = process_vm_writev(pid, &new, 1, &far, 1, 0) == 8 ? SUCCESS : FAILED;
    }
    pthread_mutex_unlock(&world->lock);
    return code;
}
int gaspi_atomic_fetch_add(Byte segment, Size offset, Rank rank, Size value, Size* old, Size ms) {
    (void)ms;
    return atomic_operation(segment, offset, rank, 0, 0, value, old);
}
int gaspi_atomic_compare_swap(Byte segment, Size offset, Rank rank, Size expected, Size value, Size* old, Size ms) {
    (void)ms;
    return atomic_operation(segment, offset, rank, 1, expected, value, old);
}

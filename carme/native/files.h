/* What all parts of copying do with files: their status and owners, their bytes, and whether they are in memory.

   Only for the other files of this folder, which define _GNU_SOURCE before. */

#ifndef CARME_FILES
#define CARME_FILES

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "copying.h"

/* What takes longer than this, in nanoseconds, was waited for. */
#define WAITED 100000

static inline int status_of(int folder, const char *name, int flags, struct statx *status)
{
    return (int)syscall(SYS_statx, folder, name, flags | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, status);
}

static inline int same_moment(const struct statx_timestamp *first, const struct statx_timestamp *second)
{
    return first->tv_sec == second->tv_sec && first->tv_nsec == second->tv_nsec;
}

static inline int not_later(const struct statx_timestamp *first, const struct statx_timestamp *second)
{
    return first->tv_sec < second->tv_sec || (first->tv_sec == second->tv_sec && first->tv_nsec <= second->tv_nsec);
}

static inline int by_inode(const void *first, const void *second)
{
    uint64_t first_inode = *(const uint64_t *)first, second_inode = *(const uint64_t *)second;
    return (first_inode > second_inode) - (first_inode < second_inode);
}

static inline int may_give(const struct manner *manner, uint32_t group)
{
    if (group == manner->group)
        return 1;
    for (int number = 0; number < manner->group_count; number++)
        if (manner->groups[number] == group)
            return 1;
    return 0;
}

/* Who a copy can belong to, like carme.staging.attributes.AttributeCopier. */
static inline uint32_t user_of(const struct manner *manner, const struct statx *its)
{
    return manner->user ? manner->user : its->stx_uid;
}

static inline uint32_t group_of(const struct manner *manner, const struct statx *its)
{
    return !manner->user || may_give(manner, its->stx_gid) ? its->stx_gid : manner->group;
}

static inline int write_all(int file, const char *block, size_t size, off_t place)
{
    while (size) {
        ssize_t written = pwrite(file, block, size, place);
        if (written <= 0) {
            errno = written ? errno : EIO;
            return -1;
        }
        block += written, size -= (size_t)written, place += written;
    }
    return 0;
}

/* Read as much as is wanted, or to the end; -1: errno. */
static inline ssize_t read_all(int file, char *block, size_t size, off_t place)
{
    size_t got = 0;
    while (got < size) {
        ssize_t more = pread(file, block + got, size - got, place + (off_t)got);
        if (more < 0)
            return -1;
        if (!more)
            break;
        got += (size_t)more;
    }
    return (ssize_t)got;
}

static inline struct digest digest_of(hasher hash, const char *block, size_t size)
{
    return hash ? hash(block, size) : (struct digest){0, 0};
}

/* Whether what was read back has the digest that was taken when it was read. */
static inline int verified(hasher hash, struct digest wanted, const char *block, const char *back, size_t size)
{
    if (!hash)
        return !memcmp(block, back, size);
    struct digest got = hash(back, size);
    return got.low == wanted.low && got.high == wanted.high;
}

static inline int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t milliseconds(void) { return nanoseconds() / 1000000; }

/* Whether a place of a file is known not to be in memory. Not all file systems can say so: errno is another one then.
   The question has the device read it. For who is kept from looking until that is done the answer is that it is there. */
static inline int is_absent(int file, off_t place)
{
    char byte;
    struct iovec room = {&byte, 1};
    int64_t begun = nanoseconds();
    errno = 0;
    ssize_t got = preadv2(file, &room, 1, place, RWF_NOWAIT);
    return got < 0 ? errno == EAGAIN : got && nanoseconds() - begun > WAITED;
}

#endif

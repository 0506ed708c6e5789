/* Common file operations of copying: status, owners, contents, and whether they are in memory.

   Only for the other files of this folder, which define _GNU_SOURCE first. */

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

/* A read that takes longer than this, in nanoseconds, came from a device. */
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
    return first->tv_sec < second->tv_sec
        || (first->tv_sec == second->tv_sec && first->tv_nsec <= second->tv_nsec);
}

static inline int by_inode(const void *first, const void *second)
{
    uint64_t first_inode = *(const uint64_t *)first, second_inode = *(const uint64_t *)second;
    return (first_inode > second_inode) - (first_inode < second_inode);
}

static inline int may_set_group(const struct copy_options *options, uint32_t group)
{
    if (group == options->group)
        return 1;
    for (int number = 0; number < options->group_count; number++)
        if (options->groups[number] == group)
            return 1;
    return 0;
}

/* The user and group of a copy, like carme.staging.attributes.AttributeCopier. */
static inline uint32_t user_of(const struct copy_options *options, const struct statx *status)
{
    return options->user ? options->user : status->stx_uid;
}

static inline uint32_t group_of(const struct copy_options *options, const struct statx *status)
{
    return !options->user || may_set_group(options, status->stx_gid) ? status->stx_gid : options->group;
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

/* Read the requested bytes, or to the end; -1: errno. */
static inline ssize_t read_all(int file, char *block, size_t size, off_t place)
{
    size_t received = 0;
    while (received < size) {
        ssize_t count = pread(file, block + received, size - received, place + (off_t)received);
        if (count < 0)
            return -1;
        if (!count)
            break;
        received += (size_t)count;
    }
    return (ssize_t)received;
}

static inline struct digest digest_of(hasher hash, const char *block, size_t size)
{
    return hash ? hash(block, size) : (struct digest){0, 0};
}

/* Whether the copy's bytes have the digest of the source's bytes. */
static inline int verified(hasher hash, struct digest wanted, const char *block, const char *back,
                           size_t size)
{
    if (!hash)
        return !memcmp(block, back, size);
    struct digest received = hash(back, size);
    return received.low == wanted.low && received.high == wanted.high;
}

static inline int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t milliseconds(void) { return nanoseconds() / 1000000; }

/* Whether a place of a file is known not to be in memory. Some file systems do not support this and set
   another errno. The test makes the device read that place; if it blocks until then, the result is that
   the place is in memory. */
static inline int is_absent(int file, off_t place)
{
    char byte;
    struct iovec buffer = {&byte, 1};
    int64_t start = nanoseconds();
    errno = 0;
    ssize_t received = preadv2(file, &buffer, 1, place, RWF_NOWAIT);
    return received < 0 ? errno == EAGAIN : received && nanoseconds() - start > WAITED;
}

#endif

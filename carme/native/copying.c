/* The part of copying whose time is that of system calls. Here: many small plain files, as they lie in a folder.

   Beside it are folders.c (their entries), compare.c (what has not changed), walk.c (both trees) and ranges.c (blocks
   of large files). Whatever is not plain, and whatever goes wrong, is left to the caller, who knows all cases and all
   words: see carme.staging.native, which is the other side of this. Nothing here calls Python, or needs more of the C
   library than glibc 2.28 has. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "files.h"

/* Raised with every change of what the two sides send each other. */
#define INTERFACE 7
#define SMALL (1 << 20)
/* Of small files that have to come from the device so many are asked for at a time, and at most so many bytes. */
#define AHEAD 128
#define AHEAD_BYTES (4 << 20)
/* Whether a file is in memory is asked again after so many that were. */
#define WARM 64
#define PERMISSIONS 0777

enum verify { VERIFY_NONE, VERIFY_READ, VERIFY_DEVICE };

int carme_interface(void) { return INTERFACE; }

/* Whether a file has extended attributes that are to be kept. SELinux' labels belong to the place. */
static int has_attributes(int file)
{
    char names[256];
    ssize_t length = (ssize_t)syscall(SYS_flistxattr, file, names, sizeof names);
    if (length < 0)
        return errno != ENOTSUP && errno != ENOSYS;
    for (const char *name = names; name < names + length; name += strlen(name) + 1)
        if (strcmp(name, "security.selinux"))
            return 1;
    return 0;
}

/* Fewer blocks than its size takes may also be a compressed file, or one that is not written out yet. */
static int has_holes(int file, const struct statx *its)
{
    return its->stx_blocks * 512 < its->stx_size && lseek(file, 0, SEEK_HOLE) != (off_t)its->stx_size;
}

/* Owner and mode of a new file. */
static int give(const struct manner *manner, int file, const struct statx *its)
{
    struct statx now;
    if (status_of(file, "", AT_EMPTY_PATH, &now))
        return -1;
    uint32_t user = user_of(manner, its), group = group_of(manner, its);
    if ((now.stx_uid != user || now.stx_gid != group) && fchown(file, user, group))
        return -1;
    return fchmod(file, its->stx_mode & PERMISSIONS);
}

/* The contents of a small file, and their verification. */
static int fill(const struct manner *manner, int original, int copy, size_t size, char *block, char *back)
{
    /* Whether it has grown meanwhile is seen by its status. */
    if (read_all(original, block, size, 0) != (ssize_t)size)
        return -1;
    if (!size)
        return 0;
    hasher hash = manner->verify == VERIFY_NONE ? NULL : manner->hash;
    struct digest wanted = digest_of(hash, block, size);
    if (write_all(copy, block, size, 0))
        return -1;
    if (manner->verify == VERIFY_NONE)
        return 0;
    if (manner->verify == VERIFY_DEVICE
        && (fdatasync(copy) || posix_fadvise(copy, 0, 0, POSIX_FADV_DONTNEED)))
        return -1;
    return read_all(copy, back, size, 0) == (ssize_t)size && verified(hash, wanted, block, back, size) ? 0 : -1;
}

/* A file for reading, if that does not have to be waited for. */
static int open_file(int folder, const char *name, int *quiet)
{
    const int reading = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    /* Reading should not count as an access; only owners may ask for that. */
    int file = openat(folder, name, reading | *quiet);
    if (file < 0 && errno == EPERM && *quiet) {
        *quiet = 0;
        file = openat(folder, name, reading);
    }
    return file;
}

/* Whether a file's beginning has to come from the device, or from a server. */
static int is_cold(int file)
{
    char byte;
    if (is_absent(file, 0))
        return 1;
    if (!errno)
        return 0;
    int64_t begun = nanoseconds();
    return pread(file, &byte, 1, 0) == 1 && nanoseconds() - begun > WAITED;
}

/* A file that is asked for ahead. */
struct wanted {
    uint64_t inode; /* First: see by_inode. */
    size_t size;
    int file;
};

/* Have files read into the page cache, all at once: they are mapped side by side, and of one request for all of that
   the kernel makes few large requests where they also lie side by side on the device. Closes them. */
static void fetch(struct wanted *wanted, int count, size_t size)
{
    char *room = size ? mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    char *end = room;
    qsort(wanted, (size_t)count, sizeof *wanted, by_inode);
    for (int number = 0; number < count; number++) {
        if (room != MAP_FAILED
            && mmap(end, wanted[number].size, PROT_READ, MAP_SHARED | MAP_FIXED, wanted[number].file, 0) != MAP_FAILED)
            end += wanted[number].size;
        close(wanted[number].file);
    }
    if (room == MAP_FAILED)
        return;
    /* Only a hint. */
    (void)madvise(room, (size_t)(end - room), MADV_WILLNEED);
    munmap(room, size);
}

/* Have the next small files read ahead, if the first of them is not in memory. Returns the record up to which that
   needs no further thought. */
static const char *read_ahead(int folder, const char *here, const char *end, int *quiet)
{
    struct wanted wanted[AHEAD];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t size = 0;
    int count = 0, warm = 0;
    for (; here < end && count < AHEAD && size < AHEAD_BYTES && warm < WARM; here += strlen(here) + 1) {
        if (warm) {
            warm++;
            continue;
        }
        int file = *here == 'f' || *here == 'n' ? open_file(folder, here + 1, quiet) : -1;
        struct stat its;
        if (file < 0)
            continue;
        if (fstat(file, &its) || !S_ISREG(its.st_mode) || !its.st_size || its.st_size > SMALL
            || (!count && (warm = !is_cold(file)))) {
            close(file);
            continue;
        }
        wanted[count] = (struct wanted){its.st_ino, ((size_t)its.st_size + page - 1) / page * page, file};
        size += wanted[count++].size;
    }
    fetch(wanted, count, size);
    return here;
}

/* Copy one file, if it is a plain small one; else, and if anything fails, nothing is left of it. */
static int copy_file(const struct manner *manner, int source, int target, const char *name, const char *writing,
                     int *quiet, char *block, char *back, int64_t *bytes)
{
    int original = open_file(source, name, quiet);
    if (original < 0)
        return -1;
    struct statx its, after;
    int done = -1;
    if (status_of(original, "", AT_EMPTY_PATH, &its) || !S_ISREG(its.stx_mode) || its.stx_nlink != 1
        || its.stx_size > SMALL || its.stx_mode & 07000 || has_holes(original, &its)
        || (manner->attributes && has_attributes(original)))
        goto out_one;
    int plain = manner->plain && its.stx_uid == manner->user && its.stx_gid == manner->group;
    int copy = openat(target, writing, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       plain ? its.stx_mode & PERMISSIONS : 0600);
    if (copy < 0)
        goto out_one;
    done = fill(manner, original, copy, its.stx_size, block, back);
    if (!done)
        done = status_of(original, "", AT_EMPTY_PATH, &after);
    if (!done
        && !(same_moment(&its.stx_mtime, &after.stx_mtime) && same_moment(&its.stx_ctime, &after.stx_ctime)
             && its.stx_size == after.stx_size))
        done = -1;
    if (!done && !plain)
        done = give(manner, copy, &its);
    if (!done) {
        struct timespec times[2] = {{its.stx_atime.tv_sec, its.stx_atime.tv_nsec},
                                    {its.stx_mtime.tv_sec, its.stx_mtime.tv_nsec}};
        done = futimens(copy, times);
    }
    /* Some file systems report a full disk or quota only here. */
    if (close(copy))
        done = -1;
    if (!done && writing != name)
        done = renameat(target, writing, target, name);
    if (done)
        unlinkat(target, writing, 0);
    else
        *bytes += (int64_t)its.stx_size;
out_one:
    close(original);
    return done;
}

/* Copy those of the entries that are plain small files. The records of all others are moved to the front of
   `records`.

   `writing`: for each record the name that the file has until it is complete, each with its zero; NULL: it may
   have its own at once. `patience`: return after so many milliseconds. Returns how many bytes of the records
   were looked at, or minus an errno. */
int64_t carme_copy(const struct manner *manner, int source, int target, char *records, int64_t length,
                   const char *writing, int64_t patience, struct counts *counts)
{
    char *block = malloc(2 * (SMALL + 4096));
    if (!block)
        return -ENOMEM;
    char *back = block + SMALL + 4096, *remaining = records, *here = records;
    const char *unnamed = writing, *end = records + length, *ahead = records, *next = records;
    int quiet = O_NOATIME, number = 0;
    int64_t until = milliseconds() + patience;
    while (here < end) {
        if (here >= next) {
            /* What is wanted after this is on its way while this is copied. */
            next = ahead > here ? ahead : read_ahead(source, here, end, &quiet);
            ahead = read_ahead(source, next, end, &quiet);
        }
        size_t size = strlen(here) + 1;
        const char *name = here + 1;
        if ((*here == 'f' || *here == 'n')
            && !copy_file(manner, source, target, name, unnamed ? unnamed : name, &quiet, block, back,
                          &counts->bytes))
            counts->files++;
        else {
            memmove(remaining, here, size);
            remaining += size;
        }
        here += size;
        if (unnamed)
            unnamed += strlen(unnamed) + 1;
        if (!(++number & 15) && milliseconds() > until)
            break;
    }
    free(block);
    counts->left = remaining - records;
    counts->names = unnamed - writing;
    return here - records;
}

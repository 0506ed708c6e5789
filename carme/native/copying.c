/* The part of copying that is dominated by system calls. This file copies small plain files of a folder.

   The other parts are folders.c (entries), compare.c (unchanged entries), walk.c (both trees) and ranges.c
   (blocks of large files). Everything that is not plain, and every error, is left to the caller,
   carme.staging.native, which handles all cases and prints all messages. This code calls no Python and
   needs only glibc 2.28. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "files.h"

/* The version of the interface to Python. Raise it with every change. */
#define INTERFACE 7
#define SMALL (1 << 20)
/* Read-ahead of small files: at most so many files and bytes at a time. */
#define AHEAD 128
#define AHEAD_BYTES (4 << 20)
/* Check again after so many files in memory whether the next one is. */
#define WARM 64
#define PERMISSIONS 0777

enum verify { VERIFY_NONE, VERIFY_READ, VERIFY_DEVICE };

int carme_interface(void) { return INTERFACE; }

/* Whether a file has extended attributes to preserve. SELinux labels depend on the place. */
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

/* A file with fewer blocks than its size may also be compressed, or not written to the device yet. */
static int has_holes(int file, const struct statx *status)
{
    return status->stx_blocks * 512 < status->stx_size
        && lseek(file, 0, SEEK_HOLE) != (off_t)status->stx_size;
}

/* Set the owner and mode of a new file. */
static int set_owner_and_mode(const struct copy_options *options, int file, const struct statx *status)
{
    struct statx current;
    if (status_of(file, "", AT_EMPTY_PATH, &current))
        return -1;
    uint32_t user = user_of(options, status), group = group_of(options, status);
    if ((current.stx_uid != user || current.stx_gid != group) && fchown(file, user, group))
        return -1;
    return fchmod(file, status->stx_mode & PERMISSIONS);
}

/* Copy the contents of a small file, and verify them. */
static int copy_contents(const struct copy_options *options, int original, int copy, size_t size, char *block,
                         char *back)
{
    /* The caller checks the status to detect a file that has grown. */
    if (read_all(original, block, size, 0) != (ssize_t)size)
        return -1;
    if (!size)
        return 0;
    hasher hash = options->verify == VERIFY_NONE ? NULL : options->hash;
    struct digest expected = digest_of(hash, block, size);
    if (write_all(copy, block, size, 0))
        return -1;
    if (options->verify == VERIFY_NONE)
        return 0;
    if (options->verify == VERIFY_DEVICE
        && (fdatasync(copy) || posix_fadvise(copy, 0, 0, POSIX_FADV_DONTNEED)))
        return -1;
    return read_all(copy, back, size, 0) == (ssize_t)size
                && verified(hash, expected, block, back, size)
             ? 0
             : -1;
}

/* Open a file for reading without blocking. */
static int open_file(int folder, const char *name, int *no_atime)
{
    const int reading = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    /* Reading should not change the access time; only owners may request that. */
    int file = openat(folder, name, reading | *no_atime);
    if (file < 0 && errno == EPERM && *no_atime) {
        *no_atime = 0;
        file = openat(folder, name, reading);
    }
    return file;
}

/* Whether the first bytes of a file must be read from the device or a server. */
static int is_cold(int file)
{
    char byte;
    if (is_absent(file, 0))
        return 1;
    if (!errno)
        return 0;
    int64_t start = nanoseconds();
    return pread(file, &byte, 1, 0) == 1 && nanoseconds() - start > WAITED;
}

/* A file to read ahead. */
struct read_ahead_file {
    uint64_t inode; /* First: see by_inode. */
    size_t size;
    int file;
};

/* Read files into the page cache at once, and close them. They are mapped next to each other, so that the
   kernel makes few large requests where they are adjacent on the device. */
static void prefetch(struct read_ahead_file *files, int count, size_t size)
{
    char *mapped =
        size ? mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    char *end = mapped;
    qsort(files, (size_t)count, sizeof *files, by_inode);
    for (int number = 0; number < count; number++) {
        if (mapped != MAP_FAILED
            && mmap(end, files[number].size, PROT_READ, MAP_SHARED | MAP_FIXED, files[number].file, 0)
                   != MAP_FAILED)
            end += files[number].size;
        close(files[number].file);
    }
    if (mapped == MAP_FAILED)
        return;
    /* Only a hint. */
    (void)madvise(mapped, (size_t)(end - mapped), MADV_WILLNEED);
    munmap(mapped, size);
}

/* Read the next small files ahead, if the first of them is not in memory. Returns the record up to which
   nothing more needs to be read ahead. */
static const char *read_ahead(int folder, const char *record, const char *end, int *no_atime)
{
    struct read_ahead_file files[AHEAD];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t size = 0;
    int count = 0, warm = 0;
    for (; record < end && count < AHEAD && size < AHEAD_BYTES && warm < WARM; record += strlen(record) + 1) {
        if (warm) {
            warm++;
            continue;
        }
        int file = *record == 'f' || *record == 'n' ? open_file(folder, record + 1, no_atime) : -1;
        struct stat status;
        if (file < 0)
            continue;
        if (fstat(file, &status) || !S_ISREG(status.st_mode) || !status.st_size || status.st_size > SMALL
            || (!count && (warm = !is_cold(file)))) {
            close(file);
            continue;
        }
        files[count] =
            (struct read_ahead_file){status.st_ino, ((size_t)status.st_size + page - 1) / page * page, file};
        size += files[count++].size;
    }
    prefetch(files, count, size);
    return record;
}

/* Copy one file if it is a small plain file. Otherwise, and after any error, leave nothing behind. */
static int copy_file(const struct copy_options *options, int source, int target, const char *name,
                     const char *temporary_name, int *no_atime, char *block, char *back, int64_t *bytes)
{
    int original = open_file(source, name, no_atime);
    if (original < 0)
        return -1;
    struct statx status, after;
    int done = -1;
    if (status_of(original, "", AT_EMPTY_PATH, &status) || !S_ISREG(status.stx_mode) || status.stx_nlink != 1
        || status.stx_size > SMALL || status.stx_mode & 07000 || has_holes(original, &status)
        || (options->attributes && has_attributes(original)))
        goto out_one;
    int plain = options->plain && status.stx_uid == options->user && status.stx_gid == options->group;
    int copy = openat(target, temporary_name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       plain ? status.stx_mode & PERMISSIONS : 0600);
    if (copy < 0)
        goto out_one;
    done = copy_contents(options, original, copy, status.stx_size, block, back);
    if (!done)
        done = status_of(original, "", AT_EMPTY_PATH, &after);
    if (!done
        && !(same_moment(&status.stx_mtime, &after.stx_mtime)
             && same_moment(&status.stx_ctime, &after.stx_ctime) && status.stx_size == after.stx_size))
        done = -1;
    if (!done && !plain)
        done = set_owner_and_mode(options, copy, &status);
    if (!done) {
        struct timespec times[2] = {{status.stx_atime.tv_sec, status.stx_atime.tv_nsec},
                                    {status.stx_mtime.tv_sec, status.stx_mtime.tv_nsec}};
        done = futimens(copy, times);
    }
    /* Some file systems report a full disk or quota only here. */
    if (close(copy))
        done = -1;
    if (!done && temporary_name != name)
        done = renameat(target, temporary_name, target, name);
    if (done)
        unlinkat(target, temporary_name, 0);
    else
        *bytes += (int64_t)status.stx_size;
out_one:
    close(original);
    return done;
}

/* Copy the entries that are small plain files. Move the records of all other entries to the front of
   `records`.

   `temporary_names`: for each record the name of the incomplete file, each with its zero; NULL: files have
   their own names at once. `time_limit`: return after so many milliseconds. Returns the number of bytes of
   the records that were processed, or minus an errno. */
int64_t carme_copy(const struct copy_options *options, int source, int target, char *records, int64_t length,
                   const char *temporary_names, int64_t time_limit, struct counts *counts)
{
    char *block = malloc(2 * (SMALL + 4096));
    if (!block)
        return -ENOMEM;
    char *back = block + SMALL + 4096, *remaining = records, *record = records;
    const char *unnamed = temporary_names, *end = records + length, *ahead = records, *next = records;
    int no_atime = O_NOATIME, number = 0;
    int64_t until = milliseconds() + time_limit;
    while (record < end) {
        if (record >= next) {
            /* Read ahead while this is copied. */
            next = ahead > record ? ahead : read_ahead(source, record, end, &no_atime);
            ahead = read_ahead(source, next, end, &no_atime);
        }
        size_t size = strlen(record) + 1;
        const char *name = record + 1;
        if ((*record == 'f' || *record == 'n')
            && !copy_file(options, source, target, name, unnamed ? unnamed : name, &no_atime, block, back,
                          &counts->bytes))
            counts->files++;
        else {
            memmove(remaining, record, size);
            remaining += size;
        }
        record += size;
        if (unnamed)
            unnamed += strlen(unnamed) + 1;
        if (!(++number & 15) && milliseconds() > until)
            break;
    }
    free(block);
    counts->left = remaining - records;
    counts->names = unnamed - temporary_names;
    return record - records;
}

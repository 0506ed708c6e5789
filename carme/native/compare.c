/* Comparison: which entries of a folder have not changed since the copy. */

#define _GNU_SOURCE
#include "files.h"

/* newfstatat suffices here and is slightly faster than statx. As a system call, because its C library
   function is newer than glibc 2.28. */
static int simple_status_of(int folder, const char *name, struct stat *status)
{
    return (int)syscall(SYS_newfstatat, folder, name, status, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT);
}

static int same_owner(const struct copy_options *options, const struct stat *source_status,
                      const struct stat *target_status)
{
    return (source_status->st_uid == target_status->st_uid && source_status->st_gid == target_status->st_gid)
        || (options->user && target_status->st_uid == options->user
            && target_status->st_gid == options->group);
}

/* Whether the destination's file is an unchanged copy. */
static int unchanged(const struct copy_options *options, const struct stat *source_status,
                     const struct stat *target_status)
{
    return source_status->st_mode == target_status->st_mode && source_status->st_nlink == 1
        && (source_status->st_ctim.tv_sec < target_status->st_ctim.tv_sec
            || (source_status->st_ctim.tv_sec == target_status->st_ctim.tv_sec
                && source_status->st_ctim.tv_nsec <= target_status->st_ctim.tv_nsec))
        && same_owner(options, source_status, target_status);
}

static int same_time(const struct copy_options *options, const struct stat *source_status,
                     const struct stat *target_status)
{
    return source_status->st_mtim.tv_sec == target_status->st_mtim.tv_sec
        && source_status->st_mtim.tv_nsec / options->unit == target_status->st_mtim.tv_nsec / options->unit;
}

/* Whether two symlinks have the same target. */
static int same_link_target(int source, int target, const char *name)
{
    char source_link[4096], target_link[4096];
    ssize_t length = readlinkat(source, name, source_link, sizeof source_link);
    return length >= 0 && length < (ssize_t)sizeof source_link
        && readlinkat(target, name, target_link, sizeof target_link) == length
        && !memcmp(source_link, target_link, (size_t)length);
}

/* Count the files and symlinks that have not changed since the copy. Move the records of all other entries
   to the front of `records`, with the letter n if their contents must be copied. `left` of the counts is
   the size of these records in bytes. */
void carme_compare(const struct copy_options *options, int source, int target, char *records, int64_t length,
                   struct counts *counts)
{
    char *remaining = records;
    for (char *record = records; record < records + length;) {
        size_t size = strlen(record) + 1;
        const char *name = record + 1;
        struct stat source_status, target_status;
        int same = 0;
        if (*record != 'd' && !simple_status_of(source, name, &source_status)
            && (S_ISREG(source_status.st_mode) || S_ISLNK(source_status.st_mode))) {
            if (simple_status_of(target, name, &target_status)) {
                if (errno == ENOENT && S_ISREG(source_status.st_mode))
                    *record = 'n';
            } else if (S_ISREG(source_status.st_mode) && S_ISREG(target_status.st_mode)) {
                if (source_status.st_size != target_status.st_size
                    || !same_time(options, &source_status, &target_status))
                    *record = 'n';
                else
                    same = unchanged(options, &source_status, &target_status);
            } else if (S_ISLNK(source_status.st_mode) && S_ISLNK(target_status.st_mode))
                same = same_owner(options, &source_status, &target_status)
                    && same_time(options, &source_status, &target_status)
                    && same_link_target(source, target, name);
        }
        if (same) {
            counts->files++;
            counts->bytes += S_ISREG(source_status.st_mode) ? (int64_t)source_status.st_size : 0;
            record += size;
            continue;
        }
        memmove(remaining, record, size);
        remaining += size;
        record += size;
    }
    counts->left = remaining - records;
}

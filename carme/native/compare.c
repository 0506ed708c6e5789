/* Comparing: which entries of a folder have not changed since they were copied. */

#define _GNU_SOURCE
#include "files.h"

/* Less than statx gives is enough here, and a little sooner had. Directly, as its name in the C library is newer
   than 2.28. */
static int simple_status_of(int folder, const char *name, struct stat *status)
{
    return (int)syscall(SYS_newfstatat, folder, name, status, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT);
}

static int same_owner(const struct manner *manner, const struct stat *its, const struct stat *own)
{
    return (its->st_uid == own->st_uid && its->st_gid == own->st_gid)
           || (manner->user && own->st_uid == manner->user && own->st_gid == manner->group);
}

/* Whether a file is at the destination as it was copied. */
static int unchanged(const struct manner *manner, const struct stat *its, const struct stat *own)
{
    return its->st_mode == own->st_mode && its->st_nlink == 1
           && (its->st_ctim.tv_sec < own->st_ctim.tv_sec
               || (its->st_ctim.tv_sec == own->st_ctim.tv_sec && its->st_ctim.tv_nsec <= own->st_ctim.tv_nsec))
           && same_owner(manner, its, own);
}

static int same_time(const struct manner *manner, const struct stat *its, const struct stat *own)
{
    return its->st_mtim.tv_sec == own->st_mtim.tv_sec
           && its->st_mtim.tv_nsec / manner->unit == own->st_mtim.tv_nsec / manner->unit;
}

/* Whether two symlinks lead to the same. */
static int same_way(int source, int target, const char *name)
{
    char its[4096], own[4096];
    ssize_t length = readlinkat(source, name, its, sizeof its);
    return length >= 0 && length < (ssize_t)sizeof its && readlinkat(target, name, own, sizeof own) == length
           && !memcmp(its, own, (size_t)length);
}

/* Of the entries, count the files and symlinks that have not changed since they were copied. The records of all others are
   moved to the front of `records`, those whose contents have to be copied with the letter n; `left` of the
   counts says how many bytes they have. */
void carme_compare(const struct manner *manner, int source, int target, char *records, int64_t length,
                   struct counts *counts)
{
    char *remaining = records;
    for (char *here = records; here < records + length;) {
        size_t size = strlen(here) + 1;
        const char *name = here + 1;
        struct stat its, own;
        int same = 0;
        if (*here != 'd' && !simple_status_of(source, name, &its) && (S_ISREG(its.st_mode) || S_ISLNK(its.st_mode))) {
            if (simple_status_of(target, name, &own)) {
                if (errno == ENOENT && S_ISREG(its.st_mode))
                    *here = 'n';
            } else if (S_ISREG(its.st_mode) && S_ISREG(own.st_mode)) {
                if (its.st_size != own.st_size || !same_time(manner, &its, &own))
                    *here = 'n';
                else
                    same = unchanged(manner, &its, &own);
            } else if (S_ISLNK(its.st_mode) && S_ISLNK(own.st_mode))
                same = same_owner(manner, &its, &own) && same_time(manner, &its, &own)
                       && same_way(source, target, name);
        }
        if (same) {
            counts->files++;
            counts->bytes += S_ISREG(its.st_mode) ? (int64_t)its.st_size : 0;
            here += size;
            continue;
        }
        memmove(remaining, here, size);
        remaining += size;
        here += size;
    }
    counts->left = remaining - records;
}

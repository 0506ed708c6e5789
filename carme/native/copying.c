/* The part of copying whose time is that of system calls: many small plain files, and blocks of large ones.

   Whatever is not plain, and whatever goes wrong, is left to the caller, who knows all cases and all words:
   see carme.staging.native, which is the other side of this. Nothing here calls Python, or needs more of the C
   library than glibc 2.28 has. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "copying.h"

/* Raised with every change of what the two sides tell each other. */
#define INTERFACE 7

#define SMALL (1 << 20)
#define BLOCK (256 << 10)
/* Past the page cache: so much at a time, by at most so many threads, from places that are multiples of this. */
#define CHUNK (2 << 20)
#define THREADS 16
#define ALIGNED 4096
/* Of small files that have to come from the device so many are asked for at a time, and at most so many bytes. */
#define AHEAD 128
#define AHEAD_BYTES (4 << 20)
/* Whether a file is in memory is asked again after so many that were. */
#define WARM 64
/* What takes longer than this, in nanoseconds, was waited for. */
#define WAITED 100000
/* No more threads than these walk. */
#define WALKERS 64
#define PERMISSIONS 0777

enum verify { VERIFY_NONE, VERIFY_READ, VERIFY_DEVICE };
enum way { WAY_PLAIN, WAY_EARLY, WAY_DIRECT };
enum outcome { DONE = 0, CHANGED = -1, CORRUPT = -2 };

int carme_interface(void) { return INTERFACE; }

static int status_of(int folder, const char *name, int flags, struct statx *status)
{
    return (int)syscall(SYS_statx, folder, name, flags | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, status);
}

static int same_moment(const struct statx_timestamp *one, const struct statx_timestamp *other)
{
    return one->tv_sec == other->tv_sec && one->tv_nsec == other->tv_nsec;
}

static int not_later(const struct statx_timestamp *one, const struct statx_timestamp *other)
{
    return one->tv_sec < other->tv_sec || (one->tv_sec == other->tv_sec && one->tv_nsec <= other->tv_nsec);
}

/* Records of entries: a letter for the kind (f file, d folder, o other, ? unknown, n file to be copied), the name, a zero. */

/* A folder whose entries are read. */
struct reader {
    int folder;
    char *next, *end;
    char room[32 << 10];
};

/* As the kernel has it: see getdents64(2). */
struct entry {
    uint64_t inode;
    int64_t place;
    uint16_t length;
    uint8_t kind;
    char name[];
};

static void read_from(struct reader *reader, int folder)
{
    reader->folder = folder;
    reader->next = reader->end = reader->room;
}

/* Where an entry's record is. */
struct placed {
    uint64_t inode; /* First: see by_inode. */
    size_t begin, size;
};

/* Read at most `most` entries of a folder; returns the records' bytes, or minus an errno. `room` is at least
   `most` times 258. A folder that is read to its end gives 0. `places`: room for `most` of them, or NULL. */
static int64_t read_records(struct reader *reader, char *records, int64_t room, int64_t most, struct placed *places)
{
    char *end = records;
    while (most > 0 && end + 258 <= records + room) {
        if (reader->next == reader->end) {
            long got = syscall(SYS_getdents64, reader->folder, reader->room, sizeof reader->room);
            if (got < 0)
                return -errno;
            if (!got)
                break;
            reader->next = reader->room, reader->end = reader->room + got;
        }
        const struct entry *entry = (const struct entry *)reader->next;
        reader->next += entry->length;
        const char *name = entry->name;
        if (name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2])))
            continue;
        switch (entry->kind) {
        case DT_REG: *end = 'f'; break;
        case DT_DIR: *end = 'd'; break;
        case DT_UNKNOWN: *end = '?'; break;
        default: *end = 'o';
        }
        size_t length = strlen(name) + 1;
        memcpy(end + 1, name, length);
        if (places)
            *places++ = (struct placed){entry->inode, (size_t)(end - records), 1 + length};
        end += 1 + length;
        most--;
    }
    return end - records;
}

static int by_inode(const void *one, const void *other)
{
    uint64_t mine = *(const uint64_t *)one, yours = *(const uint64_t *)other;
    return (mine > yours) - (mine < yours);
}

/* The same, in the order of their inodes, which is mostly that in which they lie on the device: folders may give
   them in the order of hashes. */
int64_t carme_entries(struct reader *reader, char *records, int64_t room, int64_t most)
{
    struct placed *places = malloc((size_t)most * sizeof *places);
    int64_t length = read_records(reader, records, room, most, places);
    char *copy = places && length > 0 ? malloc((size_t)length) : NULL;
    if (copy) {
        size_t count = 0;
        memcpy(copy, records, (size_t)length);
        for (int64_t end = 0; end < length; end += (int64_t)places[count++].size)
            ;
        qsort(places, count, sizeof *places, by_inode);
        char *end = records;
        for (size_t number = 0; number < count; end += places[number++].size)
            memcpy(end, copy + places[number].begin, places[number].size);
    }
    free(copy);
    free(places);
    return length;
}

/* A folder to read the entries of, by a descriptor of its own; NULL: errno says why. */
struct reader *carme_open(int folder)
{
    struct reader *reader = malloc(sizeof *reader);
    if (!reader)
        return NULL;
    read_from(reader, openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (reader->folder < 0) {
        free(reader);
        return NULL;
    }
    return reader;
}

void carme_close(struct reader *reader)
{
    close(reader->folder);
    free(reader);
}

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

static int may_give(const struct manner *manner, uint32_t group)
{
    if (group == manner->group)
        return 1;
    for (int number = 0; number < manner->group_count; number++)
        if (manner->groups[number] == group)
            return 1;
    return 0;
}

/* Who a copy can belong to, like carme.staging.attributes.AttributeCopier. */
static uint32_t user_of(const struct manner *manner, const struct statx *its)
{
    return manner->user ? manner->user : its->stx_uid;
}

static uint32_t group_of(const struct manner *manner, const struct statx *its)
{
    return !manner->user || may_give(manner, its->stx_gid) ? its->stx_gid : manner->group;
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

static int write_all(int file, const char *block, size_t size, off_t place)
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
static ssize_t read_all(int file, char *block, size_t size, off_t place)
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

static struct digest digest_of(hasher hash, const char *block, size_t size)
{
    return hash ? hash(block, size) : (struct digest){0, 0};
}

/* Whether what was read back is what was read, of which the digest was taken then. */
static int verified(hasher hash, struct digest wanted, const char *block, const char *back, size_t size)
{
    if (!hash)
        return !memcmp(block, back, size);
    struct digest got = hash(back, size);
    return got.low == wanted.low && got.high == wanted.high;
}

/* The contents of a small file, and their verification. */
static int fill(const struct manner *manner, int one, int other, size_t size, char *block, char *back)
{
    /* Whether it has grown meanwhile is seen by its status. */
    if (read_all(one, block, size, 0) != (ssize_t)size)
        return -1;
    if (!size)
        return 0;
    hasher hash = manner->verify == VERIFY_NONE ? NULL : manner->hash;
    struct digest wanted = digest_of(hash, block, size);
    if (write_all(other, block, size, 0))
        return -1;
    if (manner->verify == VERIFY_NONE)
        return 0;
    if (manner->verify == VERIFY_DEVICE
        && (fdatasync(other) || posix_fadvise(other, 0, 0, POSIX_FADV_DONTNEED)))
        return -1;
    return read_all(other, back, size, 0) == (ssize_t)size && verified(hash, wanted, block, back, size) ? 0 : -1;
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

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether a place of a file is known not to be in memory. Not all file systems can say so: errno is another one then.
   The question has the device read it. Who is kept from looking until that is done is told that it is there. */
static int is_absent(int file, off_t place)
{
    char byte;
    struct iovec room = {&byte, 1};
    int64_t begun = nanoseconds();
    errno = 0;
    ssize_t got = preadv2(file, &room, 1, place, RWF_NOWAIT);
    return got < 0 ? errno == EAGAIN : got && nanoseconds() - begun > WAITED;
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

/* Have files read into the page cache, all at once: they are mapped side by side, and of one wish for all of that
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
    /* Only a wish. */
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
    int one = open_file(source, name, quiet);
    if (one < 0)
        return -1;
    struct statx its, after;
    int done = -1;
    if (status_of(one, "", AT_EMPTY_PATH, &its) || !S_ISREG(its.stx_mode) || its.stx_nlink != 1
        || its.stx_size > SMALL || its.stx_mode & 07000 || has_holes(one, &its)
        || (manner->attributes && has_attributes(one)))
        goto out_one;
    int plain = manner->plain && its.stx_uid == manner->user && its.stx_gid == manner->group;
    int other = openat(target, writing, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       plain ? its.stx_mode & PERMISSIONS : 0600);
    if (other < 0)
        goto out_one;
    done = fill(manner, one, other, its.stx_size, block, back);
    if (!done)
        done = status_of(one, "", AT_EMPTY_PATH, &after);
    if (!done
        && !(same_moment(&its.stx_mtime, &after.stx_mtime) && same_moment(&its.stx_ctime, &after.stx_ctime)
             && its.stx_size == after.stx_size))
        done = -1;
    if (!done && !plain)
        done = give(manner, other, &its);
    if (!done) {
        struct timespec times[2] = {{its.stx_atime.tv_sec, its.stx_atime.tv_nsec},
                                    {its.stx_mtime.tv_sec, its.stx_mtime.tv_nsec}};
        done = futimens(other, times);
    }
    /* Some file systems tell of a full disk or quota only here. */
    if (close(other))
        done = -1;
    if (!done && writing != name)
        done = renameat(target, writing, target, name);
    if (done)
        unlinkat(target, writing, 0);
    else
        *bytes += (int64_t)its.stx_size;
out_one:
    close(one);
    return done;
}

static int64_t milliseconds(void) { return nanoseconds() / 1000000; }

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
    char *back = block + SMALL + 4096, *kept = records, *here = records;
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
            memmove(kept, here, size);
            kept += size;
        }
        here += size;
        if (unnamed)
            unnamed += strlen(unnamed) + 1;
        if (!(++number & 15) && milliseconds() > until)
            break;
    }
    free(block);
    counts->left = kept - records;
    counts->names = unnamed - writing;
    return here - records;
}

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
    char *kept = records;
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
        memmove(kept, here, size);
        kept += size;
        here += size;
    }
    counts->left = kept - records;
}

/* A walk through both trees that finds what has changed.

   What it finds is written as items: R and M, a folder's path with a zero, its records of entries that are to be
   looked at (there may be none: then the folder's own attributes are), and a zero; of M there are more than
   these, or than are to be looked at in one go. F, a folder's path with a zero, and a zero: it is to be looked at as a whole. G, the
   same: the destination has entries there that the source has not. */
struct walk {
    struct manner manner;
    int source, target;
    struct statx top;       /* The destination. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char *waiting;          /* The paths of folders, each with its zero, the next one last. */
    size_t waiting_length, waiting_room;
    int working;            /* Threads that may still add to them. */
    int stop, full;         /* No further folder is looked at; as there is no room for what was found. */
    int64_t until;
    char *items, *items_end, *next_item;
    int64_t batch, most;    /* So many records are R; folders with more entries than most are F. */
    int surplus;            /* Whether G is looked for. */
    struct counts counts;
    int64_t folders;
    int started, limit;     /* Threads beside the first one, and how many of them there may be. */
    pthread_t others[WALKERS];
};

/* A folder below another one, with no symlink on the way; -1: errno. */
static int open_below(int root, const char *path)
{
    const int passing = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    const int reading = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int here = root;
    char name[256];
    for (;;) {
        size_t length = strcspn(path, "/");
        if (length >= sizeof name) {
            errno = ENAMETOOLONG;
            length = 0;
        }
        memcpy(name, length ? path : ".", length ? length : 1);
        name[length ? length : 1] = 0;
        int deeper = openat(here, name, path[length] ? passing : reading);
        if (here != root)
            close(here);
        if (deeper < 0 || !path[length])
            return deeper;
        here = deeper;
        path += length + 1;
    }
}

/* What a thread knows of the folder at hand. */
struct look {
    struct reader reader;
    char *records;          /* Its entries; of them, those that are to be looked at. */
    size_t room;
    int64_t length, entries;
    char *below;            /* The paths of the folders in it. */
    size_t below_length, below_room;
    struct counts counts;
    int same;               /* Its own attributes are. */
    int surplus;            /* The destination has entries that the source has not. */
    int missing;            /* The destination has no such folder. */
    const char **names;     /* The source's names, by their hashes; a power of two of places. */
    size_t names_room;
    char *theirs;           /* Some of the destination's entries. */
};

static int grown(char **place, size_t *room, size_t wanted)
{
    if (wanted <= *room)
        return 1;
    size_t size = *room ? *room : 1 << 16;
    while (size < wanted)
        size *= 2;
    char *larger = realloc(*place, size);
    if (!larger)
        return 0;
    *place = larger, *room = size;
    return 1;
}

/* Read a whole folder's entries; whether that could be done. */
static int read_entries(const struct walk *walk, struct look *look, int folder)
{
    const int64_t step = 512;
    int64_t got = -1;
    read_from(&look->reader, folder);
    look->length = look->entries = 0;
    while (look->entries <= walk->most && grown(&look->records, &look->room, (size_t)look->length + step * 258)) {
        got = read_records(&look->reader, look->records + look->length, step * 258, step, NULL);
        if (got <= 0)
            break;
        for (const char *record = look->records + look->length; record < look->records + look->length + got;
             record += strlen(record) + 1)
            look->entries++;
        look->length += got;
    }
    return !got;
}

/* FNV-1a. */
static size_t hash_of(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325;
    while (*name)
        hash = (hash ^ (unsigned char)*name++) * 0x100000001b3;
    return (size_t)(hash ^ hash >> 32);
}

/* Whether the destination's folder has names that are not among the entries; -1: it cannot be said. */
static int has_surplus(struct look *look, int target)
{
    const int64_t step = 512;
    size_t places = 64;
    while (places < 2 * (size_t)look->entries)
        places *= 2;
    if (places > look->names_room) {
        const char **more = realloc(look->names, places * sizeof *more);
        if (!more)
            return -1;
        look->names = more, look->names_room = places;
    }
    if (!look->theirs && !(look->theirs = malloc(step * 258)))
        return -1;
    memset(look->names, 0, places * sizeof *look->names);
    for (const char *here = look->records; here < look->records + look->length; here += strlen(here) + 1) {
        size_t place = hash_of(here + 1) & (places - 1);
        while (look->names[place])
            place = (place + 1) & (places - 1);
        look->names[place] = here + 1;
    }
    read_from(&look->reader, target);
    int64_t got;
    int surplus = 0;
    while (!surplus && (got = read_records(&look->reader, look->theirs, step * 258, step, NULL))) {
        if (got < 0)
            surplus = -1;
        for (const char *here = look->theirs; !surplus && here < look->theirs + got; here += strlen(here) + 1) {
            size_t place = hash_of(here + 1) & (places - 1);
            while (look->names[place] && strcmp(look->names[place], here + 1))
                place = (place + 1) & (places - 1);
            surplus = !look->names[place];
        }
    }
    return surplus;
}

/* Of the entries, take out the folders; whether there was memory. Whether they are at the destination as well is not asked
   here: their inodes may be far apart, and whoever looks at them opens them anyway. */
static int take_folders(struct look *look, const char *path, int source)
{
    size_t above = strlen(path);
    char *kept = look->records;
    look->below_length = 0;
    for (char *here = look->records; here < look->records + look->length;) {
        size_t size = strlen(here) + 1;
        const char *name = here + 1;
        struct statx its;
        if (*here == 'd'
            || (*here == '?' && !status_of(source, name, AT_SYMLINK_NOFOLLOW, &its) && S_ISDIR(its.stx_mode))) {
            if (!grown(&look->below, &look->below_room, look->below_length + above + size + 1))
                return 0;
            char *end = look->below + look->below_length;
            if (above) {
                memcpy(end, path, above);
                end[above] = '/';
                end += above + 1;
            }
            memcpy(end, name, size - 1);
            look->below_length = (size_t)(end + size - 1 - look->below);
        } else {
            memmove(kept, here, size);
            kept += size;
        }
        here += size;
    }
    look->length = kept - look->records;
    return 1;
}

/* Look at a folder; 0: it has to be looked at as a whole. */
static int look_at(const struct walk *walk, struct look *look, const char *path)
{
    int looked = 0;
    int source = open_below(walk->source, path);
    int target = source < 0 ? -1 : open_below(walk->target, path);
    struct statx its, own;
    look->missing = source >= 0 && target < 0 && *path && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP);
    memset(&look->counts, 0, sizeof look->counts);
    if (target >= 0 && !status_of(source, "", AT_EMPTY_PATH, &its) && !status_of(target, "", AT_EMPTY_PATH, &own)
        && !(its.stx_ino == walk->top.stx_ino && its.stx_dev_major == walk->top.stx_dev_major
             && its.stx_dev_minor == walk->top.stx_dev_minor)
        && read_entries(walk, look, source)
        && (look->surplus = walk->surplus ? has_surplus(look, target) : 0) >= 0) {
        carme_compare(&walk->manner, source, target, look->records, look->length, &look->counts);
        look->length = look->counts.left;
        looked = take_folders(look, path, source);
        look->same = its.stx_mode == own.stx_mode && its.stx_mtime.tv_sec == own.stx_mtime.tv_sec
                     && its.stx_mtime.tv_nsec / walk->manner.unit == own.stx_mtime.tv_nsec / walk->manner.unit
                     && own.stx_uid == user_of(&walk->manner, &its) && own.stx_gid == group_of(&walk->manner, &its)
                     && not_later(&its.stx_ctime, &own.stx_ctime);
    }
    if (target >= 0)
        close(target);
    if (source >= 0)
        close(source);
    return looked;
}

/* Write an item, if there is room for it. */
static int write_item(struct walk *walk, char letter, const char *path, const char *records, size_t length)
{
    size_t size = strlen(path) + 1;
    if (size + length + 2 > (size_t)(walk->items_end - walk->next_item))
        return 0;
    *walk->next_item++ = letter;
    memcpy(walk->next_item, path, size);
    walk->next_item += size;
    memcpy(walk->next_item, records, length);
    walk->next_item += length;
    *walk->next_item++ = 0;
    return 1;
}

/* A folder that is not at the destination is something to be looked at in the one above. */
static int write_missing(struct walk *walk, const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *above = strndup(path, slash ? (size_t)(slash - path) : 0);
    char record[258] = "d";
    size_t length = strlen(name);
    /* It was opened, so it is no longer than names are. */
    int written = above && length < 256;
    if (written) {
        memcpy(record + 1, name, length + 1);
        written = write_item(walk, 'M', above, record, length + 2);
    }
    free(above);
    return written;
}

static int add_waiting(struct walk *walk, const char *paths, size_t length)
{
    if (!grown(&walk->waiting, &walk->waiting_room, walk->waiting_length + length))
        return 0;
    memcpy(walk->waiting + walk->waiting_length, paths, length);
    walk->waiting_length += length;
    return 1;
}

/* Take the last path that waits. */
static char *take_waiting(struct walk *walk)
{
    size_t begin = walk->waiting_length - 1;
    while (begin && walk->waiting[begin - 1])
        begin--;
    char *path = strdup(walk->waiting + begin);
    if (path)
        walk->waiting_length = begin;
    return path;
}

/* What was found in a folder; 0: there is no room for it, and nothing of it counts. */
static int note(struct walk *walk, const struct look *look, const char *path, int looked)
{
    char *before = walk->next_item;
    if (look->missing)
        return write_missing(walk, path);
    if (!looked)
        return write_item(walk, 'F', path, "", 0);
    if ((look->length || !look->same)
        && !write_item(walk, look->entries > walk->batch ? 'M' : 'R', path, look->records, (size_t)look->length))
        return 0;
    if ((look->surplus && !write_item(walk, 'G', path, "", 0))
        || !add_waiting(walk, look->below, look->below_length)) {
        walk->next_item = before;
        return 0;
    }
    walk->folders++;
    walk->counts.files += look->counts.files;
    walk->counts.bytes += look->counts.bytes;
    return 1;
}

/* How often this thread has waited for something. */
static long waits(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nvcsw;
}

static void *walk_on(void *given);

/* One more thread, if there may be. */
static int start(struct walk *walk)
{
    return !walk->stop && walk->started < walk->limit
           && !pthread_create(&walk->others[walk->started], NULL, walk_on, walk) && ++walk->started;
}

static void *walk_on(void *given)
{
    struct walk *walk = given;
    struct look look = {0};
    pthread_mutex_lock(&walk->lock);
    for (;;) {
        while (!walk->stop && !walk->waiting_length && walk->working)
            pthread_cond_wait(&walk->changed, &walk->lock);
        char *path = walk->stop || !walk->waiting_length ? NULL : take_waiting(walk);
        if (!path)
            break;
        walk->working++;
        pthread_mutex_unlock(&walk->lock);
        long before = waits();
        int looked = look_at(walk, &look, path);
        long waited = waits() - before;
        pthread_mutex_lock(&walk->lock);
        if (!note(walk, &look, path, looked)) {
            /* There was memory for it a moment ago. */
            (void)add_waiting(walk, path, strlen(path) + 1);
            walk->stop = walk->full = 1;
        }
        free(path);
        walk->working--;
        if (milliseconds() > walk->until)
            walk->stop = 1;
        /* The device, or a server, is quicker with many questions at once. */
        if (waited && walk->waiting_length)
            (void)start(walk);
        pthread_cond_broadcast(&walk->changed);
    }
    pthread_cond_broadcast(&walk->changed);
    pthread_mutex_unlock(&walk->lock);
    free(look.records);
    free(look.below);
    free(look.names);
    free(look.theirs);
    return NULL;
}

/* A walk from the top of both trees; NULL: errno. `batch`, `most`, `surplus`: see struct walk. */
struct walk *carme_walk(const struct manner *manner, int source, int target, int64_t batch, int64_t most, int surplus)
{
    struct walk *walk = calloc(1, sizeof *walk);
    if (!walk)
        return NULL;
    walk->manner = *manner;
    walk->source = source, walk->target = target, walk->batch = batch, walk->most = most;
    walk->surplus = surplus;
    if (status_of(target, "", AT_EMPTY_PATH, &walk->top) || !add_waiting(walk, "", 1)) {
        free(walk);
        return NULL;
    }
    pthread_mutex_init(&walk->lock, NULL);
    pthread_cond_init(&walk->changed, NULL);
    return walk;
}

/* Go on for so many milliseconds, with so many threads, or until there is no more room. While they have to wait for
   what they look at there may be `most` of them. `threads` 0: look at no more folders, but write those that wait as F.
   Returns how many bytes of items there are; `left` of the counts says whether folders wait and why, `names` how many
   were looked at. */
int64_t carme_walk_on(struct walk *walk, int threads, int most, int64_t patience, char *items, int64_t room,
                      struct counts *counts)
{
    walk->items = walk->next_item = items, walk->items_end = items + room;
    walk->until = milliseconds() + patience;
    walk->stop = walk->full = 0, walk->folders = 0;
    memset(&walk->counts, 0, sizeof walk->counts);
    pthread_mutex_lock(&walk->lock);
    walk->started = 0, walk->limit = threads - 1 < WALKERS ? threads - 1 : WALKERS;
    while (start(walk))
        ;
    walk->limit = most - 1 < WALKERS ? most - 1 : WALKERS;
    pthread_mutex_unlock(&walk->lock);
    if (threads)
        walk_on(walk);
    /* Whoever is still at work starts nobody else: there is nothing left to do. */
    while (walk->started)
        pthread_join(walk->others[--walk->started], NULL);
    while (!threads && walk->waiting_length) {
        char *path = take_waiting(walk);
        if (!path)
            break;
        int written = write_item(walk, 'F', path, "", 0);
        if (!written)
            (void)add_waiting(walk, path, strlen(path) + 1);
        free(path);
        if (!written)
            break;
    }
    *counts = walk->counts;
    counts->left = !walk->waiting_length ? 0 : walk->full ? LEFT_FOUND : LEFT_WAITING;
    counts->names = walk->folders;
    return walk->next_item - walk->items;
}

void carme_walk_end(struct walk *walk)
{
    pthread_mutex_destroy(&walk->lock);
    pthread_cond_destroy(&walk->changed);
    free(walk->waiting);
    free(walk);
}

/* Copy a range with a block and another one to read it back into, block by block. */
static int copy_range(int one, int other, off_t place, off_t end, size_t size, int compare, hasher hash, char *block,
                      char *back)
{
    for (; place < end; place += (off_t)size) {
        size_t want = end - place < (off_t)size ? (size_t)(end - place) : size;
        ssize_t got = read_all(one, block, want, place);
        if (got != (ssize_t)want)
            return got < 0 ? errno : CHANGED;
        struct digest wanted = digest_of(compare ? hash : NULL, block, want);
        if (write_all(other, block, want, place))
            return errno;
        if (!compare)
            continue;
        got = read_all(other, back, want, place);
        if (got < 0)
            return errno;
        if (got != (ssize_t)want || !verified(hash, wanted, block, back, want))
            return CORRUPT;
    }
    return DONE;
}

/* A range that several threads copy, each taking the next chunk. */
struct range {
    int one, other, compare;
    hasher hash;
    int64_t next, end;
    int outcome;
};

struct hand {
    struct range *range;
    char *room;
};

static void *copy_chunks(void *given)
{
    struct hand *hand = given;
    struct range *range = hand->range;
    for (;;) {
        int64_t place = __atomic_fetch_add(&range->next, CHUNK, __ATOMIC_RELAXED);
        if (place >= range->end || __atomic_load_n(&range->outcome, __ATOMIC_RELAXED) != DONE)
            return NULL;
        int64_t end = place + CHUNK < range->end ? place + CHUNK : range->end;
        int outcome = copy_range(range->one, range->other, place, end, CHUNK, range->compare, range->hash, hand->room,
                                 hand->room + CHUNK);
        if (outcome != DONE)
            __atomic_store_n(&range->outcome, outcome, __ATOMIC_RELAXED);
    }
}

static int limited(int threads) { return threads < 1 ? 1 : threads < THREADS ? threads : THREADS; }

/* How many bytes of memory carme_transfer wants for so many threads. */
int64_t carme_room(int threads) { return (int64_t)limited(threads) * 2 * CHUNK; }

/* Have a file's blocks kept for it. Only a wish: where it cannot be, they come with its contents. */
void carme_reserve(int file, int64_t size)
{
    if (fallocate(file, 0, 0, size))
        /* Nothing stays of what was only half done. */
        (void)!(ftruncate(file, 0) || ftruncate(file, size));
}

/* Copy a range of a file and, if `compare`, read back what was written, while it is near: it must have the digest
   that the source's bytes had when they were read or, without `hash`, be the same byte by byte.

   WAY_DIRECT goes past the page cache where the file system lets that be: what is read back comes from the
   device then, and no processor time goes into copies in memory that the device has to be given later anyway.
   Nor does a source that is not in memory come through it then: the kernel would ask for less of it at a time.
   WAY_EARLY has the device begin to write what is there. `threads`: so many go past the page cache at once, 16 at
   most. `room`: carme_room() bytes for these, on a page's boundary.
   Returns DONE, CHANGED (the source is shorter), CORRUPT, or an errno. */
int carme_transfer(int one, int other, int64_t start, int64_t end, int compare, hasher hash, int way, int threads,
                   char *room)
{
    int flags = fcntl(other, F_GETFL), reading = fcntl(one, F_GETFL);
    int64_t rest = start;
    int outcome = DONE;
    int direct = way == WAY_DIRECT && flags >= 0 && start % ALIGNED == 0 && !fcntl(other, F_SETFL, flags | O_DIRECT);
    int past = direct && reading >= 0 && is_absent(one, start) && !fcntl(one, F_SETFL, reading | O_DIRECT);
    if (way != WAY_PLAIN && !past)
        /* What is likely to be wanted next. */
        (void)posix_fadvise(one, end, end - start, POSIX_FADV_WILLNEED);
    if (direct) {
        struct range range = {one, other, compare, hash, start, rest = end - end % ALIGNED, DONE};
        struct hand hands[THREADS];
        pthread_t others[THREADS];
        int started = 1;
        for (int number = 0; number < limited(threads); number++)
            hands[number] = (struct hand){&range, room + 2 * CHUNK * number};
        while (started < limited(threads) && !pthread_create(&others[started], NULL, copy_chunks, &hands[started]))
            started++;
        copy_chunks(&hands[0]);
        while (--started)
            pthread_join(others[started], NULL);
        outcome = range.outcome;
        if (fcntl(other, F_SETFL, flags) || (past && fcntl(one, F_SETFL, reading)))
            outcome = outcome == DONE ? errno : outcome;
        /* Some file systems accept the wish and then want other places than these. */
        if (outcome == EINVAL)
            outcome = DONE, rest = start;
    }
    if (outcome == DONE)
        outcome = copy_range(one, other, rest, end, BLOCK, compare, hash, room, room + BLOCK);
    if (outcome == DONE && way != WAY_PLAIN && rest < end)
        /* Only a wish, too. Not all file systems know it. */
        (void)syscall(SYS_sync_file_range, other, rest, end - rest, SYNC_FILE_RANGE_WRITE);
    return outcome;
}

/* Whether a range of two files is the same: 1, 0, or minus an errno. */
int carme_same(int one, int other, int64_t start, int64_t end)
{
    char *block;
    if (posix_memalign((void **)&block, 4096, 2 * BLOCK))
        return -ENOMEM;
    char *back = block + BLOCK;
    int same = 1;
    for (off_t place = start; place < end && same == 1;) {
        size_t want = end - place < BLOCK ? (size_t)(end - place) : BLOCK;
        ssize_t mine = read_all(one, block, want, place);
        ssize_t yours = mine < 0 ? 0 : read_all(other, back, want, place);
        if (mine < 0 || yours < 0)
            same = -errno;
        else
            same = mine == (ssize_t)want && yours == (ssize_t)want && !memcmp(block, back, want);
        place += (off_t)want;
    }
    free(block);
    return same;
}

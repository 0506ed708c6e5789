/* Copying ranges of large files, by several threads and past the page cache where that can be. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "files.h"

#define BLOCK (256 << 10)
/* Past the page cache: so much at a time, by at most so many threads, from places that are multiples of this. */
#define CHUNK (2 << 20)
#define THREADS 16
#define ALIGNED 4096

enum transfer_mode { MODE_PLAIN, MODE_EARLY, MODE_DIRECT };
enum outcome { DONE = 0, CHANGED = -1, CORRUPT = -2 };

/* Copy a range with a block and another one to read it back into, block by block. */
static int copy_range(int original, int copy, off_t place, off_t end, size_t size, int compare, hasher hash,
                      char *block, char *back)
{
    for (; place < end; place += (off_t)size) {
        size_t want = end - place < (off_t)size ? (size_t)(end - place) : size;
        ssize_t got = read_all(original, block, want, place);
        if (got != (ssize_t)want)
            return got < 0 ? errno : CHANGED;
        struct digest wanted = digest_of(compare ? hash : NULL, block, want);
        if (write_all(copy, block, want, place))
            return errno;
        if (!compare)
            continue;
        got = read_all(copy, back, want, place);
        if (got < 0)
            return errno;
        if (got != (ssize_t)want || !verified(hash, wanted, block, back, want))
            return CORRUPT;
    }
    return DONE;
}

/* A range that several threads copy, each taking the next chunk. */
struct range {
    int original, copy, compare;
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
        int outcome = copy_range(range->original, range->copy, place, end, CHUNK, range->compare,
                                 range->hash, hand->room, hand->room + CHUNK);
        if (outcome != DONE)
            __atomic_store_n(&range->outcome, outcome, __ATOMIC_RELAXED);
    }
}

static int limited(int threads) { return threads < 1 ? 1 : threads < THREADS ? threads : THREADS; }

/* How many bytes of memory carme_transfer wants for so many threads. */
int64_t carme_room(int threads) { return (int64_t)limited(threads) * 2 * CHUNK; }

/* Have a file's blocks kept for it. Only a hint: where it cannot be, they come with its contents. */
void carme_reserve(int file, int64_t size)
{
    if (fallocate(file, 0, 0, size))
        /* Nothing stays of what was only half done. */
        (void)!(ftruncate(file, 0) || ftruncate(file, size));
}

/* Copy a range of a file and, if `compare`, read back what was written, while it is near: it must have the digest
   that the source's bytes had when they were read or, without `hash`, be the same byte by byte.

   MODE_DIRECT goes past the page cache where the file system lets that be: what is read back comes from the
   device then, and no processor time goes into copies in memory that the device has to be given later anyway.
   Nor does a source that is not in memory come through it then: the kernel would ask for less of it at a time.
   MODE_EARLY has the device begin to write what is there. `threads`: so many go past the page cache at once, 16 at
   most. `room`: carme_room() bytes for these, on a page's boundary.
   Returns DONE, CHANGED (the source is shorter), CORRUPT, or an errno. */
int carme_transfer(int original, int copy, int64_t start, int64_t end, int compare, hasher hash, int mode, int threads,
                   char *room)
{
    int flags = fcntl(copy, F_GETFL), reading = fcntl(original, F_GETFL);
    int64_t rest = start;
    int outcome = DONE;
    int direct = mode == MODE_DIRECT && flags >= 0 && start % ALIGNED == 0 && !fcntl(copy, F_SETFL, flags | O_DIRECT);
    int past = direct && reading >= 0 && is_absent(original, start) && !fcntl(original, F_SETFL, reading | O_DIRECT);
    if (mode != MODE_PLAIN && !past)
        /* What is likely to be wanted next. */
        (void)posix_fadvise(original, end, end - start, POSIX_FADV_WILLNEED);
    if (direct) {
        struct range range = {original, copy, compare, hash, start, rest = end - end % ALIGNED, DONE};
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
        if (fcntl(copy, F_SETFL, flags) || (past && fcntl(original, F_SETFL, reading)))
            outcome = outcome == DONE ? errno : outcome;
        /* Some file systems accept the hint and then want other places than these. */
        if (outcome == EINVAL)
            outcome = DONE, rest = start;
    }
    if (outcome == DONE)
        outcome = copy_range(original, copy, rest, end, BLOCK, compare, hash, room, room + BLOCK);
    if (outcome == DONE && mode != MODE_PLAIN && rest < end)
        /* Only a hint, too. Not all file systems know it. */
        (void)syscall(SYS_sync_file_range, copy, rest, end - rest, SYNC_FILE_RANGE_WRITE);
    return outcome;
}

/* Whether a range of two files is the same: 1, 0, or minus an errno. */
int carme_same(int original, int copy, int64_t start, int64_t end)
{
    char *block;
    if (posix_memalign((void **)&block, 4096, 2 * BLOCK))
        return -ENOMEM;
    char *back = block + BLOCK;
    int same = 1;
    for (off_t place = start; place < end && same == 1;) {
        size_t want = end - place < BLOCK ? (size_t)(end - place) : BLOCK;
        ssize_t length = read_all(original, block, want, place);
        ssize_t copy_length = length < 0 ? 0 : read_all(copy, back, want, place);
        if (length < 0 || copy_length < 0)
            same = -errno;
        else
            same = length == (ssize_t)want && copy_length == (ssize_t)want && !memcmp(block, back, want);
        place += (off_t)want;
    }
    free(block);
    return same;
}

/* Copying of ranges of large files, with several threads and past the page cache where possible. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "files.h"

#define BLOCK (256 << 10)
/* Past the page cache: bytes at a time, number of threads, alignment of positions. */
#define CHUNK (2 << 20)
#define THREADS 16
#define ALIGNED 4096

enum transfer_mode { MODE_PLAIN, MODE_EARLY, MODE_DIRECT };
enum outcome { DONE = 0, CHANGED = -1, CORRUPT = -2 };

/* Copy a range block by block, with a second block to read it back. */
static int copy_range(int original, int copy, off_t place, off_t end, size_t size, int compare, hasher hash,
                      char *block, char *back)
{
    for (; place < end; place += (off_t)size) {
        size_t requested = end - place < (off_t)size ? (size_t)(end - place) : size;
        ssize_t received = read_all(original, block, requested, place);
        if (received != (ssize_t)requested)
            return received < 0 ? errno : CHANGED;
        struct digest expected = digest_of(compare ? hash : NULL, block, requested);
        if (write_all(copy, block, requested, place))
            return errno;
        if (!compare)
            continue;
        received = read_all(copy, back, requested, place);
        if (received < 0)
            return errno;
        if (received != (ssize_t)requested || !verified(hash, expected, block, back, requested))
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

struct worker {
    struct range *range;
    char *buffer;
};

static void *copy_chunks(void *argument)
{
    struct worker *worker = argument;
    struct range *range = worker->range;
    for (;;) {
        int64_t place = __atomic_fetch_add(&range->next, CHUNK, __ATOMIC_RELAXED);
        if (place >= range->end || __atomic_load_n(&range->outcome, __ATOMIC_RELAXED) != DONE)
            return NULL;
        int64_t end = place + CHUNK < range->end ? place + CHUNK : range->end;
        int outcome = copy_range(range->original, range->copy, place, end, CHUNK, range->compare,
                                 range->hash, worker->buffer, worker->buffer + CHUNK);
        if (outcome != DONE)
            __atomic_store_n(&range->outcome, outcome, __ATOMIC_RELAXED);
    }
}

static int limited(int threads) { return threads < 1 ? 1 : threads < THREADS ? threads : THREADS; }

/* The memory that carme_transfer needs for so many threads, in bytes. */
int64_t carme_room(int threads) { return (int64_t)limited(threads) * 2 * CHUNK; }

/* Allocate a file's blocks. Only a hint: if that is impossible, they are allocated with the contents. */
void carme_reserve(int file, int64_t size)
{
    if (fallocate(file, 0, 0, size))
        /* Undo a partial allocation. */
        (void)!(ftruncate(file, 0) || ftruncate(file, size));
}

/* Copy a range of a file. If `compare`, read the copy back soon: it must have the digest of the source's
   bytes or, without `hash`, equal them byte by byte.

   MODE_DIRECT bypasses the page cache where the file system supports it: the copy is read back from the
   device, and no processor time is spent on copies in memory. A source that is not in memory bypasses the
   cache, too, because the kernel would request less at a time. MODE_EARLY starts writing to the device.
   `threads`: number of threads with MODE_DIRECT, at most 16. `buffer`: carme_room() bytes, aligned to a
   page. Returns DONE, CHANGED (the source is shorter), CORRUPT, or an errno. */
int carme_transfer(int original, int copy, int64_t start, int64_t end, int compare, hasher hash, int mode,
                   int threads, char *buffer)
{
    int flags = fcntl(copy, F_GETFL), reading = fcntl(original, F_GETFL);
    int64_t rest = start;
    int outcome = DONE;
    int direct =
        mode == MODE_DIRECT && flags >= 0 && start % ALIGNED == 0 && !fcntl(copy, F_SETFL, flags | O_DIRECT);
    int source_direct =
        direct && reading >= 0 && is_absent(original, start) && !fcntl(original, F_SETFL, reading | O_DIRECT);
    if (mode != MODE_PLAIN && !source_direct)
        /* The range that is likely to be read next. */
        (void)posix_fadvise(original, end, end - start, POSIX_FADV_WILLNEED);
    if (direct) {
        struct range range = {original, copy, compare, hash, start, rest = end - end % ALIGNED, DONE};
        struct worker workers[THREADS];
        pthread_t handles[THREADS];
        int started = 1;
        for (int number = 0; number < limited(threads); number++)
            workers[number] = (struct worker){&range, buffer + 2 * CHUNK * number};
        while (started < limited(threads)
               && !pthread_create(&handles[started], NULL, copy_chunks, &workers[started]))
            started++;
        copy_chunks(&workers[0]);
        while (--started)
            pthread_join(handles[started], NULL);
        outcome = range.outcome;
        if (fcntl(copy, F_SETFL, flags) || (source_direct && fcntl(original, F_SETFL, reading)))
            outcome = outcome == DONE ? errno : outcome;
        /* Some file systems accept O_DIRECT but need another alignment. */
        if (outcome == EINVAL)
            outcome = DONE, rest = start;
    }
    if (outcome == DONE)
        outcome = copy_range(original, copy, rest, end, BLOCK, compare, hash, buffer, buffer + BLOCK);
    if (outcome == DONE && mode != MODE_PLAIN && rest < end)
        /* Only a hint. Not all file systems support it. */
        (void)syscall(SYS_sync_file_range, copy, rest, end - rest, SYNC_FILE_RANGE_WRITE);
    return outcome;
}

/* Whether a range of two files is equal: 1, 0, or minus an errno. */
int carme_same(int original, int copy, int64_t start, int64_t end)
{
    char *block;
    if (posix_memalign((void **)&block, 4096, 2 * BLOCK))
        return -ENOMEM;
    char *back = block + BLOCK;
    int same = 1;
    for (off_t place = start; place < end && same == 1;) {
        size_t requested = end - place < BLOCK ? (size_t)(end - place) : BLOCK;
        ssize_t length = read_all(original, block, requested, place);
        ssize_t copy_length = length < 0 ? 0 : read_all(copy, back, requested, place);
        if (length < 0 || copy_length < 0)
            same = -errno;
        else
            same = length == (ssize_t)requested && copy_length == (ssize_t)requested
                && !memcmp(block, back, requested);
        place += (off_t)requested;
    }
    free(block);
    return same;
}

/* The walk through both trees, with several threads: see struct walk. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "files.h"
#include "folders.h"

/* The maximum number of threads. */
#define MAX_THREADS 64

/* A walk through both trees that finds what has changed.

   Its results are items. R and M: a folder's path with a zero, the records of its entries to examine (if
   there are none, the folder's own attributes changed), and a zero; M has more entries, or more than to
   examine at once. F: a folder's path with a zero, and a zero: examine the whole folder. G, in the same
   form: the destination has entries that the source lacks. */
struct walk {
    struct copy_options options;
    int source, target;
    struct statx top;       /* Status of the destination. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char *waiting;          /* Paths of folders to walk, each with its zero, the next one last. */
    size_t waiting_length, waiting_capacity;
    int working;            /* Threads that may still add paths. */
    int stop, full;         /* Whether to examine no further folders; whether memory for items ran out. */
    int64_t until;
    char *items, *items_end, *next_item;
    int64_t batch, max_entries;    /* Records of an R; folders with more entries than max_entries are F. */
    int surplus;            /* Whether to search for G. */
    struct counts counts;
    int64_t folders;
    int started, limit;     /* Threads besides the first one, and their maximum. */
    pthread_t workers[MAX_THREADS];
};

/* Open a folder below another one, without following symlinks; -1: errno. */
static int open_below(int root, const char *path)
{
    const int passing = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    const int reading = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int folder = root;
    char name[256];
    for (;;) {
        size_t length = strcspn(path, "/");
        if (length >= sizeof name) {
            errno = ENAMETOOLONG;
            length = 0;
        }
        memcpy(name, length ? path : ".", length ? length : 1);
        name[length ? length : 1] = 0;
        int deeper = openat(folder, name, path[length] ? passing : reading);
        if (folder != root)
            close(folder);
        if (deeper < 0 || !path[length])
            return deeper;
        folder = deeper;
        path += length + 1;
    }
}

/* A thread's data about its current folder. */
struct scan {
    struct reader reader;
    char *records;          /* Records of its entries; later of those to examine. */
    size_t capacity;
    int64_t length, entries;
    char *below;            /* Paths of its subfolders. */
    size_t below_length, below_capacity;
    struct counts counts;
    int same;               /* Its own attributes are unchanged. */
    int surplus;            /* The destination has entries that the source has not. */
    int missing;            /* The destination has no such folder. */
    const char **names;     /* A hash table of the source's names; its size is a power of two. */
    size_t names_capacity;
    char *target_entries;   /* Some of the destination's entries. */
};

static int grow(char **place, size_t *capacity, size_t wanted)
{
    if (wanted <= *capacity)
        return 1;
    size_t size = *capacity ? *capacity : 1 << 16;
    while (size < wanted)
        size *= 2;
    char *larger = realloc(*place, size);
    if (!larger)
        return 0;
    *place = larger, *capacity = size;
    return 1;
}

/* Read all entries of a folder; returns whether that succeeded. */
static int read_entries(const struct walk *walk, struct scan *scan, int folder)
{
    const int64_t step = 512;
    int64_t got = -1;
    read_from(&scan->reader, folder);
    scan->length = scan->entries = 0;
    while (scan->entries <= walk->max_entries
           && grow(&scan->records, &scan->capacity, (size_t)scan->length + step * 258)) {
        got = read_records(&scan->reader, scan->records + scan->length, step * 258, step, NULL);
        if (got <= 0)
            break;
        for (const char *record = scan->records + scan->length; record < scan->records + scan->length + got;
             record += strlen(record) + 1)
            scan->entries++;
        scan->length += got;
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

/* Whether the destination's folder has names that are not among the entries; -1: not known. */
static int has_surplus(struct scan *scan, int target)
{
    const int64_t step = 512;
    size_t places = 64;
    while (places < 2 * (size_t)scan->entries)
        places *= 2;
    if (places > scan->names_capacity) {
        const char **more = realloc(scan->names, places * sizeof *more);
        if (!more)
            return -1;
        scan->names = more, scan->names_capacity = places;
    }
    if (!scan->target_entries && !(scan->target_entries = malloc(step * 258)))
        return -1;
    memset(scan->names, 0, places * sizeof *scan->names);
    for (const char *record = scan->records; record < scan->records + scan->length;
         record += strlen(record) + 1) {
        size_t place = hash_of(record + 1) & (places - 1);
        while (scan->names[place])
            place = (place + 1) & (places - 1);
        scan->names[place] = record + 1;
    }
    read_from(&scan->reader, target);
    int64_t got;
    int surplus = 0;
    while (!surplus && (got = read_records(&scan->reader, scan->target_entries, step * 258, step, NULL))) {
        if (got < 0)
            surplus = -1;
        const char *end = scan->target_entries + (got < 0 ? 0 : got);
        for (const char *record = scan->target_entries; !surplus && record < end;
             record += strlen(record) + 1) {
            size_t place = hash_of(record + 1) & (places - 1);
            while (scan->names[place] && strcmp(scan->names[place], record + 1))
                place = (place + 1) & (places - 1);
            surplus = !scan->names[place];
        }
    }
    return surplus;
}

/* Take the folders out of the entries; returns whether there was memory. Does not check whether they exist
   at the destination: their inodes may be far apart, and the walk opens them anyway. */
static int take_folders(struct scan *scan, const char *path, int source)
{
    size_t above = strlen(path);
    char *remaining = scan->records;
    scan->below_length = 0;
    for (char *record = scan->records; record < scan->records + scan->length;) {
        size_t size = strlen(record) + 1;
        const char *name = record + 1;
        struct statx source_status;
        if (*record == 'd'
            || (*record == '?' && !status_of(source, name, AT_SYMLINK_NOFOLLOW, &source_status)
                && S_ISDIR(source_status.stx_mode))) {
            if (!grow(&scan->below, &scan->below_capacity, scan->below_length + above + size + 1))
                return 0;
            char *end = scan->below + scan->below_length;
            if (above) {
                memcpy(end, path, above);
                end[above] = '/';
                end += above + 1;
            }
            memcpy(end, name, size - 1);
            scan->below_length = (size_t)(end + size - 1 - scan->below);
        } else {
            memmove(remaining, record, size);
            remaining += size;
        }
        record += size;
    }
    scan->length = remaining - scan->records;
    return 1;
}

/* Examine a folder; 0: the caller must examine it as a whole. */
static int scan_folder(const struct walk *walk, struct scan *scan, const char *path)
{
    int is_scanned = 0;
    int source = open_below(walk->source, path);
    int target = source < 0 ? -1 : open_below(walk->target, path);
    struct statx source_status, target_status;
    scan->missing =
        source >= 0 && target < 0 && *path && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP);
    memset(&scan->counts, 0, sizeof scan->counts);
    if (target >= 0 && !status_of(source, "", AT_EMPTY_PATH, &source_status)
        && !status_of(target, "", AT_EMPTY_PATH, &target_status)
        && !(source_status.stx_ino == walk->top.stx_ino
             && source_status.stx_dev_major == walk->top.stx_dev_major
             && source_status.stx_dev_minor == walk->top.stx_dev_minor)
        && read_entries(walk, scan, source)
        && (scan->surplus = walk->surplus ? has_surplus(scan, target) : 0) >= 0) {
        carme_compare(&walk->options, source, target, scan->records, scan->length, &scan->counts);
        scan->length = scan->counts.left;
        is_scanned = take_folders(scan, path, source);
        scan->same = source_status.stx_mode == target_status.stx_mode
                  && source_status.stx_mtime.tv_sec == target_status.stx_mtime.tv_sec
                  && source_status.stx_mtime.tv_nsec / walk->options.unit
                         == target_status.stx_mtime.tv_nsec / walk->options.unit
                  && target_status.stx_uid == user_of(&walk->options, &source_status)
                  && target_status.stx_gid == group_of(&walk->options, &source_status)
                  && not_later(&source_status.stx_ctime, &target_status.stx_ctime);
    }
    if (target >= 0)
        close(target);
    if (source >= 0)
        close(source);
    return is_scanned;
}

/* Write an item if there is space for it. */
static int write_item(struct walk *walk, char kind, const char *path, const char *records, size_t length)
{
    size_t size = strlen(path) + 1;
    if (size + length + 2 > (size_t)(walk->items_end - walk->next_item))
        return 0;
    *walk->next_item++ = kind;
    memcpy(walk->next_item, path, size);
    walk->next_item += size;
    memcpy(walk->next_item, records, length);
    walk->next_item += length;
    *walk->next_item++ = 0;
    return 1;
}

/* A folder that is missing at the destination is an entry to examine in its parent folder. */
static int write_missing(struct walk *walk, const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *above = strndup(path, slash ? (size_t)(slash - path) : 0);
    char record[258] = "d";
    size_t length = strlen(name);
    /* It was opened, so its name has a valid length. */
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
    if (!grow(&walk->waiting, &walk->waiting_capacity, walk->waiting_length + length))
        return 0;
    memcpy(walk->waiting + walk->waiting_length, paths, length);
    walk->waiting_length += length;
    return 1;
}

/* Take the last waiting path. */
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

/* Record the results of a folder; 0: there is no space, and none of them count. */
static int record_scan(struct walk *walk, const struct scan *scan, const char *path, int is_scanned)
{
    char *before = walk->next_item;
    if (scan->missing)
        return write_missing(walk, path);
    if (!is_scanned)
        return write_item(walk, 'F', path, "", 0);
    if ((scan->length || !scan->same)
        && !write_item(walk, scan->entries > walk->batch ? 'M' : 'R', path, scan->records,
                       (size_t)scan->length))
        return 0;
    if ((scan->surplus && !write_item(walk, 'G', path, "", 0))
        || !add_waiting(walk, scan->below, scan->below_length)) {
        walk->next_item = before;
        return 0;
    }
    walk->folders++;
    walk->counts.files += scan->counts.files;
    walk->counts.bytes += scan->counts.bytes;
    return 1;
}

/* How often this thread has blocked. */
static long voluntary_waits(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nvcsw;
}

static void *walk_on(void *argument);

/* Start another thread if the limit allows. */
static int start(struct walk *walk)
{
    return !walk->stop && walk->started < walk->limit
           && !pthread_create(&walk->workers[walk->started], NULL, walk_on, walk) && ++walk->started;
}

static void *walk_on(void *argument)
{
    struct walk *walk = argument;
    struct scan scan = {0};
    pthread_mutex_lock(&walk->lock);
    for (;;) {
        while (!walk->stop && !walk->waiting_length && walk->working)
            pthread_cond_wait(&walk->changed, &walk->lock);
        char *path = walk->stop || !walk->waiting_length ? NULL : take_waiting(walk);
        if (!path)
            break;
        walk->working++;
        pthread_mutex_unlock(&walk->lock);
        long before = voluntary_waits();
        int is_scanned = scan_folder(walk, &scan, path);
        long waited = voluntary_waits() - before;
        pthread_mutex_lock(&walk->lock);
        if (!record_scan(walk, &scan, path, is_scanned)) {
            /* There was memory for it a moment ago. */
            (void)add_waiting(walk, path, strlen(path) + 1);
            walk->stop = walk->full = 1;
        }
        free(path);
        walk->working--;
        if (milliseconds() > walk->until)
            walk->stop = 1;
        /* A device or server is faster with many requests at once. */
        if (waited && walk->waiting_length)
            (void)start(walk);
        pthread_cond_broadcast(&walk->changed);
    }
    pthread_cond_broadcast(&walk->changed);
    pthread_mutex_unlock(&walk->lock);
    free(scan.records);
    free(scan.below);
    free(scan.names);
    free(scan.target_entries);
    return NULL;
}

/* Start a walk at the top of both trees; NULL: errno. `batch`, `max_entries`, `surplus`: see struct walk. */
struct walk *carme_walk(const struct copy_options *options, int source, int target, int64_t batch,
                        int64_t max_entries, int surplus)
{
    struct walk *walk = calloc(1, sizeof *walk);
    if (!walk)
        return NULL;
    walk->options = *options;
    walk->source = source, walk->target = target, walk->batch = batch, walk->max_entries = max_entries;
    walk->surplus = surplus;
    if (status_of(target, "", AT_EMPTY_PATH, &walk->top) || !add_waiting(walk, "", 1)) {
        free(walk);
        return NULL;
    }
    pthread_mutex_init(&walk->lock, NULL);
    pthread_cond_init(&walk->changed, NULL);
    return walk;
}

/* Continue for `time_limit` milliseconds with `threads` threads, or until the buffer is full. While
   threads block, up to `max_threads` run. `threads` 0: examine no more folders, but write the waiting ones
   as F. Returns the size of the items in bytes. `left` of the counts reports whether and why folders wait,
   `names` the number of examined folders. */
int64_t carme_walk_on(struct walk *walk, int threads, int max_threads, int64_t time_limit, char *items,
                      int64_t capacity, struct counts *counts)
{
    walk->items = walk->next_item = items, walk->items_end = items + capacity;
    walk->until = milliseconds() + time_limit;
    walk->stop = walk->full = 0, walk->folders = 0;
    memset(&walk->counts, 0, sizeof walk->counts);
    pthread_mutex_lock(&walk->lock);
    walk->started = 0, walk->limit = threads - 1 < MAX_THREADS ? threads - 1 : MAX_THREADS;
    while (start(walk))
        ;
    walk->limit = max_threads - 1 < MAX_THREADS ? max_threads - 1 : MAX_THREADS;
    pthread_mutex_unlock(&walk->lock);
    if (threads)
        walk_on(walk);
    /* A running thread starts no other one: there is nothing left to do. */
    while (walk->started)
        pthread_join(walk->workers[--walk->started], NULL);
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

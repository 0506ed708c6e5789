/* Walking through both trees at once, by several threads: see struct walk. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "files.h"
#include "folders.h"

/* No more threads than these walk. */
#define WALKERS 64

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
struct scan {
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
    char *target_entries;   /* Some of the destination's entries. */
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
static int read_entries(const struct walk *walk, struct scan *scan, int folder)
{
    const int64_t step = 512;
    int64_t got = -1;
    read_from(&scan->reader, folder);
    scan->length = scan->entries = 0;
    while (scan->entries <= walk->most && grown(&scan->records, &scan->room, (size_t)scan->length + step * 258)) {
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
    if (places > scan->names_room) {
        const char **more = realloc(scan->names, places * sizeof *more);
        if (!more)
            return -1;
        scan->names = more, scan->names_room = places;
    }
    if (!scan->target_entries && !(scan->target_entries = malloc(step * 258)))
        return -1;
    memset(scan->names, 0, places * sizeof *scan->names);
    for (const char *here = scan->records; here < scan->records + scan->length; here += strlen(here) + 1) {
        size_t place = hash_of(here + 1) & (places - 1);
        while (scan->names[place])
            place = (place + 1) & (places - 1);
        scan->names[place] = here + 1;
    }
    read_from(&scan->reader, target);
    int64_t got;
    int surplus = 0;
    while (!surplus && (got = read_records(&scan->reader, scan->target_entries, step * 258, step, NULL))) {
        if (got < 0)
            surplus = -1;
        const char *end = scan->target_entries + (got < 0 ? 0 : got);
        for (const char *here = scan->target_entries; !surplus && here < end; here += strlen(here) + 1) {
            size_t place = hash_of(here + 1) & (places - 1);
            while (scan->names[place] && strcmp(scan->names[place], here + 1))
                place = (place + 1) & (places - 1);
            surplus = !scan->names[place];
        }
    }
    return surplus;
}

/* Of the entries, take out the folders; whether there was memory. Whether they are at the destination as well is not asked
   here: their inodes may be far apart, and anyone who looks at them opens them anyway. */
static int take_folders(struct scan *scan, const char *path, int source)
{
    size_t above = strlen(path);
    char *remaining = scan->records;
    scan->below_length = 0;
    for (char *here = scan->records; here < scan->records + scan->length;) {
        size_t size = strlen(here) + 1;
        const char *name = here + 1;
        struct statx its;
        if (*here == 'd'
            || (*here == '?' && !status_of(source, name, AT_SYMLINK_NOFOLLOW, &its) && S_ISDIR(its.stx_mode))) {
            if (!grown(&scan->below, &scan->below_room, scan->below_length + above + size + 1))
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
            memmove(remaining, here, size);
            remaining += size;
        }
        here += size;
    }
    scan->length = remaining - scan->records;
    return 1;
}

/* Look at a folder; 0: it has to be looked at as a whole. */
static int scan_folder(const struct walk *walk, struct scan *scan, const char *path)
{
    int is_scanned = 0;
    int source = open_below(walk->source, path);
    int target = source < 0 ? -1 : open_below(walk->target, path);
    struct statx its, own;
    scan->missing = source >= 0 && target < 0 && *path && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP);
    memset(&scan->counts, 0, sizeof scan->counts);
    if (target >= 0 && !status_of(source, "", AT_EMPTY_PATH, &its) && !status_of(target, "", AT_EMPTY_PATH, &own)
        && !(its.stx_ino == walk->top.stx_ino && its.stx_dev_major == walk->top.stx_dev_major
             && its.stx_dev_minor == walk->top.stx_dev_minor)
        && read_entries(walk, scan, source)
        && (scan->surplus = walk->surplus ? has_surplus(scan, target) : 0) >= 0) {
        carme_compare(&walk->manner, source, target, scan->records, scan->length, &scan->counts);
        scan->length = scan->counts.left;
        is_scanned = take_folders(scan, path, source);
        scan->same = its.stx_mode == own.stx_mode && its.stx_mtime.tv_sec == own.stx_mtime.tv_sec
                     && its.stx_mtime.tv_nsec / walk->manner.unit == own.stx_mtime.tv_nsec / walk->manner.unit
                     && own.stx_uid == user_of(&walk->manner, &its) && own.stx_gid == group_of(&walk->manner, &its)
                     && not_later(&its.stx_ctime, &own.stx_ctime);
    }
    if (target >= 0)
        close(target);
    if (source >= 0)
        close(source);
    return is_scanned;
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
static int note(struct walk *walk, const struct scan *scan, const char *path, int is_scanned)
{
    char *before = walk->next_item;
    if (scan->missing)
        return write_missing(walk, path);
    if (!is_scanned)
        return write_item(walk, 'F', path, "", 0);
    if ((scan->length || !scan->same)
        && !write_item(walk, scan->entries > walk->batch ? 'M' : 'R', path, scan->records, (size_t)scan->length))
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
        long before = waits();
        int is_scanned = scan_folder(walk, &scan, path);
        long waited = waits() - before;
        pthread_mutex_lock(&walk->lock);
        if (!note(walk, &scan, path, is_scanned)) {
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
    free(scan.records);
    free(scan.below);
    free(scan.names);
    free(scan.target_entries);
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
    /* A thread that is still at work starts no other one: there is nothing left to do. */
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

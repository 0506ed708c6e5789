/* The interface of copying, for carme.c and its parts; carme.staging.native declares the same for Python. */

#ifndef CARME_COPYING
#define CARME_COPYING

#include <stddef.h>
#include <stdint.h>

#define GROUPS 1024

/* A digest of 128 bits, and its function, which has the signature of xxHash's XXH3_128bits. */
struct digest {
    uint64_t low, high;
};
typedef struct digest (*hasher)(const void *bytes, size_t size);

/* How to copy. The same as carme.staging.native._CopyOptions. */
struct copy_options {
    hasher hash;            /* NULL: compare byte by byte. */
    int32_t verify;
    int32_t attributes;     /* Leave files with extended attributes to the caller. */
    int64_t unit;           /* Resolution of times in nanoseconds. */
    uint32_t user, group;   /* The ids of this process. */
    int32_t plain;          /* New files have that user and group. */
    int32_t group_count;
    uint32_t groups[GROUPS]; /* Groups that this process may set. */
};

/* Why a walk has not ended: no time, or no memory for its items. */
enum { LEFT_WAITING = 1, LEFT_FOUND = 2 };

/* The copied files and bytes, the bytes of records that are left to the caller, and the number of names
   used. */
struct counts {
    int64_t files, bytes, left, names;
};

/* In compare.c. */
void carme_compare(const struct copy_options *options, int source, int target, char *records, int64_t length,
                   struct counts *counts);

/* In walk.c. */
struct walk;

struct walk *carme_walk(const struct copy_options *options, int source, int target, int64_t batch,
                        int64_t max_entries, int surplus);
int64_t carme_walk_on(struct walk *walk, int threads, int max_threads, int64_t time_limit, char *items,
                      int64_t capacity, struct counts *counts);

#endif

/* What copying offers to carme.c, and its parts to each other; carme.staging.native says the same to Python. */

#ifndef CARME_COPYING
#define CARME_COPYING

#include <stddef.h>
#include <stdint.h>

#define GROUPS 1024

/* A digest of 128 bits, and what makes it of some bytes: XXH3_128bits of the xxHash library has this form. */
struct digest {
    uint64_t low, high;
};
typedef struct digest (*hasher)(const void *bytes, size_t size);

/* How to copy. The same in carme.staging.native.Manner. */
struct manner {
    hasher hash;            /* NULL: what is read back is compared byte by byte. */
    int32_t verify;
    int32_t attributes;     /* Files with extended attributes are left to the caller. */
    int64_t unit;           /* Times count in so many nanoseconds. */
    uint32_t user, group;   /* Of this process. */
    int32_t plain;          /* New files belong to that user and that group. */
    int32_t group_count;
    uint32_t groups[GROUPS]; /* Those that this process may give files to. */
};

/* Why a walk has not ended: there was no time, or no room for what was found. */
enum { LEFT_WAITING = 1, LEFT_FOUND = 2 };

/* What was done; and of what was given, how many bytes are left to the caller, and how many names were used. */
struct counts {
    int64_t files, bytes, left, names;
};

/* In compare.c. */
void carme_compare(const struct manner *manner, int source, int target, char *records, int64_t length,
                   struct counts *counts);

/* In walk.c. */
struct walk;

struct walk *carme_walk(const struct manner *manner, int source, int target, int64_t batch, int64_t most, int surplus);
int64_t carme_walk_on(struct walk *walk, int threads, int most, int64_t patience, char *items, int64_t room,
                      struct counts *counts);

#endif

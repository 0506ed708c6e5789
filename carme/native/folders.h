/* The entries of folders, as records. */

#ifndef CARME_FOLDERS
#define CARME_FOLDERS

#include <stddef.h>
#include <stdint.h>

/* A record of an entry: a letter for its kind (f file, d folder, o other, ? unknown, n file to copy), the
   name, a zero. */

/* A reader of a folder's entries. */
struct reader {
    int folder;
    char *next, *end;
    char buffer[32 << 10];
};

/* The position of an entry's record. */
struct record_position {
    uint64_t inode; /* First: see by_inode. */
    size_t begin, size;
};

#pragma GCC visibility push(hidden)

/* Start to read a folder's entries. */
void read_from(struct reader *reader, int folder);

/* Read at most `max_entries` entries of a folder; returns the size of the records in bytes, or minus an
   errno. `capacity` is at least `max_entries` times 258. Returns 0 at the end of the folder. `places`:
   `max_entries` positions, or NULL. */
int64_t read_records(struct reader *reader, char *records, int64_t capacity, int64_t max_entries,
                     struct record_position *places);

#pragma GCC visibility pop

#endif

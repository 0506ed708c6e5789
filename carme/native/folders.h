/* The entries of folders, as records. */

#ifndef CARME_FOLDERS
#define CARME_FOLDERS

#include <stddef.h>
#include <stdint.h>

/* Records of entries: a letter for the kind (f file, d folder, o other, ? unknown, n file to be copied), the name, a zero. */

/* A folder whose entries are read. */
struct reader {
    int folder;
    char *next, *end;
    char room[32 << 10];
};

/* Where an entry's record is. */
struct placed {
    uint64_t inode; /* First: see by_inode. */
    size_t begin, size;
};

#pragma GCC visibility push(hidden)

/* Begin to read a folder's entries. */
void read_from(struct reader *reader, int folder);

/* Read at most `most` entries of a folder; returns the records' bytes, or minus an errno. `room` is at least
   `most` times 258. A folder that is read to its end gives 0. `places`: room for `most` of them, or NULL. */
int64_t read_records(struct reader *reader, char *records, int64_t room, int64_t most, struct placed *places);

#pragma GCC visibility pop

#endif

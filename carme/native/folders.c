/* Reading the entries of folders: see folders.h. */

#define _GNU_SOURCE
#include <dirent.h>
#include <stdlib.h>

#include "files.h"
#include "folders.h"

/* As the kernel has it: see getdents64(2). */
struct entry {
    uint64_t inode;
    int64_t place;
    uint16_t length;
    uint8_t kind;
    char name[];
};

void read_from(struct reader *reader, int folder)
{
    reader->folder = folder;
    reader->next = reader->end = reader->room;
}

int64_t read_records(struct reader *reader, char *records, int64_t room, int64_t most, struct placed *places)
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

/* Entries as of read_records, in the order of their inodes, which is mostly that in which they lie on the device: folders may give
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

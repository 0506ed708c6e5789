/* Reading the entries of folders: see folders.h. */

#define _GNU_SOURCE
#include <dirent.h>
#include <stdlib.h>

#include "files.h"
#include "folders.h"

/* The kernel's struct: see getdents64(2). */
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
    reader->next = reader->end = reader->buffer;
}

int64_t read_records(struct reader *reader, char *records, int64_t capacity, int64_t max_entries,
                     struct record_position *places)
{
    char *end = records;
    while (max_entries > 0 && end + 258 <= records + capacity) {
        if (reader->next == reader->end) {
            long length_read = syscall(SYS_getdents64, reader->folder, reader->buffer, sizeof reader->buffer);
            if (length_read < 0)
                return -errno;
            if (!length_read)
                break;
            reader->next = reader->buffer, reader->end = reader->buffer + length_read;
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
            *places++ = (struct record_position){entry->inode, (size_t)(end - records), 1 + length};
        end += 1 + length;
        max_entries--;
    }
    return end - records;
}

/* Like read_records, sorted by inode, which is usually the order on the device. Folders may list entries
   in hash order. */
int64_t carme_entries(struct reader *reader, char *records, int64_t capacity, int64_t max_entries)
{
    struct record_position *places = malloc((size_t)max_entries * sizeof *places);
    int64_t length = read_records(reader, records, capacity, max_entries, places);
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

/* Open a folder for reading its entries, with its own descriptor; NULL: see errno. */
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

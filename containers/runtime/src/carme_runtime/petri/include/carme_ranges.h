/* Ranges of a Petri net's run in C and C++: named memory that tasks share and that outlives them.
 *
 *     #include <carme_ranges.h>
 *
 *     int main(int argc, char **argv) {
 *         carme_range mesh;
 *         if (carme_range_open(&mesh, argv[1], 1)) {
 *             fprintf(stderr, "%s\n", mesh.error);
 *             return 1;
 *         }
 *         double *values = (double *)mesh.data;
 *         ...
 *         carme_range_close(&mesh);
 *     }
 *
 * Compile it with `cc -I$(carme net include) ...`; there is no library. A program that is a transition of a
 * net opens ranges by name, or by the paths that replace fields such as {mesh} in its command. Ranges on
 * another node are copied to this one first. All tasks see what the program writes once its task has
 * succeeded. A range that it writes to should be one of its task's tokens.
 */
#ifndef CARME_RANGES_H
#define CARME_RANGES_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef O_CLOEXEC /* POSIX 2008; hidden by strict C99 */
#define O_CLOEXEC 0
#endif
#ifndef SOCK_CLOEXEC
#define SOCK_CLOEXEC 0
#endif

#define CARME_RANGE_DIMENSIONS 16

typedef struct {
    void *data;                            /* the bytes */
    size_t size;                           /* number of bytes */
    char dtype[16];                        /* type of the elements in NumPy's notation, such as "<f8" */
    int dimensions;                        /* number of dimensions of the array */
    size_t shape[CARME_RANGE_DIMENSIONS];  /* shape of the array */
    char error[512];                       /* the last error */
    int file;
} carme_range;

static int carme_range_fail_(carme_range *range, const char *name, const char *reason) {
    snprintf(range->error, sizeof range->error, "Range %.200s cannot be opened: %.200s.", name, reason);
    if (range->file >= 0) close(range->file);
    range->file = -1;
    return -1;
}

/* Read the type and shape of a range from the description beside its file. */
static void carme_range_describe_(carme_range *range, const char *path) {
    char mark[4096], text[4096];
    const char *base = strrchr(path, '/'), *found;
    snprintf(mark, sizeof mark, "%.*s/.range-%s", (int)(base ? base - path : 1), base ? path : ".",
             base ? base + 1 : path);
    FILE *file = fopen(mark, "r");
    if (!file) return;
    size_t count = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[count] = 0;
    if ((found = strstr(text, "\"dtype\": \""))) sscanf(found + 10, "%15[^\"]", range->dtype);
    if ((found = strstr(text, "\"shape\": ["))) {
        char *end;
        for (found += 10; *found && *found != ']' && range->dimensions < CARME_RANGE_DIMENSIONS;
             found = end) {
            range->shape[range->dimensions] = strtoull(found, &end, 10);
            if (end == found) return;
            range->dimensions++;
            while (*end == ',' || *end == ' ') end++;
        }
    }
}

/* Ask the run's process on this node to copy the range from the node that has it. */
static void carme_range_fetch_(const char *name, const char *folder) {
    struct sockaddr_un address;
    const char *base = strrchr(folder, '/');
    char line[512];
    base = base ? base + 1 : folder;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    size_t length = strlen(base);
    if (length > sizeof address.sun_path - 1) length = sizeof address.sun_path - 1;
    memcpy(address.sun_path + 1, base, length);  /* an abstract socket: its name starts with a zero */
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0) return;
    int count = snprintf(line, sizeof line, "fetch %s\n", name);
    if (!connect(connection, (struct sockaddr *)&address,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length))
        && count < (int)sizeof line && write(connection, line, (size_t)count) == count) {
        ssize_t got;
        while ((got = read(connection, line, sizeof line)) > 0 && line[got - 1] != '\n') {}
    }
    close(connection);
}

/* Search the folders of CARME_RANGES for a range: 1 if it exists. */
static int carme_range_find_(const char *name, char *path, size_t size, char *first, size_t first_size) {
    const char *folders = getenv("CARME_RANGES");
    first[0] = 0;
    while (folders && *folders) {
        size_t length = strcspn(folders, ":");
        if (!first[0]) snprintf(first, first_size, "%.*s", (int)length, folders);
        snprintf(path, size, "%.*s/.range-%s", (int)length, folders, name);
        int is_there = !access(path, F_OK);
        snprintf(path, size, "%.*s/%s", (int)length, folders, name);
        if (is_there && !access(path, F_OK)) return 1;
        folders += length + (folders[length] == ':');
    }
    return 0;
}

/* Open and lock a file: 1 if it was replaced or moved before it was locked. */
static int carme_range_hold_(carme_range *range, const char *path, int write_too) {
    struct stat found, current;
    range->file = open(path, (write_too ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (range->file < 0) return errno == ENOENT ? 1 : -1;
    /* A locked file is neither deleted nor moved. */
    if (flock(range->file, LOCK_SH) || fstat(range->file, &found)) return -1;
    if (stat(path, &current) || current.st_ino != found.st_ino || current.st_dev != found.st_dev) {
        close(range->file);
        range->file = -1;
        errno = ENOENT;
        return 1;
    }
    range->size = (size_t)found.st_size;
    return 0;
}

/* Open a range by name or path, and map it; `write_too`: for reading and writing.
 * Returns 0, or -1 with the reason in range->error. */
static inline int carme_range_open(carme_range *range, const char *name, int write_too) {
    char path[4096], folder[4096];
    int held = 1, tries;
    memset(range, 0, sizeof *range);
    range->file = -1;
    for (tries = 0; held == 1 && tries < 100; tries++) {
        if (strchr(name, '/')) {
            snprintf(path, sizeof path, "%s", name);
        } else if (!carme_range_find_(name, path, sizeof path, folder, sizeof folder)) {
            if (!folder[0])
                return carme_range_fail_(range, name,
                                         "CARME_RANGES is not set, so this is not a task of a net");
            carme_range_fetch_(name, folder);
            if (!carme_range_find_(name, path, sizeof path, folder, sizeof folder))
                return carme_range_fail_(range, name, "no range has this name");
        }
        held = carme_range_hold_(range, path, write_too);
    }
    if (held) return carme_range_fail_(range, name, strerror(errno));
    range->data = mmap(NULL, range->size, PROT_READ | (write_too ? PROT_WRITE : 0), MAP_SHARED, range->file,
                       0);
    if (range->data == MAP_FAILED) {
        range->data = NULL;
        return carme_range_fail_(range, name, strerror(errno));
    }
    carme_range_describe_(range, path);
    return 0;
}

/* Unmap and close a range. */
static inline void carme_range_close(carme_range *range) {
    if (range->data) munmap(range->data, range->size);
    if (range->file >= 0) close(range->file);
    range->data = NULL;
    range->file = -1;
}

#endif

/* The command `carme`: starts Python with it. A copy in which nothing has changed since the last time is found out
   here, without Python, whose start takes as long as to look at ten thousand files.

   Whatever else is asked for, and whatever is not quite as it was, is Python's: see carme.cli.data and
   carme.staging.engine, which do the same and know all cases and all words. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "copying.h"

#define PROGRAM "from carme.cli import program; program()"
#define STATE ".carme-staging"
/* As in carme.staging.native. */
#define MOST (1 << 16)

/* Python walks again where there is a change after all. What was read from the device is in memory by then, so that costs
   about a second for as many files as this; with more of them, its start does not matter. */
#define MANY 500000
/* How long it takes until they are counted, in milliseconds. Somebody who looks on is shown no progress here, and not
   kept waiting for it. */
#define LONG 1000
#define SOON 300
/* As in carme.staging.engine. */
#define LOOKERS 32

/* Over a network more threads are worth while: Python knows these file systems. */
static const unsigned int local[] = {
    0xef53 /* ext */, 0x58465342 /* XFS */, 0x9123683e /* Btrfs */, 0x01021994 /* tmpfs */, 0x794c7630 /* overlay */,
};

struct request {
    const char *source, *target;
    int surplus, quiet;
};

/* Whether this is `data copy SRC DST` or `data sync SRC DST`, at most with --quiet. */
static int plain(int count, char **words, struct request *request)
{
    if (count < 5 || strcmp(words[1], "data") || (strcmp(words[2], "copy") && strcmp(words[2], "sync")))
        return 0;
    *request = (struct request){.surplus = !strcmp(words[2], "sync")};
    for (int number = 3; number < count; number++) {
        const char *word = words[number];
        if (!strcmp(word, "--quiet"))
            request->quiet = 1;
        else if (*word == '-' || !*word || request->target)
            return 0;
        else if (request->source)
            request->target = word;
        else
            request->source = word;
    }
    return request->target != NULL;
}

/* Whether a path is that folder, or below it under whatever name; also if that is not known. */
static int within(const char *path, const struct stat *top)
{
    char here[PATH_MAX];
    if (!realpath(path, here))
        return 1;
    for (;;) {
        struct stat its;
        if (stat(here, &its) || (its.st_dev == top->st_dev && its.st_ino == top->st_ino))
            return 1;
        char *slash = strrchr(here, '/');
        if (!here[1])
            return 0;
        slash[slash == here] = 0;
    }
}

static int is_local(int folder)
{
    struct statfs its;
    if (fstatfs(folder, &its))
        return 0;
    for (size_t number = 0; number < sizeof local / sizeof *local; number++)
        if ((unsigned int)its.f_type == local[number])
            return 1;
    return 0;
}

/* A folder in which no copy is under way; -1: it is none, or there is one, or Python knows better. */
static int open_top(const char *path)
{
    struct stat its;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && is_local(folder) && fstatat(folder, STATE, &its, AT_SYMLINK_NOFOLLOW) && errno == ENOENT)
        return folder;
    return -1;
}

/* Whether the one folder is as it was copied to the other. */
static int unchanged(const struct request *request, struct counts *counts)
{
    struct stat its, own;
    int source = open_top(request->source), target = source < 0 ? -1 : open_top(request->target);
    if (target < 0 || fstat(source, &its) || fstat(target, &own) || within(request->source, &own)
        || within(request->target, &its))
        return 0;
    struct manner manner = {.unit = 1, .user = geteuid(), .group = getegid()};
    manner.group_count = getgroups(GROUPS, manner.groups);
    cpu_set_t set;
    if (manner.group_count < 0 || sched_getaffinity(0, sizeof set, &set))
        return 0;
    int cores = CPU_COUNT(&set);
    struct walk *walk = carme_walk(&manner, source, target, 1, MOST, request->surplus);
    if (!walk)
        return 0;
    /* As many threads as Python takes. No room for what is found: the first change ends it. */
    int threads = 2 * (cores < 2 ? 2 : cores > 32 ? 32 : cores);
    int most = threads > LOOKERS ? threads : LOOKERS, alone = request->quiet || !isatty(2);
    int64_t files = 0;
    do {
        carme_walk_on(walk, threads, most, alone ? LONG : SOON, NULL, 0, counts);
        counts->files = files += counts->files;
    } while (counts->left == LEFT_WAITING && alone && files < MANY);
    return !counts->left;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* What carme.cli.data.Reporter says of it; the exit code. */
static int report(const struct counts *counts, double took)
{
    char time[64];
    long whole = (long)took, minutes = whole / 60;
    if (took < 60)
        snprintf(time, sizeof time, "%.1f s", took);
    else if (minutes < 60)
        snprintf(time, sizeof time, "%ld min %ld s", minutes, whole % 60);
    else
        snprintf(time, sizeof time, "%ld h %ld min", minutes / 60, minutes % 60);
    signal(SIGPIPE, SIG_IGN);
    printf("Copied 0 files (0 B), %lld unchanged, in %s, 0 B/s.\n", (long long)counts->files, time);
    if (!fflush(stdout))
        return 0;
    if (errno != EPIPE)
        fprintf(stderr, "carme: The output cannot be written: %s.\n", strerror(errno));
    return 1;
}

/* Start Python with the same arguments. It is beside this program, as in any virtual environment. */
static int python(int count, char **words)
{
    char path[PATH_MAX + 16];
    ssize_t length = readlink("/proc/self/exe", path, PATH_MAX);
    const char **arguments = calloc((size_t)count + 4, sizeof *arguments);
    if (length < 0 || !arguments) {
        fprintf(stderr, "carme: It cannot be found out where carme lies: %s. Is /proc mounted?\n", strerror(errno));
        return 1;
    }
    path[length] = 0;
    strcpy(strrchr(path, '/') + 1, "python");
    arguments[0] = path;
    /* Isolated: neither the folder that one is in nor what one sets for Python is any of its business. */
    arguments[1] = "-I";
    arguments[2] = "-c";
    arguments[3] = PROGRAM;
    for (int number = 1; number < count; number++)
        arguments[3 + number] = words[number];
    execv(path, (char **)arguments);
    fprintf(stderr, "carme: %s cannot be started: %s. Install Carme again.\n", path, strerror(errno));
    return 1;
}

int main(int count, char **words)
{
    struct request request;
    struct counts counts = {0};
    double begun = seconds();
    if (plain(count, words, &request) && unchanged(&request, &counts))
        return report(&counts, seconds() - begun);
    return python(count, words);
}

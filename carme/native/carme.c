/* The command `carme`. It starts Python, except for a copy without changes since the last one: it detects
   that without Python, whose start takes as long as reading the status of ten thousand files.

   Python handles all other commands and cases: see carme.cli.data and carme.staging.engine, which do the
   same and print all messages. */

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
/* The same as in carme.staging.native. */
#define MAX_ENTRIES (1 << 16)

/* If there is a change, Python walks again. The status of the files is in memory by then, so this costs
   about a second for as many files as this. With more files, the start of Python does not matter. */
#define MAX_FILES 500000
/* Time limits of a walk in milliseconds. On a terminal the shorter one applies, because this program shows
   no progress. */
#define QUIET_LIMIT 1000
#define WATCHED_LIMIT 300
/* The same as in carme.staging.engine. */
#define SCAN_THREADS 32

/* Local file systems. On network file systems more threads pay off; Python handles these. */
static const unsigned int local[] = {
    0xef53 /* ext */,       0x58465342 /* XFS */,     0x9123683e /* Btrfs */,
    0x01021994 /* tmpfs */, 0x794c7630 /* overlay */,
};

struct request {
    const char *source, *target;
    int surplus, quiet;
};

/* Whether this is `data copy SRC DST` or `data sync SRC DST`, with no other option than --quiet. */
static int parse_plain(int count, char **words, struct request *request)
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

/* Whether a path is that folder or below it, by any name; also true if that is unknown. */
static int is_within(const char *path, const struct stat *top)
{
    char resolved[PATH_MAX];
    if (!realpath(path, resolved))
        return 1;
    for (;;) {
        struct stat status;
        if (stat(resolved, &status) || (status.st_dev == top->st_dev && status.st_ino == top->st_ino))
            return 1;
        char *slash = strrchr(resolved, '/');
        if (!resolved[1])
            return 0;
        slash[slash == resolved] = 0;
    }
}

static int is_local(int folder)
{
    struct statfs status;
    if (fstatfs(folder, &status))
        return 0;
    for (size_t number = 0; number < sizeof local / sizeof *local; number++)
        if ((unsigned int)status.f_type == local[number])
            return 1;
    return 0;
}

/* Open a folder without a running copy; -1: it is no folder, a copy is running, or Python has to decide. */
static int open_top(const char *path)
{
    struct stat status;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && is_local(folder) && fstatat(folder, STATE, &status, AT_SYMLINK_NOFOLLOW)
        && errno == ENOENT)
        return folder;
    return -1;
}

/* Whether the target is an unchanged copy of the source. */
static int unchanged(const struct request *request, struct counts *counts)
{
    struct stat status, own;
    int source = open_top(request->source), target = source < 0 ? -1 : open_top(request->target);
    if (target < 0 || fstat(source, &status) || fstat(target, &own) || is_within(request->source, &own)
        || is_within(request->target, &status))
        return 0;
    struct copy_options options = {.unit = 1, .user = geteuid(), .group = getegid()};
    options.group_count = getgroups(GROUPS, options.groups);
    cpu_set_t set;
    if (options.group_count < 0 || sched_getaffinity(0, sizeof set, &set))
        return 0;
    int cores = CPU_COUNT(&set);
    struct walk *walk = carme_walk(&options, source, target, 1, MAX_ENTRIES, request->surplus);
    if (!walk)
        return 0;
    /* As many threads as in Python. There is no buffer for items: the first change ends the walk. */
    int threads = 2 * (cores < 2 ? 2 : cores > 32 ? 32 : cores);
    int max_threads = threads > SCAN_THREADS ? threads : SCAN_THREADS,
        unwatched = request->quiet || !isatty(2);
    int64_t files = 0;
    do {
        carme_walk_on(walk, threads, max_threads, unwatched ? QUIET_LIMIT : WATCHED_LIMIT, NULL, 0, counts);
        counts->files = files += counts->files;
    } while (counts->left == LEFT_WAITING && unwatched && files < MAX_FILES);
    return !counts->left;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Print the summary like carme.cli.data.Reporter; returns the exit code. */
static int report(const struct counts *counts, double took)
{
    char time[64];
    long seconds_taken = (long)took, minutes = seconds_taken / 60;
    if (took < 60)
        snprintf(time, sizeof time, "%.1f s", took);
    else if (minutes < 60)
        snprintf(time, sizeof time, "%ld min %ld s", minutes, seconds_taken % 60);
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
        fprintf(stderr, "carme: The path of carme cannot be read: %s. Is /proc mounted?\n",
                strerror(errno));
        return 1;
    }
    path[length] = 0;
    strcpy(strrchr(path, '/') + 1, "python");
    arguments[0] = path;
    /* Isolated: independent of the working directory and of Python's environment variables. */
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
    double start = seconds();
    if (parse_plain(count, words, &request) && unchanged(&request, &counts))
        return report(&counts, seconds() - start);
    return python(count, words);
}

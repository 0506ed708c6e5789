/* Quotas on file systems without them. Preloaded, quotactl(2) and quotactl_fd report $SIMULATED_QUOTA:
   `UID HARD SOFT USED FILES_HARD FILES_SOFT FILES`, in blocks of 1 KiB, except USED in bytes. Other users
   have no quota. Limits that are set are appended to the file $SIMULATED_QUOTA_SET: `UID HARD SOFT
   FILES_HARD`. With $SIMULATED_OLD the kernel has no quotactl_fd. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int set(int user, const uint64_t *limits) {
  FILE *file = fopen(getenv("SIMULATED_QUOTA_SET"), "a");
  if (!file) return -1;
  /* struct if_dqblk: hard, soft, used, files hard, soft, used */
  fprintf(file, "%d %llu %llu %llu\n", user, (unsigned long long)limits[0], (unsigned long long)limits[1],
          (unsigned long long)limits[3]);
  return fclose(file);
}

static int reply(unsigned command, int user, void *to) {
  if (command == 0x80000800u && getenv("SIMULATED_QUOTA_SET")) return set(user, to);
  int owner;
  unsigned long long found[6];
  const char *reported = getenv("SIMULATED_QUOTA");
  if (command != 0x80000700u || !reported ||
      sscanf(reported, "%d %llu %llu %llu %llu %llu %llu", &owner, &found[0], &found[1], &found[2], &found[3],
             &found[4], &found[5]) != 7 ||
      owner != user) {
    errno = ESRCH;
    return -1;
  }
  for (int i = 0; i < 6; i++) ((uint64_t *)to)[i] = found[i];
  return 0;
}

int quotactl(int command, const char *device, int user, void *to) {
  if (device[0] == '/' && getenv("SIMULATED_OLD")) return reply((unsigned)command, user, to);
  errno = ENOENT;
  return -1;
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  long arguments[6];
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) arguments[i] = va_arg(rest, long);
  va_end(rest);
  if (number == 443 && !getenv("SIMULATED_OLD"))
    return reply((unsigned)arguments[1], (int)arguments[2], (void *)arguments[3]);
  if (number == 443) {
    errno = ENOSYS;
    return -1;
  }
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

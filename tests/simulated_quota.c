/* Quotas where the kernel keeps none: preloaded, quotactl(2) and quotactl_fd answer what $SIMULATED_QUOTA says:
 * `UID HARD SOFT USED FILES_HARD FILES_SOFT FILES`, in blocks of 1 KiB but USED, which is in bytes. Other users have none.
 * What is set is appended to the file $SIMULATED_QUOTA_SET: `UID HARD SOFT FILES_HARD`. With $SIMULATED_OLD the kernel has no quotactl_fd. */
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
  fprintf(file, "%d %llu %llu %llu\n", user, (unsigned long long)limits[0], (unsigned long long)limits[1], (unsigned long long)limits[3]);
  return fclose(file);
}

static int answer(unsigned command, int user, void *to) {
  if (command == 0x80000800u && getenv("SIMULATED_QUOTA_SET")) return set(user, to);
  int owner;
  unsigned long long found[6];
  const char *reported = getenv("SIMULATED_QUOTA");
  if (command != 0x80000700u || !reported ||
      sscanf(reported, "%d %llu %llu %llu %llu %llu %llu", &owner, &found[0], &found[1], &found[2], &found[3], &found[4], &found[5]) != 7 ||
      owner != user) {
    errno = ESRCH;
    return -1;
  }
  for (int i = 0; i < 6; i++) ((uint64_t *)to)[i] = found[i];
  return 0;
}

int quotactl(int command, const char *device, int user, void *to) {
  if (device[0] == '/' && getenv("SIMULATED_OLD")) return answer((unsigned)command, user, to);
  errno = ENOENT;
  return -1;
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  long given[6];
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) given[i] = va_arg(rest, long);
  va_end(rest);
  if (number == 443 && !getenv("SIMULATED_OLD")) return answer((unsigned)given[1], (int)given[2], (void *)given[3]);
  if (number == 443) {
    errno = ENOSYS;
    return -1;
  }
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

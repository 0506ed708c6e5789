/* Clocks that change while a program runs. Preloaded, it adds the seconds in the file $SIMULATED_CLOCK to
 * the time of day.
 *
 * The monotonic clock cannot be set, but it can advance: by the seconds in the eight bytes of the file
 * $SIMULATED_HOURS. Timers of the program's event loop are due then; a thread that starts to wait
 * afterwards may wake up late.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_seconds(void) {
  const char *name = getenv("SIMULATED_CLOCK");
  FILE *file = name ? fopen(name, "r") : NULL;
  long seconds = 0;
  if (file && fscanf(file, "%ld", &seconds) != 1) seconds = 0;
  if (file) fclose(file);
  return seconds;
}

static int64_t elapsed_seconds(void) {
  static const volatile int64_t *seconds;
  static const int64_t none = 0;
  if (!seconds) {
    const char *name = getenv("SIMULATED_HOURS");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    seconds = memory == MAP_FAILED ? &none : memory;
  }
  return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *to) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, to);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) to->tv_sec += offset_seconds();
  if (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE) to->tv_sec += elapsed_seconds();
  return result;
}

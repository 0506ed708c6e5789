/* Common code of the simulated GPU libraries: parsing of `name=value`, and delays. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double number(const char *line, const char *name, double otherwise) {
  char key[32];
  snprintf(key, sizeof key, " %s=", name);
  const char *place = strstr(line, key);
  return place ? atof(place + strlen(key)) : otherwise;
}

static void text(const char *line, const char *name, char *to, size_t size) {
  char key[32];
  snprintf(key, sizeof key, " %s=", name);
  const char *place = strstr(line, key);
  to[0] = 0;
  if (!place) return;
  place += strlen(key);
  size_t length = strcspn(place, " \n");
  if (length >= size) length = size - 1;
  memcpy(to, place, length);
  to[length] = 0;
}

/* Wait for so many milliseconds. */
static void hang(double milliseconds) {
  if (milliseconds <= 0) return;
  struct timespec wait = {(time_t)(milliseconds / 1000),
                          (long)((long long)(milliseconds * 1e6) % 1000000000)};
  nanosleep(&wait, NULL);
}

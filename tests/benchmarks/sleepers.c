/* `sleepers UID COUNT GROUP ...`: joins the control groups (paths of their `cgroup.procs`), becomes UID,
 * and forks into COUNT processes that sleep until their parent ends. Prints their process ids, one per
 * line, then an empty line. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int count, char **words) {
  if (count < 3) return 2;
  for (int place = 3; place < count; place++) {
    FILE *file = fopen(words[place], "a");
    if (!file || fprintf(file, "%d\n", (int)getpid()) < 0 || fclose(file)) {
      perror(words[place]);
      return 1;
    }
  }
  if (setuid((uid_t)atoi(words[1]))) return 1;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  printf("%d\n", (int)getpid());
  for (int more = atoi(words[2]) - 1; more > 0; more--) {
    pid_t child = fork();
    if (child < 0) return 1;
    if (!child) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
    printf("%d\n", (int)child);
    fflush(stdout);
  }
  printf("\n");
  fflush(stdout);
  for (;;) pause();
}

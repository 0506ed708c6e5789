/* The step of training of frameworks.py with GPI-2 itself, as its users write it: `RESULT`, how many ranks
   GPI-2 sees, and the weight after the step, which is that of one process over all samples. */

#include <GASPI.h>
#include <stdio.h>
#include <stdlib.h>

static void check(gaspi_return_t answer, const char *call) {
    if (answer != GASPI_SUCCESS) {
        fprintf(stderr, "%s returned %d\n", call, (int)answer);
        exit(EXIT_FAILURE);
    }
}

int main(void) {
    static const double samples[] = {1.0, 2.0, 3.0, 4.0}, rate = 0.01;
    gaspi_rank_t rank, ranks;
    check(gaspi_proc_init(GASPI_BLOCK), "gaspi_proc_init");
    check(gaspi_proc_rank(&rank), "gaspi_proc_rank");
    check(gaspi_proc_num(&ranks), "gaspi_proc_num");
    const int share = 4 / ranks;
    double gradient = 0.0, summed = 0.0;
    for (int place = rank * share; place < (rank + 1) * share; place++)
        gradient += 2 * samples[place] * (0.0 - 3 * samples[place]) / share;
    const gaspi_group_t all = GASPI_GROUP_ALL;
    check(gaspi_allreduce(&gradient, &summed, 1, GASPI_OP_SUM, GASPI_TYPE_DOUBLE, all, GASPI_BLOCK),
          "gaspi_allreduce");
    printf("RESULT %d %.5f\n", (int)ranks, -rate * summed / ranks);
    fflush(stdout);
    check(gaspi_barrier(all, GASPI_BLOCK), "gaspi_barrier");
    check(gaspi_proc_term(GASPI_BLOCK), "gaspi_proc_term");
    return EXIT_SUCCESS;
}

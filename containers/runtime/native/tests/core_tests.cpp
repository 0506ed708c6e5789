// Tests of the core in one process: ranks are threads, and endpoints define the nodes, because sanitizers see
// only one process.
#include <cstdio>

#include "checks.hpp"

int main() {
    recorder_tests();
    kernels_tests();
    collectives_tests();
    context_tests();
    links_tests();
    if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
    else std::puts("all checks passed");
    return failures != 0;
}

// Tests of the core inside one process: ranks are threads, nodes are what their endpoints say. Made for the
// sanitizers, which see one process only.
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

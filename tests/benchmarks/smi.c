/* The least that a monitor starts if it runs `nvidia-smi` for each sample: loads the library, queries
 * load, memory, power, temperature and processes of each GPU, prints a line for each, and ends. The real
 * program takes longer. */
#include <stdio.h>

typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

int nvmlInitWithFlags(unsigned flags);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle);
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates);
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory);
int nvmlDeviceGetPowerUsage(void *handle, unsigned *power);
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes);

int main(void) {
  unsigned count = 0;
  if (nvmlInitWithFlags(0) || nvmlDeviceGetCount_v2(&count)) return 1;
  for (unsigned index = 0; index < count; index++) {
    static Process processes[4096];
    void *handle;
    Rates rates = {0, 0};
    Memory memory = {0, 0, 0};
    unsigned power = 0, running = 4096;
    if (nvmlDeviceGetHandleByIndex_v2(index, &handle)) return 1;
    nvmlDeviceGetUtilizationRates(handle, &rates);
    nvmlDeviceGetMemoryInfo(handle, &memory);
    nvmlDeviceGetPowerUsage(handle, &power);
    if (nvmlDeviceGetComputeRunningProcesses_v3(handle, &running, processes)) running = 0;
    printf("%u, %u, %llu, %u\n", index, rates.gpu, memory.used, power);
    for (unsigned place = 0; place < running; place++) printf("%u, %u\n", index, processes[place].pid);
  }
  return nvmlShutdown();
}

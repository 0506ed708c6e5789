/* A simulation of NVIDIA's management library (libnvidia-ml.so.1), for machines without a GPU.
 *
 * It reports the GPUs in the file $SIMULATED_NVML (or in SHOWN, if compiled with that), one per line. It
 * reads that file at every call, so that a test can change loads, lose GPUs and report errors meanwhile:
 *
 *   gpu uuid=GPU-0 minor=0 util=50 used=1024 total=4096 power=300 energy=5000 temp=60 \
 *       tensor=40 pids=12:100,13:200
 *
 * Sizes in MiB, power in W, energy in J, utilization in per cent. `lost=1`: the GPU has fallen off the bus.
 * `denied=1`: this account may not use it. `xid=79`: an error to report once. `throttle=64`: the bits of the
 * throttle reasons. `ecc=3 ecc2=1`: corrected and uncorrected errors. `nvlink=1`: it has NVLinks. `mig=2`:
 * number of MIG instances. `hang=500`: milliseconds that each call takes. A line `fail=9` makes
 * initialisation fail with that error. Compiled with UNCHANGING it reads the file once. Layouts: NVML API
 * Reference Manual.
 */
#include "simulated_gpus.h"

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, DENIED = 4, NOT_FOUND = 6, SMALL = 7 };
enum { TIMEOUT = 10, LOST = 15 };
enum { MAX_GPUS = 16, MAX_PIDS = 4096 };

typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; int sensor; int temperature; } Temperature;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct {
  unsigned field, scope;
  long long timestamp, latency;
  unsigned type;
  int result;
  unsigned long long value;
} Field;
typedef struct {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
} Event;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned id; int result; double value; char *names[3]; } GpmMetric;
typedef struct { unsigned version, count; void *first, *second; GpmMetric metrics[]; } GpmRequest;

typedef struct {
  char uuid[64], pids[1 << 16];
  int minor, lost, denied, mig, xid, throttle, ecc, ecc2, nvlink;
  double util, used, total, power, energy, temp, tensor, hang;
} Gpu;

static Gpu gpus[MAX_GPUS];
static int count, failure, seen, reported[MAX_GPUS];
static char handles[MAX_GPUS], instances[MAX_GPUS][8];

static void read_description(void) {
#ifdef SHOWN
  const char *name = SHOWN;
#else
  const char *name = getenv("SIMULATED_NVML");
#endif
#ifdef UNCHANGING
  if (count) return;
#endif
  FILE *file = name ? fopen(name, "r") : NULL;
  static char line[1 << 17];
  count = 0;
  failure = file ? 0 : 9;
  while (file && fgets(line, sizeof line, file) && count < MAX_GPUS) {
    if (!strncmp(line, "fail=", 5)) failure = atoi(line + 5);
    if (strncmp(line, "gpu ", 4)) continue;
    Gpu *gpu = &gpus[count];
    text(line, "uuid", gpu->uuid, sizeof gpu->uuid);
    text(line, "pids", gpu->pids, sizeof gpu->pids);
    gpu->minor = (int)number(line, "minor", count);
    gpu->lost = (int)number(line, "lost", 0);
    gpu->denied = (int)number(line, "denied", 0);
    gpu->mig = (int)number(line, "mig", 0);
    gpu->xid = (int)number(line, "xid", 0);
    gpu->throttle = (int)number(line, "throttle", 0);
    gpu->ecc = (int)number(line, "ecc", 3);
    gpu->ecc2 = (int)number(line, "ecc2", 1);
    gpu->nvlink = (int)number(line, "nvlink", 1);
    gpu->util = number(line, "util", 0);
    gpu->used = number(line, "used", 0);
    gpu->total = number(line, "total", 81920);
    gpu->power = number(line, "power", 60);
    gpu->energy = number(line, "energy", 1000);
    gpu->temp = number(line, "temp", 40);
    gpu->tensor = number(line, "tensor", 0);
    gpu->hang = number(line, "hang", 0);
    count++;
  }
  if (file) fclose(file);
}

/* The GPU of a handle in its current state. *instance: the index of a MIG instance, else -1. */
static int find(void *handle, Gpu **gpu, int *instance) {
  read_description();
  for (int i = 0; i < MAX_GPUS; i++) {
    int part = -1;
    for (int k = 0; k < 8; k++)
      if (handle == &instances[i][k]) part = k;
    if (handle != &handles[i] && part < 0) continue;
    if (i >= count || gpus[i].lost) return LOST;
    *gpu = &gpus[i];
    if (instance) *instance = part;
    hang(gpus[i].hang);
    return SUCCESS;
  }
  return INVALID;
}

#define FIND(handle)                                \
  Gpu *gpu;                                        \
  int part;                                        \
  int found = find(handle, &gpu, &part);           \
  (void)part;                                      \
  if (found) return found

int nvmlInitWithFlags(unsigned flags) { (void)flags; read_description(); seen = count; return failure; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) {
  static char words[64];
  snprintf(words, sizeof words, code == LOST ? "GPU is lost" : "simulated error %d", code);
  return words;
}
/* As in the real library, an added GPU is visible only after the next initialisation. */
int nvmlDeviceGetCount_v2(unsigned *to) { *to = (unsigned)seen; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **to) {
  read_description();
  if ((int)index >= count) return INVALID;
  if (gpus[index].lost) return LOST;
  if (gpus[index].denied) return DENIED;
  *to = &handles[index];
  return SUCCESS;
}
int nvmlDeviceGetUUID(void *handle, char *to, unsigned size) {
  FIND(handle);
  if (part >= 0) snprintf(to, size, "MIG-%s-%d", gpu->uuid, part);
  else snprintf(to, size, "%s", gpu->uuid);
  return SUCCESS;
}
int nvmlDeviceGetName(void *handle, char *to, unsigned size) {
  FIND(handle);
  snprintf(to, size, "Simulated GPU");
  return SUCCESS;
}
int nvmlDeviceGetMinorNumber(void *handle, unsigned *to) {
  FIND(handle);
  *to = (unsigned)gpu->minor;
  return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *to) {
  FIND(handle);
  to->gpu = (unsigned)gpu->util;
  to->memory = (unsigned)(gpu->util / 2);
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *to) {
  FIND(handle);
  double share = part >= 0 ? 1.0 / gpu->mig : 1;
  to->total = (unsigned long long)(gpu->total * share) << 20;
  to->used = (unsigned long long)(gpu->used * share) << 20;
  to->free = to->total - to->used;
  return SUCCESS;
}
int nvmlDeviceGetTemperatureV(void *handle, Temperature *to) {
  FIND(handle);
  to->temperature = (int)gpu->temp;
  return SUCCESS;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *to) {
  FIND(handle);
  *to = kind == 1 ? 1980 : 3201;
  return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *to) {
  FIND(handle);
  *to = (unsigned)(gpu->power * 1000);
  return SUCCESS;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *to) {
  FIND(handle);
  *to = 700000;
  return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *to) {
  FIND(handle);
  *to = (unsigned long long)(gpu->energy * 1000);
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *to) {
  FIND(handle);
  *to =
      (unsigned long long)gpu->throttle | (gpu->temp >= 90 ? 0x40 : 0); /* thermal slowdown by the hardware */
  return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int period, unsigned long long *to) {
  FIND(handle);
  (void)period;
  *to = (unsigned long long)(kind == 0 ? gpu->ecc : gpu->ecc2);
  return SUCCESS;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
  FIND(handle);
  *corrected = *uncorrected = *failed = 0;
  *pending = 1;
  return SUCCESS;
}
int nvmlDeviceGetFieldValues(void *handle, int number_of, Field *fields) {
  FIND(handle);
  for (int i = 0; i < number_of; i++) {
    fields[i].result = SUCCESS;
    fields[i].type = 3;
    switch (fields[i].field) {
      case 82: fields[i].value = (unsigned long long)gpu->temp + 5; break;
      case 94: fields[i].value = 12; break;
      case 138: fields[i].value = 2048; break;
      case 139: fields[i].value = 1024; break;
      case 38: case 52: case 59: fields[i].value = fields[i].field; break;
      default: fields[i].result = UNSUPPORTED;
    }
    if (!gpu->nvlink && fields[i].field != 82 && fields[i].field != 94) fields[i].result = UNSUPPORTED;
  }
  return SUCCESS;
}
static int processes(void *handle, unsigned *number_of, Process *to) {
  FIND(handle);
  unsigned capacity = *number_of, listed = 0;
  for (const char *place = gpu->pids; *place;) {
    char *end;
    unsigned long pid = strtoul(place, &end, 10);
    unsigned long long used = *end == ':' ? strtoull(end + 1, &end, 10) : 0;
    if (listed < capacity && to) to[listed] = (Process){(unsigned)pid, used << 20, 0xFFFFFFFF, 0xFFFFFFFF};
    listed++;
    if (*end != ',') break;
    place = end + 1;
  }
  *number_of = listed;
  return listed > capacity ? SMALL : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, Process *to) {
  return processes(handle, n, to);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *n, Process *to) {
  FIND(handle);
  (void)to;
  *n = 0;
  return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *then) {
  FIND(handle);
  *now = *then = gpu->mig > 0;
  return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *to) { FIND(handle); *to = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **to) {
  FIND(handle);
  if ((int)index >= gpu->mig) return NOT_FOUND;
  *to = &instances[gpu - gpus][index];
  return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *to) {
  FIND(handle);
  *to = (unsigned)part + 1;
  return SUCCESS;
}
int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *to) { FIND(handle); *to = 0; return SUCCESS; }

int nvmlEventSetCreate(void **to) { *to = &seen; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
  (void)types;
  (void)set;
  FIND(handle);
  return SUCCESS;
}
int nvmlEventSetWait_v2(void *set, Event *to, unsigned milliseconds) {
  (void)set; (void)milliseconds;
  read_description();
  for (int i = 0; i < count; i++) {
    if (!gpus[i].xid || reported[i] == gpus[i].xid) continue;
    reported[i] = gpus[i].xid;
    *to = (Event){&handles[i], 8, (unsigned long long)gpus[i].xid, 0, 0};
    return SUCCESS;
  }
  return TIMEOUT;
}

int nvmlGpmQueryDeviceSupport(void *handle, GpmSupport *to) {
  FIND(handle);
  to->supported = 1;
  return SUCCESS;
}
int nvmlGpmSampleAlloc(void **to) { *to = calloc(1, sizeof(Gpu)); return *to ? SUCCESS : 20; }
int nvmlGpmSampleFree(void *sample) { free(sample); return SUCCESS; }
int nvmlGpmSampleGet(void *handle, void *sample) { FIND(handle); *(Gpu *)sample = *gpu; return SUCCESS; }
int nvmlGpmMigSampleGet(void *handle, unsigned instance, void *sample) {
  (void)instance;
  return nvmlGpmSampleGet(handle, sample);
}
int nvmlGpmMetricsGet(GpmRequest *request) {
  const Gpu *gpu = request->second;
  for (unsigned i = 0; i < request->count; i++) {
    GpmMetric *metric = &request->metrics[i];
    metric->result = SUCCESS;
    switch (metric->id) {
      case 2: metric->value = gpu->util; break;
      case 5: metric->value = gpu->tensor; break;
      case 10: metric->value = gpu->util > 0 ? gpu->util / 3 : 0.0 / 0.0; break;
      case 20: metric->value = 10; break;
      default: metric->value = 0;
    }
  }
  return SUCCESS;
}

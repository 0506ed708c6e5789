/* A simulation of AMD's management library (libamd_smi.so), for machines without such a GPU.
 *
 * It reports the GPUs in the file $SIMULATED_AMDSMI, one per line, and reads that file at every call:
 *
 *   gpu uuid=amd-0 render=128 kfd=1000 util=50 used=1024 total=4096 power=300 energy=5000 temp=60
 *
 * Sizes in MiB, power in W, energy in J, utilization in per cent. `lost=1`: the GPU does not answer.
 * `denied=1`: this account may not use it. `old=1`: it reports mean power and has no energy counter.
 * `hang=500`: milliseconds that each call takes. A line `fail=34` makes initialisation fail
 * with that error; a line `version=24` sets the library's version.
 * Two GPUs share a socket, which also has a processor. Layouts: AMD SMI C API reference, version 26.
 */
#include <stdint.h>

#include "simulated_gpus.h"

enum { SUCCESS = 0, INVALID = 1, UNSUPPORTED = 2, DENIED = 10, NO_FILE = 14, NOT_INIT = 32 };
enum { MAX_GPUS = 16 };

typedef struct {
  char uuid[64];
  double render, kfd, util, used, total, power, energy, temp, lost, denied, old, hang;
} Gpu;

static Gpu gpus[MAX_GPUS];
static int count, seen, failure, version, ready;
static char handles[MAX_GPUS], sockets[MAX_GPUS], processors[MAX_GPUS];

static void read_description(void) {
  const char *name = getenv("SIMULATED_AMDSMI");
  FILE *file = name ? fopen(name, "r") : NULL;
  char line[512];
  count = 0;
  version = 26;
  failure = file ? 0 : 34;
  while (file && fgets(line, sizeof line, file) && count < MAX_GPUS) {
    if (!strncmp(line, "fail=", 5)) failure = atoi(line + 5);
    if (!strncmp(line, "version=", 8)) version = atoi(line + 8);
    if (strncmp(line, "gpu ", 4)) continue;
    Gpu *gpu = &gpus[count];
    text(line, "uuid", gpu->uuid, sizeof gpu->uuid);
    gpu->render = number(line, "render", 128 + count);
    gpu->kfd = number(line, "kfd", 1000 + count);
    gpu->util = number(line, "util", 0);
    gpu->used = number(line, "used", 0);
    gpu->total = number(line, "total", 65536);
    gpu->power = number(line, "power", 60);
    gpu->energy = number(line, "energy", 1000);
    gpu->temp = number(line, "temp", 40);
    gpu->lost = number(line, "lost", 0);
    gpu->denied = number(line, "denied", 0);
    gpu->old = number(line, "old", 0);
    gpu->hang = number(line, "hang", 0);
    count++;
  }
  if (file) fclose(file);
}

static int find(void *handle, Gpu **gpu) {
  read_description();
  if (!ready) return NOT_INIT;
  for (int i = 0; i < MAX_GPUS; i++) {
    if (handle != &handles[i]) continue;
    if (i >= count || gpus[i].lost > 0) return NO_FILE;
    if (gpus[i].denied > 0) return DENIED;
    *gpu = &gpus[i];
    hang(gpus[i].hang);
    return SUCCESS;
  }
  return INVALID;
}

#define FIND(handle)                  \
  Gpu *gpu;                          \
  int found = find(handle, &gpu);    \
  if (found) return found

int amdsmi_init(uint64_t flags) {
  read_description();
  if (flags != 2) return INVALID;
  ready = !failure;
  seen = count;
  return failure;
}
int amdsmi_shut_down(void) { ready = 0; return SUCCESS; }
int amdsmi_get_lib_version(uint32_t *to) { read_description(); to[0] = (uint32_t)version; return SUCCESS; }
int amdsmi_get_socket_handles(uint32_t *number_of, void **to) {
  *number_of = (uint32_t)(seen + 1) / 2;
  for (uint32_t i = 0; to && i < *number_of; i++) to[i] = &sockets[i];
  return SUCCESS;
}
int amdsmi_get_processor_handles(void *socket, uint32_t *number_of, void **to) {
  int place = (int)((char *)socket - sockets);
  *number_of = 2 * place + 1 < seen ? 3 : 2;
  if (!to) return SUCCESS;
  to[0] = &processors[place];
  for (uint32_t i = 1; i < *number_of; i++) to[i] = &handles[2 * place + (int)i - 1];
  return SUCCESS;
}
int amdsmi_get_processor_type(void *handle, uint32_t *to) {
  *to = (char *)handle >= processors && (char *)handle < processors + MAX_GPUS ? 2 : 1;
  return SUCCESS;
}
int amdsmi_get_gpu_device_uuid(void *handle, uint32_t *length, char *to) {
  FIND(handle);
  if (*length < 38) return INVALID;
  snprintf(to, *length, "%s", gpu->uuid);
  return SUCCESS;
}
int amdsmi_get_gpu_enumeration_info(void *handle, uint32_t *to) {
  FIND(handle);
  to[0] = (uint32_t)gpu->render;
  return SUCCESS;
}
int amdsmi_get_gpu_kfd_info(void *handle, uint64_t *to) {
  FIND(handle);
  to[0] = (uint64_t)gpu->kfd;
  return SUCCESS;
}
int amdsmi_get_gpu_asic_info(void *handle, char *to) {
  FIND(handle);
  strcpy(to, "Simulated Instinct");
  return SUCCESS;
}
int amdsmi_get_gpu_memory_total(void *handle, int kind, uint64_t *to) {
  FIND(handle);
  *to = (uint64_t)gpu->total << 20;
  return kind ? INVALID : SUCCESS;
}
int amdsmi_get_gpu_memory_usage(void *handle, int kind, uint64_t *to) {
  FIND(handle);
  *to = (uint64_t)gpu->used << 20;
  return kind ? INVALID : SUCCESS;
}
int amdsmi_get_gpu_activity(void *handle, uint32_t *to) {
  FIND(handle);
  to[0] = (uint32_t)gpu->util;
  to[1] = gpu->old > 0 ? 0xFFFF : (uint32_t)(gpu->util / 2);
  return SUCCESS;
}
int amdsmi_get_power_info(void *handle, uint32_t *to) {
  FIND(handle);
  to[2] = gpu->old > 0 ? 0xFFFF : (uint32_t)gpu->power;
  to[3] = gpu->old > 0 ? (uint32_t)gpu->power : 0xFFFF;
  return SUCCESS;
}
int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, uint64_t *to) {
  FIND(handle);
  (void)sensor;
  to[0] = 750000000;
  return SUCCESS;
}
int amdsmi_get_energy_count(void *handle, uint64_t *to, float *unit, uint64_t *taken) {
  FIND(handle);
  if (gpu->old > 0) return UNSUPPORTED;
  *unit = 15.625F;
  *to = (uint64_t)(gpu->energy * 1e6 / 15.625);
  *taken = 0;
  return SUCCESS;
}
int amdsmi_get_temp_metric(void *handle, int sensor, int metric, int64_t *to) {
  FIND(handle);
  if (metric || sensor > 2 || (sensor == 0 && gpu->old == 0)) return UNSUPPORTED;
  *to = (int64_t)gpu->temp + 5 * sensor;
  return SUCCESS;
}
int amdsmi_get_clock_info(void *handle, int kind, uint32_t *to) {
  FIND(handle);
  to[0] = kind == 0 ? 2100 : 1300;
  return SUCCESS;
}
int amdsmi_get_gpu_total_ecc_count(void *handle, uint64_t *to) {
  FIND(handle);
  to[0] = 3;
  to[1] = 1;
  return SUCCESS;
}

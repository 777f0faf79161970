/* A stand-in for libnvidia-ml.so.1 where there is no GPU. It reads the file named by FAKE_NVML: one line per GPU,
   "UUID total_bytes used_bytes processes". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char uuid[96]; unsigned long long total, used; unsigned processes; } gpu_t;
static gpu_t gpus[64];
static unsigned count;

int nvmlInitWithFlags(unsigned flags) {
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    if (!file) return 9; /* driver not loaded */
    for (count = 0; count < 64; count++) {
        gpu_t *gpu = &gpus[count];
        if (fscanf(file, "%95s %llu %llu %u", gpu->uuid, &gpu->total, &gpu->used, &gpu->processes) != 4) break;
    }
    fclose(file);
    return 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code ? "fake error" : "success"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &gpus[index]; return 0; }
int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned size) { snprintf(text, size, "%s", gpu->uuid); return 0; }
int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned size) { snprintf(text, size, "Fake GPU"); return 0; }
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, unsigned long long *memory) {
    if (!gpu->total) return 3; /* not supported: a GPU that shares the host's memory */
    memory[0] = gpu->total; memory[1] = gpu->total - gpu->used; memory[2] = gpu->used;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *n, void *infos) {
    unsigned room = *n;
    *n = gpu->processes;
    if (room < gpu->processes) return 7; /* insufficient size */
    if (infos) memset(infos, 0, 24 * gpu->processes);
    return 0;
}
/* What `ddpkit doctor` asks beside that: FAKE_CUDA is the driver's CUDA, such as 12080; FAKE_ECC each GPU's errors. */
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "570.1"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = getenv("FAKE_CUDA") ? atoi(getenv("FAKE_CUDA")) : 12080;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int since, unsigned long long *errors) {
    if (!getenv("FAKE_ECC") || kind != 1 || since != 0) return 3; /* not supported; uncorrected ones, since the reset */
    *errors = strtoull(getenv("FAKE_ECC"), NULL, 10);
    return 0;
}

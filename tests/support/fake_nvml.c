/* A stand-in for libnvidia-ml.so.1 where there is no GPU. It reads the file named by FAKE_NVML, line by line; each line
   tells of the last GPU or MIG device named above it:

     gpu UUID TOTAL USED    a GPU and its bytes of memory; 0 0: it does not tell
     mig UUID TOTAL USED    a MIG device on it
     mig-mode               it is in MIG mode
     process PID BYTES      computes on it
     load PERCENT | node NUMBER | cpus HEX | nvlink GPU | nvlink switch | lost
     xid NUMBER | ecc COUNT an error that the driver reports, once, where the file is read again; uncorrected errors
     level GPU GPU LEVEL    NVML's number for the way from one GPU to another

   What is not told of is not supported, as NVML says it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, TIMEOUT, LOST = 15 };
enum { SWITCH = -1 };

typedef struct unit {
    char uuid[128];
    unsigned long long total, used, cpus;
    int load, node, mig_mode, lost, place, ecc;
    unsigned processes, links, parts, xids;
    int xid[8];
    struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } process[64];
    int link[36];
    struct unit *part[8];
} unit_t;

static unit_t gpus[64], migs[64];
static unsigned count, mig_count;
static int levels[64][64];

static unit_t *fresh(unit_t *unit, FILE *file) {
    memset(unit, 0, sizeof *unit);
    unit->load = unit->node = unit->ecc = -1;
    if (fscanf(file, "%127s %llu %llu", unit->uuid, &unit->total, &unit->used) != 3) abort();
    return unit;
}

static int number(FILE *file) {
    int value;
    if (fscanf(file, "%d", &value) != 1) abort();
    return value;
}

static void read_line(const char *word, FILE *file) {
    static unit_t *gpu, *unit;
    char name[16];
    if (!strcmp(word, "gpu")) {
        gpu = unit = fresh(&gpus[count], file);
        gpu->place = count++;
    } else if (!strcmp(word, "mig")) {
        unit = gpu->part[gpu->parts++] = fresh(&migs[mig_count++], file);
        gpu->mig_mode = 1;
    } else if (!strcmp(word, "process")) {
        unit->process[unit->processes].pid = number(file);
        if (fscanf(file, "%llu", &unit->process[unit->processes++].memory) != 1) abort();
    } else if (!strcmp(word, "cpus")) {
        if (fscanf(file, "%llx", &unit->cpus) != 1) abort();
    } else if (!strcmp(word, "nvlink")) {
        if (fscanf(file, "%15s", name) != 1) abort();
        gpu->link[gpu->links++] = strcmp(name, "switch") ? atoi(name) : SWITCH;
    } else if (!strcmp(word, "level")) {
        int one = number(file), other = number(file);
        levels[one][other] = levels[other][one] = number(file);
    } else if (!strcmp(word, "load")) unit->load = number(file);
    else if (!strcmp(word, "node")) unit->node = number(file);
    else if (!strcmp(word, "mig-mode")) gpu->mig_mode = 1;
    else if (!strcmp(word, "lost")) gpu->lost = 1;
    else if (!strcmp(word, "ecc")) gpu->ecc = number(file);
    else if (!strcmp(word, "xid")) gpu->xid[gpu->xids++] = number(file);
    else abort();
}

int nvmlInitWithFlags(unsigned flags) {
    char word[16];
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    (void)flags;
    if (!file) return NO_DRIVER;
    count = mig_count = 0;
    memset(levels, -1, sizeof levels);
    while (fscanf(file, "%15s", word) == 1) read_line(word, file);
    fclose(file);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code ? "fake error" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, unit_t **gpu) {
    *gpu = &gpus[index];
    return gpus[index].lost ? LOST : OK;
}
int nvmlDeviceGetUUID(unit_t *unit, char *text, unsigned size) { snprintf(text, size, "%s", unit->uuid); return OK; }
int nvmlDeviceGetName(unit_t *unit, char *text, unsigned size) {
    snprintf(text, size, strncmp(unit->uuid, "MIG", 3) ? "Fake GPU" : "Fake GPU MIG 1g.10gb");
    return OK;
}
int nvmlDeviceGetMemoryInfo(unit_t *unit, unsigned long long *memory) {
    if (!unit->total) return NOT_SUPPORTED; /* a GPU that shares the host's memory */
    memory[0] = unit->total; memory[1] = unit->total - unit->used; memory[2] = unit->used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(unit_t *unit, unsigned *rates) {
    rates[0] = rates[1] = unit->load;
    return unit->load < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(unit_t *unit, unsigned *n, void *infos) {
    unsigned room = *n;
    *n = unit->processes;
    if (room < unit->processes) return TOO_SMALL;
    if (infos) memcpy(infos, unit->process, unit->processes * sizeof unit->process[0]);
    return OK;
}
int nvmlDeviceGetCpuAffinity(unit_t *unit, unsigned size, unsigned long long *words) {
    memset(words, 0, size * sizeof *words);
    words[0] = unit->cpus;
    return unit->cpus ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMemoryAffinity(unit_t *unit, unsigned size, unsigned long long *words, unsigned scope) {
    (void)scope;
    memset(words, 0, size * sizeof *words);
    if (unit->node < 0) return NOT_SUPPORTED;
    words[0] = 1ull << unit->node;
    return OK;
}

int nvmlDeviceGetMigMode(unit_t *gpu, unsigned *now, unsigned *pending) {
    *now = *pending = gpu->mig_mode;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(unit_t *gpu, unsigned *n) { (void)gpu; *n = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(unit_t *gpu, unsigned index, unit_t **part) {
    if (index >= gpu->parts) return NOT_FOUND;
    *part = gpu->part[index];
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char text[32];
} pci_t;
static int address(int place, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = place == SWITCH ? 0xff : 0x10 + place;
    return OK;
}
int nvmlDeviceGetPciInfo_v3(unit_t *gpu, pci_t *pci) { return address(gpu->place, pci); }
int nvmlDeviceGetNvLinkState(unit_t *gpu, unsigned link, unsigned *active) {
    *active = 1;
    return link < gpu->links ? OK : INVALID;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(unit_t *gpu, unsigned link, unsigned *type) {
    *type = gpu->link[link] == SWITCH ? 2 : 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(unit_t *gpu, unsigned link, pci_t *pci) { return address(gpu->link[link], pci); }
int nvmlDeviceGetTopologyCommonAncestor(unit_t *one, unit_t *other, int *level) {
    *level = levels[one->place][other->place];
    return *level < 0 ? NOT_SUPPORTED : OK;
}
/* What `ddpkit doctor` asks in addition: FAKE_CUDA is the driver's CUDA, such as 12080; FAKE_ECC each GPU's errors. */
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "570.1"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = getenv("FAKE_CUDA") ? atoi(getenv("FAKE_CUDA")) : 12080;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(unit_t *gpu, int kind, int since, unsigned long long *errors) {
    nvmlInitWithFlags(0);
    if (gpu->lost) return LOST;
    if (kind != 1 || since != 0) return NOT_SUPPORTED; /* uncorrected ones, since the reset */
    if (gpu->ecc < 0 && !getenv("FAKE_ECC")) return NOT_SUPPORTED;
    *errors = gpu->ecc < 0 ? strtoull(getenv("FAKE_ECC"), NULL, 10) : gpu->ecc;
    return OK;
}

/* Events: what has been in the file before is old. */
typedef struct {
    unit_t *gpu;
    unsigned long long type, number;
    unsigned instance, compute;
} event_t;
static unsigned delivered[64], registered[64];
int nvmlEventSetCreate(void **set) {
    nvmlInitWithFlags(0);
    memset(registered, 0, sizeof registered);
    for (unsigned place = 0; place < count; place++) delivered[place] = gpus[place].xids;
    *set = delivered;
    return OK;
}
int nvmlDeviceRegisterEvents(unit_t *gpu, unsigned long long types, void *set) {
    (void)set;
    registered[gpu->place] = types == 8; /* Xid */
    return OK;
}
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned milliseconds) {
    (void)set;
    (void)milliseconds;
    nvmlInitWithFlags(0);
    for (unsigned place = 0; place < count; place++)
        if (registered[place] && delivered[place] < gpus[place].xids) {
            event_t one = {&gpus[place], 8, gpus[place].xid[delivered[place]++], -1, -1};
            *event = one;
            return OK;
        }
    return TIMEOUT;
}
int nvmlEventSetFree(void *set) { (void)set; return OK; }

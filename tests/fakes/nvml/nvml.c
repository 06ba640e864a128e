/* A libnvidia-ml.so.1 whose GPUs are lines of a file.
 *
 * The file is named by FTSLURM_FAKE_NVML and read by each nvmlInit and nvmlDeviceGetCount. A line is
 * `GPU KEY VALUE`, GPU an index or `*`; a later line outranks an earlier one. What a function has no
 * line for, it does not support. Keys:
 *   code:FUNCTION   nvmlReturn of the function; code:* of all that take this GPU's handle
 *   hang:FUNCTION   it does not return; TERM ends it. stuck:FUNCTION: only KILL does
 *   crash:FUNCTION  it ends the process by SIGSEGV
 *   field:ID[:SCOPE] fieldcode:ID[:SCOPE]   value and nvmlReturn of a field
 *   others          see the functions below
 * With -DOLD_DRIVER the library lacks the functions of drivers after 470. With -DSTATE_FILE="PATH"
 * that is the file, whatever the environment says.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, VERSION_MISMATCH = 25 };
enum { LINES = 8192 };

typedef unsigned long long u64;
typedef void *device_t;

static struct line { int gpu; char key[80]; char value[96]; } lines[LINES];
static int num_lines;
static int is_started;

static const char *find(int gpu, const char *key) {
    for (int i = num_lines - 1; i >= 0; i--)
        if ((lines[i].gpu == gpu || lines[i].gpu == -1) && !strcmp(lines[i].key, key))
            return lines[i].value;
    return NULL;
}

static const char *find2(int gpu, const char *kind, const char *name) {
    char key[96];
    snprintf(key, sizeof key, "%s:%s", kind, name);
    return find(gpu, key);
}

static void load(void) {
    char gpu[16], row[256];
#ifdef STATE_FILE
    const char *path = STATE_FILE;
#else
    const char *path = getenv("FTSLURM_FAKE_NVML");
#endif
    FILE *file = path ? fopen(path, "r") : NULL;
    num_lines = 0;
    if (!file) return;
    while (num_lines < LINES && fgets(row, sizeof row, file)) {
        struct line *line = &lines[num_lines];
        if (sscanf(row, "%15s %79s %95[^\n]", gpu, line->key, line->value) != 3) continue;
        line->gpu = gpu[0] == '*' ? -1 : atoi(gpu);
        num_lines++;
    }
    fclose(file);
}

/* What the function has to say instead of its answer; SUCCESS when nothing. */
static int refusal(int gpu, const char *function) {
    if (find2(gpu, "hang", function)) for (;;) pause();
    if (find2(gpu, "stuck", function)) {
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, NULL);
        for (;;) pause();
    }
    if (find2(gpu, "crash", function)) raise(SIGSEGV);
    const char *code = find2(gpu, "code", function);
    return code ? atoi(code) : SUCCESS;
}

static int gpu_of(device_t device) { return (int)(intptr_t)device - 1; }

static int answer(device_t device, const char *function) {
    if (!is_started) return UNINITIALIZED;
    int code = refusal(gpu_of(device), function);
    const char *all = find(gpu_of(device), "code:*");
    return code ? code : all ? atoi(all) : SUCCESS;
}

#define ENTER(device) do { int code = answer(device, __func__); if (code) return code; } while (0)

static int number(device_t device, const char *key, u64 *value) {
    const char *text = find(gpu_of(device), key);
    if (!text) return NOT_SUPPORTED;
    *value = strtoull(text, NULL, 0);
    return SUCCESS;
}

static int small(device_t device, const char *key, unsigned *value) {
    u64 wide;
    int code = number(device, key, &wide);
    if (!code) *value = (unsigned)wide;
    return code;
}

static int text(device_t device, const char *key, char *buffer, unsigned size) {
    const char *value = find(gpu_of(device), key);
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(buffer, value);
    return SUCCESS;
}

#define SMALL(function, key) \
    int function(device_t device, unsigned *value) { ENTER(device); return small(device, key, value); }
#define LARGE(function, key) \
    int function(device_t device, u64 *value) { ENTER(device); return number(device, key, value); }
#define TEXT(function, key) \
    int function(device_t device, char *to, unsigned size) { ENTER(device); return text(device, key, to, size); }

static int start(const char *function) {
    load();
    int code = refusal(-1, function);
    if (!code && !find(-1, "gpus")) code = DRIVER_NOT_LOADED;
    is_started = !code;
    return code;
}
int nvmlInit_v2(void) { return start("nvmlInit_v2"); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return start("nvmlInit_v2"); }
int nvmlShutdown(void) { is_started = 0; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!is_started) return UNINITIALIZED;
    load();
    int code = refusal(-1, __func__);
    if (!code) *count = (unsigned)atoi(find(-1, "gpus"));
    return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if (!is_started) return UNINITIALIZED;
    if (index >= (unsigned)atoi(find(-1, "gpus"))) return INVALID_ARGUMENT;
    int code = refusal((int)index, __func__);
    if (!code) *device = (device_t)(intptr_t)(index + 1);
    return code;
}
const char *nvmlErrorString(int code) { (void)code; return "as the state file says"; }

TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
int nvmlDeviceGetPciInfo_v3(device_t device, pci_t *pci) {
    ENTER(device);
    memset(pci, 0, sizeof *pci);
    int code = text(device, "bus", pci->bus_id, sizeof pci->bus_id);
    if (!code) sscanf(pci->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return code;
}

int nvmlDeviceGetEccMode(device_t device, unsigned *now, unsigned *pending) {
    ENTER(device);
    int code = small(device, "ecc_mode", now);
    if (!code) *pending = *now;
    return code;
}
int nvmlDeviceGetMemoryErrorCounter(device_t device, unsigned error, unsigned counter,
                                    unsigned location, u64 *value) {
    char key[64];
    ENTER(device);
    snprintf(key, sizeof key, "ecc:%s:%s:%s", location == 2 ? "dram" : location == 7 ? "sram" : "other",
             counter ? "aggregate" : "volatile", error ? "uncorrected" : "corrected");
    return number(device, key, value);
}

int nvmlDeviceGetRemappedRows(device_t device, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failure) {
    ENTER(device);
    int code = small(device, "remaps_correctable", corrected);
    if (!code) code = small(device, "remaps_uncorrectable", uncorrected);
    if (!code) code = small(device, "remap_pending", pending);
    return code ? code : small(device, "remap_failure", failure);
}
int nvmlDeviceGetRowRemapperHistogram(device_t device, unsigned banks[5]) {
    static const char *keys[5] = {"banks:max", "banks:high", "banks:partial", "banks:low", "banks:none"};
    ENTER(device);
    for (int i = 0; i < 5; i++)
        if (small(device, keys[i], &banks[i])) return NOT_SUPPORTED;
    return SUCCESS;
}
int nvmlDeviceGetRetiredPages(device_t device, unsigned cause, unsigned *count, u64 *pages) {
    unsigned number_of;
    ENTER(device);
    int code = small(device, cause ? "retired:double" : "retired:single", &number_of);
    if (code) return code;
    if (*count < number_of) { *count = number_of; return INSUFFICIENT_SIZE; }
    for (unsigned i = 0; i < number_of; i++) pages[i] = 0x1000ULL * (i + 1);
    *count = number_of;
    return SUCCESS;
}
SMALL(nvmlDeviceGetRetiredPagesPendingStatus, "retired:pending")

typedef struct { unsigned field, scope; long long stamp, latency; unsigned type, code;
                 union { double d; unsigned u; u64 ull; } value; } field_t;
int nvmlDeviceGetFieldValues(device_t device, int count, field_t *fields) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        char id[32];
        snprintf(id, sizeof id, fields[i].scope ? "%u:%u" : "%u", fields[i].field, fields[i].scope);
        const char *code = find2(gpu_of(device), "fieldcode", id);
        const char *value = find2(gpu_of(device), "field", id);
        if (!value && !code) {  /* a line for all scopes */
            snprintf(id, sizeof id, "%u:*", fields[i].field);
            value = find2(gpu_of(device), "field", id);
        }
        fields[i].code = code ? (unsigned)atoi(code) : value ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 3;
        fields[i].value.ull = value ? strtoull(value, NULL, 0) : 0xdeadbeef;
    }
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *state) {
    char key[32];
    unsigned links;
    ENTER(device);
    int code = small(device, "links", &links);
    if (code) return code;
    if (link >= links) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "link:%u", link);
    code = small(device, key, state);
    if (code) code = small(device, "link:*", state);
    return code;
}
int nvmlDeviceGetNvLinkErrorCounter(device_t device, unsigned link, unsigned counter, u64 *value) {
    char key[32];
    ENTER(device);
    snprintf(key, sizeof key, "linkerror:%u:%u", link, counter);
    int code = number(device, key, value);
    if (code) {
        snprintf(key, sizeof key, "linkerror:*:%u", counter);
        code = number(device, key, value);
    }
    return code;
}

SMALL(nvmlDeviceGetCurrPcieLinkWidth, "pcie:width")
SMALL(nvmlDeviceGetMaxPcieLinkWidth, "pcie:width_max")
SMALL(nvmlDeviceGetCurrPcieLinkGeneration, "pcie:gen")
SMALL(nvmlDeviceGetMaxPcieLinkGeneration, "pcie:gen_max")
SMALL(nvmlDeviceGetPowerUsage, "power_mw")
SMALL(nvmlDeviceGetPersistenceMode, "persistence")
LARGE(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks")

int nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *value) {
    ENTER(device);
    return sensor ? NOT_SUPPORTED : small(device, "temperature", value);
}
int nvmlDeviceGetTemperatureThreshold(device_t device, unsigned which, unsigned *value) {
    char key[32];
    ENTER(device);
    snprintf(key, sizeof key, "threshold:%u", which);
    return small(device, key, value);
}
int nvmlDeviceGetUtilizationRates(device_t device, unsigned rates[2]) {
    ENTER(device);
    rates[1] = 0;
    return small(device, "utilisation", &rates[0]);
}
SMALL(nvmlDeviceGetNumaNodeId, "numa")
int nvmlDeviceGetMigMode(device_t device, unsigned *now, unsigned *pending) {
    ENTER(device);
    int code = small(device, "mig", now);
    if (!code) *pending = *now;
    return code;
}

/* `memory` is the used bytes, `processes` a list of PID:BYTES parted by commas; BYTES may be -1. */
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } process_t;
static int processes(device_t device, unsigned *count, process_t *found) {
    const char *text = find(gpu_of(device), "processes");
    unsigned size = 0;
    if (!text) return NOT_SUPPORTED;
    for (const char *at = text; at && strchr(at, ':'); at = strchr(at, ',')) {
        if (*at == ',') at++;
        if (size < *count) {
            process_t one = {(unsigned)atoi(at), strtoull(strchr(at, ':') + 1, NULL, 0), ~0u, ~0u};
            found[size] = one;
        }
        size++;
    }
    int code = size > *count ? INSUFFICIENT_SIZE : SUCCESS;
    *count = size;
    return code;
}
int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_t *found) {
    ENTER(device);
    return processes(device, count, found);
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_t;
int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_t *memory) {
    ENTER(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    memory->total = 80ULL << 30;
    memory->reserved = 600ULL << 20;
    int code = number(device, "memory", &memory->used);
    memory->free = memory->total - memory->used;
    return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *found) {
    ENTER(device);
    return processes(device, count, found);
}
LARGE(nvmlDeviceGetCurrentClocksEventReasons, "clocks")

typedef struct { unsigned version; u64 agg_parity, agg_secded, agg_cor, vol_parity, vol_secded, vol_cor,
                 buckets[5]; unsigned threshold; } sram_t;
int nvmlDeviceGetSramEccErrorStatus(device_t device, sram_t *sram) {
    ENTER(device);
    if (sram->version != (sizeof *sram | 1u << 24)) return VERSION_MISMATCH;
    if (small(device, "sram:threshold", &sram->threshold)) return NOT_SUPPORTED;
    number(device, "sram:aggregate:parity", &sram->agg_parity);
    number(device, "sram:aggregate:secded", &sram->agg_secded);
    number(device, "sram:volatile:parity", &sram->vol_parity);
    number(device, "sram:volatile:secded", &sram->vol_secded);
    return SUCCESS;
}

typedef struct { unsigned version; int margin; } margin_t;
int nvmlDeviceGetMarginTemperature(device_t device, margin_t *margin) {
    ENTER(device);
    if (margin->version != (sizeof *margin | 1u << 24)) return VERSION_MISMATCH;
    const char *value = find(gpu_of(device), "margin");
    if (!value) return NOT_SUPPORTED;
    margin->margin = atoi(value);
    return SUCCESS;
}

typedef struct { unsigned version; unsigned char uuid[16]; unsigned status, clique;
                 unsigned char state; unsigned mask; } fabric_t;
int nvmlDeviceGetGpuFabricInfoV(device_t device, fabric_t *fabric) {
    unsigned state;
    ENTER(device);
    if (fabric->version != (sizeof *fabric | 2u << 24)) return VERSION_MISMATCH;
    int code = small(device, "fabric:state", &state);
    if (code) return code;
    fabric->state = (unsigned char)state;
    small(device, "fabric:status", &fabric->status);
    small(device, "fabric:mask", &fabric->mask);
    return SUCCESS;
}

typedef struct { unsigned version, channel, tpc; } repair_t;
int nvmlDeviceGetRepairStatus(device_t device, repair_t *repair) {
    ENTER(device);
    if (repair->version != (sizeof *repair | 1u << 24)) return VERSION_MISMATCH;
    int code = small(device, "repair:channel", &repair->channel);
    return code ? code : small(device, "repair:tpc", &repair->tpc);
}

typedef struct { unsigned version, flag; } unrepairable_t;
int nvmlDeviceGetUnrepairableMemoryFlag_v1(device_t device, unrepairable_t *memory) {
    ENTER(device);
    if (memory->version != (sizeof *memory | 1u << 24)) return VERSION_MISMATCH;
    return small(device, "unrepairable", &memory->flag);
}
#endif

// A stand-in for libnvidia-ml.so.1: the functions of NVIDIA's management library that this project calls, with the
// machine that the file $FAKE_NVML describes. Types and numbers follow the library's API reference. Lines of the file:
//
//   driver <version> <CUDA version × 1000 + minor × 10>
//   gpu <UUID> <PCI bus> <memory MiB> <cores> <ok|ecc|pending|failed|lost|reset|reboot> <name>
//   mig <UUID> <memory MiB> <profile>     a MIG device of the GPU before; turns MIG on
//   link <bus of the other GPU> <count>   NVLinks of the GPU before; the bus 0 is a switch
//   hang                                  the library hangs for ever when it is started
//   fail                                  the library cannot be started

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { MAX_GPUS = 16, MAX_PARTS = 8, MAX_LINKS = 18 };

struct device {
	char uuid[80], name[96], health[16];
	unsigned bus, cores, links[MAX_LINKS], link_count, mig_count;
	unsigned long long memory;
	struct device *mig[MAX_PARTS];
	/* Of a MIG device, which is one instance for computing in one instance of the GPU: */
	struct device *gpu;
	unsigned index;
};

struct pci {
	char legacy[16];
	unsigned domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
};

static struct device gpus[MAX_GPUS], parts[MAX_GPUS * MAX_PARTS];
static unsigned gpu_count, part_count;
static char driver[80];
static int cuda;

static int is_lost(struct device *d) { return !strcmp(d->health, "lost"); }

static int text(char *to, unsigned size, const char *from) {
	snprintf(to, size, "%s", from);
	return SUCCESS;
}

static void add_gpu(const char *line) {
	struct device *d = &gpus[gpu_count++];
	sscanf(line, "gpu %79s %x %llu %u %15s %95[^\n]", d->uuid, &d->bus, &d->memory, &d->cores, d->health, d->name);
}

static void add_mig(struct device *gpu, const char *line) {
	struct device *d = &parts[part_count++];
	char profile[32] = "";
	sscanf(line, "mig %79s %llu %31s", d->uuid, &d->memory, profile);
	snprintf(d->name, sizeof d->name, "%.40s MIG %s", gpu->name, profile);
	d->gpu = gpu;
	d->index = gpu->mig_count;
	gpu->mig[gpu->mig_count++] = d;
}

static void add_links(struct device *gpu, const char *line) {
	unsigned bus = 0, count = 0;
	sscanf(line, "link %x %u", &bus, &count);
	while (count-- && gpu->link_count < MAX_LINKS)
		gpu->links[gpu->link_count++] = bus;
}

int nvmlInit_v2(void) {
	const char *path = getenv("FAKE_NVML");
	FILE *f = path ? fopen(path, "r") : NULL;
	char line[256];
	gpu_count = part_count = 0; /* it may be started again after a shutdown */
	memset(gpus, 0, sizeof gpus);
	memset(parts, 0, sizeof parts);
	if (!f)
		return DRIVER_NOT_LOADED;
	while (fgets(line, sizeof line, f)) {
		if (!strncmp(line, "hang", 4))
			for (;;)
				pause();
		if (!strncmp(line, "fail", 4)) {
			fclose(f);
			return UNKNOWN;
		}
		if (!strncmp(line, "driver ", 7))
			sscanf(line, "driver %79s %d", driver, &cuda);
		if (!strncmp(line, "gpu ", 4) && gpu_count < MAX_GPUS)
			add_gpu(line);
		if (!strncmp(line, "mig ", 4) && gpu_count && gpus[gpu_count - 1].mig_count < MAX_PARTS)
			add_mig(&gpus[gpu_count - 1], line);
		if (!strncmp(line, "link ", 5) && gpu_count)
			add_links(&gpus[gpu_count - 1], line);
	}
	fclose(f);
	return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "failed"; }

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(to, size, driver); }

int nvmlSystemGetCudaDriverVersion(int *version) {
	*version = cuda;
	return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
	*count = gpu_count;
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **d) {
	if (index >= gpu_count)
		return INVALID_ARGUMENT;
	*d = &gpus[index];
	return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **d) {
	for (unsigned i = 0; i < gpu_count; i++)
		if (!strcmp(gpus[i].uuid, uuid)) {
			*d = &gpus[i];
			return SUCCESS;
		}
	for (unsigned i = 0; i < part_count; i++)
		if (!strcmp(parts[i].uuid, uuid)) {
			*d = &parts[i];
			return SUCCESS;
		}
	return NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(struct device *d, unsigned *is) {
	*is = d >= parts && d < parts + part_count;
	return SUCCESS;
}

int nvmlDeviceGetIndex(struct device *d, unsigned *index) {
	*index = d->gpu ? d->index : d - gpus;
	return SUCCESS;
}

int nvmlDeviceGetMinorNumber(struct device *d, unsigned *minor) { return nvmlDeviceGetIndex(d, minor); }

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *d, struct device **gpu) {
	*gpu = d->gpu;
	return SUCCESS;
}

/* Instances of a GPU have the numbers from 1 on, each has one for computing with the number 0, and all have one profile. */

struct instance_info {
	struct device *gpu;
	unsigned id, profile, start, size;
};

struct compute_info {
	struct device *gpu, *instance;
	unsigned id, profile, start, size;
};

struct attributes {
	unsigned counts[8];
	unsigned long long memory;
};

int nvmlDeviceGetGpuInstanceId(struct device *d, unsigned *id) {
	*id = d->index + 1;
	return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(struct device *d, unsigned *id) {
	*id = 0;
	return SUCCESS;
}

int nvmlDeviceGetAttributes_v2(struct device *d, struct attributes *a) {
	memset(a, 0, sizeof *a);
	a->memory = d->memory;
	return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(struct device *gpu, unsigned id, struct device **instance) {
	if (id == 0 || id > gpu->mig_count)
		return NOT_FOUND;
	*instance = gpu->mig[id - 1];
	return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstanceById(struct device *instance, unsigned id, struct device **compute) {
	*compute = instance;
	return SUCCESS;
}

int nvmlGpuInstanceGetInfo(struct device *instance, struct instance_info *info) {
	memset(info, 0, sizeof *info);
	info->gpu = instance->gpu;
	info->id = instance->index + 1;
	return SUCCESS;
}

int nvmlComputeInstanceGetInfo_v2(struct device *compute, struct compute_info *info) {
	memset(info, 0, sizeof *info);
	info->gpu = compute->gpu;
	info->instance = compute;
	return SUCCESS;
}

int nvmlDeviceGetGpuInstanceProfileInfo(struct device *gpu, unsigned profile, unsigned *info) {
	info[0] = 0;
	return profile ? NOT_SUPPORTED : SUCCESS;
}

int nvmlGpuInstanceGetComputeInstanceProfileInfo(struct device *instance, unsigned profile, unsigned engine,
                                                 unsigned *info) {
	info[0] = 0;
	return profile || engine ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetUUID(struct device *d, char *to, unsigned size) { return text(to, size, d->uuid); }

int nvmlDeviceGetName(struct device *d, char *to, unsigned size) { return text(to, size, d->name); }

static int fill_pci(struct pci *p, unsigned bus) {
	memset(p, 0, sizeof *p);
	p->bus = bus;
	snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", bus);
	return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci *p) { return fill_pci(p, d->bus); }

int nvmlDeviceGetMemoryInfo(struct device *d, unsigned long long memory[3]) {
	if (is_lost(d))
		return GPU_IS_LOST;
	memory[0] = memory[1] = d->memory << 20;
	memory[2] = 0;
	return SUCCESS;
}

int nvmlDeviceGetNumGpuCores(struct device *d, unsigned *cores) {
	*cores = d->cores;
	return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
	*corrected = *uncorrected = 0;
	*pending = !strcmp(d->health, "pending");
	*failed = !strcmp(d->health, "failed");
	return SUCCESS;
}

struct field_value {
	unsigned id, scope;
	long long at, latency;
	unsigned type;
	int code;
	union {
		unsigned number;
		double widest;
	} value;
};

/* 230 is NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, whose value 1 asks for a reset, and 2 for a reboot of the node. */
int nvmlDeviceGetFieldValues(struct device *d, int count, struct field_value *values) {
	for (int i = 0; i < count; i++) {
		values[i].code = values[i].id == 230 ? SUCCESS : NOT_SUPPORTED;
		values[i].value.number = !strcmp(d->health, "reset") + 2 * !strcmp(d->health, "reboot");
	}
	return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *count) {
	*count = type == 1 && counter == 0 && !strcmp(d->health, "ecc");
	return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(struct device *d, unsigned long long *reasons) {
	/* 64 is the hardware's thermal slowdown, 4 the power limit. */
	*reasons = 4 | (strcmp(d->health, "hot") ? 0 : 64);
	return SUCCESS;
}

/* Of the programs that run the fake machine, the last one to set the mode leaves it in the file <machine>.mode. */
int nvmlDeviceSetComputeMode(struct device *d, unsigned mode) {
	char path[512];
	FILE *f;
	snprintf(path, sizeof path, "%s.mode", getenv("FAKE_NVML"));
	if (!(f = fopen(path, "w")))
		return UNKNOWN;
	fprintf(f, "%s %u", d->uuid, mode);
	return fclose(f) ? UNKNOWN : SUCCESS;
}

int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending) {
	*current = *pending = d->mig_count > 0;
	return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *count) {
	*count = MAX_PARTS;
	return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **part) {
	if (index >= d->mig_count)
		return NOT_FOUND;
	*part = d->mig[index];
	return SUCCESS;
}

int nvmlDeviceGetNvLinkState(struct device *d, unsigned link, int *active) {
	if (link >= MAX_LINKS)
		return INVALID_ARGUMENT;
	*active = link < d->link_count;
	return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *d, unsigned link, struct pci *p) {
	return fill_pci(p, d->links[link]);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *d, unsigned link, int *type) {
	*type = d->links[link] ? 0 : 2;
	return SUCCESS;
}

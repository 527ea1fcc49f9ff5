// compute uses the first GPU that CUDA finds, through its driver API and with a kernel that the driver compiles, as
// CUDA's programs do. Its argument says what for:
//   check  compute once, and print what the GPU is
//   hold   check, then compute until the process ends
//   limit  check, then allocate one GiB after the other, and print how many the GPU gave
//   fault  check, then use memory that is not the program's, and print the code of the fault
// The declarations are those of the reference of CUDA's driver API.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address; // CUdeviceptr
enum { count = 1 << 20, block = 256 };

static const char kernel[] =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry square(.param .u64 data)\n{\n"
	"  .reg .b32 %r<6>;\n  .reg .b64 %d<4>;\n"
	"  ld.param.u64 %d1, [data];\n  cvta.to.global.u64 %d2, %d1;\n"
	"  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n  mov.u32 %r3, %tid.x;\n  mad.lo.s32 %r4, %r1, %r2, %r3;\n"
	"  mul.wide.u32 %d3, %r4, 4;\n  add.s64 %d2, %d2, %d3;\n"
	"  ld.global.u32 %r5, [%d2];\n  mul.lo.u32 %r5, %r5, %r5;\n  st.global.u32 [%d2], %r5;\n  ret;\n}\n";

static void *library;

static void *find(const char *name) {
	void *f = dlsym(library, name);
	if (!f) {
		printf("%s\n", dlerror());
		exit(1);
	}
	return f;
}

// CALL calls a function of the library, and ends the program with the code that is not 0.
#define CALL(name, types, ...) do { \
	int code = ((int (*) types)find(name))(__VA_ARGS__); \
	if (code) { printf("%s: code %d\n", name, code); exit(1); } \
} while (0)

static void *square;

static void compute(address data) {
	static unsigned in[count], out[count];
	for (unsigned n = 0; n < count; n++)
		in[n] = n;
	void *args[] = {&data};
	CALL("cuMemcpyHtoD_v2", (address, const void *, size_t), data, in, sizeof in);
	CALL("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
		void **), square, count / block, 1, 1, block, 1, 1, 0, NULL, args, NULL);
	CALL("cuMemcpyDtoH_v2", (void *, address, size_t), out, data, sizeof out);
	for (unsigned n = 0; n < count; n++)
		if (out[n] != n * n) {
			printf("the square of %u is not %u\n", n, out[n]);
			exit(1);
		}
}

int main(int argc, char **argv) {
	const char *purpose = argc > 1 ? argv[1] : "check";
	setvbuf(stdout, NULL, _IOLBF, 0);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		printf("%s\n", dlerror());
		return 1;
	}
	int device, gpus;
	void *context, *module;
	unsigned char id[16];
	char name[128];
	size_t memory;
	CALL("cuInit", (unsigned), 0);
	CALL("cuDeviceGetCount", (int *), &gpus);
	CALL("cuDeviceGet", (int *, int), &device, 0);
	CALL("cuDeviceGetUuid_v2", (void *, int), id, device);
	CALL("cuDeviceGetName", (char *, int, int), name, sizeof name, device);
	CALL("cuDeviceTotalMem_v2", (size_t *, int), &memory, device);
	CALL("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, device);
	CALL("cuModuleLoadData", (void **, const void *), &module, kernel);
	CALL("cuModuleGetFunction", (void **, void *, const char *), &square, module, "square");
	address data;
	CALL("cuMemAlloc_v2", (address *, size_t), &data, count * sizeof(unsigned));
	compute(data);
	printf("computed on %d GPUs: ", gpus);
	for (int n = 0; n < 16; n++)
		printf("%s%02x", n == 4 || n == 6 || n == 8 || n == 10 ? "-" : "", id[n]);
	printf(" %zu %s\n", memory, name);
	if (!strcmp(purpose, "hold"))
		for (;;)
			compute(data);
	if (!strcmp(purpose, "limit")) {
		size_t free, total;
		CALL("cuMemGetInfo_v2", (size_t *, size_t *), &free, &total);
		printf("%zu of %zu bytes are free\n", free, total);
		int (*allocate)(address *, size_t) = (int (*)(address *, size_t))find("cuMemAlloc_v2");
		int code, gib = 0;
		while (!(code = allocate(&data, 1ul << 30)))
			gib++;
		printf("code %d after %d GiB\n", code, gib);
	}
	if (!strcmp(purpose, "fault")) {
		int (*synchronize)(void) = (int (*)(void))find("cuCtxSynchronize");
		address nowhere[] = {16, 1ull << 60};
		int code = 0;
		for (int n = 0; n < 2 && !code; n++) {
			void *args[] = {&nowhere[n]};
			CALL("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
				void **, void **), square, 1, 1, 1, block, 1, 1, 0, NULL, args, NULL);
			code = synchronize();
			printf("address %llx: code %d\n", nowhere[n], code);
		}
	}
	return 0;
}

// count prints how many GPUs CUDA finds: it loads libcuda.so.1 as CUDA's programs do.

#include <dlfcn.h>
#include <stdio.h>

int main(void) {
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		printf("%s\n", dlerror());
		return 1;
	}
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
	int (*get_count)(int *) = (int (*)(int *))dlsym(library, "cuDeviceGetCount");
	int count = -1, code = init(0);
	if (!code)
		code = get_count(&count);
	printf("code %d, %d GPUs\n", code, count);
	return code;
}

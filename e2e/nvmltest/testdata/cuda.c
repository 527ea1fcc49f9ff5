// A stand-in for libcuda.so.1: the functions of CUDA's driver API that the tests call. It counts the GPUs as NVIDIA's does:
// by the device nodes that it can open. A node that the cgroup allows and that has no driver counts.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static int usable(const char *path) {
	int fd = open(path, O_RDWR);
	if (fd >= 0)
		close(fd);
	return fd >= 0 || errno == ENXIO || errno == ENODEV;
}

int cuInit(unsigned flags) { return usable("/dev/nvidiactl") && usable("/dev/nvidia-uvm") ? 0 : 100; }

int cuDeviceGetCount(int *count) {
	char path[32];
	*count = 0;
	for (int i = 0; i < 16; i++) {
		snprintf(path, sizeof path, "/dev/nvidia%d", i);
		*count += usable(path);
	}
	return 0;
}

// Takes the place of the function of NVIDIA's library that changes a setting of a GPU, and leaves the setting as it is.

int nvmlDeviceSetComputeMode(void *device, int mode) { return 0; }

//go:build cgo

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/lookup"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// library is NVIDIA's management library: that of the system, or of the driver below another root.
func library(root string) nvml.Interface {
	if root == "/" {
		return nvml.New()
	}
	found, err := lookup.NewLibraryLocator(lookup.WithRoot(root), lookup.WithLogger(silent{})).Locate("libnvidia-ml.so.1")
	if err != nil || len(found) == 0 {
		return nvml.New(nvml.WithLibraryPath(filepath.Join(root, "libnvidia-ml.so.1"))) // its error names the path
	}
	return nvml.New(nvml.WithLibraryPath(found[0]))
}

// executable is a program of the driver below root: on the search path, or where drivers are installed.
func executable(root, name string) (string, error) {
	found, err := lookup.NewExecutableLocator(silent{}, root).Locate(name)
	if err != nil || len(found) == 0 {
		return "", fmt.Errorf("the driver below %s has no %s: %w", root, name, err)
	}
	return found[0], nil
}

// cdiSpec describes what containers need to use these GPUs or MIG devices. Of NVIDIA's hooks it has those that only
// name links and directories, which the agent makes without running them. Sockets of the host's daemons are left out.
func cdiSpec(root string, ids []string) (*specs.Spec, error) {
	namer, err := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err != nil {
		return nil, err
	}
	devices := "/"
	if _, err := os.Stat(filepath.Join(root, "dev/nvidiactl")); err == nil {
		devices = root
	}
	driver, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(library(root)),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithDevRoot(devices),
		nvcdi.WithDeviceNamers(namer),
		nvcdi.WithLogger(silent{}),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils, nvcdi.FeatureDisableIPCDiscoverer,
			nvcdi.FeatureNoAdditionalGIDsForDeviceNodes),
		nvcdi.WithDisabledHooks(nvcdi.AllHooks),
		nvcdi.WithEnabledHooks(nvcdi.CreateSymlinksHook, nvcdi.UpdateLDCacheHook),
	)
	if err != nil {
		return nil, err
	}
	found, err := driver.GetDeviceSpecsByID(ids...)
	if err != nil {
		return nil, fmt.Errorf("describe the GPUs: %w", err)
	}
	common, err := driver.GetCommonEdits()
	if err != nil {
		return nil, fmt.Errorf("describe the driver: %w", err)
	}
	return &specs.Spec{
		Version: specs.CurrentVersion, Kind: "nvidia.com/gpu", Devices: found, ContainerEdits: *common.ContainerEdits,
	}, nil
}

// silent is a logger that drops everything: what matters is an error.
type silent struct{}

func (silent) Debugf(string, ...any)   {}
func (silent) Errorf(string, ...any)   {}
func (silent) Infof(string, ...any)    {}
func (silent) Warningf(string, ...any) {}
func (silent) Tracef(string, ...any)   {}

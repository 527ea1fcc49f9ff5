package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// targetsCommand says where an app fits before it is launched.
func (a *app) targetsCommand() *cobra.Command {
	var (
		version   string
		volumes   []string
		resources *resourceChoice
	)
	columns := []column[client.Target]{
		{"KIND", func(t client.Target) string { return string(t.Kind) }},
		{"ID", func(t client.Target) string { return t.ID }},
		{"FITS", func(t client.Target) string {
			if t.Fits {
				return "yes"
			}
			return "no (" + string(t.Reason) + ")"
		}},
		{"FREE CPU MILLIS", func(t client.Target) string { return strconv.FormatInt(t.FreeCPUMillis, 10) }},
		{"FREE MEMORY MIB", func(t client.Target) string { return strconv.FormatInt(t.FreeMemoryMib, 10) }},
		{"FREE ACCELERATORS", func(t client.Target) string { return strconv.Itoa(int(t.FreeAccelerators)) }},
	}
	c := projectListing(a, "targets APP", "Where an app fits, and why it does not fit elsewhere", cobra.ExactArgs(1),
		columns, func(ctx context.Context, s *session, project string, args []string,
			_ string,
		) (_ *http.Response, err error) {
			v := version
			if v == "" {
				if v, err = s.latestVersion(ctx, args[0]); err != nil {
					return nil, err
				}
			}
			chosen := resources.chosen()
			ids := make([]string, 0, len(volumes))
			for _, volume := range volumes {
				id, err := s.volumeID(ctx, project, volume)
				if err != nil {
					return nil, err
				}
				ids = append(ids, id)
			}
			return s.hub.ListTargets(ctx, project, args[0], v, &client.ListTargetsParams{
				Accelerators:       max(resources.accelerators, 0),
				AcceleratorModel:   chosen.AcceleratorModel,
				AcceleratorSharing: chosen.AcceleratorSharing,
				CPUMillis:          chosen.CPUMillis,
				MemoryMib:          chosen.MemoryMib,
				Requirement:        resources.requirements,
				VolumeID:           ids,
			}, s.editors()...)
		})
	c.Flags().StringVar(&version, "version", "", "version (default: the newest active one)")
	c.Flags().StringArrayVar(&volumes, "volume", nil, "volume of the project that the instance is to have, by id or name "+
		"(repeatable)")
	resources = placementFlags(c.Flags())
	return c
}

const (
	sharingUsage = "one slice of a GPU that other instances of the org use as well: mps or time_slices, where the " +
		"version allows it"
	cpuUsage         = "CPU in thousandths of a core, within the version's bounds (0: as it is, or the version's default)"
	memoryUsage      = "memory in MiB, within the version's bounds (0: as it is, or the version's default)"
	requirementUsage = "Python package of the environment, as NAME[EXTRA]>=VERSION (repeatable)"
)

// resourceChoice is what the flags of resourceFlags name.
type resourceChoice struct {
	client.InstanceResources

	accelerators int32
	// hostPorts are NAME=PORT.
	hostPorts []string
	// volumeSizes are NAME=MIB.
	volumeSizes []string
	// requirements, and the lines of the file requirementsFile, are the environment.
	requirements     []string
	requirementsFile string
	noEnvironment    bool
	// projectVolumes are NAME=VOLUME.
	projectVolumes []string
}

func resourceFlags(f *pflag.FlagSet) *resourceChoice {
	r := placementFlags(f)
	f.Int64Var(&r.DiskMib, "disk-mib", 0, "what a container may write to its own file system, in MiB")
	f.Int64Var(&r.ShmMib, "shm-mib", 0, "size of /dev/shm in MiB")
	f.StringArrayVar(&r.hostPorts, "host-port", nil, "port of the node for a port of the version, as NAME=PORT; 0 leaves "+
		"it to the node (repeatable)")
	f.StringArrayVar(&r.volumeSizes, "volume-size", nil, "size of a volume of the version in MiB, as NAME=MIB "+
		"(repeatable)")
	f.StringVar(&r.requirementsFile, "requirements-file", "", "file with Python packages, one a line; - for stdin")
	f.StringArrayVar(&r.projectVolumes, "volume", nil, "volume of the project for a volume of the version, as "+
		"NAME=VOLUME, the second by id or name (repeatable)")
	return r
}

// placementFlags are those that decide where an instance fits.
func placementFlags(f *pflag.FlagSet) *resourceChoice {
	r := &resourceChoice{}
	f.Int32Var(&r.accelerators, "accelerators", -1, "number of accelerators; 0 for none (-1: as it is, or the default)")
	f.StringVar(&r.AcceleratorModel, "accelerator-model", "", "model of the accelerators, as nodes report it")
	f.StringVar((*string)(&r.AcceleratorSharing), "accelerator-sharing", "", sharingUsage)
	f.Int64Var(&r.CPUMillis, "cpu-millis", 0, cpuUsage)
	f.Int64Var(&r.MemoryMib, "memory-mib", 0, memoryUsage)
	f.StringArrayVar(&r.requirements, "requirement", nil, requirementUsage)
	return r
}

func (r *resourceChoice) chosen() client.InstanceResources {
	out := r.InstanceResources
	if r.accelerators >= 0 {
		out.Accelerators = &r.accelerators
	}
	return out
}

func (r *resourceChoice) portsAndVolumes(ctx context.Context, s *session, project string) (client.PortChoices,
	client.VolumeChoices, error,
) {
	ports, err := r.ports()
	if err != nil {
		return nil, nil, err
	}
	volumes, err := r.volumes()
	if err != nil {
		return nil, nil, err
	}
	for _, text := range r.projectVolumes {
		name, volume, _ := strings.Cut(text, "=")
		if name == "" || volume == "" {
			return nil, nil, usage(fmt.Errorf("--volume must look like NAME=VOLUME, not %q", text))
		}
		id, err := s.volumeID(ctx, project, volume)
		if err != nil {
			return nil, nil, err
		}
		volumes = append(volumes, client.VolumeChoice{Name: name, VolumeID: id})
	}
	return ports, volumes, nil
}

// ports reads the ports of the node that were chosen.
func (r *resourceChoice) ports() (client.PortChoices, error) {
	var chosen client.PortChoices
	for _, text := range r.hostPorts {
		name, number, _ := strings.Cut(text, "=")
		port, err := strconv.ParseUint(number, 10, 16)
		if err != nil || name == "" {
			return nil, usage(fmt.Errorf("--host-port must look like NAME=PORT, not %q", text))
		}
		chosen = append(chosen, client.PortChoice{Name: name, HostPort: int32(port)})
	}
	return chosen, nil
}

// volumes reads the chosen sizes of volumes.
func (r *resourceChoice) volumes() (client.VolumeChoices, error) {
	var chosen client.VolumeChoices
	for _, text := range r.volumeSizes {
		name, size, _ := strings.Cut(text, "=")
		mebibytes, err := strconv.ParseInt(size, 10, 64)
		if err != nil || name == "" || mebibytes <= 0 {
			return nil, usage(fmt.Errorf("--volume-size must look like NAME=MIB, not %q", text))
		}
		chosen = append(chosen, client.VolumeChoice{Name: name, SizeMib: mebibytes})
	}
	return chosen, nil
}

// environment reads the Python packages that were chosen; the zero value keeps what there is.
func (r *resourceChoice) environment(stdin io.Reader) (client.EnvironmentChoice, error) {
	chosen := client.EnvironmentChoice{Requirements: r.requirements}
	if r.requirementsFile != "" {
		text, err := readInput(stdin, r.requirementsFile)
		if err != nil {
			return chosen, usage(err)
		}
		for line := range strings.Lines(string(text)) {
			line, _, _ = strings.Cut(line, "#")
			if line = strings.TrimSpace(line); line != "" {
				chosen.Requirements = append(chosen.Requirements, line)
			}
		}
	}
	if r.noEnvironment {
		if len(chosen.Requirements) > 0 {
			return chosen, usage(errors.New("--no-environment leaves no room for --requirement"))
		}
		chosen.Requirements = []string{}
	}
	return chosen, nil
}

func readInput(stdin io.Reader, path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(path)
}

package cli

import (
	"context"
	"fmt"
	"net/http"
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
			return s.hub.ListTargets(ctx, project, args[0], v, &client.ListTargetsParams{
				Accelerators:     max(resources.accelerators, 0),
				AcceleratorModel: chosen.AcceleratorModel,
				CPUMillis:        chosen.CPUMillis,
				MemoryMib:        chosen.MemoryMib,
			}, s.editors()...)
		})
	c.Flags().StringVar(&version, "version", "", "version (default: the newest active one)")
	resources = placementFlags(c.Flags())
	return c
}

const (
	cpuUsage    = "CPU in thousandths of a core, within the version's bounds (0: as it is, or the version's default)"
	memoryUsage = "memory in MiB, within the version's bounds (0: as it is, or the version's default)"
)

// resourceChoice is what the flags of resourceFlags name.
type resourceChoice struct {
	client.InstanceResources

	accelerators int32
	// hostPorts are NAME=PORT.
	hostPorts []string
}

func resourceFlags(f *pflag.FlagSet) *resourceChoice {
	r := placementFlags(f)
	f.Int64Var(&r.DiskMib, "disk-mib", 0, "what a container may write to its own file system, in MiB")
	f.Int64Var(&r.ShmMib, "shm-mib", 0, "size of /dev/shm in MiB")
	f.StringArrayVar(&r.hostPorts, "host-port", nil, "port of the node for a port of the version, as NAME=PORT; 0 leaves "+
		"it to the node (repeatable)")
	return r
}

// placementFlags are those that decide where an instance fits.
func placementFlags(f *pflag.FlagSet) *resourceChoice {
	r := &resourceChoice{}
	f.Int32Var(&r.accelerators, "accelerators", -1, "number of accelerators; 0 for none (-1: as it is, or the default)")
	f.StringVar(&r.AcceleratorModel, "accelerator-model", "", "model of the accelerators, as nodes report it")
	f.Int64Var(&r.CPUMillis, "cpu-millis", 0, cpuUsage)
	f.Int64Var(&r.MemoryMib, "memory-mib", 0, memoryUsage)
	return r
}

func (r *resourceChoice) chosen() client.InstanceResources {
	out := r.InstanceResources
	if r.accelerators >= 0 {
		out.Accelerators = &r.accelerators
	}
	return out
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

package runtime

import (
	"context"
	"os"
	"path/filepath"

	"github.com/moby/sys/signal"

	"github.com/gpuaas/gpuaas/protocol"
)

// configFile is the instance's config below configMount, which is in /run: a file system in memory.
const (
	configMount = "/run/gpuaas"
	configFile  = "config.json"
)

// writeConfig replaces the file by a rename: the app reads the old content or the new one, whole.
func writeConfig(dir, json string) error {
	if err := makeDir(dir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(dir, configFile)
	if err := writeFile(path+".new", []byte(json), 0o444); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// DeliverConfig replaces the config file of a running container, and sends the signal that the config names to its
// first process.
func (r *Runtime) DeliverConfig(ctx context.Context, id string, config *protocol.Config) error {
	if err := writeConfig(r.files(id).configDir, config.GetJson()); err != nil {
		return err
	}
	return r.tell(ctx, id, config.GetOnChange(), config.GetSignal())
}

// tell sends the signal that announces a change, if any, to a container's first process.
func (r *Runtime) tell(ctx context.Context, id string, onChange protocol.Config_OnChange, name string) error {
	if onChange != protocol.Config_SIGNAL {
		return nil
	}
	number, err := signal.ParseSignal(name)
	if err != nil {
		return badSpec("The workload names no signal: " + name + ".")
	}
	return r.signal(r.ns(ctx), id, number, false)
}

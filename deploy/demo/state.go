package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// config is what a demo is made from.
type config struct {
	Dir, RunDir, Bin, Source string
	App                      string
	Listen                   string
	Bridge, PodCIDR          string
	PortRange                string
	// Containerd is used where it serves; elsewhere the demo starts one of its own.
	Containerd string
}

func defaults() *config {
	return &config{
		Dir: "/var/lib/gpuaas-demo", RunDir: "/run/gpuaas-demo", Bin: "bin", Source: ".", App: "demo",
		Listen: "127.0.0.1:0", Bridge: "gpuaas-demo0", PodCIDR: "10.213.0.0/24", PortRange: "21000-21999",
		Containerd: devcluster.SystemContainerd,
	}
}

// state is what `down` needs to know, written before anything of it exists or right after.
type state struct {
	Config        config
	Agent         devcluster.AgentConfig
	OwnContainerd bool
	Processes     []process
}

// process identifies one process: a reused pid has other start ticks.
type process struct {
	Name       string
	PID        int
	StartTicks uint64
}

func stateFile(dir string) string { return filepath.Join(dir, "demo.json") }

func (s *state) save() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	tmp := stateFile(s.Config.Dir) + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, stateFile(s.Config.Dir))
}

func (s *state) started(name string, pid int) error {
	ticks, err := devcluster.StartTicks(pid)
	if err != nil {
		return fmt.Errorf("%s has ended: %w", name, err)
	}
	s.Processes = append(s.Processes, process{Name: name, PID: pid, StartTicks: ticks})
	return s.save()
}

func (s *state) end(name string) error {
	for _, p := range s.Processes {
		if p.Name == name {
			if err := devcluster.EndProcess(p.PID, p.StartTicks, 30*time.Second); err != nil {
				return err
			}
		}
	}
	return nil
}

// down removes everything that a demo in dir made. Without one it does nothing.
func down(ctx context.Context, dir string) error {
	data, err := os.ReadFile(stateFile(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var s state
	if err := json.Unmarshal(data, &s); err != nil {
		return fmt.Errorf("%s cannot be read: %w", stateFile(dir), err)
	}
	if err := s.end("agent"); err != nil {
		return err
	}
	if s.Agent.ContainerdAddress != "" {
		if err := s.uninstall(ctx); err != nil {
			return err
		}
	}
	if err := s.end("hub"); err != nil {
		return err
	}
	if s.OwnContainerd {
		if err := s.end("containerd"); err != nil {
			return err
		}
		former, err := devcluster.NewContainerd(s.containerdDir())
		if err == nil {
			err = former.Destroy()
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("containerd: %w", err)
		}
	}
	// The state file goes last: a `down` that was interrupted is run again.
	if err := os.RemoveAll(s.Config.RunDir); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != filepath.Base(stateFile(dir)) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.RemoveAll(dir)
}

// uninstall has the agent remove what it made. It needs containerd, which may have been killed meanwhile.
func (s *state) uninstall(ctx context.Context) error {
	if _, err := os.Stat(s.Agent.DataDir()); errors.Is(err, fs.ErrNotExist) {
		return nil // the agent never started
	}
	if s.OwnContainerd && !s.running("containerd") {
		d, err := devcluster.StartContainerd(ctx, s.containerdDir())
		if err != nil {
			return err
		}
		if err := s.started("containerd", d.PID()); err != nil {
			return err
		}
	}
	return devcluster.Uninstall(ctx, s.Agent)
}

func (s *state) running(name string) bool {
	for _, p := range s.Processes {
		ticks, err := devcluster.StartTicks(p.PID)
		if p.Name == name && err == nil && ticks == p.StartTicks {
			return true
		}
	}
	return false
}

func (s *state) containerdDir() string { return filepath.Join(s.Config.Dir, "containerd") }

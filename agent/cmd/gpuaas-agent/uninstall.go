package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/agent/internal/accelerator"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newUninstall() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use: "uninstall",
		Short: "Remove everything that this agent made on the machine: containers, images, networks, volumes, rules, " +
			"files, keys",
		Long: `Removes every container, snapshot, image, network, volume, rule, changed sysctl and file of this agent,
its key and usage too. Give it the flags that the agent ran with. Usage that no hub has yet is lost,
so decommission the node first.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.uninstall(cmd.Context()) },
	}
	c.runFlags(cmd.Flags())
	return cmd
}

// uninstall can be run again: it removes what an interrupted one has left.
func (c *config) uninstall(ctx context.Context) error {
	log, err := c.logger()
	if err != nil {
		return err
	}
	if _, err := os.Stat(c.dataDir); errors.Is(err, os.ErrNotExist) {
		if _, err := os.Stat(c.runDir); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	// The lock is no proof: with another --data-dir than the agent's, all containers of an agent that runs would be gone.
	if err := c.refuseBesideAgent(ctx); err != nil {
		return err
	}
	if err := c.directories(); err != nil {
		return err
	}
	lock, err := lockDataDir(c.dataDir)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	rt, err := runtime.Open(ctx, c.runtimeConfig(log))
	if err != nil {
		return err
	}
	purgeErr := rt.Purge(ctx)
	nw, err := network.Open(ctx, c.networkConfig(rt, nil, log))
	if err == nil {
		err = nw.Purge(ctx)
	}
	volumes, environments, volumesErr := c.openVolumes(log)
	if volumesErr == nil {
		volumesErr = errors.Join(environments.Purge(ctx), volumes.Purge(ctx))
	}
	mpsErr := accelerator.StopMPS(ctx, c.inventoryConfig(log))
	if err := errors.Join(purgeErr, err, volumesErr, mpsErr, rt.Close()); err != nil {
		return fault.New(fault.Internal, codeUninstallIncomplete, "Not everything could be removed; the data directory "+
			"stays, so that uninstall can be run again.", err)
	}
	if err := removeSocket(c.socket()); err != nil {
		return err
	}
	return c.removeDirectories()
}

// refuseBesideAgent refuses to work while an agent listens on the local socket.
func (c *config) refuseBesideAgent(ctx context.Context) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.socket())
	if err != nil {
		return nil //nolint:nilerr // nobody listens there
	}
	return errors.Join(fault.New(fault.Conflict, fault.CodeDataDirInUse, "A gpuaas-agent runs and answers on "+c.socket()+
		": stop it first, and give uninstall the flags that it ran with.", nil), conn.Close())
}

// removeSocket removes what a killed agent has left of its socket, which may lie outside its directories.
func removeSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err == nil && info.Mode().Type() != os.ModeSocket:
		return nil // another file
	case err == nil:
		err = os.Remove(path)
	}
	if err != nil {
		return fault.New(fault.Internal, codeUninstallIncomplete, fmt.Sprintf("%s cannot be removed.", path), err)
	}
	return nil
}

// removeDirectories empties the two directories, and removes them unless they are mount points.
func (c *config) removeDirectories() error {
	for _, dir := range []string{c.runDir, c.dataDir} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fault.New(fault.Internal, codeUninstallIncomplete, fmt.Sprintf("%s cannot be removed.",
					filepath.Join(dir, e.Name())), err)
			}
		}
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.EBUSY) {
			return err
		}
	}
	return nil
}

package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/containerdtest"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// execute runs the command in this process, with directories of its own.
func execute(t *testing.T, args ...string) (out string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var stdout bytes.Buffer
	err = program().Execute(ctx, args, &stdout, &stdout)
	return stdout.String(), err
}

func directories(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	return []string{
		"--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"), "--log-level",
		"error",
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	skip.Root(t, "the commands of the agent")
}

func TestBadFlagsAreNamed(t *testing.T) {
	for _, c := range []struct {
		says string
		args []string
	}{
		{"--port-range", []string{"run", "--port-range", "20000"}},
		{"--port-range", []string{"run", "--port-range", "29999-20000"}},
		{"--local-socket-mode", []string{"run", "--local-socket-mode", "0666"}},
		{"--log-level", []string{"run", "--log-level", "loud"}},
	} {
		_, err := execute(t, append(c.args, directories(t)[:4]...)...)
		require.ErrorContains(t, err, c.says)
	}
}

func TestEnvironmentSetsWhatTheCommandLineDoesNot(t *testing.T) {
	t.Setenv("GPUAAS_AGENT_PORT_RANGE", "broken")
	_, err := execute(t, append([]string{"run"}, directories(t)...)...)
	require.ErrorContains(t, err, "--port-range")
	t.Setenv("GPUAAS_AGENT_METERING_INTERVAL", "often")
	_, err = execute(t, append([]string{"run"}, directories(t)...)...)
	require.ErrorContains(t, err, "GPUAAS_AGENT_METERING_INTERVAL")
}

func TestAnIntervalWithAWrongUnitIsRefused(t *testing.T) {
	for _, flag := range []string{
		"--metering-interval", "--usage-interval", "--report-interval", "--dial-retry-max", "--resync",
	} {
		for _, value := range []string{"0s", "-10s", "10ms", "240h"} {
			_, err := execute(t, append([]string{"run", flag, value}, directories(t)...)...)
			require.ErrorContains(t, err, flag+`" flag: must be between`)
		}
	}
}

func TestNoChildOutlivesAStartThatFails(t *testing.T) {
	needRoot(t)
	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, "runc"), []byte("#!/bin/sh\nexec sleep 600\n"), 0o700))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	args := append([]string{"run", "--containerd-address", "/nonexistent/socket"}, directories(t)...)
	_, err := execute(t, args...)
	require.EqualValues(t, "containerd_unavailable", fault.As(err).Code)
	_, err = unix.Wait4(-1, nil, unix.WNOHANG, nil)
	require.ErrorIs(t, err, unix.ECHILD)
}

func TestStartUpTroublesSayWhatToDo(t *testing.T) {
	needRoot(t)
	daemon := containerdtest.Start(t)
	for name, c := range map[string]struct {
		code, says string
		args       []string
	}{
		"no containerd": {"containerd_unavailable", "containerd", []string{
			"--containerd-address",
			"/nonexistent/containerd.sock",
		}},
		"not enrolled": {"enrollment_incomplete", "--api-url", []string{"--containerd-address", daemon.Address}},
		"no join token": {"enrollment_incomplete", "--join-token-file", []string{
			"--containerd-address", daemon.Address, "--api-url", "https://127.0.0.1:1", "--root-fingerprint", "sha256:00",
		}},
		"join token missing": {"join_token_unreadable", "/nonexistent/token", []string{
			"--containerd-address", daemon.Address, "--api-url", "https://127.0.0.1:1", "--root-fingerprint", "sha256:00",
			"--join-token-file", "/nonexistent/token",
		}},
		"data directory is a file": {"directory_unusable", "--data-dir", []string{"--data-dir", "/proc/version"}},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"run"}, directories(t)...)
			_, err := execute(t, append(args, c.args...)...)
			require.Error(t, err)
			require.EqualValues(t, c.code, fault.As(err).Code, err)
			require.Contains(t, fault.As(err).Public, c.says)
		})
	}
}

func TestOneAgentForEachDataDirectory(t *testing.T) {
	dirs := directories(t)
	require.NoError(t, os.MkdirAll(dirs[1], 0o700))
	lock, err := lockDataDir(dirs[1])
	require.NoError(t, err)
	defer func() { require.NoError(t, lock.Close()) }()
	for _, verb := range []string{"run", "enroll", "uninstall"} {
		args := append([]string{verb}, dirs...)
		_, err := execute(t, args...)
		require.EqualValues(t, "data_dir_in_use", fault.As(err).Code, verb)
	}
}

func TestUninstallOfNothingIsDone(t *testing.T) {
	_, err := execute(t, append([]string{"uninstall"}, directories(t)...)...)
	require.NoError(t, err)
}

// An agent whose data directory uninstall was not given holds another lock, and would lose its containers.
func TestUninstallRefusesBesideAnAgentThatRuns(t *testing.T) {
	dirs := directories(t)
	require.NoError(t, os.MkdirAll(dirs[3], 0o700))
	l, err := net.Listen("unix", filepath.Join(dirs[3], "agent.sock"))
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	_, err = execute(t, append([]string{"uninstall"}, dirs...)...)
	require.EqualValues(t, "data_dir_in_use", fault.As(err).Code, "%v", err)
	require.Contains(t, fault.As(err).Public, "agent.sock")
	require.NoDirExists(t, dirs[1], "a directory that was mistyped is not made")
}

func TestFullDiskIsToldAtOnce(t *testing.T) {
	needRoot(t)
	dirs := directories(t)
	require.NoError(t, os.MkdirAll(dirs[1], 0o700))
	mountSmall(t, dirs[1])
	_, err := execute(t, append([]string{"enroll"}, dirs...)...)
	require.EqualValues(t, "disk_full", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "Free some space")
}

// Many nodes may enroll from one address at a time.
func TestAnEnrollmentThatIsLimitedByRateIsTriedAgain(t *testing.T) {
	needRoot(t)
	var asked atomic.Int64
	hub := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	defer hub.Close()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("token"), 0o600))
	args := append([]string{"enroll"}, directories(t)...)
	_, err := execute(t, append(args, "--api-url", hub.URL, "--join-token-file", token, "--root-fingerprint",
		protocol.FingerprintPrefix+strings.Repeat("0", 64))...)
	require.EqualValues(t, 2, asked.Load(), "the second answer is final")
	require.True(t, fault.IsPermanent(err))
}

func TestASocketThatAKilledAgentHasLeftIsRemoved(t *testing.T) {
	dir := t.TempDir()
	socket, file := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "file")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{socket, socket, file} {
		require.NoError(t, removeSocket(path))
	}
	require.NoFileExists(t, socket)
	require.FileExists(t, file)
}

//go:build cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
)

const (
	// lockFD is the lock that the agent hands over; it is held as long as this process lives.
	lockFD = 3
	// mpsReadyMax bounds how long the daemon may take until it has its socket, and each of its commands.
	mpsReadyMax = 10 * time.Second
)

// runMPS runs the MPS daemon of a GPU until it ends, in a mount namespace of its own in which /dev/shm is that of its
// containers. Only MPS's server may use the GPU meanwhile: a program that does not go through MPS cannot.
func runMPS(root, gpu, dir, threadPercent, memoryMiB string) error {
	runtime.LockOSThread() // the daemon gets its signal when the thread ends that has started it
	unix.CloseOnExec(lockFD)
	unix.Umask(0)
	if err := setComputeMode(root, gpu, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS); err != nil {
		return err
	}
	err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount(filepath.Join(dir, "shm"), "/dev/shm", "", unix.MS_BIND, ""))
	if err != nil {
		return fmt.Errorf("mount /dev/shm: %w", err)
	}
	control, err := executable(root, "nvidia-cuda-mps-control")
	if err != nil {
		return err
	}
	env := append(os.Environ(), "CUDA_VISIBLE_DEVICES="+gpu, "CUDA_MPS_PIPE_DIRECTORY="+filepath.Join(dir, "pipe"),
		"CUDA_MPS_LOG_DIRECTORY="+filepath.Join(dir, "log"))
	daemon := exec.CommandContext(context.Background(), control, "-f")
	daemon.Env, daemon.Stdout, daemon.Stderr = env, os.Stdout, os.Stderr
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := daemon.Start(); err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		_ = daemon.Process.Kill()
	}()
	go func() {
		err := limitMPS(control, env, filepath.Join(dir, "pipe", "control"), threadPercent, memoryMiB)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "ready"), nil, 0o600)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			_ = unix.Kill(0, unix.SIGKILL)
		}
	}()
	err = daemon.Wait()
	fmt.Fprintln(os.Stderr, "the MPS daemon has ended:", err)
	if err := endMPS(root, gpu); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		_ = os.WriteFile(filepath.Join(dir, "released"), nil, 0o600)
	}
	return unix.Kill(0, unix.SIGKILL) // its servers, too
}

// limitMPS tells the daemon what each client may use, before there is one: a client may only lower it.
func limitMPS(control string, env []string, socket, threadPercent, memoryMiB string) error {
	for deadline := time.Now().Add(mpsReadyMax); ; time.Sleep(50 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return errors.New("the MPS daemon has no socket")
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), mpsReadyMax)
	defer cancel()
	cmd := exec.CommandContext(ctx, control)
	cmd.Env, cmd.Stdin = env, strings.NewReader("set_default_active_thread_percentage "+threadPercent+
		"\nset_default_device_pinned_mem_limit 0 "+memoryMiB+"M\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("limit what MPS gives a client: %w: %s", err, out)
	}
	return nil
}

// endMPS lets every program use the GPU again. One that is gone has lost its mode.
func endMPS(root, gpu string) error {
	if err := setComputeMode(root, gpu, nvml.COMPUTEMODE_DEFAULT); !errors.Is(err, nvml.ERROR_NOT_FOUND) {
		return err
	}
	return nil
}

func setComputeMode(root, gpu string, mode nvml.ComputeMode) error {
	driver := library(root)
	if code := driver.Init(); code != nvml.SUCCESS {
		return fmt.Errorf("start NVIDIA's driver: %w", code)
	}
	defer func() { _ = driver.Shutdown() }()
	device, code := driver.DeviceGetHandleByUUID(gpu)
	if code == nvml.SUCCESS {
		code = device.SetComputeMode(mode)
	}
	if code != nvml.SUCCESS {
		return fmt.Errorf("set the compute mode of %s: %w", gpu, code)
	}
	return nil
}

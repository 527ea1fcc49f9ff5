// Package sandbox runs a test program on a machine of its own: in new mount, network, process, host name, IPC and
// cgroup namespaces, with its own /tmp, /run, /var and copies of /etc and /dev. Changes outside are not visible inside,
// and what the program leaves behind ends with the sandbox. It prevents accidents, not attacks: root inside is root.
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const (
	// stageEnv tells a run of the program where it is: outside (unset), init or inside.
	stageEnv    = "GPUAAS_SANDBOX_STAGE"
	stageInit   = "init"
	stageInside = "inside"
	// baseEnv is the directory that holds the sandbox's files, and its cgroups' name.
	baseEnv = "GPUAAS_SANDBOX_BASE"
	// keptEnv lists what is visible inside at its usual place although it lies in a directory that is replaced.
	keptEnv = "GPUAAS_SANDBOX_KEPT"
	// exitTrouble is the exit status of an init that could not prepare the sandbox.
	exitTrouble = 125
)

// Config says what a program needs.
type Config struct {
	// Base is a directory on a disk below which the sandbox keeps its files while it exists.
	Base string
	// Keep are directories that stay visible even where they lie in /tmp, /run, /var, /etc or /dev.
	Keep []string
	// Prepare runs outside before the sandbox is made: for what needs the network.
	Prepare func() error
}

// OfTree returns the configuration of a program that runs in its source tree: the tree and the directories of the Go
// tool are visible, for tests that compile what they run.
func OfTree() (Config, error) {
	out, err := exec.Command("go", "env", "GOMOD", "GOROOT", "GOCACHE", "GOMODCACHE").Output()
	if err != nil {
		return Config{}, fmt.Errorf("ask for the Go tool's directories: %w", err)
	}
	dirs := strings.Fields(string(out))
	if filepath.Base(dirs[0]) != "go.mod" {
		return Config{}, errors.New("the program runs outside the source tree")
	}
	root := filepath.Dir(dirs[0])
	return Config{Base: filepath.Join(root, ".cache"), Keep: append(dirs[1:], root)}, nil
}

// Run runs the tests in a sandbox and returns their exit status. Without root there can be no sandbox, and the tests
// run as they are. Call it from TestMain and nowhere else: it starts the program again.
func Run(c Config, tests func() int) (int, error) {
	switch os.Getenv(stageEnv) {
	case stageInside:
		return tests(), nil
	case stageInit:
		return runInit()
	}
	if os.Geteuid() != 0 {
		return tests(), nil
	}
	if c.Prepare != nil {
		if err := c.Prepare(); err != nil {
			return 1, fmt.Errorf("prepare the sandbox: %w", err)
		}
	}
	return c.runOutside()
}

// RunInTree is Run for tests that need nothing but their source tree. It prints an error.
func RunInTree(tests func() int) (code int) {
	c, err := OfTree()
	if err == nil {
		code, err = Run(c, tests)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// Inside reports whether the program runs in a sandbox.
func Inside() bool { return os.Getenv(stageEnv) == stageInside }

// Kept are the directories that the sandbox shares with the machine although they lie where its own files are.
func Kept() []string { return filepath.SplitList(os.Getenv(keptEnv)) }

// runOutside makes the directories and cgroups, waits for the program inside, and removes both.
func (c Config) runOutside() (code int, err error) {
	if err := os.MkdirAll(c.Base, 0o755); err != nil {
		return 1, err
	}
	if err := removeAbandoned(c.Base); err != nil {
		return 1, err
	}
	base := filepath.Join(c.Base, fmt.Sprintf("%s%d", namePrefix, os.Getpid()))
	if err := os.Mkdir(base, 0o755); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, remove(base)) }()
	if err := makeCgroups(filepath.Base(base)); err != nil {
		return 1, err
	}
	// The kernel closes this end whatever ends this program, and the sandbox ends then.
	leash, held, err := os.Pipe()
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, leash.Close(), held.Close()) }()
	init := exec.Command("/proc/self/exe", os.Args[1:]...)
	init.Args[0] = os.Args[0]
	init.Env = append(os.Environ(), stageEnv+"="+stageInit, baseEnv+"="+base, keptEnv+"="+strings.Join(c.hidden(),
		string(filepath.ListSeparator)))
	init.Stdin, init.Stdout, init.Stderr = os.Stdin, os.Stdout, os.Stderr
	init.ExtraFiles = []*os.File{leash}
	init.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, // what kills the program's group leaves it to init to end the sandbox
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	return exitStatus(init.Run())
}

// hidden are those of Keep that lie in a directory that the sandbox replaces.
func (c Config) hidden() []string {
	var all []string
	for _, dir := range append(slices.Clone(c.Keep), outputDirs()...) {
		for _, own := range ownDirs {
			if strings.HasPrefix(dir, own.path+"/") {
				all = append(all, dir)
			}
		}
	}
	return all
}

// outputDirs are where the Go tool expects files of a test program: the tool itself made them below /tmp.
func outputDirs() []string {
	var dirs []string
	for _, arg := range os.Args[1:] {
		if name, file, ok := strings.Cut(arg, "="); ok && slices.Contains([]string{
			"-test.testlogfile", "-test.coverprofile",
			"-test.gocoverdir",
		}, name) {
			dirs = append(dirs, filepath.Dir(file))
		}
	}
	return dirs
}

func exitStatus(err error) (int, error) {
	if e, ok := errors.AsType[*exec.ExitError](err); ok && e.ExitCode() > 0 {
		return e.ExitCode(), nil
	}
	if err != nil {
		return 1, fmt.Errorf("run the sandbox: %w", err)
	}
	return 0, nil
}

// namePrefix is followed by the id of the process that made the sandbox.
const namePrefix = "sandbox-"

// removeAbandoned removes what a test program that was killed left outside.
func removeAbandoned(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscanf(e.Name(), namePrefix+"%d", &pid); err != nil || syscall.Kill(pid, 0) == nil {
			continue
		}
		if err := remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func remove(base string) error {
	return errors.Join(removeCgroups(filepath.Base(base)), os.RemoveAll(base))
}

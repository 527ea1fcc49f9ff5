package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Row is one measurement. The rows of one subject are in one file; rows lists them all.
type Row struct {
	// Name is what `make bench ROW=<regexp>` matches.
	Name string
	// Measure returns lines of the table. It registers what it starts with Env.Defer.
	Measure func(ctx context.Context, e *Env) ([]Result, error)
	// Long marks a row that takes so long that it is measured only when it is asked for.
	Long bool
}

// Result is one line of the table.
type Result struct {
	// Name names the line; it begins with its row's name.
	Name string `json:"name"`
	// What is measured, for people.
	What string `json:"what"`
	// Unit of P50, P99, Baseline and Parts.
	Unit string `json:"unit"`
	// N is how many samples there are; 1 where P50 is a single value.
	N   int     `json:"n"`
	P50 float64 `json:"p50"`
	// P99 is zero where N is less than minForP99.
	P99 float64 `json:"p99,omitzero"`
	// Baseline is the median of the least that the same work can cost; zero where none is measured.
	Baseline float64 `json:"baseline,omitzero"`
	// Ratio is P50 to Baseline, both with all their digits.
	Ratio float64 `json:"ratio,omitzero"`
	// Target is what must hold, in words; Reached reports whether it did.
	Target  string `json:"target"`
	Reached bool   `json:"reached"`
	// Parts are medians of the steps that Baseline or P50 consists of.
	Parts []Part `json:"parts,omitempty"`
	// Note says how the line was measured.
	Note       string    `json:"note,omitempty"`
	MeasuredAt time.Time `json:"measured_at"`
	// Conditions is nil in lines that were measured before they were recorded.
	Conditions *Conditions `json:"conditions,omitempty"`
	// OtherCommit marks a line that is not of the commit of the last run, or of changes that are in no commit.
	OtherCommit bool `json:"other_commit,omitzero"`

	raw Samples
}

// Part is the duration of one step.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Env is the environment that all rows of one run share.
type Env struct {
	// Source is the root of the tree, Bin the directory of the programs that `make build` makes.
	Source, Bin string
	// Params change the size of rows.
	Params Params

	samples int
	root    string
	undo    []func() error
	testbed *Testbed
}

// newEnv makes the directory of this run: below /tmp, where an unprivileged PostgreSQL can work.
func newEnv(source string, samples int) (*Env, error) {
	e := &Env{
		Source: source, Bin: filepath.Join(source, "bin"), samples: samples,
		root: fmt.Sprintf("/tmp/gpuaas-bench-%d", os.Getpid()),
	}
	if err := e.lock(); err != nil {
		return nil, err
	}
	if err := os.Mkdir(e.root, 0o711); err != nil {
		return nil, errors.Join(err, e.close())
	}
	e.Defer(func() error { return os.RemoveAll(e.root) })
	return e, os.Chmod(e.root, 0o711)
}

// lock keeps other runs away, which would use the same bridge and ports. The name of an abstract socket is the network
// namespace's, as bridges and ports are, and ends with the process (unix(7)).
func (e *Env) lock() error {
	l, err := net.Listen("unix", "@gpuaas-bench")
	if err != nil {
		return fmt.Errorf("another benchmark runs on this machine: %w", err)
	}
	e.Defer(l.Close)
	return nil
}

// Samples is the number of samples to take: full, or fewer in a quick run (N=…).
func (e *Env) Samples(full int) int {
	if e.samples > 0 {
		return min(e.samples, full)
	}
	return full
}

// Quick reports whether this run takes fewer samples, or rows of another size; its results are not written.
func (e *Env) Quick() bool { return e.samples > 0 || e.Params.given() }

// Dir makes a directory that is removed at the end of the run.
func (e *Env) Dir(name string) (string, error) {
	dir := filepath.Join(e.root, name)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// inMemory mounts a tmpfs for what daemons keep below /run, as on a node (file-hierarchy(7)), until the end of the run.
func (e *Env) inMemory(path string) error {
	if err := os.Mkdir(path, 0o711); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711"); err != nil {
		return errors.Join(fmt.Errorf("mount a tmpfs at %s: %w", path, err), os.Remove(path))
	}
	e.Defer(func() error {
		// The daemon may have unmounted and removed it already.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		return os.RemoveAll(path)
	})
	return nil
}

// Defer registers a function that runs at the end of the program; the last one runs first.
func (e *Env) Defer(undo func() error) { e.undo = append(e.undo, undo) }

// close runs the deferred functions.
func (e *Env) close() error {
	var errs []error
	for _, undo := range slices.Backward(e.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// Say prints a line of progress.
func (e *Env) Say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

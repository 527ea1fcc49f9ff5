package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Row is one thing to measure. Rows of one subject lie in one file and are listed in rows.
type Row struct {
	// Name is one word for `make bench ROW=<regexp>`.
	Name string
	// Measure gives one or more lines of the table. What it starts it hands to Env.Defer, so that it ends with the program
	// however that ends.
	Measure func(ctx context.Context, e *Env) ([]Result, error)
}

// Result is one line of the table.
type Result struct {
	// Name names the line; it begins with its row's name.
	Name string `json:"name"`
	// What is measured, for people.
	What string `json:"what"`
	// Unit of P50, P99, Floor and Parts.
	Unit string `json:"unit"`
	// N is how many samples there are; 1 where P50 and P99 are the same single value.
	N   int     `json:"n"`
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	// Floor is the median of what the same costs at least; zero where there is no such thing.
	Floor float64 `json:"floor,omitzero"`
	// Ratio is P50 to Floor, both with all their digits.
	Ratio float64 `json:"ratio,omitzero"`
	// Target is what the line must reach, in words.
	Target  string `json:"target"`
	Reached bool   `json:"reached"`
	// Parts are medians of the steps that Floor or P50 consists of.
	Parts []Part `json:"parts,omitempty"`
	// Note says what a reader must know to repeat it.
	Note       string    `json:"note,omitempty"`
	MeasuredAt time.Time `json:"measured_at"`
}

// Part is one step.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Env is what rows share.
type Env struct {
	// Source is the root of the tree, Bin the directory of the programs that `make build` makes.
	Source, Bin string

	samples int
	root    string
	undo    []func() error
	stand   *Stand
}

// newEnv makes the directory of this run: below /tmp, where an unprivileged PostgreSQL can work.
func newEnv(source string, samples int) (*Env, error) {
	e := &Env{
		Source: source, Bin: filepath.Join(source, "bin"), samples: samples,
		root: fmt.Sprintf("/tmp/gpuaas-bench-%d", os.Getpid()),
	}
	if err := os.Mkdir(e.root, 0o711); err != nil {
		return nil, err
	}
	e.Defer(func() error { return os.RemoveAll(e.root) })
	return e, os.Chmod(e.root, 0o711)
}

// Samples is how many samples to take where full are wanted: fewer while developing (N=…).
func (e *Env) Samples(full int) int {
	if e.samples > 0 {
		return min(e.samples, full)
	}
	return full
}

// Quick says that this run takes fewer samples than it should: nothing of it is kept.
func (e *Env) Quick() bool { return e.samples > 0 }

// Dir makes a directory that ends with the program.
func (e *Env) Dir(name string) (string, error) {
	dir := filepath.Join(e.root, name)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// inMemory makes a directory in memory that ends with the program: what daemons keep below /run, which is a tmpfs on a
// node (file-hierarchy(7)) and need not be one where this runs.
func (e *Env) inMemory(path string) error {
	if err := os.Mkdir(path, 0o711); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711"); err != nil {
		return errors.Join(fmt.Errorf("mount a tmpfs at %s: %w", path, err), os.Remove(path))
	}
	e.Defer(func() error {
		// Whoever has lived in it may have unmounted and removed it.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		return os.RemoveAll(path)
	})
	return nil
}

// Defer has something undone at the end of the program, in reverse order.
func (e *Env) Defer(undo func() error) { e.undo = append(e.undo, undo) }

// close undoes everything.
func (e *Env) close() error {
	var errs []error
	for _, undo := range slices.Backward(e.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// Say tells whoever waits what goes on.
func (e *Env) Say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"
)

// test is one test function.
type test struct {
	Package string `json:"package"`
	Name    string `json:"name"`
}

// record is a finished run of a test; Log is where the output of a failure lies.
type record struct {
	test
	Passed  bool    `json:"passed"`
	Seconds float64 `json:"seconds"`
	Log     string  `json:"log,omitempty"`
}

type config struct {
	tests []test
	times int
	seed  uint64
	// dir keeps the record and the failures' output: what it holds is not run again.
	dir string
	out io.Writer
	run func(ctx context.Context, t test) (output string, err error)
}

// soak runs what is not recorded yet and lists the failures of all runs that are.
func soak(ctx context.Context, c config) (failures int, err error) {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return 0, err
	}
	path := filepath.Join(c.dir, "runs.jsonl")
	done, err := read(path)
	if err != nil {
		return 0, err
	}
	todo := c.remaining(done)
	_, _ = fmt.Fprintf(c.out, "%d runs recorded in %s, %d to go\n", len(done), c.dir, len(todo))
	for n, t := range todo {
		begun := time.Now()
		output, failed := c.run(ctx, t)
		if ctx.Err() != nil {
			return 0, fmt.Errorf("interrupted; the next call goes on: %w", ctx.Err())
		}
		r := record{test: t, Passed: failed == nil, Seconds: time.Since(begun).Seconds()}
		if failed != nil {
			r.Log = filepath.Join(c.dir, fmt.Sprintf("%s-%d.log", t.Name, len(done)))
			text := fmt.Sprintf("%s\n%v\n", output, failed)
			if err := os.WriteFile(r.Log, []byte(text), 0o600); err != nil {
				return 0, err
			}
			_, _ = fmt.Fprintf(c.out, "%d of %d: FAIL %s %s: %s\n", n+1, len(todo), t.Package, t.Name, r.Log)
		}
		if err := add(path, r); err != nil {
			return 0, err
		}
		done = append(done, r)
	}
	return c.summary(done), nil
}

// remaining are the runs that are missing, in random order.
func (c config) remaining(done []record) (todo []test) {
	ran := map[test]int{}
	for _, r := range done {
		ran[r.test]++
	}
	for _, t := range c.tests {
		for range c.times - ran[t] {
			todo = append(todo, t)
		}
	}
	random := rand.New(rand.NewPCG(c.seed, 0))
	random.Shuffle(len(todo), func(i, j int) { todo[i], todo[j] = todo[j], todo[i] })
	return todo
}

// summary prints the failures of the tests that were asked for.
func (c config) summary(done []record) (failures int) {
	runs := 0
	for _, t := range c.tests {
		for _, r := range done {
			if r.test != t {
				continue
			}
			runs++
			if !r.Passed {
				failures++
				_, _ = fmt.Fprintf(c.out, "failed: %s %s: %s\n", t.Package, t.Name, r.Log)
			}
		}
	}
	_, _ = fmt.Fprintf(c.out, "%d tests, %d runs, %d failures\n", len(c.tests), runs, failures)
	return failures
}

// read returns the record; a last line that a crash cut off is no run.
func read(path string) (done []record, err error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for lines := bufio.NewScanner(bytes.NewReader(raw)); lines.Scan(); {
		var r record
		if json.Unmarshal(lines.Bytes(), &r) == nil && r.Name != "" {
			done = append(done, r)
		}
	}
	return done, nil
}

func add(path string, r record) (err error) {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	// Begins with a line feed, so that a line which was cut off spoils no other.
	_, err = file.Write(append([]byte("\n"), line...))
	return err
}

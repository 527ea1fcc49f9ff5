// Package release builds the programs of an earlier version from the tree's own history, for the tests that upgrade
// from it. Command record, below it, records what those programs leave on disk.
package release

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// From names another version than the last release: a tag or a commit.
const From = "GPUAAS_UPGRADE_FROM"

// Version is a version of the programs.
type Version struct {
	// Name is its tag, or the commit that was asked for.
	Name   string
	Commit string
	// Dir is where its programs and its recording lie.
	Dir string
}

// Last returns the version that From names, else the newest tag; ok is false where there is neither.
func Last(ctx context.Context, root string) (v Version, ok bool, err error) {
	name := os.Getenv(From)
	if name == "" {
		tags, err := exec.CommandContext(ctx, "git", "-C", root, "tag", "--list", "v*", "--sort=-v:refname").Output()
		if err != nil || len(tags) == 0 {
			return Version{}, false, nil //nolint:nilerr // a tree without git has no releases
		}
		name, _, _ = strings.Cut(string(tags), "\n")
	}
	v, err = Find(ctx, root, name)
	return v, err == nil, err
}

// Find resolves a tag or a commit.
func Find(ctx context.Context, root, name string) (Version, error) {
	out, err := exec.CommandContext(ctx, "git", "-C", root, "rev-parse", "--verify", name+"^{commit}").Output()
	if err != nil {
		return Version{}, fmt.Errorf("find version %q: %w", name, err)
	}
	commit := strings.TrimSpace(string(out))
	return Version{Name: name, Commit: commit, Dir: filepath.Join(root, ".cache", "release", commit)}, nil
}

// Bin is the directory of its programs.
func (v Version) Bin() string { return filepath.Join(v.Dir, "bin") }

// Build builds its programs, once.
func (v Version) Build(ctx context.Context, root string) error {
	done := filepath.Join(v.Bin(), "done")
	if _, err := os.Stat(done); err == nil {
		return nil
	}
	src := filepath.Join(v.Dir, "src")
	if err := errors.Join(os.RemoveAll(v.Dir), os.MkdirAll(src, 0o700)); err != nil {
		return err
	}
	const script = `git -C "$1" archive "$2" | tar -x -C "$3" && cd "$3" && CGO_ENABLED=0 go build -trimpath ` +
		`-buildvcs=false -ldflags "-s -w" -o "$4/" ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent ./pkg/cmd/gpuaas`
	out, err := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-ec", script, "bash", root, v.Commit, src,
		v.Bin()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build version %s: %w: %s", v.Name, err, out)
	}
	return errors.Join(os.WriteFile(done, nil, 0o600), os.RemoveAll(src))
}

// Unpack unpacks a recording, a gzipped tar file, into dir. A name that leads out of dir is an error.
func Unpack(archive, dir string) (err error) {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	plain, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	for entries := tar.NewReader(plain); ; {
		entry, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := unpackEntry(dir, entry, entries); err != nil {
			return fmt.Errorf("unpack %s: %w", entry.Name, err)
		}
	}
}

func unpackEntry(dir string, entry *tar.Header, content io.Reader) error {
	if !filepath.IsLocal(entry.Name) && entry.Name != "./" {
		return errors.New("the name leads out of the directory")
	}
	path, mode := filepath.Join(dir, entry.Name), entry.FileInfo().Mode().Perm()
	if entry.FileInfo().IsDir() {
		return os.MkdirAll(path, mode)
	}
	data, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, mode)
}

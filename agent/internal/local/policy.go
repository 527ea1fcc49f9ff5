package local

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// DefaultPolicyFile holds the owner's policy where no other file is named. It may be missing.
const DefaultPolicyFile = "/etc/gpuaas/policy.yaml"

// PolicyFile is the owner's policy on disk. What was read last counts until something else can be read, also after a
// restart: neither a typing error nor a file that is away for a moment stops or admits anything.
type PolicyFile struct {
	path, kept string
	key        []byte

	mu       sync.Mutex
	lastRead version
	rules    policy.Policy
	// read says that rules are of the file, or of its copy, and not what stands for none.
	read bool
	err  error
}

// version tells one content of a file from another without reading it.
type version struct {
	size     int64
	modified time.Time
}

// OpenPolicy reads the owner's policy from path. kept is a file of the agent's own with what it read last. A named file
// that does not exist, or one that cannot be read and never could, is an error; the default one may be missing, which
// allows everything. key authenticates the copy: an altered one counts as none.
func OpenPolicy(path, kept string, key []byte) (*PolicyFile, error) {
	p := &PolicyFile{path: path, kept: kept, key: key}
	_, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && path == DefaultPolicyFile:
		return p, p.removeCopy()
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.New(fault.Malformed, codePolicyMissing, fmt.Sprintf("There is no file %s. Write the owner's "+
			"policy there, or leave --policy away.", path), err)
	}
	if _, err = p.Read(); err == nil || p.read {
		return p, nil // what was read counts, although a full disk may not have kept it
	}
	copied, keptErr := readAtMost(kept, len(p.code(nil)))
	if keptErr != nil {
		return nil, err
	}
	code, doc, _ := bytes.Cut(copied, []byte("\n"))
	if !hmac.Equal(append(code, '\n'), p.code(doc)) {
		return nil, err
	}
	if p.rules, keptErr = policy.Parse(doc); keptErr != nil {
		return nil, err
	}
	return p, nil
}

// Read gives what the owner allows now. With an error, which says what is wrong with the file, it gives what counted
// before.
func (p *PolicyFile) Read() (policy.Policy, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	info, err := os.Stat(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		return p.rules, p.err // from the next start on it counts as missing
	}
	if err != nil {
		return p.rules, err
	}
	now := version{info.Size(), info.ModTime()}
	if p.err == nil && now == p.lastRead {
		return p.rules, nil
	}
	// With an error it is read again next time: the disk may have room by then.
	if p.err = p.load(); p.err == nil {
		p.lastRead = now
	}
	return p.rules, p.err
}

func (p *PolicyFile) load() error {
	doc, err := readAtMost(p.path, 0)
	if err != nil {
		return err
	}
	rules, err := policy.Parse(doc)
	if err != nil {
		return err
	}
	p.rules, p.read = rules, true
	// First whole, then in place.
	next := p.kept + ".next"
	if err := os.WriteFile(next, append(p.code(doc), doc...), 0o600); err != nil {
		return err
	}
	return os.Rename(next, p.kept)
}

func (p *PolicyFile) removeCopy() error {
	if err := os.Remove(p.kept); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// code is the line that the copy of the policy begins with, a comment of YAML.
func (p *PolicyFile) code(doc []byte) []byte {
	h := hmac.New(sha256.New, p.key)
	h.Write([]byte("policy.yaml\x00"))
	h.Write(doc)
	return fmt.Appendf(nil, "# %x\n", h.Sum(nil))
}

// readAtMost reads one byte more than a policy may have, and so many before it: policy.Parse says that it is too long.
func readAtMost(path string, before int) ([]byte, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, int64(before+policy.MaxBytes+1)))
}

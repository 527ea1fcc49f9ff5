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
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// DefaultPolicyFile holds the owner's policy where no other file is named. It may be missing.
const DefaultPolicyFile = "/etc/gpuaas/policy.yaml"

// PolicyFile is the owner's policy on disk. The last policy that could be read stays in force, also after a restart:
// neither a typing error nor a file that is missing for a moment stops or admits anything.
type PolicyFile struct {
	path, kept string
	key        []byte

	mu       sync.Mutex
	lastRead version
	rules    policy.Policy
	// read says that rules come from the file and not from the zero value.
	read bool
	err  error
}

// version tells one content of a file from another without reading it.
type version struct {
	size     int64
	modified time.Time
}

// OpenPolicy reads the owner's policy from path, or from kept, the agent's copy of the last policy that it could read.
// It fails where it has neither; the default file may be missing, which allows everything. key authenticates the copy.
func OpenPolicy(path, kept string, key []byte) (*PolicyFile, error) {
	p := &PolicyFile{path: path, kept: kept, key: key}
	_, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && path == DefaultPolicyFile:
		return p, os.RemoveAll(kept)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fault.New(fault.Malformed, codePolicyMissing, fmt.Sprintf("There is no file %s. Write the owner's "+
			"policy there, or leave --policy away.", path), err)
	}
	if _, err = p.Read(); err == nil || p.read {
		return p, nil // without a copy where the disk is full
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

// Read returns what the owner allows now. With an error, which says what is wrong with the file, it returns the policy
// that was in force before.
func (p *PolicyFile) Read() (policy.Policy, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	info, err := os.Stat(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		p.err = nil // what was wrong with it is gone, too; the next start notices that the file is missing
		return p.rules, nil
	}
	if err != nil {
		return p.rules, err
	}
	now := version{info.Size(), info.ModTime()}
	if p.err == nil && now == p.lastRead {
		return p.rules, nil
	}
	// After an error the next call reads the file again: the disk may have space by then.
	if p.err = p.load(); p.err == nil {
		p.lastRead = now
	}
	return p.rules, p.err
}

// Egress returns what the owner lets members reach now; the reconciler reports an error in the file.
func (p *PolicyFile) Egress() policy.Egress {
	rules, _ := p.Read()
	return rules.Egress
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
	return durable.Replace(p.kept, append(p.code(doc), doc...), 0o600)
}

// code is the first line of the copy, a comment in YAML: the authentication code of the policy.
func (p *PolicyFile) code(doc []byte) []byte {
	h := hmac.New(sha256.New, p.key)
	h.Write([]byte("policy.yaml\x00"))
	h.Write(doc)
	return fmt.Appendf(nil, "# %x\n", h.Sum(nil))
}

// readAtMost reads the bytes before the policy and one more than a policy may have: policy.Parse then refuses it.
func readAtMost(path string, before int) ([]byte, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, int64(before+policy.MaxBytes+1)))
}

package network

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
)

const recordSuffix = ".json"

// record is what is remembered of a member: what Remove needs, and what makes a repeated Setup cheap.
type record struct {
	BootID string `json:"boot_id"`
	// Ready is false while it is being made.
	Ready bool          `json:"ready"`
	Ports []PortMapping `json:"ports"`
	IP    string        `json:"ip,omitempty"`
}

func (n *Network) recordPath(memberID string) string {
	return filepath.Join(n.membersDir(), memberID+recordSuffix)
}

// readRecord also reads one that a crash has cut off: its member is known by its name, and what it says does not count.
func (n *Network) readRecord(memberID string) (record, error) {
	data, err := os.ReadFile(n.recordPath(memberID))
	if err != nil {
		return record{}, err
	}
	var r record
	if json.Unmarshal(data, &r) != nil || r.BootID != n.bootID {
		return record{Ports: r.Ports}, nil //nolint:nilerr // it says as much as nothing
	}
	return r, nil
}

// writeRecord need not sync: when the machine goes down, so does what the record is about.
func (n *Network) writeRecord(memberID string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := n.recordPath(memberID)
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// forgetEarlierBoot removes what the state directory says about a boot that is over: addresses and networks went with
// it.
func (n *Network) forgetEarlierBoot() error {
	path := filepath.Join(n.cfg.StateDir, "boot")
	was, err := os.ReadFile(path)
	if err == nil && strings.TrimSpace(string(was)) == n.bootID {
		return nil
	}
	if err == nil {
		for _, dir := range []string{n.ipamDir(), n.membersDir(), n.nsDir()} {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
		}
	}
	//nolint:gosec // remapped containers walk to their namespaces
	if err := os.MkdirAll(n.cfg.StateDir, 0o711); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(n.bootID+"\n"), 0o600)
}

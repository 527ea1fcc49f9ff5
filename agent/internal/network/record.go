package network

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

const recordSuffix = ".json"

// record is the stored state of an attachment: Remove needs it, and a repeated Setup compares it.
type record struct {
	BootID string `json:"boot_id"`
	// Ready is false while the attachment is being made or removed.
	Ready bool          `json:"ready"`
	Ports []PortMapping `json:"ports"`
	IP    netip.Addr    `json:"ip,omitzero"`
	// Turn grows with each Publish of a member: of two attachments with a port, the one with the greater turn has it.
	Turn uint64 `json:"turn,omitempty"`
}

func (n *Network) recordPath(id string) string {
	return filepath.Join(n.membersDir(), id+recordSuffix)
}

// readRecord accepts a damaged record and one of an earlier boot: only the ports count then.
func (n *Network) readRecord(id string) (record, error) {
	data, err := os.ReadFile(n.recordPath(id))
	if err != nil {
		return record{}, err
	}
	var r record
	if json.Unmarshal(data, &r) != nil || r.BootID != n.bootID {
		return record{Ports: r.Ports}, nil //nolint:nilerr // only the file's name counts then
	}
	return r, nil
}

// writeRecord need not sync: when the machine goes down, so does what the record is about.
func (n *Network) writeRecord(id string, r record) error {
	return writeJSON(n.recordPath(id), r)
}

// removeUnfinished removes the records that an earlier agent was killed while it wrote: they are part of no attachment.
func (n *Network) removeUnfinished() error {
	entries, err := os.ReadDir(n.membersDir())
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), recordSuffix+unfinishedSuffix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(n.membersDir(), e.Name())))
		}
	}
	return err
}

// forgetEarlierBoot removes what the state directory has of an earlier boot: its networks are gone.
func (n *Network) forgetEarlierBoot() error {
	path := filepath.Join(n.cfg.StateDir, "boot")
	was, err := os.ReadFile(path)
	if err == nil && strings.TrimSpace(string(was)) == n.bootID {
		return nil
	}
	if err == nil {
		for _, dir := range []string{n.leasesPath(), n.membersDir(), n.nsDir()} {
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

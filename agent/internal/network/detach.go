package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// RemoveMember removes every attachment of the member, and with the last one of the node the shared network.
func (n *Network) RemoveMember(ctx context.Context, memberID string) error {
	all, err := n.List()
	if err != nil {
		return err
	}
	for _, id := range all {
		if memberOf(id) == memberID {
			if err := n.Remove(ctx, id); err != nil {
				return err
			}
		}
	}
	return n.Close(ctx)
}

// Remove removes an attachment, also an incomplete one, and with the last one the shared network. An unknown one is no
// error.
func (n *Network) Remove(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := n.attachments.Lock(ctx, id)
	if err != nil {
		return err
	}
	err = n.detach(id)
	unlock()
	if err != nil {
		return err
	}
	return n.Close(ctx)
}

// detach removes everything of one attachment.
func (n *Network) detach(id string) error {
	n.use.RLock()
	defer n.use.RUnlock()
	r, err := n.readRecord(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Nothing is made without a record; only empty files can be there.
		return n.removeNamespaces(id)
	case err != nil:
		return fmt.Errorf("read the record of %s: %w", id, err)
	}
	var counted net.IP // the address, if the table counts flows of it
	begun := false
	address := r.IP
	if !address.IsValid() { // the record is not complete
		address, _ = n.addressOf(id)
	}
	addr := net.IP(address.AsSlice())
	if addr != nil {
		if counted, begun, err = n.countedFlows(addr); err != nil {
			return err
		}
		begun = begun || !r.Ready // an interrupted removal may have ended the count
	}
	peered, err := n.unready(id, r, address, counted)
	if err := errors.Join(err, n.reservePorts(id, nil)); err != nil {
		return err
	}
	if err := removeLink(n.hostLink(id)); err != nil {
		return err
	}
	if begun || peered {
		if err := deleteFlows(addr); err != nil {
			return err
		}
	}
	failpoint.Hit("agent/detach/veth_removed")
	if err := errors.Join(n.releaseAddress(id), n.removeNamespaces(id)); err != nil {
		return err
	}
	failpoint.Hit("agent/detach/namespaces_removed")
	return os.RemoveAll(n.recordPath(id))
}

// unready marks the record, so that no peer is let in any more, then closes ports and ways to peers. peered reports
// whether there were any.
func (n *Network) unready(id string, r record, address netip.Addr, counted net.IP) (peered bool, err error) {
	n.peering.Lock()
	defer n.peering.Unlock()
	if r.Ready {
		r.Ready = false
		if err := n.writeRecord(id, r); err != nil {
			return false, err
		}
		failpoint.Hit("agent/detach/unready")
	}
	peers, err := n.peersWith(address)
	if err != nil {
		return false, err
	}
	return len(peers) > 0, n.close(r.Ports, counted, peers)
}

// List names every attachment, also a part of one, in order.
func (n *Network) List() ([]string, error) {
	entries, err := os.ReadDir(n.membersDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the services' networks: %w", err)
	}
	var all []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), recordSuffix); ok {
			all = append(all, id)
		}
	}
	return all, nil
}

// Close removes the shared network, unless there is an attachment. The next Setup makes it again.
func (n *Network) Close(ctx context.Context) error {
	all, err := n.List()
	if err != nil || len(all) > 0 {
		return err
	}
	n.use.Lock()
	defer n.use.Unlock()
	if all, err = n.List(); err != nil || len(all) > 0 {
		return err
	}
	n.ready = false
	return n.removeShared(ctx)
}

// Purge removes every attachment and everything else of this agent, also its state directory.
func (n *Network) Purge(ctx context.Context) error {
	all, err := n.List()
	if err != nil {
		return err
	}
	for _, id := range all {
		if err := n.Remove(ctx, id); err != nil {
			return err
		}
	}
	if err := n.Close(ctx); err != nil {
		return err
	}
	return os.RemoveAll(n.cfg.StateDir)
}

// isReady reports whether the attachment was completed.
func (n *Network) isReady(id string) bool {
	r, err := n.readRecord(id)
	return err == nil && r.Ready
}

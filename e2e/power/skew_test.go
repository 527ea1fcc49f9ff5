package power_test

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// skewed is a node with two disks, of which one is put back to an older copy. Since the copy, one instance was
// decommissioned and another one launched, from an image that the node had to pull.
type skewed struct {
	*node

	kept, gone, later string
}

// newSkewed replaces what is in dir of the node by what was there before.
func newSkewed(t *testing.T, dir func(n *node) string, before func(s *skewed)) *skewed {
	t.Helper()
	n := newNode(harness.New(t))
	s := &skewed{node: n}
	n.shipImage("2.0.0")
	s.kept, s.gone = n.request("kept", "1.0.0"), n.request("gone", "1.0.0")
	n.awaitServing(s.kept, s.gone)
	backup := filepath.Join(n.Dir, "backup", "copy")
	s.reboot(func() { n.CopyDisk(dir(n), backup) })
	n.awaitServing(s.kept, s.gone)

	n.Decommission(n.Instance(s.gone))
	s.later = n.request("later", "2.0.0")
	n.awaitServing(s.later)
	before(s)
	s.reboot(func() { n.CopyDisk(backup, dir(n)) })
	return s
}

// reboot switches the node off, does something, and boots it.
func (n *node) reboot(whileOff func()) {
	n.T.Helper()
	off := n.PowerOff(n.Agent)
	whileOff()
	n.outages = append(n.outages, outage{off, n.Boot(n.Agent)})
}

// requireConverged checks that everything runs that the signed state names, and nothing else.
func (s *skewed) requireConverged() {
	s.T.Helper()
	s.awaitServing(s.kept, s.later)
	s.awaitGone(s.gone)
	s.requireBilledOnce([]string{s.kept, s.later}, s.gone)
}

// Laws 1 and 5: containerd's disk is older than the store. Its record of an ended container is removed, the image that
// it does not know is pulled again, and the usage chain goes on as it was.
func TestLaw05AContainerdOlderThanTheStoreConverges(t *testing.T) {
	var before says
	s := newSkewed(t, func(n *node) string { return filepath.Join(n.Containerd.Dir, "root") }, func(s *skewed) {
		s.Explain(harness.Faults{Why: "the older disk lacks an image", Pulls: true})
		var err error
		before, err = s.says(s.Agent)
		require.NoError(t, err)
	})
	s.awaitServing(s.kept, s.later)
	now, err := s.says(s.Agent)
	require.NoError(t, err)
	require.Equal(t, before.Incarnation, now.Incarnation, "the store is not behind")
	s.requireConverged()
}

// Laws 2 and 5: the store is older than containerd, and than what the hub has posted. The hub notices at the hello: the
// store takes a new incarnation, so that its chain does not fork, and gets the state that the hub has now.
func TestLaw05AStoreOlderThanContainerdConverges(t *testing.T) {
	var before says
	s := newSkewed(t, func(n *node) string { return n.Agent.Config.DataDir() }, func(s *skewed) {
		s.Explain(harness.Faults{
			Why: "the older store measures again what ran when it was copied, and runs for a moment what was decommissioned " +
				"since",
			Restarts: 1,
			Suspense: []string{"already_billed", "outside_claim"},
		})
		s.Eventually("usage of the new instance is posted", func() (err error) {
			if before, err = s.says(s.Agent); err != nil {
				return err
			}
			usage, err := s.Tenant.Usage(s.Ctx, s.later)
			return harness.Pending(err, len(usage) > 0)
		})
	})
	s.Eventually("the store takes a new incarnation, and its usage is posted", func() error {
		now, err := s.says(s.Agent)
		return harness.Pending(err, now.Incarnation != before.Incarnation && now.Usage.LastSegment > 0 &&
			now.Usage.Marks.Posted == now.Usage.LastSegment)
	})
	s.requireConverged()
	later := 0
	require.NoError(t, s.Database().QueryRow(s.Ctx, `SELECT count(*) FROM suspense_records
		WHERE reason = 'already_billed' AND ended_at > $1`, s.outages[0].off).Scan(&later))
	require.Zero(t, later, "what the store measures again ran before it was copied")
}

package nodes_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
)

// An instance is shown with the names of its nodes: it is newer once one of them has another name, and only then.
func TestTheInstancesOfARenamedNodeAreNewer(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	i, _, _ := hubtest.Running(t, h, l)
	before := h.Instance(i.ID)
	h.Advance(time.Second)
	n.Connect(hubtest.Hello("i1"))
	require.Equal(t, before.UpdatedAt, h.Instance(i.ID).UpdatedAt)
	renamed := hubtest.Hello("i1")
	renamed.Facts.Hostname = "another"
	n.Connect(renamed)
	require.True(t, h.Instance(i.ID).UpdatedAt.After(before.UpdatedAt))
}

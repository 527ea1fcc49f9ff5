package recovery_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 16: no state of a node names what an external worker operates there, so that its absence from a newer one says
// nothing.
func TestLaw16WhatAnExternalWorkerOperatesGoesOn(t *testing.T) {
	h, n, l := hubtest.NewWithNode(t)
	h.Launch()
	l.ExpectState(1)
	cluster := h.LaunchWorker()
	backup := h.Backup()
	made := h.Launch()
	state, push := l.ExpectState(2)
	require.NoError(t, l.Conn.Close(0, "the hub is gone"))

	again := h.Restore(backup)
	n.Hub = again
	l = n.Connect(holds("i1", state, push.GetEnvelope()))
	l.UploadState(&protocol.StateUpload{
		State: push.GetEnvelope(), Parts: push.GetParts(), Bundle: n.Bundle.Envelope(), Last: true,
	})
	takeBundle(t, n, l)
	l.ExpectState(2)
	require.Equal(t, map[string]string{finding.Instance: made.ID}, again.Findings())
	require.Equal(t, cluster.Lifecycle, again.Instance(cluster.ID).Lifecycle)
}

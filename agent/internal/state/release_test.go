package state_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/e2e/release"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

// lastRecording is what e2e/release/record recorded with the programs of the last release: here the disk of a node
// whose hub went away, and which was killed some seconds later.
const lastRecording = "../../../.cache/release/last"

func TestTheLastReleasesNodeIsTakenOver(t *testing.T) {
	if _, err := os.Stat(lastRecording); err != nil {
		skip.Except(t, skip.NoRelease, "make release-fixture VERSION=<tag or commit> records one")
	}
	text, err := os.ReadFile(filepath.Join(lastRecording, "answers.json"))
	require.NoError(t, err)
	var told struct {
		NodeID    string `json:"node_id"`
		Instances []struct {
			DisplayName string `json:"display_name"`
			Members     []struct {
				ID string `json:"id"`
			} `json:"members"`
		} `json:"instances"`
	}
	require.NoError(t, json.Unmarshal(text, &told))
	members := map[string]string{}
	for _, i := range told.Instances {
		members[i.DisplayName] = i.Members[0].ID
	}
	dir := t.TempDir()
	require.NoError(t, release.Unpack(filepath.Join(lastRecording, "node.tar.gz"), dir))

	// The key that seals the store comes from the node's own.
	creds, err := uplink.OpenCredentials(dir)
	require.NoError(t, err)
	for round := range 2 { // what this version has written must not keep it from reading again
		s, err := state.Open(filepath.Join(dir, "state"), state.Options{MinFreeBytes: 1, Key: creds.StoreKey()})
		require.NoError(t, err)
		require.NoError(t, accept.Resume(s, creds.Identity().RootFingerprint, "", creds.Node()))
		require.Empty(t, s.Unverified())
		require.Equal(t, told.NodeID, s.NodeID())
		require.True(t, s.Bundle().Valid())
		require.Positive(t, s.Accepted().Generation)
		require.Contains(t, s.Members(), members["running"])
		require.Contains(t, s.Members(), members["stopped"])
		require.NotNil(t, s.Members()[members["gone"]].Removal, "the proof of removal stays until the hub has it for good")
		require.Positive(t, s.Leases()[members["running"]].GetLeaseNo())
		require.Len(t, s.Runs(), 1)
		for _, run := range s.Runs() {
			require.Equal(t, members["running"], run.MemberID)
			require.Equal(t, round > 0, s.Measured(run.ID), "the interval is open until a sample finds the container gone")
		}
		spool := s.Spool()
		require.Less(t, spool.Marks.Posted, spool.LastSegment, "usage waits that the hub has not seen")
		for number := spool.Marks.Posted + 1; number <= spool.LastSegment; number++ {
			segment, err := s.Segment(number)
			require.NoError(t, err)
			require.NotEmpty(t, segment.GetSignatures())
		}
		require.NoError(t, s.Identify(told.NodeID, creds.Signer()))
		at := s.LastStamp().At.Add(time.Second)
		require.NoError(t, s.SaveSample(meter.Observation{At: at}, clock.Stamp{At: at}))
		require.NoError(t, s.Close())
	}
}

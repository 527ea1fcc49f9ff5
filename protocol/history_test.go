package protocol_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// record writes the messages of the current version; never done for a version that was released.
var record = flag.Bool("record", false, "write testdata/v<Version> anew")

func recorded() map[string]proto.Message {
	env := func(kind string) *protocol.Envelope {
		return &protocol.Envelope{PayloadType: kind, Payload: []byte{1}, Signatures: []*protocol.Signature{
			{KeyId: "k1", Signature: []byte{2}},
		}}
	}
	at := timestamppb.New(time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC))
	return map[string]proto.Message{
		"hello": &protocol.NodeMessage{Message: &protocol.NodeMessage_Hello{Hello: &protocol.Hello{
			ProtocolVersion: 1, AgentVersion: "1.0.0", Incarnation: "i1", Epoch: 1, Generation: 4, StateSha256: []byte{1, 2},
			BundleVersion: 1, LastSegment: 9,
			Facts: &protocol.NodeFacts{
				Hostname: "n1", CpuCores: 2, MemoryBytes: 1 << 34,
				Conditions: []string{"user_namespaces_unavailable"}, BootTime: at,
			},
		}}},
		"usage": &protocol.UsageSegment{
			NodeId: "n1", Incarnation: "i1", Number: 2, PreviousSha256: []byte{3}, SealedAt: at,
			Records: []*protocol.UsageRecord{
				{
					Sequence: 5, MemberId: "m1", Revision: 1, Meter: "session_seconds", Quantity: 30_000_000, StartedAt: at,
					EndedAt: at, RunId: "r1", LeaseNo: 1, Final: true,
				},
			},
		},
		"state": &protocol.DesiredState{
			NodeId: "n1", NodeKeySha256: []byte{4}, Epoch: 1, Generation: 4, IssuedAt: at,
			MinBundleVersion: 1, Parts: []*protocol.PartRef{{Id: "m1", Sha256: []byte{5}, SizeBytes: 6}},
		},
		"leases": &protocol.LeaseBatch{NodeId: "n1", Incarnation: "i1", Epoch: 1, IssuedAt: at, Leases: []*protocol.Lease{
			{
				MemberId: "m1", LeaseNo: 1, HoldId: "h1", Prices: []*protocol.FrozenPrice{{
					Meter: "session_seconds", PriceId: "p1",
					PriceNanos: 7, PerQuantity: 1_000_000,
				}}, CapNanos: 8, Currency: "USD", ExpiresAt: at, DurationSeconds: 604800,
				EndPolicy: "stop",
			},
		}},
		"welcome": &protocol.HubMessage{Message: &protocol.HubMessage_Welcome{Welcome: &protocol.Welcome{
			ProtocolVersion: 1, SessionNo: 3, PostedSegment: 4, ArchivedSegment: 2, RequestStateUpload: true,
		}}},
		"state_upload": &protocol.NodeMessage{Message: &protocol.NodeMessage_StateUpload{StateUpload: &protocol.StateUpload{
			Bundle: env(protocol.PayloadBundle), State: env(protocol.PayloadState), Parts: [][]byte{{3}},
			Leases: []*protocol.Envelope{env(protocol.PayloadLeases)}, Last: true,
		}}},
	}
}

// A newer hub meets an older agent: a message recorded under an older version keeps its meaning.
func TestRecordedMessagesOfOldVersionsKeepTheirMeaning(t *testing.T) {
	for version, messages := range map[string]map[string]proto.Message{"v1": recorded()} {
		for name, want := range messages {
			replay(t, filepath.Join("testdata", version), name, want)
		}
	}
}

func replay(t *testing.T, dir, name string, want proto.Message) {
	t.Helper()
	wire := filepath.Join(dir, name+".pb")
	if *record {
		require.NoError(t, os.MkdirAll(dir, 0o750))
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(wire, data, 0o600))
	}
	data, err := os.ReadFile(wire)
	require.NoError(t, err)
	got := want.ProtoReflect().New().Interface()
	require.NoError(t, proto.Unmarshal(data, got))
	require.True(t, proto.Equal(want, got), "%s reads\n%s", wire, prototext.Format(got))
}

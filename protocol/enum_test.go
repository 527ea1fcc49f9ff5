package protocol_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

func TestTextsOfEnumsAreThoseOfTheAPI(t *testing.T) {
	require.Equal(t, "leases", protocol.Envelope_LEASES.Text())
	require.Equal(t, "part_digest_mismatch", protocol.Nack_PART_DIGEST_MISMATCH.Text())
	require.Equal(t, "ready", protocol.WorkloadStatus_READY.Text())
	require.Equal(t, "out_of_memory", protocol.WorkloadStatus_OUT_OF_MEMORY.Text())
	require.Empty(t, protocol.Nack_REASON_UNSPECIFIED.Text())
}

// An older agent meets a newer hub, and the other way round.
func TestAValueOfANewerPeerIsCarriedAndShown(t *testing.T) {
	raw, err := proto.Marshal(&protocol.Nack{Reason: 4711})
	require.NoError(t, err)
	var got protocol.Nack
	require.NoError(t, protocol.Unmarshal(raw, &got))
	require.Equal(t, "unknown_4711", got.GetReason().Text())
	again, err := proto.Marshal(&got)
	require.NoError(t, err)
	require.Equal(t, raw, again)
}

func TestAStoredReasonIsAText(t *testing.T) {
	type row struct {
		Reason protocol.WorkloadStatus_Reason `json:",omitempty"`
	}
	for reason, want := range map[protocol.WorkloadStatus_Reason]string{
		protocol.WorkloadStatus_CRASH_LOOP: `{"Reason":"crash_loop"}`,
		protocol.WorkloadStatus_Reason(99): `{"Reason":"unknown_99"}`,
		0:                                  `{}`,
	} {
		raw, err := json.Marshal(row{reason})
		require.NoError(t, err)
		require.Equal(t, want, string(raw))
		var back row
		require.NoError(t, json.Unmarshal(raw, &back))
		require.Equal(t, reason, back.Reason)
	}
	for _, wrong := range []string{"made_up", "reason_unspecified", "unknown_x"} {
		require.Error(t, json.Unmarshal([]byte(`{"Reason":"`+wrong+`"}`), &row{}))
	}
}

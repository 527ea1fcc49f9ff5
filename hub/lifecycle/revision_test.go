package lifecycle

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestWhatARollbackGoesBackTo(t *testing.T) {
	at := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	first := Revision{No: 1, AppVersion: "1.0.0", ReadyAt: at}
	second := Revision{No: 2, AppVersion: "2.0.0", Previous: 1, Fallback: 1, ReadyAt: at}
	broken := Revision{No: 3, AppVersion: "3.0.0", Previous: 2, Fallback: 2}
	all := Revisions{first, second, broken}
	cases := []struct {
		name      string
		revisions Revisions
		wanted    int64
		status    Status
		version   string
		no        int64
		code      string
	}{
		{"the previous one", all, 2, Running, "", 1, ""},
		{"there is none", all[:1], 1, Running, "", 0, "no_previous_version"},
		{"a named one", all, 2, Running, "1.0.0", 1, ""},
		{"the one that runs", all, 2, Running, "2.0.0", 0, "version_unchanged"},
		{"one that never ran", all, 2, Running, "3.0.0", 0, "reference_unknown"},
		{"one that nobody knows", all, 2, Running, "9.0.0", 0, "reference_unknown"},
		{"from a failed upgrade", all, 3, Failed, "", 2, ""},
		{"from a fallback that failed", all[:1], 1, Failed, "", 1, ""},
		{"from one that failed, the same again", all, 2, Failed, "2.0.0", 2, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r, err := c.revisions.RollbackTarget(c.wanted, c.status, c.version)
			if c.code != "" {
				require.EqualValues(t, c.code, fault.As(err).Code)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.no, r.No)
		})
	}
	require.EqualValues(t, 2, all.LastWorking(3), "what a failed upgrade is left for")
	require.EqualValues(t, 2, all.LastWorking(2))
	require.Zero(t, Revisions{{No: 1, AppVersion: "1.0.0"}}.LastWorking(1))
}

package uplink

import (
	"crypto/tls"
	"crypto/x509"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/state"
)

// Law 13: a node whose certificate expired while it was cut off has no session until it is renewed.
func TestExpiredCertificateIsTriedAtLeastOnceAMinute(t *testing.T) {
	store, err := state.Open(filepath.Join(t.TempDir(), "state"), state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Close()) }()
	source, err := state.MachineTime()
	require.NoError(t, err)
	clock := state.NewClock(store, source, time.Time{})
	for name, c := range map[string]struct {
		left, most time.Duration
	}{
		"expired":      {-time.Hour, renewExpiredRetryMax},
		"expires soon": {2 * time.Minute, 2*time.Minute + renewExpiredRetryMax},
		"good":         {24 * time.Hour, renewRetryMax},
	} {
		r := &renewer{
			creds: &Credentials{cert: &tls.Certificate{Leaf: &x509.Certificate{NotAfter: clock.Now().Add(c.left)}}},
			clock: clock,
		}
		retry, wait := renewRetryMin, time.Duration(0)
		for range 20 {
			retry, wait = r.afterFailure(retry)
			require.LessOrEqual(t, wait, c.most, name)
			require.GreaterOrEqual(t, wait, renewRetryMin/2, name)
		}
		require.GreaterOrEqual(t, wait, c.most/2-time.Second, name)
	}
}

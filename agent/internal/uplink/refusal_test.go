package uplink

import (
	"context"
	"crypto/tls"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestTheReasonOfARefusedCertificateIsAskedForWithGrowingPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("bad certificate")
		asked, answer := 0, error(fault.New(fault.Forbidden, "node_banned", "", nil).Permanent())
		c := inquiry{ask: func(context.Context, *tls.Certificate) error {
			asked++
			return answer
		}}
		for range 24 * 60 * 2 {
			require.ErrorContains(t, c.reason(t.Context(), nil, refused), "node_banned", "also between two questions")
			time.Sleep(30 * time.Second)
		}
		require.Greater(t, asked, int(24*time.Hour/renewRetryMax))
		require.Less(t, asked, 2*int(24*time.Hour/renewRetryMax)+10)

		answer = fault.New(fault.Unavailable, "hub_unreachable", "", nil)
		time.Sleep(renewRetryMax)
		require.ErrorIs(t, c.reason(t.Context(), nil, refused), refused, "the hub said nothing")
	})
}

package harness_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

func TestConvergenceThatTakesLongerThanTheBoundIsAFailure(t *testing.T) {
	require.Equal(t, 2*time.Minute, harness.ConvergenceBound)
	for name, c := range map[string]struct {
		takes     time.Duration
		converges bool
	}{
		"at once":          {0, true},
		"within the bound": {harness.ConvergenceBound - time.Second, true},
		"after it":         {harness.ConvergenceBound + time.Second, false},
		"never":            {time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, errAway := time.Now(), errors.New("away")
				err := harness.Await(t.Context(), harness.ConvergenceBound, func() error {
					if time.Since(began) < c.takes {
						return errAway
					}
					return nil
				})
				if c.converges {
					require.NoError(t, err)
					return
				}
				require.ErrorIs(t, err, errAway)
				require.Equal(t, harness.ConvergenceBound, time.Since(began))
			})
		})
	}
}

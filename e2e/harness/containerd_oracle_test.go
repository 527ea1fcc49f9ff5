package harness_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

func TestTimeThatContainersShareCountsOnce(t *testing.T) {
	ran := func(from, to int) harness.Stretch {
		return harness.Stretch{From: time.Unix(int64(from), 0), To: time.Unix(int64(to), 0)}
	}
	for name, c := range map[string]struct {
		ran       []harness.Stretch
		total     time.Duration
		stretches int
	}{
		"none":              {nil, 0, 0},
		"one after another": {[]harness.Stretch{ran(8, 9), ran(1, 3)}, 3 * time.Second, 2},
		"at once":           {[]harness.Stretch{ran(1, 5), ran(2, 4), ran(4, 8)}, 7 * time.Second, 1},
		"end to start":      {[]harness.Stretch{ran(1, 2), ran(2, 3)}, 2 * time.Second, 1},
		"never seen up":     {[]harness.Stretch{ran(1, 2), ran(5, 5), ran(7, 6)}, time.Second, 1},
	} {
		total, stretches := harness.Together(c.ran)
		require.Equal(t, c.total, total, name)
		require.Equal(t, c.stretches, stretches, name)
	}
}

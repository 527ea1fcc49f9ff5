package httpapi

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A request that one of its budgets refuses costs its caller nothing of the others.
func TestARefusedRequestIsChargedToNoBudget(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	b := &budgets{}
	total := newBudget("total", 1, 2, nil)
	keys := newBudget("key", 1, 5, total)
	caller, all := charge{keys, "caller"}, charge{total, ""}
	for range 2 {
		require.NoError(t, b.spend([]charge{caller, all}, now))
	}
	for range 10 {
		require.Error(t, b.spend([]charge{caller, all}, now))
	}
	require.NoError(t, b.check([]charge{caller}, 3, now))
	require.Error(t, b.check([]charge{caller}, 4, now))
}

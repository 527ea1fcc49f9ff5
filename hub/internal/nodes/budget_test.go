package nodes

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestNodeThatRenamesItsStoreAgainAndAgainIsNotLetIn(t *testing.T) {
	var b budgets
	now := time.Unix(1_800_000_000, 0)
	for i := range incarnationsBurst {
		require.True(t, b.mayUseIncarnation("n1", fmt.Sprint(i), now))
	}
	require.False(t, b.mayUseIncarnation("n1", "another", now))
	require.True(t, b.mayUseIncarnation("n1", fmt.Sprint(incarnationsBurst-1), now), "the name that it has")
	require.True(t, b.mayUseIncarnation("n2", "another", now))
	require.True(t, b.mayUseIncarnation("n1", "another", now.Add(time.Hour)))
}

func TestBudgetsOfSilentNodesAreForgotten(t *testing.T) {
	var b budgets
	now := time.Unix(1_800_000_000, 0)
	for i := range 100 {
		b.mayRecordRefusal(fmt.Sprint(i), now)
	}
	b.mayRecordRefusal("n1", now.Add(2*budgetsKept))
	require.Len(t, b.byNode, 1)
}

package groupcommit_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/groupcommit"
)

func TestItemsThatArriveDuringACommitFormTheNextGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var groups [][]int
		gate := make(chan struct{})
		q := groupcommit.New(groupcommit.AtMost[int](2), func(_ context.Context, group []int) {
			<-gate
			groups = append(groups, group)
		})
		for n := range 6 {
			q.Put(t.Context(), n)
			synctest.Wait()
		}
		for range 4 {
			gate <- struct{}{}
			synctest.Wait()
		}
		require.Equal(t, [][]int{{0}, {1, 2}, {3, 4}, {5}}, groups, "the first does not wait for others")
		// A goroutine that still ran here would fail the synctest bubble.
	})
}

func TestTheQueueStartsAgainAfterItWasEmptyAndOutlivesItsCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var groups [][]string
		q := groupcommit.New(groupcommit.All[string], func(ctx context.Context, group []string) {
			require.NoError(t, ctx.Err())
			groups = append(groups, group)
		})
		for _, item := range []string{"a", "b"} {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			q.Put(ctx, item)
			synctest.Wait()
		}
		require.Equal(t, [][]string{{"a"}, {"b"}}, groups)
	})
}

package nodes

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func requestOf(node string) *request { return &request{peer: nodelink.Peer{NodeID: node}} }

func TestRequestsThatArriveDuringACommitFormTheNextGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var batches [][]string
		gate := make(chan struct{})
		q := &groupCommit{commit: func(_ context.Context, batch []*request) {
			batches = append(batches, nodesOf(batch))
			<-gate
		}}
		first := requestOf("first")
		q.put(t.Context(), first)
		synctest.Wait()
		var all []*request
		want := []string{}
		for i := range maxGroup + 1 {
			w := requestOf(strconv.Itoa(i))
			all, want = append(all, w), append(want, w.peer.NodeID)
			q.put(t.Context(), w)
		}
		again := requestOf("0")
		q.put(t.Context(), again)
		synctest.Wait()
		require.Equal(t, [][]string{{"first"}}, batches, "a single request does not wait, the others wait for it")
		for range 3 {
			gate <- struct{}{}
			synctest.Wait()
		}
		require.Equal(t, [][]string{{"first"}, want[:maxGroup], {want[maxGroup], "0"}}, batches,
			"in order, no batch too large, one request of a node in each")
		for _, w := range append(all, first, again) {
			require.NoError(t, w.wait(t.Context()))
		}
		require.False(t, q.working)
	})
}

func TestARequestWaitsNoLongerThanItsConnectionLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		q := &groupCommit{commit: func(context.Context, []*request) { <-gate }}
		ctx, cancel := context.WithCancel(t.Context())
		w := requestOf("gone")
		q.put(ctx, w)
		cancel()
		require.Error(t, w.wait(ctx))
		close(gate)
		synctest.Wait()
		require.NoError(t, w.wait(t.Context()), "what was under way has ended nevertheless")
	})
}

func TestOneBadRequestFailsAloneAndAnUnavailableHubIsTriedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want [][]string
	}{
		"one is to blame":   {errors.New("bad"), [][]string{{"a", "bad", "c"}, {"a"}, {"bad", "c"}, {"bad"}, {"c"}}},
		"the hub is away":   {fault.New(fault.Unavailable, "away", "Later.", nil), [][]string{{"a", "bad", "c"}}},
		"nothing was wrong": {nil, [][]string{{"a", "bad", "c"}}},
	} {
		var tried [][]string
		commitOrSplit(t.Context(), []string{"a", "bad", "c"}, func(_ context.Context, batch []string) error {
			tried = append(tried, batch)
			if slices.Contains(batch, "bad") {
				return c.err
			}
			return nil
		})
		require.Equal(t, c.want, tried, name)
	}
}

package nodes

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/groupcommit"
)

func requestOf(node string) *request { return &request{peer: nodelink.Peer{NodeID: node}} }

func TestAGroupHasTheOldestRequestsAndOneOfEachNode(t *testing.T) {
	waiting := []*request{requestOf("0")}
	want := []string{"0"}
	for i := range maxGroup {
		waiting = append(waiting, requestOf(strconv.Itoa(i)))
		if i > 0 {
			want = append(want, strconv.Itoa(i))
		}
	}
	waiting = append(waiting, requestOf("last"), requestOf("later"))
	var groups [][]string
	for len(waiting) > 0 {
		var group []*request
		group, waiting = nextGroup(waiting)
		groups = append(groups, nodesOf(group))
	}
	require.Equal(t, [][]string{want, {"0", "last", "later"}}, groups)
}

// A service whose commits wait for the gate.
func gated(gate chan struct{}, committed *[][]string) *Service {
	return &Service{requests: groupcommit.New(nextGroup, func(_ context.Context, group []*request) {
		*committed = append(*committed, nodesOf(group))
		<-gate
		for _, r := range group {
			close(r.done)
		}
	})}
}

func TestRequestsThatArriveDuringACommitFormTheNextGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var committed [][]string
		gate := make(chan struct{})
		svc := gated(gate, &committed)
		var done sync.WaitGroup
		for _, node := range []string{"first", "a", "b", "a"} {
			done.Go(func() { require.NoError(t, svc.submit(t.Context(), requestOf(node))) })
			synctest.Wait()
		}
		require.Equal(t, [][]string{{"first"}}, committed, "a single request does not wait, the others wait for it")
		for range 3 {
			gate <- struct{}{}
			synctest.Wait()
		}
		done.Wait()
		require.Equal(t, [][]string{{"first"}, {"a", "b"}, {"a"}}, committed)
	})
}

func TestARequestWaitsNoLongerThanItsConnectionLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var committed [][]string
		gate := make(chan struct{})
		svc := gated(gate, &committed)
		ctx, cancel := context.WithCancel(t.Context())
		r := requestOf("gone")
		ended := make(chan error)
		go func() { ended <- svc.submit(ctx, r) }()
		synctest.Wait()
		cancel()
		require.Error(t, <-ended)
		close(gate)
		<-r.done // the commit that was under way ended nevertheless
	})
}

// A commit takes longer than nodes wait for it, so that they give up and dial again. What they gave up delays no
// other, and does not gather.
func TestARequestThatNobodyWaitsForIsNotCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var committed [][]string
		gate := make(chan struct{})
		svc := gated(gate, &committed)
		var done sync.WaitGroup
		done.Go(func() { require.NoError(t, svc.submit(t.Context(), requestOf("first"))) })
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 2 * maxGroup {
			done.Go(func() { require.Error(t, svc.submit(ctx, requestOf(strconv.Itoa(i)))) })
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		done.Go(func() { require.NoError(t, svc.submit(t.Context(), requestOf("again"))) })
		synctest.Wait()
		close(gate)
		done.Wait()
		require.Equal(t, [][]string{{"first"}, {"again"}}, committed)

		cancel()
		require.Error(t, svc.submit(ctx, requestOf("last")), "one that is abandoned at once leaves the queue empty")
		synctest.Wait()
		require.NoError(t, svc.submit(t.Context(), requestOf("next")))
		require.Equal(t, []string{"next"}, committed[len(committed)-1])
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

// A report that has become outdated before its parts are applied has none.
func TestNoPartsOfAReportAreNotSplit(t *testing.T) {
	tries := 0
	commitOrSplit(t.Context(), nil, func(context.Context, []string) error {
		if tries++; tries > 8 {
			return nil // or it would go on for ever
		}
		return errors.New("bad")
	})
	require.Equal(t, 1, tries)
}

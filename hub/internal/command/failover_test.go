package command_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// grants are callers who grant credits, each with a key of its own, until they are stopped.
type grants struct {
	w        *world
	commands *command.Service
	// admin grants: keys count for their caller alone.
	admin iam.Principal
	stop  chan struct{}
	done  sync.WaitGroup

	mu       sync.Mutex
	progress *sync.Cond
	answered int64
	// unanswered are the keys of grants whose answer was an error.
	unanswered []string
}

func (g *grants) one(ctx context.Context, key string) error {
	meta := g.w.Meta(key)
	meta.Principal = g.admin
	return second(g.commands.GrantCredit(ctx, meta, ledger.Grant{
		OrgID: g.w.Project.OrgID, Currency: "EUR", Nanos: 1_000_000_000,
	}))
}

func (g *grants) start(ctx context.Context, callers int) {
	g.stop = make(chan struct{})
	for caller := range callers {
		g.done.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-g.stop:
					return
				default:
				}
				key := fmt.Sprintf("grant-%d-%d", caller, n)
				err := g.one(ctx, key)
				if err != nil && !fault.Is(err, fault.Unavailable) {
					g.w.T.Errorf("%s: %v", key, err)
				}
				g.mu.Lock()
				if err == nil {
					g.answered++
				} else {
					g.unanswered = append(g.unanswered, key)
				}
				g.mu.Unlock()
				g.progress.Broadcast()
			}
		})
	}
}

// further waits until n more grants were answered.
func (g *grants) further(n int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for until := g.answered + n; g.answered < until; {
		g.progress.Wait()
	}
}

// refused waits until n grants were not answered.
func (g *grants) refused(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.unanswered) < n {
		g.progress.Wait()
	}
}

// The primary's machine dies under a stream of commits, and the standby is promoted: the hub goes on by itself, all it
// has answered is there, and what it could not answer is done once when it is asked for again.
func TestLaw06AFailoverLosesNothingThatWasAnswered(t *testing.T) {
	pair := dbtest.NewPair(t)
	d, err := db.Open(t.Context(), pair.URL())
	require.NoError(t, err)
	t.Cleanup(d.Close)
	require.NoError(t, db.Migrate(t.Context(), d))
	w := &world{commandtest.In(t, d)}
	w.Allocation()
	before := w.Instance()
	credit, held := w.Wallet()

	// The callers' hub is another one than the world's, which counts what commits enqueue.
	callers, err := db.Open(t.Context(), pair.URL())
	require.NoError(t, err)
	t.Cleanup(callers.Close)
	g := &grants{w: w, commands: &command.Service{DB: callers}, admin: w.Admin("").Principal}
	g.progress = sync.NewCond(&g.mu)
	g.start(t.Context(), 4)
	halt := sync.OnceFunc(func() {
		close(g.stop)
		g.done.Wait()
	})
	t.Cleanup(halt)
	g.further(40)
	pair.KillPrimary(t)
	g.refused(8)
	pair.PromoteStandby(t)
	g.further(40)
	halt()
	for _, key := range g.unanswered {
		require.NoError(t, g.one(t.Context(), key), "the same request again: %s", key)
	}

	granted := g.answered + int64(len(g.unanswered))
	available, nowHeld := w.Wallet()
	require.Equal(t, credit+granted*1_000_000_000, available, "each grant once, the answered and the repeated ones")
	require.Equal(t, held, nowHeld)
	require.EqualValues(t, granted+1, w.Count(`SELECT count(*) FROM postings WHERE kind = 'credit'`))
	require.Zero(t, w.Count(unbalanced), "every posting sums to zero")
	require.Equal(t, before.ID, w.Get(before.ID).ID)
	w.decommissioned(before)
}

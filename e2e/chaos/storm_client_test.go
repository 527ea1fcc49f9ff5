package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// lifecycle is one instance's whole life, as it was asked for.
type lifecycle struct {
	id     string
	member string
	// events are what must have happened, each once; runs how many containers did.
	events []string
	runs   int
}

// work lives one life after the other until the storm is over.
func (s *storm) work(ctx context.Context, over <-chan struct{}, number int, hub *client.Hub) error {
	random := rand.New(rand.NewPCG(s.plan.seed, uint64(number)+100))
	for n := 0; ; n++ {
		select {
		case <-over:
			return nil
		default:
		}
		l := &stormClient{s: s, ctx: ctx, hub: hub}
		if err := l.runLifecycle(random, fmt.Sprintf("life-%d-%d", number, n)); err != nil {
			return fmt.Errorf("life %d of worker %d (%s): %w", n, number, l.id, err)
		}
		s.mu.Lock()
		s.lives = append(s.lives, l.lifecycle)
		s.mu.Unlock()
	}
}

// stormClient is a client that takes one instance through its life. It repeats what did not come through, with the same
// key, as a real one does.
type stormClient struct {
	lifecycle
	s   *storm
	ctx context.Context
	hub *client.Hub
}

// runLifecycle creates, uses, perhaps stops and starts, perhaps upgrades and rolls back, and decommissions.
func (l *stormClient) runLifecycle(random *rand.Rand, name string) error {
	project := l.s.Tenant.Project.ID
	i, err := again[client.AppInstance](l, func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.CreateAppInstance(l.ctx, project, client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{l.s.Allocation.ID},
			},
		}, key)
	})
	if err != nil {
		return err
	}
	l.id, l.member = i.ID, i.Members[0].ID
	l.events = []string{"requested", "deploying", "running"}
	if err := l.serves(harness.FirstGreeting); err != nil {
		return err
	}
	if random.IntN(3) == 0 {
		if err := l.stopAndStart(); err != nil {
			return err
		}
	}
	if random.IntN(3) == 0 {
		if err := l.upgradeAndRollBack(); err != nil {
			return err
		}
	}
	if err := l.act("decommission", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.DecommissionAppInstance(l.ctx, project, l.id, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "decommission_requested", "decommissioned")
	_, err = l.await(client.AppInstanceStatusDecommissioned)
	return err
}

func (l *stormClient) stopAndStart() error {
	project := l.s.Tenant.Project.ID
	if err := l.act("stop", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.StopAppInstance(l.ctx, project, l.id, key)
	}); err != nil {
		return err
	}
	if _, err := l.await(client.AppInstanceStatusStopped); err != nil {
		return err
	}
	if err := l.act("start", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.StartAppInstance(l.ctx, project, l.id, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "stop_requested", "stopped", "start_requested", "running")
	return l.serves(harness.FirstGreeting)
}

func (l *stormClient) upgradeAndRollBack() error {
	project := l.s.Tenant.Project.ID
	if err := l.act("upgrade", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.UpgradeAppInstance(l.ctx, project, l.id, client.AppInstanceUpgrade{TargetVersion: "2.0.0"}, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "upgrade_requested", "upgraded")
	if err := l.serves(harness.SecondGreeting); err != nil {
		return err
	}
	if err := l.act("rollback", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.RollbackAppInstance(l.ctx, project, l.id, client.AppInstanceRollback{}, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "rollback_requested", "rolled_back")
	return l.serves(harness.FirstGreeting)
}

// serves waits until the instance runs, and calls it: what is said to run answers.
func (l *stormClient) serves(greeting string) error {
	i, err := l.await(client.AppInstanceStatusRunning)
	if err != nil {
		return err
	}
	l.runs++
	body, err := scenario.Get(l.ctx, i.Endpoints[0].URL+"/")
	if err != nil {
		return fmt.Errorf("it runs and does not answer: %w", err)
	}
	if !strings.Contains(body, greeting) {
		return fmt.Errorf("it answers %q instead of %q", body, greeting)
	}
	return nil
}

func (l *stormClient) act(what string, call func(key client.RequestEditorFn) (*http.Response, error)) error {
	if _, err := again[client.AppInstance](l, call); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (l *stormClient) await(status client.AppInstanceStatus) (client.AppInstance, error) {
	for {
		i, err := l.hub.WaitInstance(l.ctx, l.s.Tenant.Project.ID, l.id, status, nil)
		if err == nil || !isPassing(err) || !pause(l.ctx, retryPause) {
			return i, err
		}
	}
}

// retryPause is how long a client waits before it repeats a call whose own retries all failed.
const retryPause = 200 * time.Millisecond

// again repeats a call with one idempotency key until there is an answer.
func again[T any](l *stormClient, call func(key client.RequestEditorFn) (*http.Response, error)) (T, error) {
	id := scenario.NewID()
	key := func(_ context.Context, r *http.Request) error {
		r.Header.Set("X-Idempotency-Key", id)
		return nil
	}
	for {
		v, err := client.Read[T](call(key))
		if err == nil || !isPassing(err) || !pause(l.ctx, retryPause) {
			return v, err
		}
	}
}

// isPassing tells what a hub that is being started again explains from everything else.
func isPassing(err error) bool {
	if _, is := errors.AsType[*client.UnreachableError](err); is {
		return true
	}
	if p, is := errors.AsType[*client.Problem](err); is {
		return p.Status == http.StatusServiceUnavailable || p.Status == http.StatusTooManyRequests
	}
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
}

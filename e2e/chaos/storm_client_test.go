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

// lifecycle is what a client has asked of one instance.
type lifecycle struct {
	id     string
	member string
	// events are the events that must have happened once each, runs the number of container runs.
	events []string
	runs   int
	// app is the slug of its app, which has several services where that is the project's.
	app string
}

// work takes one instance after the other through its lifecycle until the faults are over.
func (s *storm) work(ctx context.Context, over <-chan struct{}, number int, hub *client.Hub) error {
	random := rand.New(rand.NewPCG(s.plan.seed, uint64(number)+100))
	for n := 0; ; n++ {
		select {
		case <-over:
			return nil
		default:
		}
		l := &stormClient{s: s, ctx: ctx, hub: hub}
		if l.app = harness.AppSlug; number == 0 {
			l.app = harness.ProjectSlug
		}
		if err := l.runLifecycle(random, fmt.Sprintf("instance-%d-%d", number, n)); err != nil {
			return fmt.Errorf("instance %d of worker %d (%s): %w", n, number, l.id, err)
		}
		s.mu.Lock()
		s.lifecycles = append(s.lifecycles, l.lifecycle)
		s.mu.Unlock()
	}
}

// stormClient takes one instance through its lifecycle. It repeats unanswered requests with the same idempotency key.
type stormClient struct {
	lifecycle
	s   *storm
	ctx context.Context
	hub *client.Hub
}

// runLifecycle creates, calls and decommissions an instance; at random it also stops and starts it, or upgrades it and
// rolls it back.
func (l *stormClient) runLifecycle(random *rand.Rand, name string) error {
	project := l.s.Tenant.Project.ID
	i, err := callUntilAnswered[client.AppInstance](l, func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.CreateAppInstance(l.ctx, project, client.AppInstanceCreate{
			AppSlug: l.app, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{l.s.Allocation.ID},
			},
		}, key)
	})
	if err != nil {
		return err
	}
	l.id, l.member = i.ID, i.Members[0].ID
	l.events = []string{"requested", "deploying", "running"}
	if err := l.checkServing(harness.FirstGreeting); err != nil {
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
	return l.checkServing(harness.FirstGreeting)
}

func (l *stormClient) upgradeAndRollBack() error {
	project := l.s.Tenant.Project.ID
	if err := l.act("upgrade", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.UpgradeAppInstance(l.ctx, project, l.id, client.AppInstanceUpgrade{TargetVersion: "2.0.0"}, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "upgrade_requested", "upgraded")
	if err := l.checkServing(harness.SecondGreeting); err != nil {
		return err
	}
	if err := l.act("rollback", func(key client.RequestEditorFn) (*http.Response, error) {
		return l.hub.RollbackAppInstance(l.ctx, project, l.id, client.AppInstanceRollback{}, key)
	}); err != nil {
		return err
	}
	l.events = append(l.events, "rollback_requested", "rolled_back")
	return l.checkServing(harness.FirstGreeting)
}

// checkServing waits until the instance runs, and checks the app's answer.
func (l *stormClient) checkServing(greeting string) error {
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
	if _, err := callUntilAnswered[client.AppInstance](l, call); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (l *stormClient) await(status client.AppInstanceStatus) (client.AppInstance, error) {
	for {
		i, err := l.s.Tenant.AwaitStatus(l.ctx, l.hub, l.id, status, nil)
		if err == nil || !isTransient(err) || !pause(l.ctx, retryPause) {
			return i, err
		}
	}
}

// retryPause is the pause after a call whose own retries have all failed.
const retryPause = 200 * time.Millisecond

// callUntilAnswered repeats a call with one idempotency key until the hub answers.
func callUntilAnswered[T any](l *stormClient, call func(key client.RequestEditorFn) (*http.Response, error),
) (T, error) {
	id := scenario.NewID()
	key := func(_ context.Context, r *http.Request) error {
		r.Header.Set("X-Idempotency-Key", id)
		return nil
	}
	for {
		v, err := client.Read[T](call(key))
		if err == nil || !isTransient(err) || !pause(l.ctx, retryPause) {
			return v, err
		}
	}
}

// isTransient reports whether a restart of the hub explains the error.
func isTransient(err error) bool {
	if _, is := errors.AsType[*client.UnreachableError](err); is {
		return true
	}
	if p, is := errors.AsType[*client.Problem](err); is {
		return p.Status == http.StatusServiceUnavailable || p.Status == http.StatusTooManyRequests
	}
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
}

// Package delivery sends events to webhooks: one goroutine for each, so that a slow one delays no other. It reads the
// events as the owner of the webhook may see them, and writes how far it is into the rows of package webhook.
package delivery

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/hub/internal/webhook"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/notify"
)

const (
	// MaxTries of an event make it a dead letter.
	MaxTries = 10
	// disableAfter is how long nothing was delivered when an event that fails in its last try disables a webhook.
	disableAfter = 24 * time.Hour
	// The pause after a failed try doubles from firstPause up to maxPause: ten tries take about half an hour.
	firstPause = 5 * time.Second
	maxPause   = 10 * time.Minute
	// saveEvery is how many events pass a webhook before its position is saved without a delivery.
	saveEvery = 1000
	// passEvery is how often webhooks without a goroutine are searched for.
	passEvery = 10 * time.Second
)

// Deliverer sends events to the webhooks. Its exported fields are required.
type Deliverer struct {
	DB      *db.DB
	Queries *query.Service
	// Sealer opens the secrets.
	Sealer iam.Sealer
	// Client is NewClient's.
	Client *http.Client
	Now    func() time.Time
	Log    *slog.Logger

	// pause replaces pauseAfter in tests.
	pause func(tries int) time.Duration

	mu      sync.Mutex
	senders map[string]notify.Signal
	all     sync.WaitGroup
}

// Run delivers until ctx ends.
func (d *Deliverer) Run(ctx context.Context) error {
	d.senders = map[string]notify.Signal{}
	pass := loop.New("webhooks", passEvery, d.start, d.Log)
	d.DB.OnCommit(webhook.Queue, func(id string) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if changed, running := d.senders[id]; running {
			changed.Send()
			return
		}
		pass.Wake()
	})
	err := pass.Run(ctx)
	d.all.Wait()
	return err
}

// start starts the goroutine of each active webhook that has none.
func (d *Deliverer) start(ctx context.Context) error {
	ids, err := db.Query(ctx, d.DB, func(tx db.Tx) ([]string, error) { return webhook.ActiveIDs(ctx, tx) })
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		if _, running := d.senders[id]; running {
			continue
		}
		s := &sender{Deliverer: d, id: id, changed: notify.NewSignal()}
		d.senders[id] = s.changed
		d.all.Go(func() {
			err := s.run(ctx)
			d.mu.Lock()
			delete(d.senders, id)
			d.mu.Unlock()
			if err != nil && !errors.Is(err, errStopped) && ctx.Err() == nil {
				d.Log.ErrorContext(ctx, "deliveries of a webhook stopped, and will go on", slog.String("webhook_id", id),
					slog.Any("error", err))
			}
		})
	}
	return nil
}

// errStopped ends the goroutine of a webhook that is no longer active.
var errStopped = errors.New("the webhook is not active")

// sender delivers to one webhook.
type sender struct {
	*Deliverer

	id string
	// changed is sent to when the webhook's rows have changed.
	changed notify.Signal
	reader  *query.EventReader
}

func (s *sender) run(ctx context.Context) error {
	w, owner, err := s.load(ctx)
	if err != nil {
		return err
	}
	if err := s.open(ctx, w, owner); err != nil {
		return err
	}
	saved := w.Pos
	for {
		if err := s.replay(ctx); err != nil {
			return err
		}
		events, more, ended, err := s.reader.Read(ctx)
		if err != nil {
			return err
		}
		for _, e := range slices.Clone(events) { // each may take hours
			if err := s.deliver(ctx, e); err != nil {
				return err
			}
			saved = e.Pos
		}
		if pos := s.reader.Position(); pos-saved >= saveEvery {
			if err := s.write(ctx, func(tx db.Tx) error { return webhook.Advance(ctx, tx, s.id, pos) }); err != nil {
				return err
			}
			saved = pos
		}
		if ended {
			return errStopped
		}
		if more == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-more:
		case <-s.changed:
			if _, _, err := s.load(ctx); err != nil {
				return err
			}
		}
	}
}

// open begins after the last event that the webhook is done with. Where those are no longer kept, it begins with the
// oldest that is.
func (s *sender) open(ctx context.Context, w webhook.Webhook, owner iam.Principal) (err error) {
	filter := query.EventFilter{OrgID: w.OrgID, ProjectID: w.ProjectID, Types: w.Types, After: w.Pos}
	s.reader, err = s.Queries.Events(ctx, owner, filter)
	if fault.Is(err, fault.Conflict) {
		s.Log.WarnContext(ctx, "a webhook leaves out events that are no longer kept", slog.String("webhook_id", s.id))
		filter.After = 0
		s.reader, err = s.Queries.Events(ctx, owner, filter)
	}
	return err
}

// load reads the webhook and its owner as they are now. One whose owner may have no webhooks is disabled.
func (s *sender) load(ctx context.Context) (w webhook.Webhook, owner iam.Principal, err error) {
	_, err = db.Query(ctx, s.DB, func(tx db.Tx) (_ struct{}, err error) {
		w, err = webhook.ByID(ctx, tx, s.id)
		if err == nil {
			owner, err = iam.CurrentPrincipal(ctx, tx, w.Owner)
		}
		return struct{}{}, err
	})
	switch {
	case fault.Is(err, fault.NotFound) && w.ID == "", err == nil && w.Status != webhook.Active:
		return w, owner, errStopped
	case err != nil && !fault.Is(err, fault.NotFound):
		return w, owner, err
	}
	if err == nil {
		err = iam.Authorize(owner, iam.WebhookWrite, w.OrgID, "")
	}
	if err != nil {
		return w, owner, errors.Join(s.write(ctx, func(tx db.Tx) error {
			return s.disable(ctx, tx, webhook.OwnerNotAllowed)
		}), errStopped)
	}
	return w, owner, nil
}

// deliver tries an event until it was delivered or is a dead letter. One that the owner may not see is left out.
func (s *sender) deliver(ctx context.Context, e event.Numbered) error {
	for waited := false; ; {
		w, owner, err := s.load(ctx)
		if err != nil {
			return err
		}
		s.reader.Replace(owner)
		if !s.reader.MaySee(&e.Event) {
			return nil
		}
		if w.Tries > 0 && w.Pos < e.Pos-1 {
			// Tries and pause are those of an event before this one, which was left out meanwhile.
			if err := s.write(ctx, func(tx db.Tx) error { return webhook.Advance(ctx, tx, s.id, e.Pos-1) }); err != nil {
				return err
			}
			continue
		}
		if w.NextTryAt != nil && !waited {
			if !s.wait(ctx, untilTry(*w.NextTryAt, s.Now())) {
				return ctx.Err()
			}
			if err := s.replay(ctx); err != nil {
				return err
			}
			waited = true // what the webhook and its owner are by now counts
			continue
		}
		waited = false
		result := s.send(ctx, w, e)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		done, err := s.record(ctx, w, e, result)
		if err != nil || done {
			return err
		}
	}
}

// wait waits for the next try. A change of the webhook's rows ends it: a caller asks to try at once.
func (s *sender) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-s.changed:
	}
	return true
}

// record writes how a try went, and reports whether it was the last one of the event.
func (s *sender) record(ctx context.Context, w webhook.Webhook, e event.Numbered, result outcome,
) (done bool, err error) {
	now := s.Now()
	last := w.Tries+1 >= MaxTries
	end := result.ends(w, last, now)
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (bool, error) {
		switch {
		case result == outcome{}:
			return true, webhook.Delivered(ctx, tx, s.id, e.Pos, now)
		case end != "":
			return false, s.disable(ctx, tx, end)
		case !last:
			return false, webhook.Failed(ctx, tx, s.id, webhook.Failure{
				Pos: e.Pos, Reason: result.failure, NextTryAt: now.Add(s.pauseAfter(w.Tries)), At: now,
			})
		}
		return true, webhook.Bury(ctx, tx, s.id, webhook.DeadLetter{
			EventID:   e.ID,
			Type:      e.Type,
			Subject:   e.Subject,
			Pos:       e.Pos,
			Tries:     w.Tries + 1,
			LastError: result.failure,
			FailedAt:  now,
		})
	})
}

// pauseAfter is how long to wait after a try that failed, with so many failed ones before it.
func (d *Deliverer) pauseAfter(tries int) time.Duration {
	if d.pause != nil {
		return d.pause(tries)
	}
	return min(firstPause<<min(tries, 20), maxPause)
}

// untilTry is how long to wait for the next try: no longer than a pause, also where the clock was set back since.
func untilTry(at, now time.Time) time.Duration { return min(at.Sub(now), maxPause) }

// replay sends the dead letters that are to be sent once more.
func (s *sender) replay(ctx context.Context) error {
	for {
		letter, err := db.Query(ctx, s.DB, func(tx db.Tx) (*webhook.DeadLetter, error) {
			return webhook.Replaying(ctx, tx, s.id)
		})
		if err != nil || letter == nil {
			return err
		}
		result, end, err := s.sendAgain(ctx, letter.EventID)
		if err != nil {
			return err
		}
		if err := s.write(ctx, func(tx db.Tx) error {
			err := webhook.Replayed(ctx, tx, s.id, letter.EventID, result.failure, s.Now())
			if err == nil && end != "" {
				err = s.disable(ctx, tx, end)
			}
			return err
		}); err != nil {
			return err
		}
		if end != "" {
			return errStopped
		}
	}
}

// sendAgain sends the event of a dead letter; end is why the webhook ends with that.
func (s *sender) sendAgain(ctx context.Context, eventID string) (result outcome, end webhook.Reason, err error) {
	w, owner, err := s.load(ctx)
	if err != nil {
		return outcome{}, "", err
	}
	e, err := db.Query(ctx, s.DB, func(tx db.Tx) (*event.Numbered, error) { return event.ByID(ctx, tx, eventID) })
	if err != nil {
		return outcome{}, "", err
	}
	s.reader.Replace(owner)
	if e == nil || !s.reader.MaySee(&e.Event) {
		return outcome{failure: "the event is no longer kept, or the owner may not see it"}, "", nil
	}
	result = s.send(ctx, w, *e)
	return result, result.ends(w, true, s.Now()), ctx.Err()
}

// disable stops the webhook.
func (s *sender) disable(ctx context.Context, tx db.Tx, reason webhook.Reason) error {
	w, err := webhook.Disable(ctx, tx, s.id, reason, s.Now())
	if err != nil {
		return err
	}
	return change.Record(ctx, tx, change.BySystem(db.NewID(), s.Now()), change.Entry{
		Event:        "iam.webhook.disabled",
		Action:       iam.WebhookWrite,
		ResourceType: change.Webhook,
		ResourceID:   w.ID,
		Version:      w.ResourceVersion,
		OrgID:        w.OrgID,
		ProjectID:    w.ProjectID,
		Reason:       string(reason),
		Data:         map[string]any{"reason": reason},
		Before:       map[string]any{"status": webhook.Active},
		After:        map[string]any{"status": webhook.Disabled, "reason": reason},
	})
}

func (s *sender) write(ctx context.Context, fn func(db.Tx) error) error {
	return db.WriteTx(ctx, s.DB, fn)
}

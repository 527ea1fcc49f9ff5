package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// A hub that keeps no watchers is asked again and again: a launch takes tenths of a second, so the first pauses are
// short; a pause is a sixteenth of the time waited so far, so that nobody learns of a change much later than that.
const (
	minPoll   = 10 * time.Millisecond
	maxPoll   = 2 * time.Second
	pollShare = 16
)

// InstanceError says that an instance ended somewhere else than where it was waited for.
type InstanceError struct {
	Instance AppInstance
	Wanted   AppInstanceStatus
}

func (e *InstanceError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "app instance %s is %s instead of %s", e.Instance.ID, e.Instance.Status, e.Wanted)
	if e.Instance.StatusReason != "" {
		text.WriteString(": " + string(e.Instance.StatusReason))
	}
	for _, m := range e.Instance.Members {
		if m.Detail != "" {
			text.WriteString("; " + m.Detail)
		}
	}
	text.WriteString("; correlation id " + e.Instance.CorrelationID)
	return text.String()
}

// WaitInstance watches an instance until it has the wanted status, and tells onChange (may be nil) about every change
// on the way. It returns an *InstanceError when the status can no longer be reached, and the context's error when that
// ends first.
func (h *Hub) WaitInstance(ctx context.Context, projectID, id string, want AppInstanceStatus,
	onChange func(AppInstance),
) (AppInstance, error) {
	var last AppInstance
	err := h.Watch(ctx, projectID, id, func(i AppInstance) (bool, error) {
		if onChange != nil && (i.Status != last.Status || i.StatusReason != last.StatusReason || i.Health != last.Health) {
			onChange(i)
		}
		last = i
		switch {
		case i.Status == want:
			return true, nil
		case i.Status == AppInstanceStatusDecommissioned,
			i.Status == AppInstanceStatusFailed && want != AppInstanceStatusDecommissioned,
			i.Status == AppInstanceStatusDecommissioning && want != AppInstanceStatusDecommissioned:
			return true, &InstanceError{Instance: i, Wanted: want}
		}
		return false, nil
	})
	if err != nil && ctx.Err() != nil && last.ID != "" {
		err = errors.Join(fmt.Errorf("app instance %s is still %s", last.ID, last.Status), err)
	}
	return last, err
}

// Watch looks at an instance each time it has changed until see says that it has seen enough.
func (h *Hub) Watch(ctx context.Context, projectID, id string, see func(AppInstance) (enough bool, err error)) error {
	start := time.Now()
	seen, keeps := "", true
	for {
		asked := time.Now()
		i, next, err := h.look(ctx, projectID, id, seen, &keeps)
		if err != nil {
			return err
		}
		if enough, err := see(i); enough || err != nil {
			return err
		}
		news := keeps && next != seen
		seen = next
		if news || keeps && time.Since(asked) > maxPoll {
			continue // the next answer waits by itself
		}
		timer := time.NewTimer(min(maxPoll, max(minPoll, time.Since(start)/pollShare)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// look gives an instance as soon as it is not what was seen, if the hub keeps watchers; a hub of an earlier release
// does not.
func (h *Hub) look(ctx context.Context, projectID, id, seen string, keeps *bool) (AppInstance, string, error) {
	if *keeps {
		s, err := Read[AppInstanceSeen](h.WatchAppInstance(ctx, projectID, id, &WatchAppInstanceParams{Seen: seen}))
		if p, is := errors.AsType[*Problem](err); !is || p.Status != http.StatusNotFound {
			return s.Instance, s.Seen, err
		}
		*keeps = false
	}
	i, err := Read[AppInstance](h.GetAppInstance(ctx, projectID, id))
	return i, "", err
}

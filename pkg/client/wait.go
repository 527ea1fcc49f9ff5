package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// watchWait is how long the hub waits for a change before it answers with what there is.
	watchWait = "30s"
	// minPoll is the least time between two answers without a change: a hub with too many watchers answers at once.
	minPoll = time.Second
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
	var before AppInstance
	return h.FollowInstance(ctx, projectID, id, want, func(i AppInstance) {
		if onChange != nil &&
			(i.Status != before.Status || i.StatusReason != before.StatusReason || i.Health != before.Health) {
			onChange(i)
		}
		before = i
	})
}

// FollowInstance is WaitInstance that passes on every answer, also those in which only the pull of an image goes on.
func (h *Hub) FollowInstance(ctx context.Context, projectID, id string, want AppInstanceStatus,
	onAnswer func(AppInstance),
) (AppInstance, error) {
	var last AppInstance
	err := h.Watch(ctx, projectID, id, func(i AppInstance) (bool, error) {
		onAnswer(i)
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

// Watch reads an instance each time it has changed, until see says that it has seen enough.
func (h *Hub) Watch(ctx context.Context, projectID, id string, see func(AppInstance) (enough bool, err error)) error {
	var version int64
	for {
		asked := time.Now()
		i, err := Read[AppInstance](h.Client.GetAppInstance(ctx, projectID, id,
			&GetAppInstanceParams{After: version, Wait: watchWait}))
		if err != nil {
			return err
		}
		if enough, err := see(i); enough || err != nil {
			return err
		}
		pause := minPoll - time.Since(asked)
		if i.ResourceVersion != version {
			pause = 0
		}
		version = i.ResourceVersion
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

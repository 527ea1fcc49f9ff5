package httpapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"
)

// watchTime is how long a watcher waits at most, watchLook how soon it looks again where nobody woke it.
const (
	watchTime = 10 * time.Second
	watchLook = time.Second
)

// WatchAppInstance gives one instance as soon as it is not what the caller has seen. Who may see it is looked at each time.
func (s *Server) WatchAppInstance(ctx context.Context, r WatchAppInstanceRequestObject) (WatchAppInstanceResponseObject, error) {
	// Listening before looking: what changes in between wakes.
	wake, off := s.Instances.Wakes.On(r.AppInstanceID)
	defer off()
	limit := time.NewTimer(watchTime)
	defer limit.Stop()
	for last := wake == nil; ; {
		view, err := s.viewOf(ctx, r.ProjectID, r.AppInstanceID)
		if err != nil {
			return nil, err
		}
		seen, err := standsFor(view)
		if err != nil || last || seen != r.Params.Seen {
			return WatchAppInstance200JSONResponse{Seen: seen, Instance: view}, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-wake:
		case <-time.After(watchLook):
		case <-limit.C:
			last = true
		}
		last = last || s.Instances.Wakes.Closed()
	}
}

// standsFor is the same for the same view.
func standsFor(view AppInstance) (string, error) {
	raw, err := json.Marshal(view)
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16]), err
}

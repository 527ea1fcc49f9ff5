package httpapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// watchTime is how long a watcher waits at most, watchLook how soon it looks again where nobody woke it.
const (
	watchTime = 10 * time.Second
	watchLook = time.Second
)

// WatchAppInstance gives one instance as soon as it is not what the caller has seen. Who may see it is looked at before each answer.
// Where nothing has changed in this process since the caller's last answer, it begins with waiting.
func (s *Server) WatchAppInstance(ctx context.Context, r WatchAppInstanceRequestObject) (WatchAppInstanceResponseObject, error) {
	// Listening before looking: what changes in between wakes.
	wake, off := s.Instances.Wakes.On(r.AppInstanceID)
	defer off()
	limit := time.NewTimer(watchTime)
	defer limit.Stop()
	last := wake == nil
	for look := last || !s.unchanged(r.AppInstanceID, r.Params.Seen); ; look = true {
		if look {
			moment := s.Instances.Wakes.Moment()
			view, err := s.viewOf(ctx, r.ProjectID, r.AppInstanceID)
			if err != nil {
				return nil, err
			}
			digest, err := digestOf(view)
			if err != nil || last || !strings.HasPrefix(r.Params.Seen, digest) {
				return WatchAppInstance200JSONResponse{Seen: digest + fmt.Sprintf("%016x", moment), Instance: view}, err
			}
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

// digestChars is the length of what in `seen` stands for the view. The rest is the moment before which it was looked at.
const digestChars = 16

// digestOf is the same for the same view.
func digestOf(view AppInstance) (string, error) {
	raw, err := json.Marshal(view)
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:digestChars/2]), err
}

// unchanged reports that this process has changed nothing of the instance since it gave the caller what it has seen. What others
// change is found by looking now and then.
func (s *Server) unchanged(id, seen string) bool {
	if len(seen) <= digestChars {
		return false
	}
	moment, err := strconv.ParseUint(seen[digestChars:], 16, 64)
	return err == nil && !s.Instances.Wakes.Since(moment, id)
}

package httpapi

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// watchTime is how long a watcher waits at most, watchLook how soon it looks again where nobody woke it.
const (
	watchTime = 10 * time.Second
	watchLook = time.Second
)

// WatchAppInstance gives one instance as soon as it is not what the caller has seen. Who may see it is looked at before
// each answer. Where nothing has changed in this process since this caller's last answer, it begins with waiting; a
// caller that has had no answer cannot tell a foreign instance from an absent one.
func (s *Server) WatchAppInstance(ctx context.Context,
	r WatchAppInstanceRequestObject,
) (WatchAppInstanceResponseObject, error) {
	// Listening before looking: what changes in between wakes.
	wake, off := s.Wakes.On(r.AppInstanceID)
	defer off()
	limit := time.NewTimer(cmp.Or(s.watchTime, watchTime))
	defer limit.Stop()
	last := wake == nil
	for look := last || !s.unchanged(ctx, r); ; look = true {
		if look {
			version := s.Wakes.Version(r.AppInstanceID)
			view, err := s.viewOf(ctx, r.ProjectID, r.AppInstanceID)
			if err != nil {
				return nil, err
			}
			digest, err := digestOf(view)
			if err != nil || last || !strings.HasPrefix(r.Params.Seen, digest) {
				return WatchAppInstance200JSONResponse{Seen: digest + s.seenTag(ctx, r, digest, version), Instance: view}, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-wake:
		case <-time.After(cmp.Or(s.watchLook, watchLook)):
		case <-limit.C:
			last = true
		}
		last = last || s.Wakes.Closed()
	}
}

// digestChars is the length of what in `seen` stands for the view; tagBytes, as hexadecimal, of the rest.
const (
	digestChars = 16
	tagBytes    = 8
)

func newWatchKey() (key [sha256.Size]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
}

// digestOf is the same for the same view.
func digestOf(view AppInstance) (string, error) {
	raw, err := json.Marshal(view)
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:digestChars/2]), err
}

// seenTag proves that this process gave this caller the view when the instance had that version; it tells nothing else.
func (s *Server) seenTag(ctx context.Context, r WatchAppInstanceRequestObject, digest string, version uint64) string {
	s.watchOnce.Do(func() { s.watchKey = newWatchKey() })
	mac := hmac.New(sha256.New, s.watchKey[:])
	fmt.Fprintf(mac, "%s\x00%s\x00%s\x00%s\x00%d", callOf(ctx).caller.key, r.ProjectID, r.AppInstanceID, digest, version)
	return hex.EncodeToString(mac.Sum(nil)[:tagBytes])
}

// unchanged reports that this process has changed nothing of the instance since it gave the caller what it has seen.
// What others change is found by looking now and then.
func (s *Server) unchanged(ctx context.Context, r WatchAppInstanceRequestObject) bool {
	if len(r.Params.Seen) <= digestChars {
		return false
	}
	digest, tag := r.Params.Seen[:digestChars], r.Params.Seen[digestChars:]
	return hmac.Equal([]byte(tag), []byte(s.seenTag(ctx, r, digest, s.Wakes.Version(r.AppInstanceID))))
}

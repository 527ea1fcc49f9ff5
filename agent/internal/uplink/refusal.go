package uplink

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// inquiry finds out why a hub refuses this node's certificate: the handshake does not say, a renewal does. One
// goroutine uses it.
type inquiry struct {
	// ask renews the certificate that was shown, unless that was done meanwhile.
	ask func(ctx context.Context, shown *tls.Certificate) error
	// next is when the hub may be asked again, pause the time between two inquiries.
	next  time.Time
	pause time.Duration
	// answer is the code that the hub refused the last renewal with; empty when it did not.
	answer fault.Code
}

// reason returns why the hub refused the certificate shown, and refusal itself if the hub does not say.
func (q *inquiry) reason(ctx context.Context, shown *tls.Certificate, refusal error) error {
	if !time.Now().Before(q.next) {
		q.answer = ""
		if failed := q.ask(ctx, shown); fault.IsPermanent(failed) {
			q.answer = fault.As(failed).Code
		}
		q.pause = min(max(2*q.pause, renewRetryMin), renewRetryMax)
		q.next = time.Now().Add(jitter(q.pause))
	}
	if q.answer == "" {
		return refusal
	}
	return refusedSession(string(q.answer))
}

// refusedSession is the end of a session that the hub refused for that reason.
func refusedSession(reason string) error {
	return fmt.Errorf("the hub refuses the session: %s", reason)
}

package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Releases reports whether the action gives something back rather than taking it.
func Releases(a Action) bool { return a.order() <= orderRetire }

// Failed returns the member after a failure that belongs to no single service.
func (m Member) Failed(revision uint64, reason protocol.WorkloadStatus_Reason, detail string, permanent bool,
	ran time.Duration, now time.Time,
) Member {
	m.Tries = m.failed(revision, reason, detail, permanent, ran, now)
	return m
}

package agent

import "time"

// Intervals of a node's agent; its flags change the defaults.
const (
	// DefaultMeteringInterval is the time between two samples of usage: a power cut loses at most this much.
	DefaultMeteringInterval = 10 * time.Second
	// DefaultResync is the time between two passes without a cause.
	DefaultResync = 30 * time.Second
	// AwayRetry is the pause after an action that failed because containerd or the hub did not answer.
	AwayRetry = time.Second
	// ReleaseRetry is the pause after another action that failed through no fault of the workload.
	ReleaseRetry = 5 * time.Second
)

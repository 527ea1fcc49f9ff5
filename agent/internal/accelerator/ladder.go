package accelerator

import (
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// DefaultTestFor is how long a reset accelerator must be without a fault until it is given to containers again.
	DefaultTestFor = 30 * time.Second
	// maxResets of one accelerator within resetWindow; a fault after the last of them quarantines it.
	maxResets   = 3
	resetWindow = time.Hour
	// resetRetry is the pause after a reset that failed.
	resetRetry = time.Minute
)

// rung is where an accelerator stands on the health ladder: healthy, needs_reset, testing, healthy again; or
// quarantined until an operator releases it or the node is rebooted. The zero value is healthy: then the driver's word
// holds.
type rung struct {
	// Health is one of protocol's, empty where the driver's word holds.
	Health string `json:"health,omitempty"`
	// Reason is why, or of a healthy one what was the fault of its last program.
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
	// ByDriver: the driver resets it, not the agent.
	ByDriver bool `json:"by_driver,omitempty"`
	// Resets are those since FirstReset, failed ones included.
	Resets     int       `json:"resets,omitempty"`
	FirstReset time.Time `json:"first_reset,omitzero"`
	RetryAt    time.Time `json:"retry_at,omitzero"`
}

// notAhead bounds the times of a rung that an earlier agent has stored. Where the clock was set back since, they lie
// ahead, and the accelerator would be out of use until they come again.
func (r rung) notAhead(now time.Time) rung {
	r.Since, r.FirstReset, r.RetryAt = earlier(r.Since, now), earlier(r.FirstReset, now), earlier(r.RetryAt,
		now.Add(resetRetry))
	return r
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// after is the rung after a message of the driver.
func (r rung) after(s signal, now time.Time) rung {
	if r.Health == protocol.HealthQuarantined {
		return r
	}
	switch s.Verdict {
	case noVerdict:
	case appFault:
		if r.Health == "" {
			r.Reason, r.Since = s.Cause+" of the app", now
		}
	case needsReset, driverResets:
		if r.Health != protocol.HealthNeedsReset {
			r = r.needReset(s, now)
		}
	case driverHasReset:
		if r.Health == protocol.HealthNeedsReset {
			r = r.resetBy(nil, now)
		}
	case needsService:
		r.Health, r.Reason, r.Since = protocol.HealthQuarantined, s.Cause, now
	}
	return r
}

func (r rung) needReset(s signal, now time.Time) rung {
	if now.Sub(r.FirstReset) > resetWindow {
		r.Resets = 0
	}
	r.Health, r.Reason, r.Since, r.ByDriver = protocol.HealthNeedsReset, s.Cause, now, s.Verdict == driverResets
	if r.Resets >= maxResets {
		r.Health = protocol.HealthQuarantined
	}
	return r
}

// resetBy is the rung after a reset, which failed where err is not nil. It changes nothing where a message of the
// driver, or an operator, has moved the accelerator on meanwhile.
func (r rung) resetBy(err error, now time.Time) rung {
	if r.Health != protocol.HealthNeedsReset {
		return r
	}
	if r.Resets == 0 {
		r.FirstReset = now
	}
	r.Resets++
	switch {
	case err == nil:
		r.Health, r.Since = protocol.HealthTesting, now
	case r.Resets >= maxResets:
		r.Health, r.Since = protocol.HealthQuarantined, now
	default:
		r.RetryAt = now.Add(resetRetry)
	}
	return r
}

// noResetReason ends the reason of an accelerator that the agent cannot reset.
const noResetReason = "; the agent cannot reset it: reset it or reboot the node"

// withoutReset is the rung of an accelerator for which the machine has no program that resets it.
func (r rung) withoutReset() rung {
	if !strings.HasSuffix(r.Reason, noResetReason) {
		r.Reason += noResetReason
	}
	return r
}

// afterRelease begins the reason of an accelerator that an operator has released.
const afterRelease = "released by an operator after "

// released is the rung once an operator has repaired the accelerator: it is tested, and past resets do not count.
func (r rung) released(now time.Time) rung {
	reason := afterRelease + strings.TrimPrefix(r.cause(), afterRelease)
	return rung{Health: protocol.HealthTesting, Reason: reason, Since: now}
}

// cause is the reason without what a reset or test has said since, of which only the last counts.
func (r rung) cause() string {
	cause, _, _ := strings.Cut(r.Reason, "; ")
	return cause
}

// duty is what the agent does to an accelerator now.
type duty int

const (
	noDuty duty = iota
	dutyReset
	// dutyTest: nothing was wrong for the time of the test, so the test program decides.
	dutyTest
)

// step returns the rung as time passes, and what the agent does now. answers: the driver names the accelerator and
// finds no fault; free: no container has it.
func (r rung) step(answers, free bool, testFor time.Duration, now time.Time) (next rung, due duty) {
	switch {
	case r.Health == protocol.HealthNeedsReset:
		if free && !r.ByDriver && !now.Before(r.RetryAt) {
			due = dutyReset
		}
	case r.Health != protocol.HealthTesting || now.Sub(r.Since) < testFor:
	case !answers:
		r.Health, r.Reason, r.Since = protocol.HealthQuarantined, r.cause()+"; it does not work after its reset", now
	default:
		due = dutyTest
	}
	return r, due
}

// tested is the rung after the test program, which failed where err is not nil.
func (r rung) tested(err error, now time.Time) rung {
	if r.Health != protocol.HealthTesting {
		return r // a fault came meanwhile
	}
	if err != nil {
		r.Health, r.Reason, r.Since = protocol.HealthQuarantined, r.cause()+"; "+err.Error(), now
		return r
	}
	r.Health, r.Reason, r.Since = "", "", now
	return r
}
